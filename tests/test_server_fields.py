"""The tables of docs/request-fields.md, sent field by field to a running server."""

import json
import re
from pathlib import Path

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import chat_completion_assistant_message_param as assistant_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from graft.server.responses import ResponsesRequest
from graft.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Message, TokenizeRequest
from served import post, running
from served_tools import SHORT, engine_with

PAGE = Path(__file__).parent.parent / "docs" / "request-fields.md"
SHARED = {  # tables that several sections share
    "Chat completions, completions and responses": ("Chat completions", "Completions", "Responses"),
    "Chat completions and completions": ("Chat completions", "Completions"),
}
USER = {"role": "user", "content": "x"}
SECTIONS = {
    # the section: its path, its model, a body to which fields are added, and the official client's type for it
    "Chat completions": (
        "/v1/chat/completions",
        ChatRequest,
        {"messages": [USER], "temperature": 0, "max_tokens": 3},
        chat_params.CompletionCreateParamsBase,
    ),
    "Messages": (
        "/v1/chat/completions",
        Message,
        {"temperature": 0, "max_tokens": 3},
        assistant_params.ChatCompletionAssistantMessageParam,
    ),
    "Completions": (
        "/v1/completions",
        CompletionRequest,
        {"prompt": "x", "temperature": 0, "max_tokens": 3},
        text_params.CompletionCreateParamsBase,
    ),
    "Responses": (
        "/v1/responses",
        ResponsesRequest,
        {"input": "x", "temperature": 0, "max_output_tokens": 3},
        response_create_params.ResponseCreateParamsBase,
    ),
    "Tokenize": ("/tokenize", TokenizeRequest, {"prompt": "x"}, None),
    "Detokenize": ("/detokenize", DetokenizeRequest, {"tokens": [70]}, None),
}


def rows_of(section):
    """Field, status, accepted and refused values of every row of a section."""
    page = PAGE.read_text()
    headings = [section, *(heading for heading, sections in SHARED.items() if section in sections)]
    texts = [page.split(f"## {heading}\n")[1].split("\n## ")[0] for heading in headings]
    for line in "\n".join(texts).splitlines():
        if re.match(r"\| `", line):
            field, status, *values = (cell.strip() for cell in line.strip("|").split(" | "))
            accepted, refused = ([json.loads(value) for value in re.findall(r"`(.*?)`", cell)] for cell in values)
            yield field.strip("` "), status, accepted, refused


@pytest.fixture(scope="module")
def url():
    with running(engine_with(SHORT), served_model_name="smollm2-135m") as url:
        yield url


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_of_fields_says_what_the_server_does(url, section):
    path, model, base, official = SECTIONS[section]
    rows = {field: (status, accepted, refused) for field, status, accepted, refused in rows_of(section)}
    taken = {field for field, (status, *_) in rows.items() if status != "refused"}
    assert taken == {field.alias or name for name, field in model.model_fields.items()}
    assert official is None or official.__annotations__.keys() <= rows.keys(), "the official client has more fields"

    def body_with(field, value):
        if section == "Messages":
            return {**base, "messages": [value, USER]}
        # An object with the field itself has other fields that it needs.
        return {**base, **value} if isinstance(value, dict) and field in value else {**base, field: value}

    def said(answer):
        """The texts of an answer, and all else that depends on the request alone."""
        choices = [{**choice, "speculation": None} for choice in answer.json().get("choices", ())]
        return choices or [item["content"] for item in answer.json()["output"]]

    plain = said(post(url, path, **base)) if path.startswith("/v1/") and section != "Messages" else None
    for field, (status, accepted, refused) in rows.items():
        assert status in ("used", "ignored", "inert", "refused")
        assert bool(accepted) == (status != "refused") and (refused or status in ("used", "ignored")), field
        for value in accepted:
            answer = post(url, path, **body_with(field, value))
            assert answer.status_code == 200, (field, value, answer.text)
            if status in ("ignored", "inert") and plain is not None:
                assert said(answer) == plain, (field, value)
        for value in refused:
            answer = post(url, path, **body_with(field, value))
            assert answer.status_code == 400, (field, value, answer.text)
            error = answer.json()["error"]
            assert re.search(rf"\b{field}\b", f"{error['param']} {error['message']}"), (field, value, error)

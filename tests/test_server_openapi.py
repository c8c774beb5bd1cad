"""Answers fit the official client, and the OpenAPI document says what the server takes."""

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from graft.server.app import make_app
from graft.server.settings import ServeSettings
from served import CHAT, post, running
from served_tools import NAMED, SHORT, TOOLS, engine_with


@pytest.fixture(scope="module")
def url():
    with running(engine_with(SHORT)) as url:
        yield url


@pytest.fixture(scope="module")
def document(url):
    return httpx.get(f"{url}/openapi.json").json()


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        (ChatCompletion, "/v1/chat/completions", {**CHAT, "max_tokens": 4, "n": 2, "prompt_logprobs": 1}),
        (ChatCompletion, "/v1/chat/completions", {**CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
        (ChatCompletion, "/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": NAMED}),
        (Completion, "/v1/completions", {"prompt": "abcabcabc", "max_tokens": 9, "return_rounds": True}),
        (Completion, "/v1/completions", {"prompt": ["a", "bc"], "max_tokens": 3, "logprobs": 2}),
        (Response, "/v1/responses", {"input": "x", "max_output_tokens": 3}),
    ],
)
def test_answers_are_what_openais_client_reads(url, model, path, body):
    model.model_validate(post(url, path, **body).json())


def test_streams_errors_and_keys_are_in_the_document(document):
    assert "securitySchemes" not in document["components"], "no key is asked for"
    assert not [name for name in document["components"]["schemas"] if "ValidationError" in name]
    for methods in document["paths"].values():
        for route in methods.values():
            assert "422" not in route["responses"] and "401" not in route["responses"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
    with_keys = make_app(engine_with(), ServeSettings(api_keys=("k",)), "tiny").openapi()
    assert with_keys["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert with_keys["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in with_keys["paths"]["/health"]["get"]


@pytest.mark.parametrize("body", [{"temperature": "1"}, {"max_tokens": "5"}, {"stream": 1}, {"logit_bias": {"x": 1}}])
def test_types_are_those_of_the_document(url, body):
    assert post(url, prompt="x", **body).status_code == 400

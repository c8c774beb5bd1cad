"""The Responses API, through the official client: text, tools, JSON, streams, and what is refused."""

import json

import openai
import pytest

from graft.server.responses import ResponsesRequest
from served import post, running
from served_tools import NAMED, SHORT, WEATHER, WITH_TOOLS, engine_with, fits

FUNCTION = {"type": "function", **WEATHER["function"], "strict": False}


@pytest.fixture(scope="module")
def url():
    with running(engine_with(SHORT), max_tokens=400) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_a_response_says_what_a_chat_completion_says(client):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=9)
    for given in ("hi", [{"role": "user", "content": "hi"}], [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]):  # fmt: skip
        response = client.responses.create(
            model="tiny", instructions="be brief", input=given, temperature=0, max_output_tokens=9
        )
        assert response.output_text == chat.choices[0].message.content
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.input_tokens == chat.usage.prompt_tokens and response.usage.output_tokens == 9
        assert response.store is False and response._request_id


def test_events_tell_the_whole_response(client):
    options = {"model": "tiny", "input": "hi", "temperature": 0, "max_output_tokens": 9}
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    with client.responses.stream(model="tiny", input="hi", temperature=0, max_output_tokens=9) as stream:
        for _ in stream:
            pass


def test_a_function_is_called_and_its_result_goes_back(client):
    choice = {"type": "function", "name": NAMED["function"]["name"]}
    options = {"model": "tiny", "tools": [FUNCTION], "tool_choice": choice, "temperature": 0}
    asked = [{"role": "user", "content": "weather?"}]
    response = client.responses.create(input=asked, **options)
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "get_weather", "completed")
    assert fits(call.arguments)
    events = list(client.responses.create(input=asked, stream=True, **options))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and len(deltas) > 3
    assert events[-1].response.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = client.responses.create(
        model="tiny", input=[*asked, call.model_dump(), result], tools=[FUNCTION], temperature=0, max_output_tokens=5
    )
    assert after.output_text
    chat = client.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=5,
        tools=[WEATHER],
        messages=[
            *asked,
            {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": {
                "name": call.name, "arguments": call.arguments}}]},
            {"role": "tool", "tool_call_id": "x", "content": "sunny"},
        ],
    )  # fmt: skip
    assert chat.choices[0].message.content == after.output_text


def test_reasoning_is_an_item_of_its_own():
    with running(engine_with(WITH_TOOLS + "<think>")) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        response = client.responses.create(model="tiny", input="x", temperature=0, max_output_tokens=6)
        assert response.output[0].type == "reasoning" and response.output[0].content[0].text
        back = [item.model_dump() for item in response.output]
        again = [{"role": "user", "content": "x"}, *back, {"role": "user", "content": "x"}]
        assert client.responses.create(model="tiny", input=again, max_output_tokens=1).id
        kinds = [
            e.type
            for e in client.responses.create(model="tiny", input="x", max_output_tokens=6, temperature=0, stream=True)
        ]
        assert "response.reasoning_text.delta" in kinds


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "null"])
def test_a_call_that_went_wrong_may_come_back(url, arguments):
    call = {"type": "function_call", "call_id": "a", "name": "odd name", "arguments": arguments, "status": "incomplete"}
    result = {"type": "function_call_output", "call_id": "a", "output": "no such function"}
    asked = [{"role": "user", "content": "x"}, call, result]
    assert post(url, "/v1/responses", input=asked, max_output_tokens=1).status_code == 200
    (message,) = (m for m in ResponsesRequest(input=asked).as_chat().messages if m.role == "assistant")
    assert message.tool_calls[0].as_dict()["function"] == {"name": "odd name", "arguments": arguments}


def test_reasoning_goes_back_to_the_answer_it_came_with():
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    user, said = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}

    def told(*items):
        messages = ResponsesRequest(input=list(items)).as_chat().messages
        return [(m.role, m.reasoning_content, m.content, len(m.tool_calls or ())) for m in messages]

    asked, alone = ("user", None, "x", 0), ("assistant", "hm", None, 0)
    assert told(user, thought, said, call) == [asked, ("assistant", "hm", "y", 1)]
    assert told(user, said, thought, call) == [asked, ("assistant", None, "y", 0), ("assistant", "hm", None, 1)]
    assert told(user, thought, user, said) == [asked, alone, asked, ("assistant", None, "y", 0)]
    assert told(user, thought) == [asked, alone]


def test_json_of_a_schema(client):
    form = {"type": "json_schema", "name": "a", "schema": {"enum": ["red", "blue"]}}
    response = client.responses.create(model="tiny", input="x", text={"format": form})
    assert json.loads(response.output_text) in ("red", "blue") and response.status == "completed"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"max_output_tokens": 500}, "more than the 400"),
    ],
)
def test_references_and_lengths_beyond_the_limit_are_refused_by_name(url, body, words):
    answer = post(url, "/v1/responses", **{"input": "x", **body})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert post(url, "/v1/responses", input="x", max_output_tokens=1, store=None, reasoning=None).status_code == 200

"""What one request may cost the server, and requests that once crashed it or were misread."""

import json

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from gates import PATIENCE, Gate
from graft import GraftError
from graft.engine.jobs import BusyError, Job
from graft.engine.scheduler import Scheduler
from graft.engine.settings import SchedulerSettings
from graft.model.sampler import SamplingSettings
from graft.server.grammar import Grammars, SchemasBusyError
from graft.server.responses import ResponsesRequest
from graft.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from graft.server.serving import Serving
from graft.server.settings import ServeSettings
from served import CHAT, metric, new_engine, post, running

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def url():
    with running() as url:
        yield url


def message_of(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


# Cost


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [{}] * 500}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 500}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * 500}]}),
        (ChatRequest, {**CHAT, "stop_token_ids": ["x"] * 500}),
        (CompletionRequest, {"prompt": [[-1] * 500]}),
        (DetokenizeRequest, {"tokens": [-1] * 500}),
        (TokenizeRequest, {"messages": [{}] * 500}),
        (ResponsesRequest, {"input": [{}] * 500}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{}] * 500}]}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 500}),
        (ChatRequest, {**CHAT, "tools": [{}] * 500}),
        (ChatRequest, {**CHAT, "logit_bias": {str(i): "x" for i in range(500)}}),
        (ChatRequest, {**CHAT, "logit_bias": {f"x{i}": 1 for i in range(500)}}),
        (ChatRequest, {**CHAT, "metadata": {str(i): i for i in range(500)}}),
        (ChatRequest, {**CHAT, "chat_template_kwargs": {str(i): [] for i in range(500)}}),
        (TokenizeRequest, {**CHAT, "chat_template_kwargs": {str(i): [] for i in range(500)}}),
        (ResponsesRequest, {"input": "x", "metadata": {str(i): i for i in range(500)}}),
        (ChatRequest, {**CHAT, **{f"x{i}": 1 for i in range(500)}}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x", **{f"x{i}": 1 for i in range(500)}}]}),
        (ResponsesRequest, {"input": [{f"x{i}": 1 for i in range(500)}]}),
    ],
)
def test_many_bad_entries_are_refused_at_the_first(kind, body):
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(body)
    assert refused.value.error_count() < 150


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
def test_more_log_probabilities_of_prompts_than_a_response_holds_are_refused(url, asked):
    answer = post(url, prompt=["x" * 800] * 128, max_tokens=1, **asked)
    assert "log-probabilities of prompts, more than 1048576" in message_of(answer)


def test_stop_strings_are_bounded(url):
    for stop in ("x" * 1025, ["x" * 1025]):
        assert "1024 characters" in message_of(post(url, prompt="x", stop=stop))
    assert post(url, prompt="x", stop=["x" * 1024], max_tokens=1).status_code == 200


def test_prompts_of_one_request_wait_as_one():
    engine = new_engine()
    scheduler = Scheduler(engine, SchedulerSettings(max_rows=1, max_waiting=2))
    settings = SamplingSettings(max_new_tokens=900, ignore_eos=True)

    def job():
        return Job(engine.new_sequences(engine.encode("abc"), settings), lambda news: None)

    assert scheduler.is_ready.wait(PATIENCE)
    gate = Gate(engine.target)
    try:
        scheduler.submit(job())
        gate.wait()
        scheduler.submit(*(job() for _ in range(5)))
        scheduler.submit(job())
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
        with pytest.raises(BusyError, match="2 requests are waiting"):
            scheduler.submit(job())
    finally:
        gate.open_when(lambda: scheduler.is_closing)
        scheduler.close()


# Refusals


@pytest.mark.parametrize("name", ["maxTokens", "max-tokens", "temprature", "str", "X" * 64])
def test_an_unknown_field_is_named_as_the_client_wrote_it(url, name):
    answer = post(url, prompt="x", **{name: 1})
    assert message_of(answer) == f"{name} is not supported" and answer.json()["error"]["param"] == name
    inner = post(url, prompt="x", stream=True, stream_options={name: 1})
    assert message_of(inner) == f"stream_options.{name} is not supported"
    assert message_of(post(url, prompt="x", **{"X" * 5000: 1})) == "X" * 64 + " is not supported", "a long one is cut"


def test_busy_compilers_are_said_to_be_busy_where_any_json_would_do(url, monkeypatch):
    async def compile_(self, wanted):
        raise SchemasBusyError("busy") if wanted.text == "{}" else GraftError("no")

    monkeypatch.setattr(Grammars, "compile", compile_)
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "string"}, "strict": False}}
    answer = post(url, prompt="x", response_format=wanted)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_cannot_repeat_are_refused(url, number):
    schema = f'{{"type": "object", "x": [{number}]}}'
    bodies = {
        "responses": '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}',
        "chat/completions": '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
        '"function": {"name": "f", "parameters": SCHEMA}}]}',
        "completions": '{"prompt": "x", "structured_outputs": {"json": SCHEMA}}',
    }
    for path, body in bodies.items():
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{url}/v1/{path}", content=body.replace("SCHEMA", schema), headers=headers, timeout=60)
        assert "not finite" in message_of(answer)


def test_a_request_arrives_before_its_prompt_is_read(url, monkeypatch):
    async def encode(*given):
        raise AssertionError("it was tokenized first")

    monkeypatch.setattr(Serving, "encode", encode)
    monkeypatch.setattr(Serving, "encode_chat", encode)
    assert post(url, prompt="x", model="other").status_code == 404
    assert post(url, "/v1/chat/completions", **CHAT, model="other").status_code == 404


@pytest.mark.parametrize("rule", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_an_answer_whose_calls_have_a_grammar_ends_where_it_ends(url, rule):
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    for asked in ({"tools": [strict]}, {"tools": [TOOL], "parallel_tool_calls": False}):
        answer = post(url, "/v1/chat/completions", **CHAT, **asked, **rule)
        assert "cannot be combined with calls that are forced, strict" in message_of(answer)
    ChatRequest(**CHAT, tools=[TOOL], **rule)
    ChatRequest(**CHAT, tools=[strict], tool_choice="none", **rule)


def test_nothing_given_is_silently_ignored(url):
    assert "guided_regex" in message_of(post(url, prompt="x", guided_regex=""))
    for more in ({"tools": [TOOL]}, {"chat_template_kwargs": {"a": True}}):
        assert "requires messages" in message_of(post(url, "/tokenize", prompt="x", **more))


def test_a_chunked_body_that_is_too_large_is_counted_as_such():
    with running(max_body_bytes=1000) as url:
        body = json.dumps({"prompt": "x" * 5000}).encode()
        headers = {"content-type": "application/json"}
        pieces = (body[at : at + 500] for at in range(0, len(body), 500))
        assert httpx.post(f"{url}/v1/completions", content=pieces, headers=headers).status_code == 413
        lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if 'reason="' in line]
        assert [line.split('reason="')[1].split('"')[0] for line in lines if line.endswith(" 1.0")] == ["size"]
        assert metric(url, "generation_tokens_total") == 0


# Settings and the page


def test_a_key_that_no_header_can_give_is_refused():
    with pytest.raises(GraftError, match="ASCII"):
        ServeSettings(api_keys=("schlüssel",))


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.com", False)],
)
def test_every_loopback_address_is_local(host, is_local):
    settings = ServeSettings(host=host)
    assert settings.is_local == is_local == bool(settings.hosts)
    if is_local:
        assert {host, f"[{host}]"} & set(settings.hosts)


def test_the_page_cannot_be_given_another_base_or_send_forms_elsewhere(url):
    policy = httpx.get(url).headers["content-security-policy"]
    assert "base-uri 'none'" in policy and "form-action 'self'" in policy

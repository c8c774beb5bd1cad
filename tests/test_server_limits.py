"""The server's limits and manners: what clients send back, half-sent requests, hosts, TLS, ids, and how it stops."""

import json
import logging
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from gates import PATIENCE, Clock, Gate
from graft.engine.scheduler import Scheduler
from graft.server.connection import TimedProtocol
from graft.server.settings import ServeSettings
from served import A_LETTER, CHAT, GREEDY, metric, new_engine, post, running, until


@pytest.fixture
def errors(caplog):
    """What uvicorn logs, which it keeps to itself."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def url():
    with running() as url:
        yield url


@pytest.fixture(scope="module")
def timed():
    """A server, and the clock by which it ends what is never wholly sent."""
    clock = Clock()
    with running(clock=clock) as url:
        yield url, clock


# What clients send back


def test_an_answer_of_ours_can_be_sent_back_as_the_official_client_dumps_it(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    message = client.chat.completions.create(model="tiny", **CHAT, **GREEDY).choices[0].message
    dumped = message.model_dump()
    assert dumped["refusal"] is None, "it has nulls"
    history = [*CHAT["messages"], dumped, {"role": "user", "content": "and?"}]
    bare = [*CHAT["messages"], {"role": "assistant", "content": message.content}, history[-1]]
    whole, same = (client.chat.completions.create(model="tiny", messages=m, **GREEDY) for m in (history, bare))
    assert whole.choices[0].message.content == same.choices[0].message.content
    assert whole._request_id


def test_a_schema_that_is_not_strict_may_be_one_that_cannot_be_compiled(url):
    schema = {"type": "string", "minLength": 3, "maxLength": 2}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
    answer = post(url, prompt="x", response_format=wanted, max_tokens=30, seed=1, logit_bias={"95": 4})
    assert answer.status_code == 200, answer.text
    wanted["json_schema"]["strict"] = True
    assert post(url, prompt="x", response_format=wanted).status_code == 400


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"stop": ["a"] * 17}, "stop: at most 16 entries are allowed, not 17", "stop"),
        ({"prompt": ["a"] * 129}, "prompt: at most 128 entries are allowed, not 129", "prompt"),
        ({"prompt": ""}, "prompt: it is empty", "prompt"),
        ({"prompt": ["a", ""]}, "prompt.1: it is empty", "prompt.1"),
        ({"prompt": [[]]}, "prompt.0: it is empty", "prompt.0"),
        ({"prompt": [1, 999999]}, "the prompt holds 999999, but token ids of this model are 0 to 258", "prompt"),
        ({"max_tokens": 1024}, "this model's maximum context length is 1024 tokens, and the prompt has 1: "
         "max_tokens can be at most 1023, not 1024", "max_tokens"),
        ({"prompt": "x" * 1024},
         "this model's maximum context length is 1024 tokens, and the prompt has 1024", "prompt"),
        ({"guided_json": ENDLESS},
         "guided_json cannot be used: it asks for a text without end, or is too complex", "guided_json"),
        ({"guided_json": {"$ref": "#"}}, "guided_json cannot be used: nothing fits it", "guided_json"),
        ({"guided_json": {"type": "string", "pattern": "("}},
         "guided_json cannot be used: invalid regular expression: unclosed group", "guided_json"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex cannot be used: nothing fits it", "guided_regex"),
    ],
)  # fmt: skip
def test_errors_are_short_and_name_the_field_of_the_api(url, body, message, param):
    answer = post(url, **{"prompt": "x", **body})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == message
    assert answer.json()["error"]["param"] == param
    assert (answer.json()["error"]["code"] == "context_length_exceeded") == ("context" in message)


def test_a_grammar_that_fails_later_says_so_in_one_line(url):
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/e"}}, "required": ["a"]}
    parts = {"b": {"enum": [1, 2]}, "a": {"$ref": "#/$defs/e"}}
    schema = {"type": "object", "properties": parts, "required": ["b", "a"]}
    answer = post(url, prompt="x", guided_json={"$defs": {"e": endless}, **schema}, max_tokens=300)
    reason = "it asks for a text without end, or is too complex"
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"guided_json cannot be followed: {reason}"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 1024}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 1024}, "max_completion_tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1024}, "max_output_tokens"),
        ("/v1/responses", {"input": "x" * 2000}, "input"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}},
         "text.format"),
    ],
)  # fmt: skip
def test_each_endpoint_names_its_own_fields(url, path, body, field):
    error = post(url, path, **body).json()["error"]
    assert error["param"] == field and (field in error["message"] or "the prompt has" in error["message"])


def test_the_newer_length_wins_and_large_seeds_are_seeds(url):
    body = {**CHAT, "max_tokens": 9, "max_completion_tokens": 3, "ignore_eos": True}
    assert post(url, "/v1/chat/completions", **body).json()["usage"]["completion_tokens"] == 3
    drawn = [
        post(url, prompt="x", seed=seed, max_tokens=12, n=2).json()["choices"]
        for seed in (2**63 - 1, 2**63 - 1, 2**63 - 2, -(2**63))
    ]
    texts = [[choice["text"] for choice in choices] for choices in drawn]
    assert texts[0] == texts[1] and len({tuple(text) for text in texts}) == 3 and texts[0][0] != texts[0][1]


def test_an_answer_continues_the_assistants_last_message(url):
    messages = [*CHAT["messages"], {"role": "assistant", "content": "It is"}]
    asked = {"temperature": 0, "max_tokens": 6}
    continued = post(url, "/v1/chat/completions", messages=messages, continue_final_message=True, **asked).json()
    # The tokenizer's own template, by hand.
    same = post(url, "/v1/completions", prompt="[user]x\n[assistant]It is", **asked).json()
    assert continued["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    ids = post(url, "/tokenize", messages=messages, continue_final_message=True).json()["tokens"]
    assert post(url, "/detokenize", tokens=ids).json()["prompt"] == "[user]x\n[assistant]It is"
    refused = post(url, "/v1/chat/completions", **CHAT, continue_final_message=True)
    assert refused.status_code == 400 and "requires a last message of the assistant" in refused.text


def test_guided_json_may_be_text(url):
    for schema in ({"enum": [17]}, '{"enum": [17]}'):
        assert post(url, prompt="x", guided_json=schema).json()["choices"][0]["text"] == "17"


def events_of(answer):
    return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


def test_usage_comes_with_every_chunk_if_asked_for(url):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(post(url, prompt="abc", stream=True, stream_options=options, **GREEDY))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 12 and events[-1]["choices"] == []
    plain = events_of(post(url, prompt="abc", stream=True, **GREEDY))
    assert not any("usage" in event for event in plain)


def test_events_can_be_padded_to_tell_nothing_by_their_size(url):
    body = {"prompt": "abc", "stream": True, **GREEDY}
    answer = post(url, stream_options={"include_obfuscation": True}, **body)
    sizes = {len(line.removeprefix("data: ")) % 256 for line in answer.iter_lines() if line.startswith("data: {")}
    assert sizes == {0}
    assert all("obfuscation" not in event for event in events_of(post(url, **body)))


# Limits


def test_a_huge_prompt_is_refused_before_it_is_tokenized():
    engine = new_engine()
    encode = engine.encode

    def watched(prompt, **more):
        assert len(prompt) < 100_000
        return encode(prompt, **more)

    engine.encode = watched
    with running(engine, max_prompt_bytes=1000) as url:
        answer = post(url, prompt="word " * 200_000)
        assert answer.status_code == 400 and "more than the 1000 allowed" in answer.json()["error"]["message"]
        assert [post(url, "/tokenize", prompt="x" * size).status_code for size in (1000, 1001)] == [200, 400]
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 100_000})}}
        called = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
        assert post(url, "/v1/chat/completions", messages=called).status_code == 400


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [(b"", b""), (HEAD, b"408"), (HEAD + b"Content-Length: 100\r\n\r\n{", b"408"), (b"GET /health HT", b"408")],
)
def test_a_request_that_is_never_wholly_sent_is_ended(timed, sent, answered, errors, monkeypatch):
    url, clock = timed
    host, _, port = url.removeprefix("http://").partition(":")
    heard, name = threading.Event(), "data_received" if sent else "connection_made"
    hear = getattr(TimedProtocol, name)
    monkeypatch.setattr(TimedProtocol, name, lambda *given: (hear(*given), heard.set()))
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(sent)
        assert heard.wait(PATIENCE)
        clock.put_forward(ServeSettings().read_timeout)
        received = b""
        while piece := connection.recv(4096):  # until the server closes it
            received += piece
    assert answered in received.split(b"\r\n")[0]
    if answered:
        assert json.loads(received.split(b"\r\n\r\n")[1])["error"]["type"] == "timeout_error"
    assert "Traceback" not in errors.text


def test_a_slow_answer_is_not_a_slow_request():
    """The limit is on what clients send: a connection that waits for its answer, or for its next request, stays."""
    engine, clock, late = new_engine(), Clock(), ServeSettings().read_timeout + 1
    body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    with running(engine, clock=clock) as url, httpx.Client(timeout=60) as http, ThreadPoolExecutor(1) as pool:
        gate = Gate(engine.target)
        answer = pool.submit(http.post, f"{url}/v1/completions", json=body)
        gate.wait()
        clock.put_forward(late)
        assert httpx.get(f"{url}/health").status_code == 200, "timers of before are over"
        gate.open()
        answers = [answer.result()]
        clock.put_forward(late)
        assert httpx.get(f"{url}/health").status_code == 200
        answers.append(http.get(f"{url}/health"))
        assert [each.status_code for each in answers] == [200, 200]
        streams = [each.extensions["network_stream"] for each in answers]
        assert len({stream.get_extra_info("client_addr") for stream in streams}) == 1, "the same connection still"


# Who may ask


def test_a_proxy_may_keep_its_own_host():
    with running(allowed_hosts=("api.example.com", "*.example.org")) as url:

        def status(host):
            return httpx.get(f"{url}/version", headers={"host": host}).status_code

        assert [status(h) for h in ("api.example.com", "API.example.com:443", "a.example.org", "127.0.0.1")] == [
            200
        ] * 4
        assert [status(h) for h in ("example.com", "evil.example", "example.org", "evilexample.org", "")] == [400] * 5
        assert "allowed-hosts" in httpx.get(url, headers={"host": "x"}).json()["error"]["message"]


def test_it_speaks_https(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    more = ["-keyout", key, "-out", cert, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(["openssl", *words, *more], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("there is no openssl that makes such a certificate")
    with running(ssl_certfile=cert, ssl_keyfile=key) as url:
        context = ssl.create_default_context(cafile=cert)
        assert url.startswith("https") and httpx.get(f"{url}/version", verify=context).status_code == 200


def test_every_answer_has_the_requests_id(url, caplog):
    given = httpx.get(f"{url}/version", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = [post(url, **body).headers["x-request-id"] for body in ({"prompt": "x", **GREEDY}, {"nonsense": 1})]
    assert len(set(made)) == 2 and all(name.startswith("req-") for name in made)
    odd = httpx.get(f"{url}/version", headers={"x-request-id": "a b" * 100}).headers["x-request-id"]
    assert odd.startswith("req-"), "not what could confuse a log"
    with caplog.at_level("INFO"):
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", **GREEDY}, headers={"x-request-id": "mine-2"})
        until(lambda: "mine-2" in caplog.text)


def test_refusals_have_their_types_and_are_counted():
    engine = new_engine()
    with running(engine, api_keys=("right",), max_rows=1, max_waiting=0) as url:

        def failed(reason):
            text = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer right"}).text
            lines = [line for line in text.splitlines() if f'reason="{reason}"' in line and "_total" in line]
            return sum(float(line.split()[-1]) for line in lines)

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as refused:
            client.completions.create(model="tiny", prompt="x")
        assert refused.value.type == "authentication_error" and refused.value.code == "invalid_api_key"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0)
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="x", extra_body={"nonsense": 1})
        assert refused.value.type == "invalid_request_error" and refused.value.param == "nonsense"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        gate = Gate(engine.target)
        slow = {"model": "tiny", "prompt": "abc", "max_tokens": 900, "stream": True, "logit_bias": A_LETTER}
        stream = client.completions.create(**slow)
        gate.wait()
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="x")
        assert refused.value.type == "rate_limit_error" and refused.value.response.headers["retry-after"] == "1"
        stream.close()
        gate.open()
        assert [failed(reason) for reason in ("key", "request", "model", "busy")] == [1, 1, 1, 1]


# Beginning and end


def test_it_is_alive_before_it_is_ready():
    engine = new_engine()
    warm_up, may_go_on = engine.warm_up, threading.Event()

    def slow(*given):
        assert may_go_on.wait(PATIENCE)
        warm_up(*given)

    engine.warm_up = slow
    with running(engine, waits=False) as url:
        try:
            until(lambda: httpx.get(f"{url}/live").json() == {"status": "starting"})  # before that it says loading
            early = httpx.get(f"{url}/health"), post(url, prompt="x", **GREEDY)
            assert [answer.status_code for answer in early] == [503, 503]
            assert "starting" in early[1].json()["error"]["message"] and early[1].headers["retry-after"] == "1"
        finally:
            may_go_on.set()
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        assert httpx.get(f"{url}/live").json() == {"status": "ok"}
        assert metric(url, "generation_tokens_total") == 0 and metric(url, "prefix_cache_tokens") == 0
        assert post(url, prompt="x", **GREEDY).status_code == 200


def test_requests_cut_off_at_shutdown_get_an_error(errors, monkeypatch):
    """Decoding is held until the server has begun to stop."""
    monkeypatch.setattr("graft.server.connection.GRACE", PATIENCE)  # clients may be slow here
    close = Scheduler.close
    body = {"prompt": "abc", "max_tokens": 1000, "logit_bias": A_LETTER, "speculate": False}
    engine = new_engine()
    with ThreadPoolExecutor(2) as pool, running(engine, shutdown_timeout=1e-6) as url:
        gate = Gate(engine.target)
        streamed = pool.submit(post, url, stream=True, **body)
        gate.wait()
        whole = pool.submit(post, url, **body)
        until(lambda: metric(url, "num_requests_waiting") == 1)
        gate.let(4)
        gate.wait()
        assert metric(url, "num_requests_running") == 2

        def open_and_close(scheduler, *given):
            gate.open_when(lambda: scheduler.is_closing)
            close(scheduler, *given)

        monkeypatch.setattr(Scheduler, "close", open_and_close)
    answer = whole.result()
    assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]
    last = events_of(streamed.result())[-1]
    assert "shutting down" in last["error"]["message"]
    assert "Traceback" not in errors.text

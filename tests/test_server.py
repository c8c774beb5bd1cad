"""The HTTP server: the official OpenAI client, plain HTTP, and malformed or hostile requests."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from llguidance import LLMatcher

from gates import PATIENCE, Clock, Gate
from graft import Engine, GraftError
from graft.cli.options import LOADING
from graft.cli.serve import SERVING as FLAGS
from graft.engine.scheduler import Scheduler
from graft.server import grammar
from graft.server.app import make_app
from graft.server.settings import SERVING, ServeSettings, gather
from served import A_LETTER, CHAT, GREEDY, metric, new_engine, new_model, post, running, until
from tiny import byte_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    return new_engine()


@pytest.fixture(scope="module")
def url(engine):
    with running(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def alone():
    return Engine(new_model(), byte_tokenizer(), policy="off")


# What it answers


def test_the_official_client_chats(client, alone):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = alone.generate(messages, max_new_tokens=12)
    answer = client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(expected.prompt_ids), 12)


def test_a_stream_joins_to_the_whole(client, alone):
    messages = [{"role": "user", "content": [{"type": "text", "text": "tell me "}, {"type": "text", "text": "more"}]}]
    expected = alone.generate([{"role": "user", "content": "tell me more"}], max_new_tokens=40, temperature=1.0, seed=4)
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_completion_tokens=40,
        seed=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [expected.finish_reason]
    assert last.choices == [] and last.usage.completion_tokens == len(expected.ids)


def test_settings_mean_what_they_mean_to_the_engine(client, alone):
    given = {
        "seed": 7, "n": 2, "temperature": 1.3, "top_p": 0.9, "stop": ["e"], "presence_penalty": 0.5,
        "frequency_penalty": 0.3, "logit_bias": {"70": 3.0},
    }  # fmt: skip
    more = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": [9]}
    expected = alone.generate("graft", max_new_tokens=20, **{**given, "logit_bias": {70: 3.0}}, **more)
    answer = client.completions.create(model="tiny", prompt="graft", max_tokens=20, **given, extra_body=more)
    assert [c.text for c in answer.choices] == [c.text for c in expected.choices]
    assert [c.finish_reason for c in answer.choices] == [c.finish_reason for c in expected.choices]


def test_log_probabilities_are_the_models_own(client, alone):
    expected = alone.generate("graft", max_new_tokens=6, logprobs=2).choices[0].logprobs
    old = client.completions.create(model="tiny", prompt="graft", temperature=0, max_tokens=6, logprobs=2)
    assert old.choices[0].logprobs.token_logprobs == pytest.approx([e.logprob for e in expected], abs=1e-3)
    assert old.choices[0].logprobs.text_offset[0] == 0
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=3, **GREEDY
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 12 and all(len(token.top_logprobs) == 3 for token in content)
    assert (
        bytes(b for token in content for b in token.bytes).decode(errors="replace") == chat.choices[0].message.content
    )


def test_several_prompts_come_back_in_order(client, alone):
    answer = client.completions.create(model="tiny", prompt=["one", "two"], n=2, seed=1, max_tokens=5)
    expected = [c.text for p in ("one", "two") for c in alone.generate(
        p, max_new_tokens=5, n=2, seed=1, temperature=1.0).choices]  # fmt: skip
    assert [c.text for c in sorted(answer.choices, key=lambda c: c.index)] == expected
    by_ids = client.completions.create(model="tiny", prompt=alone.encode("one"), seed=1, max_tokens=5)
    assert by_ids.choices[0].text == expected[0]


def test_a_schema_is_met_every_time(url):
    body = {
        "messages": [{"role": "user", "content": "who?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    }
    with ThreadPoolExecutor(16) as pool, httpx.Client(timeout=60) as http:
        ask = f"{url}/v1/chat/completions"
        answers = list(pool.map(lambda i: http.post(ask, json={**body, "seed": i}), range(40)))
    for answer in answers:
        choice = answer.json()["choices"][0]
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "age", "kind"} and 0 <= person["age"] <= 120 and len(person["name"]) <= 8
        assert choice["finish_reason"] == "stop"
    assert len({answer.text.split('"content":')[1][:40] for answer in answers}) > 20, "and they are drawn"


def test_statistics_and_rounds_come_along(url):
    answer = post(url, prompt="abcabcabc" * 5, return_rounds=True, **GREEDY).json()["choices"][0]
    numbers = answer["speculation"]
    assert numbers["num_rounds"] + numbers["num_accepted_tokens"] == 12
    assert numbers["mean_acceptance_length"] == pytest.approx(12 / numbers["num_rounds"], abs=1e-3)
    assert sum(numbers["accepted_by_source"].values()) == numbers["num_accepted_tokens"]
    assert sum(numbers["accepted_per_position"]) == numbers["num_accepted_tokens"]
    assert len(answer["rounds"]) == numbers["num_rounds"]
    assert answer["text"].startswith("".join(new["text"] for r in answer["rounds"] for new in r["new"]))
    assert "rounds" not in post(url, prompt="abc", **GREEDY).json()["choices"][0]


def test_models_tokenize_health_and_version_endpoints(url, client):
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    tokens = post(url, "/tokenize", prompt="grün").json()
    assert tokens["count"] == 5 == len(tokens["tokens"])
    assert post(url, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "grün"}
    assert post(url, "/tokenize", messages=[{"role": "user", "content": "x"}]).json()["count"] > 1
    health = httpx.get(f"{url}/health").json()
    assert health.keys() == {"status", "weights", "steps", "not_fused"} and health["weights"] == "float32"
    assert health["steps"] == ("fused, exact in any batch" if health["not_fused"] is None else "eager")
    assert "version" in httpx.get(f"{url}/version").json()
    elsewhere = httpx.get(f"{url}/version", headers={"host": "evil.example"})
    assert elsewhere.status_code == 400, "a page elsewhere cannot reach a local server"


def test_metrics_count(url):
    names = ("generation_tokens_total", "prompt_tokens_total", "request_success_total")
    before = [metric(url, name) for name in names]
    post(url, prompt="ababab", **GREEDY)
    assert [metric(url, name) - b for name, b in zip(names, before, strict=True)] == [12, 6, 1]
    text = httpx.get(f"{url}/metrics").text
    assert 'graft:spec_decode_num_draft_tokens_total{model_name="tiny",source="' in text
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert f"graft:{name}_bucket" in text


# What it refuses


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temprature": 1}, "temprature is not supported"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 5000}, "max_tokens is 5000, more than the 4096 allowed"),
        ({"max_tokens": 2000}, "maximum context length is 1024 tokens"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "maximum context length is 1024 tokens"),
        ({"messages": [{"role": "user", "content": "ü" * 8193}]}, "bytes, more than the 16384 allowed"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"n": 100}, "n=100 answers are more than"),
        ({"logit_bias": {"999": 1}}, "the model has no token 999"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 3,
            "maxLength": 2}}}}, "Unsatisfiable"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "cannot be combined with response_format"),
        ({"model": "other"}, "'tiny' is"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(url, body, words):
    answer = post(url, "/v1/chat/completions", **{**CHAT, **body})
    assert answer.status_code == (404 if "model" in body else 400)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b'{"prompt": "\xff\xfe"}', 400), (b"[" * 100_000, 400), (b"", 400), (b'"', 400),
     (b'{"prompt": "\\ud800"}', 400), (b'{"prompt": "x", "seed": 1e400}', 400), (b" " * 10_000_000, 413)],
)  # fmt: skip
def test_bodies_that_are_no_requests(url, content, status):
    headers = {"content-type": "application/json"}
    assert httpx.post(f"{url}/v1/completions", content=content, headers=headers).status_code == status
    chunked = httpx.post(f"{url}/v1/completions", content=(content[i : i + 65536] for i in range(
        0, len(content), 65536)), headers=headers)  # fmt: skip
    assert chunked.status_code == status and "error" in chunked.json()


def test_keys_are_asked_for():
    with running(api_keys=("right", "other")) as url:

        def status(path, key):
            return httpx.get(url + path, headers={"authorization": key} if key else {}).status_code

        assert [status("/v1/models", key) for key in (None, "Bearer wrong", "Basic right", "right")] == [401] * 4
        assert [status("/v1/models", f"Bearer {key}") for key in ("right", "other")] == [200, 200]
        assert status("/metrics", None) == 401 and status("/health", None) == 200
        assert httpx.post(f"{url}/v1/completions", content=b"x").status_code == 401, "before the body is read"


# When users go, or come in crowds


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_place(engine, url, monkeypatch, stream):
    """Decoding is held until the scheduler hears that the client has gone."""
    gate, cancel = Gate(engine.target), Scheduler.cancel
    monkeypatch.setattr(Scheduler, "cancel", lambda *given: (cancel(*given), gate.open()))
    failures = metric(url, "request_failure_total")
    body = {"prompt": "abc", "max_tokens": 900, "logit_bias": A_LETTER, "speculate": False, "stream": stream}
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(request_bytes("/v1/completions", body))
        gate.wait()
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200"), "its answer has begun"
        assert metric(url, "num_requests_running") == 1 and metric(url, "kv_cache_usage_perc") > 0
    until(lambda: metric(url, "num_requests_running") == 0 == metric(url, "kv_cache_usage_perc"))
    until(lambda: metric(url, "request_failure_total") == failures + 1)
    assert post(url, prompt="abc", **GREEDY).status_code == 200


@pytest.mark.parametrize(("seed", "num_texts"), [(-2, 1), (-1, 3)])
def test_every_seed_gives_one_text_but_minus_one_which_is_a_new_seed_each_time(url, seed, num_texts):
    asked = {"prompt": "abc", "max_tokens": 24, "temperature": 1, "seed": seed, "ignore_eos": True}
    texts = {post(url, **asked).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == num_texts


def request_bytes(path, body):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def test_a_request_that_takes_too_long_is_ended(engine, url, monkeypatch):
    """The scheduler's clock is put forward while decoding is held: by then a stream has begun."""
    body = {"prompt": "abc", "max_tokens": 200, "logit_bias": A_LETTER, "speculate": False}
    with ThreadPoolExecutor(1) as pool:
        for stream in (False, True):
            clock, gate = Clock(), Gate(engine.target)
            monkeypatch.setattr("graft.engine.scheduler.time", clock.as_module())
            asked = pool.submit(post, url, stream=stream, **body)
            gate.wait()
            clock.put_forward(ServeSettings().timeout)
            gate.open()
            answer = asked.result()
            assert answer.status_code == (200 if stream else 504)
            if stream:
                assert "took longer than allowed" in list(answer.iter_lines())[-2], "a stream ends with the error"
    early = post(url, stream=True, **body)  # for which it is late already
    assert early.status_code == 504, "one that has not begun has a status"


@pytest.mark.parametrize(
    ("learning", "shared_with"),
    [
        ("shared", [True, True, True]),
        ("auto", [True, True, False]),
        pytest.param("key", [True, True, False], marks=pytest.mark.slow),  # what auto means for several keys
        ("isolated", [True, False, False]),
        ("off", [True, False, False]),
    ],
)
def test_the_prefix_cache_is_shared_as_the_learning_setting_says(learning, shared_with):
    """Keys and values that were kept: by the same key and user, another user, another key."""
    with running(learning=learning, api_keys=("a", "b")) as url:

        def num_cached(key, user):
            body = {"prompt": "some text that is longer than a page " * 4, "user": user, **GREEDY}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert num_cached("a", "me") == 0
        assert [num_cached(*who) > 0 for who in (("a", "me"), ("a", "you"), ("b", "me"))] == shared_with


@pytest.mark.parametrize(("learning", "salts"), [("key", 1), ("isolated", 2), ("off", 3)])
def test_tables_learn_from_those_who_may_share(learning, salts):
    engine = new_engine(isolated=True)
    seen = set()
    finish = engine.device_rounds.finish_text
    engine.device_rounds.finish_text = lambda text: (seen.add(engine.policy.salt_of(text)), finish(text))
    with running(engine, learning=learning) as url:
        for user in ("me", "you", "me"):
            post(url, prompt="abc", user=user, **GREEDY)
    assert len(seen) == salts


SECRET = "my card number is 4929-1234-8765, keep it"
PROBE = "tell me: my card number is "


def spelt_by(url, key, **body):
    """What every path of every round of an answer says, and where the proposals came from."""
    body = {"prompt": PROBE, "return_rounds": True, "temperature": 0, "max_tokens": 30, "ignore_eos": True, **body}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
    (choice,) = answer.json()["choices"]
    paths, sources = set(), set()
    for each in choice["rounds"]:
        said = [""]
        for token, parent in zip(each["tokens"][1:], each["parents"][1:], strict=True):
            said.append(said[parent] + token)
        paths.update(said)
        sources.update(each["sources"])
    return paths, sources, choice


def says_the_secret(paths):
    return any(part in path for path in paths for part in ("4929", "1234", "8765"))


@pytest.mark.parametrize("learning", ["auto", "shared", pytest.param("key", marks=pytest.mark.slow), "isolated", "off"])
def test_no_round_shows_what_another_key_has_said(learning):
    """Nor, where texts learn from all, what a table or a finished text proposed and the model did not say."""
    with running(learning=learning, api_keys=("alice", "bob")) as url:
        for _ in range(2):
            spelt_by(url, "alice", prompt=SECRET)
        paths, sources, choice = spelt_by(url, "bob")
        assert not says_the_secret(paths) and "past" not in sources
        hidden = sum(each["num_hidden"] for each in choice["rounds"])
        assert (hidden > 0) == (learning == "shared"), "there was something to hide"
        paths, sources, _ = spelt_by(url, "alice")
        if learning == "auto":
            assert says_the_secret(paths) and "past" in sources, "who has said it learns from it"


@pytest.mark.parametrize(("settings", "sees_all"), [({}, True), ({"api_keys": ("one",)}, False)])
def test_without_keys_a_round_shows_every_guess(settings, sees_all):
    with running(**settings) as url:
        for _ in range(2):
            spelt_by(url, "one", prompt=SECRET)
        paths, _, choice = spelt_by(url, "one")
        assert says_the_secret(paths) == sees_all
        assert (sum(each["num_hidden"] for each in choice["rounds"]) == 0) == sees_all


@pytest.mark.parametrize(
    ("keys", "learning", "sharing"),
    [
        ((), "auto", "shared"),
        (("a",), "auto", "shared"),
        (("a", "a"), "auto", "shared"),
        (("a", "b"), "auto", "key"),
        (("a", "b"), "shared", "shared"),
        ((), "key", "key"),
        (("a", "b"), "isolated", "isolated"),
        (("a",), "off", "off"),
    ],
)
def test_several_keys_keep_apart_unless_told_otherwise(keys, learning, sharing):
    assert ServeSettings(api_keys=keys, learning=learning).sharing == sharing


def test_an_engine_whose_texts_learn_from_each_other_is_not_served_to_those_who_are_kept_apart():
    with pytest.raises(GraftError, match="isolated"):
        make_app(new_engine(), ServeSettings(api_keys=("a", "b")), "tiny")


def test_logs_hold_no_prompts_unless_asked_for(caplog):
    for log_prompts in (False, True):
        caplog.clear()
        with caplog.at_level("INFO"), running(log_prompts=log_prompts) as url:
            post(url, prompt="my secret", **GREEDY)
        assert "6 new" not in caplog.text and "12 new in" in caplog.text
        assert ("my secret" in caplog.text) == log_prompts


# How it is told


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nhost: 0.0.0.0\nmax_rows: 3\nmodel: some-model\nbudget: 9\n")
    environment = {"GRAFT_SERVE_PORT": "2", "GRAFT_SERVE_MAX_ROWS": "4", "GRAFT_SERVE_API_KEYS": "a,b", "HOME": "/"}
    loading, settings = gather({"port": 3}, environment, file, tuple(LOADING))
    assert (settings.port, settings.max_rows, settings.host) == (3, 4, "0.0.0.0")
    assert settings.api_keys == ("a", "b") and loading == {"model": "some-model", "budget": 9}


@pytest.mark.parametrize(
    ("flags", "environment", "file", "words"),
    [
        ({}, {}, "prot: 1", "unknown setting 'prot': did you mean 'port'?"),
        ({}, {"GRAFT_SERVE_PROT": "1"}, "", "unknown setting 'prot'"),
        ({}, {"GRAFT_SERVE_PORT": "x"}, "", "port: "),
        ({"learning": "some"}, {}, "", "learning"),
        ({}, {"GRAFT_SERVE_EXACT": "maybe"}, "", "exact: "),
        ({"max_rows": 0}, {}, "", "max_rows must be at least 1"),
        ({}, {}, "- 1", "must hold settings"),
        ({}, {}, "port: [", "cannot read"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path, flags, environment, file, words):
    path = tmp_path / "serve.yaml"
    path.write_text(file)
    with pytest.raises(GraftError, match=words.replace("?", r"\?")):
        gather(flags, environment, path, tuple(LOADING))


@pytest.mark.parametrize("word", ["off", "no", "false"])
def test_off_means_off_wherever_it_is_written(tmp_path, word):
    file = tmp_path / "serve.yaml"
    file.write_text(f"learning: off\npolicy: off\npage: {word}\nexact: {word}\n")
    loading, settings = gather({}, {}, file, tuple(LOADING))
    assert (settings.learning, settings.page) == ("off", False)
    assert loading == {"policy": "off", "exact": False}
    loading, settings = gather({}, {"GRAFT_SERVE_PAGE": word, "GRAFT_SERVE_EXACT": word}, None, tuple(LOADING))
    assert not settings.page and loading == {"exact": False}


def test_every_setting_has_its_flag():
    assert set(FLAGS) == set(SERVING)


# The load test


def test_the_load_test_reports_what_users_felt(url, graft, tmp_path):
    for more in ((), ("--rate", "50", "--plain")):
        out = tmp_path / "load.json"
        words = ("--url", url, "--requests", "6", "--concurrency", "3", "--max-tokens", "8", "--out", str(out))
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "abc"}\n{"prompt": "abcd"}\n')
        finished = graft("bench", "serve", *words, "--prompts", str(prompts), *more)
        assert finished.status == 0 and "6 answered, 0 refused, 0 failed" in finished.out
        figures = json.loads(out.read_text())
        assert figures["answered"] == 6 and figures["tokens_per_second"] > 0
        assert figures["time_to_first_token"]["p50"] <= figures["time_to_last_token"]["p99"]
        assert figures["mean_acceptance_length"] >= 1
    assert graft("bench", "serve", "--url", "http://127.0.0.1:9", "--requests", "1").status == 2


# What others send


def slow_until(released, begun, function):
    """The function, which a schema that says so keeps busy until it is released."""

    def slow(schema, **more):
        if "slow" in schema:
            begun.release()
            assert released.wait(PATIENCE)
        return function(schema, **more)

    return slow


def asked_for(url, schema, **body):
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    return post(url, prompt="x", response_format=wanted, max_tokens=2, **body)


SLOW = {"type": "string", "description": "slow"}


def test_a_schema_that_takes_too_long_is_refused_and_stalls_nobody(monkeypatch):
    clock = Clock()
    released, begun = threading.Event(), threading.Semaphore(0)
    compiled = slow_until(released, begun, LLMatcher.grammar_from_json_schema)
    monkeypatch.setattr(grammar, "LLMatcher", Stub(LLMatcher, grammar_from_json_schema=compiled))
    with running(clock=clock) as url, ThreadPoolExecutor(3) as crowd:
        first = crowd.submit(asked_for, url, SLOW)
        assert begun.acquire(timeout=PATIENCE)
        assert post(url, prompt="abc", **GREEDY).status_code == 200
        assert asked_for(url, PERSON).status_code == 200, "there is another thread for it"
        assert not first.done(), "they were answered meanwhile"
        refused = clock.put_forward_until(first)
        assert refused.status_code == 400 and "takes longer than 5 s" in refused.json()["error"]["message"]
        second = crowd.submit(asked_for, url, SLOW)
        assert begun.acquire(timeout=PATIENCE), "now both threads are kept"
        assert clock.put_forward_until(second).status_code == 400
        arrived, compile_ = threading.Event(), grammar.Grammars.compile
        monkeypatch.setattr(grammar.Grammars, "compile", lambda *given: (arrived.set(), compile_(*given))[1])
        third = crowd.submit(asked_for, url, PERSON)
        assert arrived.wait(PATIENCE)
        busy = clock.put_forward_until(third)
        assert busy.status_code == 503 and busy.headers["retry-after"]
        assert post(url, prompt="abc", **GREEDY).status_code == 200
        released.set()
        until(lambda: asked_for(url, PERSON).status_code == 200)  # they come back


class Stub:
    """A class with some of its functions exchanged."""

    def __init__(self, kind, **functions):
        self._kind, self._functions = kind, functions

    def __getattr__(self, name):
        return self._functions.get(name) or getattr(self._kind, name)

    def __call__(self, *given, **more):
        return self._kind(*given, **more)


def test_a_schema_that_is_too_large_is_refused(url):
    large = asked_for(url, {"enum": [f"value {number:07d}" for number in range(5000)]})
    assert large.status_code == 400 and "65536" in large.json()["error"]["message"]


def test_long_texts_do_not_keep_short_ones_waiting():
    engine = new_engine()
    encode, begun, may_go_on = engine.encode, threading.Event(), threading.Event()

    def slow(prompt, **options):
        if len(prompt) > 20_000:
            begun.set()
            assert may_go_on.wait(PATIENCE)
        return encode(prompt, **options)

    engine.encode = slow
    with running(engine, max_prompt_bytes=100_000) as url, ThreadPoolExecutor(1) as crowd:
        long = crowd.submit(post, url, prompt="word " * 5000, **GREEDY)
        assert begun.wait(PATIENCE)
        try:
            assert post(url, prompt="abc", **GREEDY).status_code == 200
            assert post(url, "/tokenize", prompt="abc").status_code == 200
        finally:
            may_go_on.set()
        assert long.result().status_code == 400


@pytest.mark.parametrize("name", ["compute_bitmask", "is_stopped", "consume_token", "is_error"])
def test_a_grammar_that_panics_ends_its_answer_alone(name):
    class PanicError(BaseException):
        pass

    def panic(*_):
        raise PanicError("index out of bounds")

    matcher = type("Matcher", (), {n: lambda self, *given: b"\xff" * 8 for n in dir(LLMatcher) if n[0] != "_"})()
    matcher.is_stopped = matcher.is_error = lambda: False
    matcher.consume_token = lambda token: True
    matcher.deep_copy = lambda: matcher
    setattr(matcher, name, panic)
    constraint = grammar.GrammarConstraint(matcher)
    constraint.mask(torch.zeros(60))
    constraint.take(3)
    assert constraint.error == "response_format cannot be followed: index out of bounds"
    assert torch.equal(constraint.mask(torch.ones(60)), torch.ones(60))

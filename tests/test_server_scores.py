"""Log-probabilities of prompts (echo, prompt_logprobs), and answers that must fit a regular expression or a choice."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from gates import PATIENCE
from graft.server import answers, refusals
from served import GREEDY, new_engine, post, running
from tiny import byte_tokenizer

LONG = "a text that is longer than a page of the cache, " * 4


@pytest.fixture(scope="module")
def engine():
    return new_engine()


@pytest.fixture(scope="module")
def url(engine):
    with running(engine, max_batched_tokens=64) as url:
        yield url


def scored(engine, text):
    """The prompt's log-probabilities by one forward of transformers' own."""
    ids = torch.tensor([byte_tokenizer().encode(text)])
    with torch.no_grad():
        logprobs = engine.target.model(ids).logits[0].log_softmax(dim=1)
    return [float(logprobs[place, token]) for place, token in enumerate(ids[0, 1:].tolist())]


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("text", ["x", "graft", LONG])
def test_an_echoed_prompt_comes_with_the_models_own_log_probabilities(url, engine, text, speculate):
    for _ in range(2):  # what is kept of the first must not leave the second without
        body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "speculate": speculate}
        choice = post(url, **body).json()["choices"][0]
        found = choice["logprobs"]
        assert choice["text"].startswith(text) and found["token_logprobs"][0] is None is found["top_logprobs"][0]
        assert found["token_logprobs"][1:-1] == pytest.approx(scored(engine, text), abs=1e-4)
        assert len(found["tokens"]) == len(text) + 1 == len(found["text_offset"])
        assert "".join(found["tokens"][:-1]) == text and found["text_offset"][:-1] == list(range(len(text)))
        assert all(len(top) == 1 for top in found["top_logprobs"][1:])


def test_a_prompt_can_be_scored_without_an_answer(url):
    body = {"prompt": ["ab", "abc"], "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = post(url, **body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "abc"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [2, 3]
    assert answer["usage"]["completion_tokens"] == 0 and answer["choices"][0]["finish_reason"] == "length"
    assert post(url, prompt="ab", max_tokens=0).status_code == 400
    by_ids = post(url, **{**body, "prompt": byte_tokenizer().encode("abc")}).json()["choices"][0]
    assert by_ids["text"] == "abc" and by_ids["logprobs"]["tokens"] == answer["choices"][1]["logprobs"]["tokens"]


def test_a_stream_with_echo_joins_to_the_whole(url):
    body = {"prompt": "graft", "echo": True, "logprobs": 2, "n": 2, "seed": 3, "max_tokens": 8}
    whole = post(url, **body).json()["choices"]
    events = [json.loads(line[6:]) for line in post(url, stream=True, **body).iter_lines() if line[:7] == "data: {"]
    for index in range(2):
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(part["text"] for part in parts) == whole[index]["text"]
        for name in ("tokens", "text_offset", "token_logprobs"):
            joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            expected = whole[index]["logprobs"][name]
            assert joined[1:] == (pytest.approx(expected[1:], abs=1e-4) if "logprobs" in name else expected[1:])
            assert joined[0] == expected[0]


@pytest.mark.parametrize("stream", [True, False])
def test_others_are_answered_while_a_long_echoed_prompt_is_written_as_json(url, monkeypatch, stream):
    begun, may_go_on, write = threading.Event(), threading.Event(), refusals.dump_json

    def slow(content):
        if any("y" * 300 in choice.get("text", "") for choice in content.get("choices", ())):
            begun.set()
            assert may_go_on.wait(PATIENCE)
        return write(content)

    for module in (refusals, answers):
        monkeypatch.setattr(module, "dump_json", slow)
    body = {"prompt": "y" * 300, "echo": True, "logprobs": 0, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(post, url, **body, **GREEDY)
        assert begun.wait(PATIENCE)
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        may_go_on.set()
        assert "y" * 300 in long.result().text


def test_log_probabilities_of_prompts_by_token_id(url, engine):
    expected = scored(engine, "graft")
    ids = byte_tokenizer().encode("graft")
    for answer in (post(url, prompt="graft", prompt_logprobs=2, **GREEDY),):
        first, *others = answer.json()["choices"][0]["prompt_logprobs"]
        assert first is None and [len(other) >= 2 for other in others] == [True] * 4
        assert [other[str(token)]["logprob"] for token, other in zip(ids[1:], others, strict=True)] == pytest.approx(
            expected, abs=1e-4
        )
    chat = post(url, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], prompt_logprobs=0, **GREEDY)
    assert len(chat.json()["choices"][0]["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]
    assert post(url, prompt="x", prompt_logprobs=1, stream=True).status_code == 400


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"guided_regex": "[a-c]{2}-[0-9]+x"}, "[a-c]{2}-[0-9]+x"),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, "(yes|no)!"),
        ({"guided_choice": ["red (a)", "green|", '"blue"']}, r'red \(a\)|green\||"blue"'),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "1|2"),
    ],
)
def test_answers_fit_what_they_must(url, wanted, pattern):
    for seed in range(2):
        body = {"prompt": "which?", "seed": seed, "max_tokens": 30, **wanted}
        choice, plain = (post(url, **body, speculate=speculate).json()["choices"][0] for speculate in (True, False))
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"])
        else:
            assert re.fullmatch("[a-c]{2}-[0-9]+", choice["text"]), "only digits may go on for ever"
        assert choice["text"] == plain["text"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_regex": "("}, "guided_regex cannot be used: invalid regular expression: unclosed group"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "give only one of"),
        ({"structured_outputs": {}}, "give one of json, regex and choice"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar is not supported"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_an_unsatisfiable_constraint_is_refused(url, body, words):
    answer = post(url, prompt="x", **body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]

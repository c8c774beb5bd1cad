"""Markers of calls and reasoning that are tokens of their own: special ones leave no text but where they are read."""

import json
from contextlib import ExitStack
from functools import cache

import httpx
import pytest
from tokenizers import AddedToken

from graft import Engine, GraftError
from graft.request.detokenizer import TextStream
from graft.server.grammar import GrammarSpec
from graft.server.serving import Serving
from served import CHAT, post, running
from served_tools import NAMED, SHORT, TOOLS, WITH_TOOLS, engine_with, fits
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

MARKERS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
)  # fmt: skip
ARGUMENTS = '{"city": "rome", "unit": "C"}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
THINKS = "{# <think> #}" + SHORT


def marked_tokenizer(is_special=True):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(marker, special=is_special, normalized=False) for marker in MARKERS])
    return tokenizer


def marked_engine(template=SHORT, is_special=True):
    tokenizer = marked_tokenizer(is_special)
    tokenizer.chat_template = template
    model = tiny_model(vocab_size=BYTE_VOCAB + len(MARKERS), max_position_embeddings=4096, num_hidden_layers=1)
    return Engine(model, tokenizer, budget=12)


@pytest.fixture(scope="module")
def served():
    """An engine of some kind and the address of its server, which tests share."""
    with ExitStack() as stack:

        @cache
        def serve(make=marked_engine, *given, **settings):
            engine = make(*given)
            return engine, stack.enter_context(running(engine, **settings))

        yield serve


@pytest.fixture
def says(monkeypatch):
    """Makes any model give an answer of the parts given, of which markers are single tokens."""

    def say(engine, *parts):
        ids = engine.tokenizer.get_added_vocab()
        rule = " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts)

        async def wanted(self, body, thinks):
            return GrammarSpec("grammar", f"start: {rule}\n")

        monkeypatch.setattr(Serving, "grammar_of_calls", wanted)

    return say


def whole_and_streamed(url, **body):
    """The message of an answer and its usage, asked for whole; the same, streamed and put together."""
    body = {**CHAT, "max_tokens": 200, **body}
    whole = post(url, "/v1/chat/completions", **body).json()
    told = {"content": "", "reasoning_content": "", "calls": []}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(f"{url}/v1/chat/completions", json={**body, **options}, timeout=60).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for name in ("content", "reasoning_content"):
            told[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                told["calls"].append([part["function"]["name"], ""])
            told["calls"][part["index"]][1] += part["function"]["arguments"]
    assert "choices" in whole, whole
    message = whole["choices"][0]["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    first = {name: message.get(name) or "" for name in ("content", "reasoning_content")} | {"calls": calls}
    assert events[-1]["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    return first, told, whole["usage"]


# Where no call is forced


@pytest.mark.parametrize(
    ("name", "template", "parts"),
    [
        ("hermes", SHORT, ("I look.\n", "<tool_call>", f"\n{CALL}\n", "</tool_call>")),
        ("qwen", SHORT, ("I look.\n", "<tool_call>", f"\n{CALL}\n", "</tool_call>")),
        ("mistral", WITH_TOOLS, ("I look.", "[TOOL_CALLS]", f"[{CALL}]")),
        ("mistral", WITH_TOOLS, ("I look.", "[TOOL_CALLS]", "get_weather", "[ARGS]", ARGUMENTS)),
        ("mistral", WITH_TOOLS, ("I look.", "[TOOL_CALLS]", "get_weather", "[CALL_ID]", "a1", "[ARGS]", ARGUMENTS)),
        ("llama3", WITH_TOOLS, ("I look.", "<|python_tag|>", CALL)),
    ],
)
def test_calls_are_found_by_markers_that_are_special_tokens(says, served, name, template, parts):
    engine, url = served(marked_engine, template, tool_parser=name)
    says(engine, *parts)
    first, told, usage = whole_and_streamed(url, tools=TOOLS, tool_choice="auto")
    assert first == told == {"content": "I look.", "reasoning_content": "", "calls": [["get_weather", ARGUMENTS]]}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("is_special", [True, False])
def test_reasoning_is_found_by_markers_and_its_tokens_are_counted(says, served, is_special):
    engine, url = served(marked_engine, THINKS, is_special)
    says(engine, "<think>", "hm, rome", "</think>", "\n", "<tool_call>", f"\n{CALL}\n", "</tool_call>")
    first, told, usage = whole_and_streamed(url, tools=TOOLS)
    response = post(url, "/v1/responses", input="x", tools=[{"type": "function", **TOOLS[0]["function"]}]).json()
    assert first == told == {"content": "", "reasoning_content": "hm, rome", "calls": [["get_weather", ARGUMENTS]]}
    # The two markers and eight letters.
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 10}
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 10}
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]


@pytest.mark.parametrize(
    ("make", "parts", "max_tokens", "count"),
    [
        (engine_with, ("<think>hm</think>yes",), 50, len("<think>hm</think>")),  # the markers are spelt
        (marked_engine, ("<think>", "hm, rome", "</think>", "yes"), 5, 5),  # it is cut
        (marked_engine, ("no, ", "<think>", "hm", "</think>"), 50, 0),
    ],
)
def test_tokens_of_reasoning_are_counted(says, served, make, parts, max_tokens, count):
    engine, url = served(make, THINKS, *([True] if make is marked_engine else []))
    says(engine, *parts)
    usage = whole_and_streamed(url, max_tokens=max_tokens)[2]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == count


def test_markers_that_nobody_looks_for_leave_no_text(says, served):
    engine, url = served(marked_engine, SHORT)
    says(engine, "<think>", "a", "<tool_call>", CALL, "</tool_call>", "b")
    first, told, _ = whole_and_streamed(url)
    assert first == told == {"content": f"a{CALL}b", "reasoning_content": "", "calls": []}
    unasked, _, _ = whole_and_streamed(url, tools=TOOLS, tool_choice="none")
    assert unasked == first
    ids = engine.tokenizer.convert_tokens_to_ids(["<tool_call>"])
    answer = post(url, prompt="x", max_tokens=2, logit_bias={str(ids[0]): 100}).json()
    assert answer["choices"][0]["text"] == ""


# Where one is


@pytest.mark.parametrize(("name", "template"), [("hermes", SHORT), ("mistral", WITH_TOOLS)])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_with_markers_that_are_special_tokens(served, name, template, choice):
    _, url = served(marked_engine, template, tool_parser=name)
    first, told, _ = whole_and_streamed(url, tools=TOOLS[:1], tool_choice=choice, seed=3, max_tokens=600)
    assert first == told and first["content"] == "" and first["calls"]
    assert all(function == "get_weather" and fits(arguments) for function, arguments in first["calls"])


# The text


def test_kept_tokens_are_text_and_other_special_ones_are_not():
    tokenizer = marked_tokenizer()
    ids = tokenizer.encode("a<think>b</s><tool_call>ü</tool_call>", add_special_tokens=False)
    kept = frozenset(tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]))
    streams = [TextStream(tokenizer, [], kept=kept), TextStream(tokenizer, [])]
    for stream in streams:
        for token in ids:
            stream.push(token)
        stream.finish()
    assert [stream.text for stream in streams] == ["ab<tool_call>ü</tool_call>", "abü"]
    # a, <think>, b, </s>, <tool_call>, two halves of a letter, </tool_call>
    counts = [streams[0].num_tokens(len(text)) for text in ("", "a", "ab", "ab<", "ab<tool_call>", "ab<tool_call>ü")]
    assert counts == [0, 1, 3, 5, 5, 7]
    assert streams[0].num_tokens(10_000) == len(ids)


def test_a_stop_string_finds_a_kept_token_as_text():
    tokenizer = marked_tokenizer()
    call, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</s>"])
    stream = TextStream(tokenizer, [], ["l><", "x<tool_call>", "</s>"], kept=frozenset([call]))
    assert [stream.push(token) for token in (*tokenizer.encode("ax"), call)] == [False, False, True]
    assert stream.text == "a"
    assert TextStream(tokenizer, [], ["</s>"], kept=frozenset([call])).push(end)
    with pytest.raises(GraftError, match="never part of the text"):
        TextStream(tokenizer, [], ["x<tool_call>"])

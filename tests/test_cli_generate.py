"""`graft generate`: prompts in, answers out, and what every bad option says."""

import json
import re
from dataclasses import fields
from typing import get_args

import pytest

import graft as library
from conftest import Finished
from graft import SamplingSettings
from graft.cli.generate import ANSWERS
from graft.cli.options import SAMPLING

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine(model_folder):
    return library.load(model_folder)


def test_every_sampling_setting_has_an_option_that_tells_its_default():
    options = ANSWERS | SAMPLING
    assert set(options) == {field.name for field in fields(SamplingSettings)}
    for field in fields(SamplingSettings):
        if field.type in ("int", "float"):
            _, option = get_args(options[field.name])
            assert option.help.endswith(rf"[dim]\[default: {field.default:g}][/]")


def test_answer_is_that_of_the_library(graft_tiny, engine):
    expected = engine.generate(HI, max_new_tokens=8).text
    assert graft_tiny("generate", "hi") == Finished(0, expected + "\n", "")


def test_raw_continues_the_text_as_it_is(graft_tiny, engine):
    expected = engine.generate("hi", max_new_tokens=8).text
    assert graft_tiny("generate", "hi", "--raw").out == expected + "\n"


@pytest.mark.parametrize("words", [["generate"], ["generate", "-"]])
def test_prompt_comes_from_stdin_without_its_last_newline(words, graft_tiny, engine):
    expected = engine.generate([{"role": "user", "content": "grüße\n"}], max_new_tokens=8).text
    assert graft_tiny(*words, stdin="grüße\n\n".encode()).out == expected + "\n"


def test_json_has_the_facts_of_the_answer(graft_tiny, engine):
    facts = json.loads(graft_tiny("generate", "hi", "--json", "--temperature", "0.8", "--seed", "5").out)
    expected = engine.generate(HI, max_new_tokens=8, temperature=0.8, seed=5)
    assert (facts["text"], facts["ids"], facts["seed"]) == (expected.text, expected.ids, 5)
    assert facts["finish_reason"] == "length"
    assert facts["prompt_tokens"] == len(expected.prompt_ids)
    assert facts["stats"]["tokens"] == 8
    assert "choices" not in facts and "logprobs" not in facts


def test_json_has_all_choices_and_their_logprobs_when_asked(graft_tiny):
    words = ["--json", "--n", "2", "--logprobs", "3", "--temperature", "1", "--seed", "5"]
    facts = json.loads(graft_tiny("generate", "hi", *words).out)
    first, second = facts["choices"]
    assert first["text"] == facts["text"] != second["text"]
    assert [entry["token"] for entry in second["logprobs"]] == second["ids"]
    assert len(second["logprobs"][0]["alternatives"]) == 3


def test_options_that_repeat_reach_the_model(graft_tiny):
    words = ["--logit-bias", "80=50", "--logit-bias", "81=1000", "--stop-token-id", "7", "--stop-token-id", "81"]
    facts = json.loads(graft_tiny("generate", "hi", "--json", *words).out)
    assert (facts["ids"], facts["finish_reason"]) == ([81], "stop")


def test_stats_go_to_stderr(graft_tiny):
    err = graft_tiny("generate", "hi", "--stats", "--device", "cpu").err
    assert all(label in err for label in ("tokens/s", "mean accepted length", "accepted by source", "verify"))
    assert re.search(r"steps +(eager|fused, exact in any batch) *\n", err) and "GPU memory" not in err


def test_stats_say_where_plain_decoding_was_chosen(graft_tiny):
    assert "plain decoding" in (err := graft_tiny("generate", "hi", "--stats", "--policy", "off").err)
    assert "all 8 rounds: no tree was verified" in err
    facts = json.loads(graft_tiny("generate", "aaaaaaaa", "--json", "--stats", "--budget", "4").out)
    assert facts["stats"]["plain_rounds"] < facts["stats"]["rounds"], "with a budget, trees are verified"


def test_stats_say_that_an_answer_was_recalled(graft_tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    words = ("generate", "hi", "--stats", "--budget", "8", "--keep-learned")
    first, again = graft_tiny(*words), graft_tiny(*words)
    assert first.out == again.out and "recalled" not in first.err
    assert re.search(r"recalled +[5-8] of 8 tokens, from earlier answers", again.err), again.err
    assert "the speed is not that of new text" in again.err


def test_without_trees_show_tree_says_how_to_see_some(graft_tiny):
    words = "No round had a tree: trees did not seem to pay on this machine. --budget 16 verifies them anyway."
    assert words in graft_tiny("generate", "aaaa", "--show-tree", "--policy", "off").err
    assert words not in graft_tiny("generate", "aaaa", "--show-tree", "--budget", "4").err


def test_trees_are_drawn_on_stderr_and_the_answer_stays_alone_on_stdout(graft_tiny):
    plain = graft_tiny("generate", "aaaa").out
    result = graft_tiny("generate", "aaaa", "--show-tree", "--color-by-origin", "--budget", "4")
    assert result.out == plain, "a pipe gets no colours"
    assert "round 1 after" in result.err and "adjacency" in result.err and "the model's own" in result.err


def test_color_by_origin_colours_a_terminal(graft_tiny, monkeypatch):
    same_again = ["--logit-bias", "81=1000", "--budget", "4"]  # easy to guess
    plain = graft_tiny("generate", "aaaa", *same_again).out
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = graft_tiny("generate", "aaaa", "--color-by-origin", *same_again).out
    assert "\x1b[" in out and re.sub(r"\x1b\[[\d;]*m", "", out) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert graft_tiny("generate", "aaaa", "--color-by-origin", *same_again).out == plain


@pytest.mark.parametrize("verb", ["generate", "chat", "check", "demo"])
def test_unknown_option_is_refused(verb, graft):
    result = graft(verb, "--temprature", "1")
    assert result.status == 2
    assert "--temprature" in result.err


@pytest.mark.parametrize("words", [[], [""], ["--raw"]])
def test_empty_prompt_is_refused(words, graft_tiny):
    result = graft_tiny("generate", *words, stdin=b"\n")
    assert (result.status, result.err) == (2, "error: the prompt is empty\n")

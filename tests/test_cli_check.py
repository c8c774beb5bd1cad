"""`graft check` and `graft.checking.compare`: differences are found, named, and told from exact ties."""

import json
import math
from dataclasses import replace

import pytest
import torch

import graft as library
from graft import SamplingSettings, loading
from graft.checking import compare as checking
from graft.checking.compare import Decoded, compare, find_difference, plain_twin
from graft.checking.reference import processors
from graft.model.sampler import Sampler
from proposers import Oracle
from tiny import tiny_model

PROMPT = [3, 17, 42, 9]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "one"}\n{"id": "b", "turns": ["two", "later"]}\n')
    return str(path)


@pytest.fixture
def wrong_reference(monkeypatch):
    """Makes transformers seem to choose another fourth token for every prompt but the first."""
    right, calls = checking.transformers_answer, []

    def wrong(*arguments):
        ids = right(*arguments)
        calls.append(ids)
        return ids if len(calls) == 1 else [*ids[:3], ids[3] ^ 1, *ids[4:]]

    monkeypatch.setattr(checking, "transformers_answer", wrong)


def test_check_of_equal_texts_exits_with_0(graft_tiny, data):
    result = graft_tiny("check", "--prompts", data)
    assert result.status == 0
    assert result.out.splitlines()[:2] == [
        "2 prompts, 16 tokens, 0 differ",
        "compared with plain decoding and transformers",
    ]
    assert result.err == ""


def test_every_round_has_a_budget_for_a_tree_unless_the_policy_is_plain(graft_tiny, data, monkeypatch):
    load, budgets = loading.load, []

    def watched(**given):
        budgets.append(given.get("budget"))
        return load(**given)

    monkeypatch.setattr(loading, "load", watched)
    assert graft_tiny("check", "--prompts", data, "--json").status == 0
    assert graft_tiny("check", "--prompts", data, "--budget", "3").status == 0
    plain = json.loads(graft_tiny("check", "--prompts", data, "--json", "--policy", "off").out)
    assert budgets == [16, 3, None]
    assert (plain["accepted"], plain["min_accepted"]) == (0, 0)


def test_check_fails_when_too_few_tokens_were_accepted_from_trees(graft_tiny, data):
    enough = json.loads(graft_tiny("check", "--prompts", data, "--json").out)
    assert enough["min_accepted"] == 1 <= enough["accepted"]
    more = str(enough["accepted"] + 1)
    result = graft_tiny("check", "--prompts", data, "--min-accepted", more)
    assert result.status == 1 and "0 differ" in result.out
    assert f"not enough: with fewer than {more} accepted tokens this check says little about speculation" in result.out
    assert graft_tiny("check", "--prompts", data, "--min-accepted", "-1").status == 2


def test_a_prompt_that_cannot_be_decoded_is_named_before_any_is(graft_tiny, data, monkeypatch):
    with open(data, "a") as file:
        file.write(json.dumps({"id": "long", "prompt": "word " * 400}) + "\n")
    monkeypatch.setattr(checking, "compare", lambda *arguments: pytest.fail("a prompt was decoded"))
    result = graft_tiny("check", "--prompts", data)
    assert result.status == 2 and f"{data}, prompt 3 (id long): the prompt has" in result.err


def test_check_exits_1_and_names_the_first_difference_when_texts_differ(graft_tiny, data, wrong_reference):
    result = graft_tiny("check", "--prompts", data)
    assert result.status == 1
    lines = result.out.splitlines()
    assert lines[0] == "2 prompts, 16 tokens, 1 differ"
    place = lines.index(f"first difference: {data}, prompt 2 (id b), new token 3")
    assert lines[place + 1].startswith("  transformers: token ")
    assert lines[place + 2].startswith("  graft: token ")
    assert lines[place + 3] == "  not a tie: the logits are not equal"


def test_exact_tie_is_told_and_excused(graft_tiny, data, wrong_reference, monkeypatch):
    monkeypatch.setattr(checking, "next_logits", lambda model, ids: torch.zeros(1000))
    result = graft_tiny("check", "--prompts", data)
    assert result.status == 0
    assert result.out.startswith("2 prompts, 16 tokens, 1 differ\n")
    assert "an exact tie" in result.out


def test_sampled_text_is_compared_with_transformers_too(graft_tiny, data, wrong_reference):
    result = graft_tiny("check", "--prompts", data, "--temperature", "0.8", "--top-k", "40", "--seed", "3")
    assert result.status == 1
    lines = result.out.splitlines()
    assert lines[1] == "compared with plain decoding and transformers"
    place = lines.index(f"first difference: {data}, prompt 2 (id b), new token 3")
    assert ", score " in lines[place + 2] and lines[place + 3] == "  not a tie: the scores are not equal"


def test_text_that_ends_at_a_stop_text_is_compared_with_plain_decoding_alone(graft_tiny, data, wrong_reference):
    result = graft_tiny("check", "--prompts", data, "--stop", "no such text")
    assert result.status == 0
    assert "compared with plain decoding\n" in result.out


def test_logits_of_a_difference_are_the_models_own():
    model = tiny_model()
    logits = model(torch.tensor([[*PROMPT, 5]])).logits[0, -1]
    difference = find_difference(model, PROMPT, Decoded("plain", [5, 6]), Decoded("graft", [5, 7]))
    assert difference is not None and difference.position == 1
    assert (difference.expected.token, difference.found.token) == (6, 7)
    assert difference.expected.logit == pytest.approx(logits[6].item(), abs=1e-5)
    assert difference.found.logit == pytest.approx(logits[7].item(), abs=1e-5)
    assert not difference.is_tie


def test_answer_that_ended_early_is_a_difference_and_no_tie():
    difference = find_difference(tiny_model(), PROMPT, Decoded("plain", [5, 6]), Decoded("graft", [5]))
    assert difference is not None and difference.found.token is None
    assert not difference.is_tie


def test_compare_counts_what_was_accepted_and_finds_a_wrong_token():
    model = tiny_model()
    settings = SamplingSettings(max_new_tokens=12)
    plain = library.Engine(model, policy="off")
    answer = plain.generate(PROMPT, max_new_tokens=12).ids
    engine = library.Engine(model, policy=Oracle(answer, len(PROMPT)))
    comparison = compare(engine, plain_twin(engine), PROMPT, settings)
    assert comparison.difference is None
    assert comparison.num_tokens == 12
    assert comparison.stats.accepted > 6

    other = library.Engine(tiny_model(seed=1), policy="off")
    comparison = compare(other, plain, PROMPT, settings)
    assert comparison.difference is not None
    assert comparison.difference.expected.decoder == "plain"


# The rule of sampled answers, against transformers' own parts

EVERYTHING = {
    "temperature": 1.5,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {5: 2.0, 7: -3.0, 20: 1.5},
    "min_tokens": 6,
}


@pytest.fixture(scope="module")
def plain():
    model = tiny_model()
    model.generation_config.eos_token_id = [2, 5, 11]
    return library.Engine(model, policy="off")


@pytest.mark.parametrize(
    "options",
    [
        EVERYTHING,
        {**EVERYTHING, "ignore_eos": True, "stop_token_ids": [20, 21]},
        {**EVERYTHING, "temperature": 0.0, "min_tokens": 16},
    ],
    ids=["drawn", "with other endings", "greedy"],
)
def test_answers_are_those_of_transformers_own_processors(plain, options):
    lengths = set()
    for seed in range(3):
        settings = SamplingSettings(max_new_tokens=20, seed=seed, **options)
        answer = plain.generate(PROMPT, **vars(settings)).ids
        engine = library.Engine(plain.target.model, policy=Oracle(answer, len(PROMPT)))
        assert checking.comparable_to_transformers(engine, settings)
        assert compare(engine, plain, PROMPT, settings).difference is None
        lengths.add(len(answer))
    assert min(lengths) >= options["min_tokens"]


LONG = {"max_new_tokens": 16, "ignore_eos": True}


def first_seen(plain, **options):
    """The first difference of a few answers, decoded plainly; greedy ones are all the same."""
    for seed in range(6 if options.get("temperature") else 1):
        settings = SamplingSettings(**{"max_new_tokens": 10, "seed": seed, **options})
        if (difference := compare(plain, plain, PROMPT, settings).difference) is not None:
            return difference
    return None


@pytest.mark.parametrize(
    ("options", "forgotten"),
    [
        ({"temperature": 2.0, "top_k": 3}, {"top_k": 0}),
        ({"temperature": 2.0, "top_p": 0.5}, {"top_p": 1.0}),
        ({"temperature": 2.0, "min_p": 0.4}, {"min_p": 0.0}),
        ({"logit_bias": {20: 4.0}}, {"logit_bias": {}}),
        ({"logit_bias": {5: 40.0}, "min_tokens": 3}, {"min_tokens": 2}),
        ({"repetition_penalty": 2.0}, {"repetition_penalty": 1.0}),
        ({"presence_penalty": 2.0}, {"presence_penalty": 0.0}),
        ({"frequency_penalty": 1.0}, {"frequency_penalty": 0.0}),
        ({"frequency_penalty": 0.3, **LONG}, {"frequency_penalty": 0.0, "presence_penalty": 0.3}),  # each token once
        ({"temperature": 1.0}, {"seed": 1_000}),
    ],
    ids=lambda given: next(iter(given)) if len(given) == 1 else None,
)
def test_a_setting_that_the_sampler_forgets_is_a_difference(plain, monkeypatch, options, forgotten):
    """Plain decoding has the same sampler, so that only transformers can tell."""
    begin = Sampler.__init__

    def forgetful(self, settings, *others):
        begin(self, [replace(each, **forgotten) for each in settings], *others)

    monkeypatch.setattr(Sampler, "__init__", forgetful)
    difference = first_seen(plain, **options)
    assert difference is not None and difference.expected.decoder == "transformers"
    assert not difference.is_tie


def test_a_token_that_the_settings_exclude_is_no_tie():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[6] = model.lm_head.weight[7]
    settings = SamplingSettings(temperature=1.0, logit_bias={6: -math.inf, 7: -math.inf}, seed=1)
    rule = processors(library.Engine(model, policy="off"), settings, len(PROMPT))
    difference = find_difference(model, PROMPT, Decoded("plain", [6]), Decoded("graft", [7]), rule)
    assert difference is not None and difference.expected.score is None
    assert difference.expected.logit == difference.found.logit and not difference.is_tie

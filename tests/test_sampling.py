"""The sampler against plain references, and the exactness of its distribution."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graft import Engine, SamplingSettings
from graft.model.noise import gumbel_noise
from graft.model.sampler import Sampler, truncated
from graft.spec_decode.acceptance import walk_step
from proposers import Oracle, RandomTrees, ScriptedTrees, tree_of
from reference import splitmix
from tiny import VOCAB, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5]
EVERYTHING = {
    "temperature": 1.3,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {5: 2.0, 7: -3.0},
    "min_tokens": 4,
    "seed": 11,
}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        pytest.param({"temperature": 1.3, "top_p": 0.9}, marks=pytest.mark.slow),
        pytest.param(
            {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}, marks=pytest.mark.slow
        ),
        EVERYTHING,  # top-p and penalties among it
    ],
)
def test_same_seed_same_text_with_any_tree_and_with_none(options):
    model = tiny_model()
    for seed in range(2):
        settings = {"max_new_tokens": 20, **options, "seed": seed}
        plain = Engine(model, policy="off").generate(PROMPT, **settings).ids
        for policy in (RandomTrees(20), RandomTrees(20, merge=True, seed=1), Oracle(plain, len(PROMPT))):
            assert Engine(model, policy=policy).generate(PROMPT, **settings).ids == plain
        graft = Engine(model, budget=20)
        assert graft.generate(PROMPT, **settings).ids == plain
        assert graft.generate(PROMPT, **settings).ids == plain, "nor does what was learned before"


def test_answers_of_one_request_differ_and_each_can_be_had_again_by_its_seed():
    engine = Engine(tiny_model(), budget=8)
    result = engine.generate(PROMPT, temperature=1.0, max_new_tokens=12, seed=5, n=3)
    assert len({tuple(choice.ids) for choice in result.choices}) == 3
    for choice in result.choices:
        again = engine.generate(PROMPT, temperature=1.0, max_new_tokens=12, seed=choice.seed)
        assert again.ids == choice.ids


def test_rows_that_stay_or_join_are_sampled_as_if_alone():
    """Four steps of three rows, then four without the second, then four with a newcomer."""
    settings = [
        SamplingSettings(**{**EVERYTHING, "seed": 3, "logit_bias": {5: 9.0}}),
        SamplingSettings(temperature=0.3, seed=9),
        SamplingSettings(temperature=2.5, frequency_penalty=0.8, seed=4),
        SamplingSettings(temperature=1.5, seed=6),
    ]
    histories = [PROMPT, [1, 2], [4] * 9, [8]]
    logits = [torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(i)) * 2 for i in range(12)]

    def sampler_of(*rows):
        own = [[each[row] for row in rows] for each in (settings, histories)]
        return Sampler(*own, [2], VOCAB, torch.device("cpu"))

    there, steps, drawn = sampler_of(0, 1, 2), {row: [] for row in range(4)}, {row: [] for row in range(4)}
    for number, rows in enumerate([(0, 1, 2)] * 4 + [(0, 2)] * 4 + [(0, 2, 3)] * 4):
        if number == 4:
            there = there.select([0, 2])
        if number == 8:
            there = there.concat(sampler_of(3))
        tokens = there.choose(logits[number][list(rows)], [True] * len(rows)).tolist()
        for row, token in zip(rows, tokens, strict=True):
            steps[row].append(number)
            drawn[row].append(token)
    for row in range(4):
        alone = sampler_of(row)
        assert [alone.choose(logits[number][row : row + 1], [True]).item() for number in steps[row]] == drawn[row]


def test_a_row_that_does_not_walk_keeps_its_history():
    settings = [SamplingSettings(temperature=1.0, frequency_penalty=1.0, seed=1)]
    logits = torch.zeros(1, VOCAB)
    one, other = (Sampler(settings, [PROMPT], [], VOCAB, torch.device("cpu")) for _ in range(2))
    other.choose(logits, [False])
    assert [one.choose(logits, [True]).item() for _ in range(20)] == [
        other.choose(logits, [True]).item() for _ in range(20)
    ]


def test_truncation_and_penalties_mean_what_they_mean_in_transformers():
    """Our scores, before noise, are those of transformers' own processors in its own order."""
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.05),
        ]
    )
    settings = SamplingSettings(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.4)
    for seed in range(50):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
        sampler = Sampler([settings], [PROMPT], [], VOCAB, torch.device("cpu"))
        ours = sampler._truncated(sampler._penalized(logits) / 0.7)
        torch.testing.assert_close(ours, processors(torch.tensor([PROMPT]), logits.clone()))


@pytest.mark.parametrize(
    ("setting", "processor"),
    [
        ({"top_k": 3}, TopKLogitsWarper(3)),
        ({"top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
        ({"top_k": 61}, TopKLogitsWarper(61)),
        ({"top_p": 0.01}, TopPLogitsWarper(0.01)),
        ({"min_p": 1.0}, MinPLogitsWarper(1.0)),
    ],
)
def test_each_way_to_truncate_leaves_alone_what_it_leaves_in_transformers(setting, processor):
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **setting}
    for seed in range(20):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
        found = truncated(logits, *(torch.tensor([value]) for value in given.values()))
        torch.testing.assert_close(found, processor(torch.tensor([PROMPT]), logits.clone()))


def test_greedy_choices_with_bias_and_penalties_are_those_of_a_page_of_numpy():
    """Tokens come again and again: what is taken off for each time adds up."""
    settings = SamplingSettings(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.45, logit_bias={2: 1.5, 5: -2.0}
    )
    prompt, rng = [3, 1, 3], np.random.default_rng(0)
    usual, bias = np.array([3.0, 0, 2, 0, 1, 4, 0, 0]), np.array([0, 0, 1.5, 0, 0, -2.0, 0, 0])
    sampler = Sampler([settings], [prompt], [], 8, torch.device("cpu"))
    seen, counts = set(prompt), np.zeros(8)
    for step in range(40):
        logits = usual + rng.normal(size=8) - 8 * (step % 2)  # above zero, then below
        scores = logits + bias
        for token in seen:
            scores[token] = scores[token] / 1.2 if scores[token] > 0 else scores[token] * 1.2
        scores -= 0.3 * (counts > 0) + 0.45 * counts
        token = int(scores.argmax())
        assert sampler.choose(torch.tensor(logits, dtype=torch.float32)[None], [True]).item() == token
        seen.add(token)
        counts[token] += 1
    assert counts.max() > 5 and len(seen) == 8, "some come often, and all at last"


def test_penalties_and_bans_follow_the_nodes_own_path_inside_a_tree():
    """Flat logits and a frequency penalty: every token drawn lowers itself at once, inside one accepted block."""
    vocab = 4
    logits = torch.zeros(4, vocab)
    chain = np.array([[0, 0, 1, 2], [0, 0, 1, 2]])  # tokens and parents: plain decoding takes 0, then 1, then 2
    sampler = Sampler([SamplingSettings(frequency_penalty=1.0)], [[3]], [], vocab, torch.device("cpu"))
    assert walk_step(chain, [0], [4], logits, sampler, [True], most=8) == ([[0, 1, 2, 3]], [[1, 2, 3]])


def test_a_sampler_that_begins_within_an_answer_goes_on_as_the_one_before_it():
    """A row that was preempted, or whose rounds the host takes over, gets a new one."""
    settings, usual = [SamplingSettings(**EVERYTHING)] * 2, ([1, 5], VOCAB, torch.device("cpu"))
    ids = [PROMPT[:3], PROMPT[:5]]
    sampler = Sampler(settings, ids, *usual)
    for number, logits in enumerate(torch.randn(9, 2, VOCAB, generator=torch.Generator().manual_seed(0)) * 2):
        again = Sampler(settings, ids, *usual, None, [3, 5])
        tokens = sampler.choose(logits, [True, True]).tolist()
        assert again.choose(logits, [True, True]).tolist() == tokens, number
        ids = [[*own, token] for own, token in zip(ids, tokens, strict=True)]


def test_what_stands_behind_a_rows_own_tree_is_never_accepted():
    """Padding, or the next row: it may have the token that comes next."""
    step, logits = np.array([[5, 5, 5], [0, 0, 0]]), torch.eye(8)[[5, 5, 5]]
    sampler = Sampler([SamplingSettings()] * 2, [[5]] * 2, [], 8, torch.device("cpu"))
    assert walk_step(step, [0, 1], [1, 2], logits, sampler, [True, True], most=4) == ([[5], [5, 5]], [[], [1]])


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_endings_are_forbidden_for_as_many_tokens_as_in_transformers(min_tokens):
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [7], device="cpu")
    sampler = Sampler([SamplingSettings(min_tokens=min_tokens)], [PROMPT], [7], VOCAB, torch.device("cpu"))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9] = 5.0, 1.0
    ids = list(PROMPT)
    for _ in range(min_tokens + 2):
        expected = processor(torch.tensor([ids]), logits.clone()).argmax().item()
        assert sampler.choose(logits, [True]).item() == expected
        ids.append(expected)
    assert ids[len(PROMPT) :] == [9] * min_tokens + [7, 7]


def fit(counts, expected):
    """The chi-square p-value of counts against what was expected, up to scale."""
    expected = expected.double() / expected.double().sum() * counts.sum()
    return chisquare(counts.double().numpy(), expected.numpy()).pvalue


def test_an_ignored_end_is_not_forbidden_by_min_tokens():
    model = tiny_model()
    model.generation_config.eos_token_id = 7
    engine = Engine(model, policy="off")
    options = {"max_new_tokens": 4, "logit_bias": {7: 100.0}, "ignore_eos": True}
    assert engine.generate(PROMPT, min_tokens=3, **options).ids == [7] * 4
    assert 7 not in engine.generate(PROMPT, min_tokens=3, **{**options, "ignore_eos": False}).ids[:2]


class FixedTree(ScriptedTrees):
    """The same two-level tree in every round: right, wrong and duplicate proposals."""

    def __init__(self, tokens, parents):
        def make(lengths, roots):
            return tree_of([[root, *tokens] for root in roots], [[0, *parents]] * len(roots))

        super().__init__(len(tokens), make)


DRAWS = 1_536


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(8 * DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        pytest.param([0, 0, 1, 2, 2, 3], [0, 0, 1, 1, 2, 3], id="duplicates"),
        pytest.param([4, 4, 4], [0, 0, 1], id="mostly wrong", marks=pytest.mark.slow),
    ],
)
def test_two_sampled_tokens_follow_the_models_exact_distribution(tokens, parents, draws):
    """Chi-square over many draws of two tokens against the exact joint distribution.

    Each draw is a row of a batch with a seed of its own, decoded in one process by the real round.
    """
    vocab, batch = 5, 64
    model = tiny_model(vocab_size=vocab, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)  # flat enough that every pair is expected often
        first = model(torch.tensor([[1, 2]])).logits[0, -1].softmax(0)
        second = model(torch.tensor([[1, 2, t] for t in range(vocab)])).logits[:, -1].softmax(-1)
    expected = (first[:, None] * second).flatten() * draws
    assert expected.min() > 5

    engine = Engine(model, policy=FixedTree(tokens, parents))
    counts, accepted = torch.zeros(vocab * vocab), 0
    for start in range(0, draws, batch):
        result = engine.generate([1, 2], temperature=1.0, max_new_tokens=2, n=batch, seed=start)
        for choice in result.choices:
            counts[choice.ids[0] * vocab + choice.ids[1]] += 1
            accepted += choice.stats.accepted
    assert accepted > draws / 20, "the tree took part"
    assert fit(counts, expected) > 1e-3


def test_the_distribution_test_notices_a_biased_rule():
    """A coin per child in turn gives a duplicate child a second chance: a wrong rule, and the test says so."""
    probability, children = torch.tensor([0.3, 0.3, 0.2, 0.2]), [0, 0, 1]
    coins = torch.rand(DRAWS, len(children), generator=torch.Generator().manual_seed(0)) < probability[children]
    token = torch.multinomial(probability, DRAWS, replacement=True, generator=torch.Generator().manual_seed(1))
    for child, coin in reversed(list(zip(children, coins.T, strict=True))):
        token = torch.where(coin, child, token)
    counts = token.bincount(minlength=4)
    assert fit(counts, probability) < 1e-6


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 7), (-5, 4096), (2**61 + 3, 123_456)])
def test_noise_is_the_gumbel_quantile_of_a_hash_of_seed_position_and_token(seed, position):
    key = splitmix((splitmix(seed % 2**64) + position) % 2**64)
    bits = [splitmix((key + token * 0x9E3779B97F4A7C15) % 2**64) for token in range(1000)]
    uniform = (np.array([each >> 11 for each in bits], dtype=np.float64) + 0.5) / 2**53
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 1000)[0]
    np.testing.assert_allclose(noise.numpy(), -np.log(-np.log(uniform)), rtol=1e-12)

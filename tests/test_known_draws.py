"""Drafts that know the noise of coming draws: what they propose, and that the text stays that of plain decoding."""

from __future__ import annotations

import io
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import chisquare
from transformers.generation.logits_process import MinPLogitsWarper

import block_heads
import graft
import heads
from batches import opened, prefill
from drafted import drafts
from graft import Engine, SamplingSettings
from graft.cli.rounds import drawn
from graft.drafters.beam_drafter import likeliest
from graft.drafters.block.drafter import BlockDrafter
from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.drafters.early_exit import EarlyExitDrafter
from graft.drafters.small_model import SmallModelDrafter
from graft.model.noise import ComingDraws, RowDraws, draft_temperature, gumbel_noise, noise_of_tokens
from graft.spec_decode.calibration import by_noise
from tiny import BYTE_VOCAB, VOCAB, byte_tokenizer, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5]
TREE = TreeSettings(depth=3, topk=8, total_token=16)
MASK = (1 << 64) - 1


def make_drafter(name, model):
    if name == "eagle3":
        return Eagle3Drafter(heads.make_head(model), TREE)
    if name == "small model":
        return SmallModelDrafter(tiny_model(seed=1), VOCAB, TREE)
    if name == "early exit":
        return EarlyExitDrafter(model, 1, TREE)
    return BlockDrafter(block_heads.make_head(model, **block_heads.HEADS[name]))


DRAFTERS = ("eagle3", "marginal", "conditional", "markov", "small model", "early exit")


# The noise


def plain_mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def plain_noise(seed, position, tokens):
    """The noise by its definition, in whole numbers and NumPy."""
    key = plain_mix((plain_mix(seed & MASK) + position) & MASK)
    bits = [plain_mix((key + token * 0x9E3779B97F4A7C15) & MASK) >> 11 for token in tokens]
    return -np.log(-np.log((np.array(bits, dtype=np.float64) + 0.5) * 2.0**-53))


def test_the_noise_of_a_few_tokens_is_the_same_bits_as_that_of_the_vocabulary():
    seeds, positions = torch.tensor([5, -7, 2**61]), torch.tensor([0, 12, 900])
    everything = gumbel_noise(seeds, positions, 5000)
    few = torch.tensor([0, 3, 4999, 3, 2048])
    assert torch.equal(noise_of_tokens(seeds, positions, few), everything[:, few])


# The ranking of drafts


def test_drafted_tokens_are_ranked_by_log_q_over_temperature_and_noise():
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 3, (2, 4, 30)).astype(np.float32)
    tokens = np.sort(generator.choice(500, 30, replace=False))
    rows = [RowDraws(seed=11, position=40, temperature=0.7), RowDraws(seed=12, position=7, temperature=1.3)]
    places, q = likeliest(torch.from_numpy(logits), 5, ComingDraws(rows), 3, torch.from_numpy(tokens))
    for row, own in enumerate(rows):
        noise = plain_noise(own.seed, own.position + 2, tokens.tolist())  # depth 3 is two draws after the next
        for beam in range(4):
            scores = logits[row, beam].astype(np.float64) / own.temperature
            scores = scores - np.log(np.exp(scores).sum()) + noise
            order = np.argsort(-scores)[:5]
            assert places[row, beam].tolist() == order.tolist()
            weights = np.exp(scores)
            np.testing.assert_allclose(q[row, beam].numpy(), weights[order] / weights.sum(), rtol=1e-4)


def test_greedy_rows_are_drafted_by_the_same_bits_beside_sampled_ones():
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1)) * 4
    beside = ComingDraws([RowDraws(5, 9, 1.0), None])
    expected, found = likeliest(logits, 6, None, 2), likeliest(logits, 6, beside, 2)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one[1], other[1])
        assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("min_p", [0.05, 0.2])
def test_draws_with_min_p_are_guessed_better_at_a_lower_temperature(min_p):
    """The drafter's logits are the target's, less certain and with errors. transformers truncates."""
    generator, seeds = torch.Generator().manual_seed(0), torch.arange(2000)
    target = 2.5 * torch.randn(2000, 500, generator=generator)
    logits = (0.85 * target + torch.randn(2000, 500, generator=generator))[:, None]
    drawn = (MinPLogitsWarper(min_p)(None, target) + gumbel_noise(seeds, seeds, 500)).argmax(dim=1)

    def share_guessed(temperature):
        draws = ComingDraws([RowDraws(seed, seed, temperature) for seed in seeds.tolist()])
        return (likeliest(logits, 1, draws, 1)[0][:, 0, 0] == drawn).float().mean()

    assert share_guessed(draft_temperature(1.0, min_p)) > share_guessed(1.0) + 0.01


def open_batch(engine, settings):
    batch = opened(engine, engine.new_sequences(PROMPT, settings))
    prefill(engine, batch)
    return batch


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafters_first_level_is_the_perturbed_one_of_its_own_distribution(name):
    model = tiny_model(num_hidden_layers=6)
    drafter = make_drafter(name, model)
    engine = Engine(model, drafter=drafter, budget=12)
    batch = open_batch(engine, SamplingSettings(temperature=0.8, seed=21, max_new_tokens=20))
    draws = engine.new_sampler(batch.sequences).coming_draws()
    known, unknown = (drafts(drafter, batch.draft, batch.roots(), 24, 1, given)[0] for given in (draws, None))
    noise, sharpness = plain_noise(21, len(PROMPT), range(VOCAB)), getattr(drafter, "sharpness", 1.0)
    q = np.zeros(VOCAB)
    # As the drafter's whole distribution is not to be had here, tokens of both levels are compared in pairs.
    q[unknown.tokens[0].numpy()] = unknown.probabilities[0].numpy()
    tokens = [token for token in known.tokens[0].tolist() if q[token] > 0]
    assert len(tokens) >= 2
    found = dict(zip(known.tokens[0].tolist(), np.log(known.probabilities[0].numpy()), strict=True))
    for one, other in pairwise(tokens):
        expected = sharpness * (np.log(q[one]) - np.log(q[other])) / 0.8 + noise[one] - noise[other]
        assert found[one] - found[other] == pytest.approx(expected, abs=2e-3)


def test_a_drafter_that_is_the_target_guesses_every_draw():
    model = tiny_model(num_hidden_layers=6)
    chain = TreeSettings(depth=3, topk=1, total_token=4)
    engine = Engine(model, drafter=SmallModelDrafter(model, VOCAB, chain), policy="dense-with-noise", budget=4)
    for seed in range(4):
        result = engine.generate(PROMPT, temperature=1.0, max_new_tokens=20, seed=seed, ignore_eos=True)
        assert result.stats.rounds == 4, "a round gives all four drafts and the target's own token"


def test_block_slots_take_the_noise_of_their_own_positions():
    """With a head whose logits are all equal, each slot's likeliest tokens are those of the highest noise there."""
    model = tiny_model(num_hidden_layers=6)
    head = block_heads.make_head(model, **block_heads.MARGINAL)
    head.marginals = lambda hidden: torch.zeros(*hidden.shape[:2], VOCAB)
    drafter = BlockDrafter(head)
    engine = Engine(model, drafter=drafter, budget=12)
    batch = open_batch(engine, SamplingSettings(temperature=1.0, seed=8, max_new_tokens=20))
    draws = engine.new_sampler(batch.sequences).coming_draws()
    for depth, level in enumerate(drafts(drafter, batch.draft, batch.roots(), draws=draws)[:3]):
        best = plain_noise(8, len(PROMPT) + depth, range(VOCAB)).argmax()
        assert level.tokens[0, level.path_probabilities[0].argmax()] == best


# The text


@pytest.mark.parametrize("name", DRAFTERS)
def test_same_seed_same_text_with_the_noise_without_it_and_plain(name):
    model = tiny_model(num_hidden_layers=6)
    drafter = make_drafter(name, model)
    each = [{"temperature": warm, "seed": seed} for seed in range(3) for warm in (0.6, 1.0)]

    def texts(policy):
        engine = Engine(model, drafter=drafter, policy=policy, budget=12)
        return [result.ids for result in engine.generate_batch([PROMPT] * 6, each=each, max_new_tokens=24)]

    plain = texts("off")
    assert len(set(map(tuple, plain))) == 6
    assert texts("graft") == texts("graft-without-noise") == plain


def test_draws_keep_the_models_own_distribution():
    """5,000 draws with trees that know the noise, two in each of 2,500 answers, against the model's probabilities."""
    model = tiny_model()
    engine = Engine(model, drafter=make_drafter("eagle3", model), budget=4)
    counts = np.zeros((VOCAB, VOCAB))  # by first and second token
    for start in range(0, 2500, 500):
        result = engine.generate(PROMPT, n=500, seed=start, temperature=1.0, max_new_tokens=2, ignore_eos=True)
        for choice in result.choices:
            counts[tuple(choice.ids)] += 1
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, first] for first in range(VOCAB)])).logits.double()
    first, second = logits[0, -2].softmax(-1).numpy(), logits[:, -1].softmax(-1).numpy()
    firsts, seconds = counts.sum(axis=1), counts.sum(axis=0)
    for observed, expected in ((firsts, first * counts.sum()), (seconds, firsts @ second)):
        often = expected >= 5
        observed, expected = (np.append(part[often], part[~often].sum()) for part in (observed, expected))
        assert chisquare(observed, expected).pvalue > 1e-3


# Priors


def test_priors_split_by_noise_have_the_prior_as_their_mean_and_what_is_rarely_right_stays_unlikely():
    """A copy that is right at one place in twenty is mostly of a token that the model hardly considers there."""
    prior = torch.tensor([0.9, 0.5, 0.05])
    ends = np.array([0.0, 0.05, 0.15, 0.35, 0.7, 1.3, 2.2, 3.5, np.inf])
    often, middling, rarely = split = by_noise(prior).view(3, 8)
    np.testing.assert_allclose(split.numpy() @ -np.diff(np.exp(-ends)), prior.numpy(), rtol=1e-5)
    assert rarely[0] < 0.15 and often[0] > 0.9 > rarely[0] < middling[0]


# What cannot be drawn


def proposed_tokens(engine, **settings):
    """By depth, all tokens that verified trees held."""
    seen = []
    step = engine.target.run_step

    def watched(inputs, tables, rows, num_tokens):
        tokens, _, _, depths = inputs.columns[:4, 1:num_tokens].tolist()
        seen.extend((len(sequence.ids) + depth - 1, token) for token, depth in zip(tokens, depths, strict=True))
        return step(inputs, tables, rows, num_tokens)

    engine.target.run_step = watched
    sequence = engine.new_sequences(PROMPT, SamplingSettings(**settings))[0]
    for _ in engine.rounds([sequence]):
        pass
    return seen, sequence


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_cannot_be_drawn_is_never_proposed(temperature):
    model = tiny_model()
    drafter = make_drafter("eagle3", model)
    settings = {"temperature": temperature, "max_new_tokens": 24, "seed": 1, "ignore_eos": True}
    usual, _ = proposed_tokens(Engine(model, drafter=drafter, budget=16), **settings)
    counts = np.bincount([token for _, token in usual], minlength=VOCAB)
    banned, ending = np.argsort(-counts)[:2].tolist()
    assert counts[ending] > 0
    settings |= {"logit_bias": {banned: -math.inf}, "stop_token_ids": [ending]}
    for least in range(6, 14):  # at some of these borders the ending would be proposed one token too early
        seen, sequence = proposed_tokens(Engine(model, drafter=drafter, budget=16), **settings, min_tokens=least)
        assert seen
        assert banned not in {token for _, token in seen}
        assert ending not in {token for position, token in seen if position < len(PROMPT) + least}
        assert sequence.new_ids == Engine(model, policy="off").generate(PROMPT, **settings, min_tokens=least).ids


# Calibration by kind of row


def test_a_state_that_knows_greedy_rows_alone_is_still_restored():
    policy = Engine(tiny_model(), budget=4).policy
    state = policy.state()
    old = {key: value[:, :3, :32] * 2 if key.startswith("calibration/") else value for key, value in state.items()}
    old |= {key: value[:12] * 3 for key, value in state.items() if key.startswith("paths/")}
    policy.restore(old)
    new = policy.state()
    for key in (key for key in state if key.startswith("calibration/")):
        assert torch.equal(new[key][:, :3, :32], state[key][:, :3, :32] * 2), "greedy rows"
        assert torch.equal(new[key][:, 3:], state[key][:, 3:]), "sampled rows begin with their priors"
    assert torch.equal(new["paths/hoped"][:12], state["paths/hoped"][:12] * 3)
    assert torch.equal(new["paths/hoped"][12:], state["paths/hoped"][12:])


# What a user sees


def test_a_round_says_that_the_tree_knew_the_random_numbers():
    model = tiny_model(vocab_size=BYTE_VOCAB)
    for temperature, policy in ((1.0, "graft"), (1.0, "graft-without-noise"), (0.0, "graft")):
        engine = Engine(model, byte_tokenizer(), policy=policy, budget=6)
        records = []
        "".join(engine.stream("grafting", watch=records.append, temperature=temperature, seed=1, max_new_tokens=24))
        with_tree = [record for record in records if len(record.tokens) > 1]
        assert with_tree
        knew = temperature > 0 and policy == "graft"
        for record in with_tree:
            console = Console(record=True, width=200, file=io.StringIO())
            console.print(drawn(record, "round", dict.fromkeys(engine.policy.sources, "green"), str))
            assert (
                "guessed with the random numbers that the sampler was about to use" in console.export_text()
            ) == knew


def test_decode_foresees_the_draws_of_torchs_own_generator():
    """The draft model is the target, so it guesses every draw whose noise it knows."""
    model, ids = tiny_model(), torch.tensor([PROMPT, PROMPT[::-1]])
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.4, "eos_token_id": None}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    torch.manual_seed(5)
    expected, next_draw = model.generate(ids, **options), torch.rand(1)
    given = {"custom_generate": graft.decode, "draft": model, "profile": None, "return_dict_in_generate": True}
    rounds = {}
    for policy, noise in (("dense", "torch"), ("dense-with-noise", "torch"), ("dense-with-noise", "keyed")):
        torch.manual_seed(5)
        result = model.generate(ids, **given, policy=policy, budget=60, noise=noise, **options)
        rounds[policy, noise] = sum(stats.rounds for stats in result.stats)
        if noise == "torch":
            assert torch.equal(result.sequences, expected)
            assert torch.equal(torch.rand(1), next_draw)
    unknown = rounds.pop(("dense", "torch"))
    assert all(known < 0.6 * unknown for known in rounds.values()), (unknown, rounds)

"""Drafts that know the noise of coming draws: what they propose, and that the text stays that of plain decoding."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
import torch

import block_heads
import heads
from batches import prefill
from graft import Engine, SamplingSettings
from graft.model.noise import ComingDraws, RowDraws, gumbel_noise, noise_of_tokens
from graft.spec_decode.proposers.block.drafter import BlockDrafter
from graft.spec_decode.proposers.drafter import TreeSettings, likeliest
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.early_exit import EarlyExitDrafter
from graft.spec_decode.proposers.small_model import SmallModelDrafter
from tiny import VOCAB, tiny_model

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
    own = torch.tensor([[1, 2], [4000, 0], [77, 4999]])
    assert torch.equal(noise_of_tokens(seeds, positions, own), everything.gather(1, own))


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


def open_batch(engine, settings):
    batch = engine.open(engine.new_sequences(PROMPT, settings))
    prefill(engine, batch)
    return batch


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafters_first_level_is_the_perturbed_one_of_its_own_distribution(name):
    model = tiny_model(num_hidden_layers=6)
    drafter = make_drafter(name, model)
    engine = Engine(model, drafter=drafter, budget=12)
    batch = open_batch(engine, SamplingSettings(temperature=0.8, seed=21, max_new_tokens=20))
    draws = batch.chooser.coming_draws()
    known, unknown = (next(iter(drafter.passes(batch.draft, batch.roots(), draws=given)))[0] for given in (draws, None))
    noise = plain_noise(21, len(PROMPT), range(VOCAB))
    q = np.zeros(VOCAB)
    # As the drafter's whole distribution is not to be had here, tokens of both levels are compared in pairs.
    q[unknown.tokens[0].numpy()] = unknown.probabilities[0].numpy()
    tokens = [token for token in known.tokens[0].tolist() if q[token] > 0]
    assert len(tokens) >= 2
    found = dict(zip(known.tokens[0].tolist(), np.log(known.probabilities[0].numpy()), strict=True))
    for one, other in pairwise(tokens):
        expected = (np.log(q[one]) - np.log(q[other])) / 0.8 + noise[one] - noise[other]
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
    levels = next(iter(drafter.passes(batch.draft, batch.roots(), draws=batch.chooser.coming_draws())))
    for depth, level in enumerate(islice(levels, 3)):
        best = plain_noise(8, len(PROMPT) + depth, range(VOCAB)).argmax()
        assert level.tokens[0, level.path_probabilities[0].argmax()] == best


# The text


@pytest.mark.parametrize("name", DRAFTERS)
def test_same_seed_same_text_with_the_noise_without_it_and_plain(name):
    model = tiny_model(num_hidden_layers=6)
    drafter = make_drafter(name, model)
    engines = [Engine(model, drafter=drafter, policy=p, budget=12) for p in ("graft", "graft-without-noise")]
    for seed in range(6):
        for temperature in (0.6, 1.0):
            settings = {"temperature": temperature, "seed": seed, "max_new_tokens": 24}
            plain = Engine(model, policy="off").generate(PROMPT, **settings).ids
            for engine in engines:
                assert engine.generate(PROMPT, **settings).ids == plain

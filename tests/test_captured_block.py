"""The captured block drafter without a GPU, its graphs called instead of replayed: against the eager drafter."""

import random

import pytest

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")


from block_heads import make_head
from captured_parts import DEVICE, PROMPT, StaticTarget, Text, assert_alike, draws_of
from drafted import drafts
from graft.drafters import head_drafter
from graft.drafters.block.drafter import BlockDrafter, BlockTreeSettings
from graft.drafters.block.fused_head import FastBlock, why_not
from graft.drafters.head_drafter import HeadDrafter
from graft.model.captures import Captures
from graft.model.step import Chunk
from tiny import tiny_model

TREE = BlockTreeSettings(width=4, nodes=9)
HEADS = {
    "marginal": {"shifted": False},
    "conditional": {"shifted": True, "conditional": True, "own_mask": True},
    "causal": {"shifted": True, "causal": (True, False), "windows": (6, None), "head_norms": False},
    "markov": {"shifted": False, "markov": "rnn", "markov_rank": 5},
}


class SmallDrafter(BlockDrafter):
    """With the head in Triton, and contexts whose borders short texts cross."""

    contexts = (16, 32)

    def __init__(self, head, settings):
        super().__init__(head, settings, FastBlock(head, settings))


class BlockText(Text):
    """Rows of a target and of a block drafter, without an engine."""

    def __init__(self, model, kind, head="marginal", settings=TREE, target=StaticTarget):
        self.drafter = kind(make_head(model, **HEADS[head]).to(DEVICE), settings)
        self.target = target(model, self.drafter.hidden_layers)
        self.rng = random.Random(0)

    def levels(self, state, roots, keep=None, temperatures=None):
        return drafts(self.drafter, state, roots, keep, draws=draws_of(state, temperatures))


def both(model, *given):
    return BlockText(model, SmallDrafter, *given), BlockText(model, BlockDrafter, *given)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6).to(DEVICE)


@pytest.mark.parametrize(("kind", "shuffled"), [*((kind, False) for kind in HEADS), ("conditional", True)])
def test_drafts_are_those_of_the_eager_drafter(plain, model, kind, shuffled):
    """Of ragged rows, one of them without a token before its root, over contexts of several pages."""
    found = []
    for text in both(model, kind):
        cache, state = text.open(PROMPT, [5, 6], PROMPT * 14, [7], shuffled=shuffled)
        roots = [11, 6, 11, 7]
        levels = text.levels(state, roots)
        known = (0.7, 0.0, 1.2, 1.0)
        for keep, temperatures in ((5, None), (5, known), (1, None), (1, known), (None, None), (None, known)):
            roots = text.round(cache, state, roots)
            levels += text.levels(state, roots, keep, temperatures)
        assert text.drafter.is_captured == isinstance(text.drafter, SmallDrafter)
        found.append((levels, state.lengths))
    assert_alike(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_the_real_kernels_draft_the_same(model, monkeypatch):
    """In Triton's interpreter, where there is no GPU; with little padding, as every program takes its time there. One
    layer of the head is causal, one is not."""
    monkeypatch.setattr(Captures, "capture", lambda captures, run: run)  # without a trial
    monkeypatch.setattr(HeadDrafter, "_try", lambda drafter, state: None)
    monkeypatch.setattr(head_drafter, "ENTRIES", (4,))
    found = []
    for text in both(model, "causal"):
        cache, state = text.open(PROMPT[:3])
        levels = text.levels(state, [42], keep=3)
        roots = text.round(cache, state, [42], 3)
        found.append(levels + text.levels(state, roots, keep=3, temperatures=(0.8,)))
    assert_alike(*found)


def test_a_row_that_begins_with_anothers_pages_drafts_the_same(plain, model):
    """Its beginning was entered by another row; only its end is read."""
    text = BlockText(model, SmallDrafter, "conditional")
    prompt, pool = (PROMPT * 14)[:150], text.target.pool
    cache, state = text.open(prompt)
    expected = text.levels(state, prompt[-1:])
    pool.keep_prefix(cache.rows[0], prompt[:-1], "")
    cache.release()
    row = pool.open_with_prefix(prompt, "", 200)
    assert row.length > 64
    again = text.target.cache_of([row])
    state = text.drafter.open(again)
    assert state.lengths == [row.length]
    _, (verified,) = text.target.step(None, None, [Chunk(row, prompt[row.length : -1])])
    text.drafter.read([(state, 0, verified, prompt[-len(verified.tokens[0]) :])])
    assert_alike(text.levels(state, prompt[-1:]), expected)


def test_heads_that_no_kernel_can_run_say_why(model):
    assert all(why_not(make_head(model, **changes)) is None for changes in HEADS.values())
    windowed = make_head(model, shifted=True, windows=(None, 8))
    assert why_not(windowed) == "it has a window of attention without being causal"
    assert why_not(make_head(model, shifted=True, causal=(False, True), windows=(None, 8))) is None
    assert why_not(make_head(model, shifted=True).double()) == "its weights are torch.float64"

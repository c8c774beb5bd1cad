"""The captured block drafter without a GPU, its graphs called instead of replayed: against the eager drafter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

from graft.spec_decode.proposers.block.cuda_graphs import CapturedBlockDrafter
from graft.spec_decode.proposers.block.drafter import BlockDrafter, BlockTreeSettings
from graft.spec_decode.proposers.captured import CapturedDrafter, CapturedState
from test_block_drafter import make_head
from test_captured_drafter import DEVICE, PROMPT, SmallTarget, StaticTarget, Text, assert_alike, plain  # noqa: F401
from tiny import tiny_model

TREE = BlockTreeSettings(width=4, nodes=9)
HEADS: dict[str, dict[str, Any]] = {
    "marginal": {"shifted": False},
    "conditional": {"shifted": True, "conditional": True, "own_mask": True},
    "causal": {"shifted": True, "causal": (True, False), "windows": (6, None), "head_norms": False},
    "markov": {"shifted": False, "markov": "rnn", "markov_rank": 5},
}


class SmallDrafter(CapturedBlockDrafter):
    """Contexts whose borders short texts cross."""

    contexts = (16, 32)


class BlockText(Text):
    """Rows of a target and of a block drafter, without an engine."""

    def __init__(self, model, kind, head="marginal", settings=TREE, target=StaticTarget):
        self.drafter = kind(make_head(model, **HEADS[head]).to(DEVICE), settings)
        self.target = target(model, self.drafter.hidden_layers)
        self.rng = random.Random(0)

    def levels(self, state, roots, keep=None):
        (levels,) = self.drafter.passes(state, torch.tensor(roots), keep)
        return list(levels)


def both(model, *given):
    return BlockText(model, SmallDrafter, *given), BlockText(model, BlockDrafter, *given)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6).to(DEVICE)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_drafts_are_those_of_the_eager_drafter(plain, model, kind, shuffled):  # noqa: F811
    """Of ragged rows, one of them without a token before its root, over contexts of several pages."""
    found = []
    for text in both(model, kind):
        cache, state = text.open(PROMPT, [5, 6], PROMPT * 14, [7], shuffled=shuffled)
        roots = [11, 6, 11, 7]
        levels = text.levels(state, roots)
        for keep in (5, 5, None):
            roots = text.round(cache, state, roots)
            levels += text.levels(state, roots, keep)
        assert isinstance(state, CapturedState) == isinstance(text.drafter, CapturedDrafter)
        found.append((levels, state.lengths))
    assert_alike(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]

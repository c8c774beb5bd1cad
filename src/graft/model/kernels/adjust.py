"""Bias, penalties, min_tokens and grammar masks as one Triton kernel over a step's logits. Importing it needs Triton.

The result is that of `Sampler`, bit for bit. What the host knows of a row lies in a slot of the state. Tokens on the
path to a node count as if they were in the answer. Which rows have slots, and which nodes masks: `engine.adjustments`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048  # logits of one program
MASK_BITS = 32  # tokens of the vocabulary in a word of a mask

# An entry of `State.entries` holds two flags, and above them how often the answer has the token.
IS_IN_PROMPT, IS_ENDING, ONE_TOKEN = 1, 2, 4
_IS_IN_PROMPT, _IS_ENDING, _COUNT_SHIFT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(2)


class State(NamedTuple):
    """What is known of every vocabulary token, by slot."""

    entries: Tensor  # [S, V] int32
    bias: Tensor  # [S, V] float32

    @classmethod
    def make(cls, num_slots: int, vocab_size: int, device: torch.device) -> State:
        shape = (num_slots, vocab_size)
        return cls(torch.zeros(shape, dtype=torch.int32, device=device), torch.zeros(shape, device=device))


class Rows(NamedTuple):
    """The settings of each row of a step; the last one is for padding. Fields are [R + 1]."""

    slots: Tensor  # int32; -1: nothing is adjusted but by masks
    first_ends: Tensor  # int32 the first position at which the answer may end
    repetition: Tensor  # float32
    presence: Tensor  # float32
    frequency: Tensor  # float32


class Masks(NamedTuple):
    """Which tokens grammars allow after each node."""

    numbers: Tensor  # [T] int32 the mask of each token of the step; -1: none
    bits: Tensor  # [M, words] int32


def adjust(logits: Tensor, columns: Tensor, by_row: Tensor, rows: Rows, state: State, masks: Masks) -> None:
    """Adjust the logits [T, V] of a step in place. columns, by_row: see `ranking.lay_out`."""
    num_tokens, vocab_size = logits.shape
    tokens, parents, _, depths, rows_of, _ = columns
    _adjust_kernel[(num_tokens, triton.cdiv(vocab_size, _CHUNK))](
        *(logits, logits.stride(0), tokens, parents, depths, rows_of, by_row[0], by_row[2]),
        *(*rows, *state, *masks, masks.bits.shape[1], vocab_size),
        CHUNK=_CHUNK,
        num_warps=4,
        enable_fp_fusion=False,  # the same bits as the sampler
    )


def count_tokens(state: State, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Count a round's new tokens [R, W] in their rows' slots [R]; counts [R]: how many each row has."""
    number = torch.arange(tokens.shape[1], device=tokens.device)
    is_new = (number < counts[:, None]) & (slots[:, None] >= 0)
    vocab_size = state.entries.shape[1]
    places = slots.clamp(min=0)[:, None] * vocab_size + torch.where(is_new, tokens, 0)
    state.entries.view(-1).index_add_(0, places.flatten(), (is_new * ONE_TOKEN).int().flatten())


@triton.jit(do_not_specialize=["num_words"])
def _adjust_kernel(
    logits: tl.tensor,
    token_stride: tl.int64,
    tokens: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    slots: tl.tensor,
    first_ends: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    entries: tl.tensor,
    biases: tl.tensor,
    mask_numbers: tl.tensor,
    masks: tl.tensor,
    num_words: int,
    vocab_size: int,
    CHUNK: tl.constexpr,
) -> None:
    """A program is a chunk of the logits after one token."""
    token, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + token)
    slot = tl.load(slots + row)
    mask = tl.load(mask_numbers + token)
    if (slot < 0) & (mask < 0):
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab_size
    there = logits + token * token_stride + ids
    x = tl.load(there, mask=inside, other=0.0)
    if slot >= 0:
        own = slot.to(tl.int64) * vocab_size + ids
        entry = tl.load(entries + own, mask=inside, other=0)
        count = entry >> _COUNT_SHIFT
        start, depth, node = tl.load(starts + row), tl.load(depths + token), token
        for _ in range(depth):  # the tokens on the path to this node, itself included, but not the root
            count += (ids == tl.load(tokens + node)).to(tl.int32)
            node = start + tl.load(parents + node)
        x += tl.load(biases + own, mask=inside, other=0.0)
        penalty = tl.load(repetition + row)
        is_seen = (count > 0) | ((entry & _IS_IN_PROMPT) != 0)
        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
        x -= tl.where(count > 0, tl.load(presence + row), 0.0)
        x -= tl.load(frequency + row) * count.to(tl.float32)
        # The token after a root is at the row's committed length + 1.
        is_too_early = tl.load(lengths + row) + 1 + depth < tl.load(first_ends + row)
        x = tl.where(is_too_early & ((entry & _IS_ENDING) != 0), float("-inf"), x)
    if mask >= 0:
        word = tl.load(masks + mask.to(tl.int64) * num_words + (ids >> 5), mask=inside, other=0)
        x = tl.where((word >> (ids & 31)) & 1 != 0, x, float("-inf"))
    tl.store(there, x, mask=inside)

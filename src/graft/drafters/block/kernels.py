"""Triton kernels of block heads: the slots of a block and the tokens of its table. Importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.drafters.block.tree import Table


def slots(roots: Tensor, embedding: Tensor, mask: Tensor, width: int) -> Tensor:
    """Inputs [R * width, H] of blocks: the embedding of a root [R] int32, then `width` - 1 times the mask [H].

    embedding: [vocab, H].
    """
    size = len(mask)
    out = embedding.new_empty(len(roots) * width, size)
    block = triton.next_power_of_2(size)
    _slots_kernel[(len(out),)](
        *(roots, embedding, mask, out),
        width,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


def children(logits: Tensor, candidates: Tensor, k: int) -> Table:
    """`block.tree.children` as a kernel. Among equal candidates, the first wins."""
    batch, num_slots, num_parents, num_candidates = logits.shape
    tokens = logits.new_empty(batch, num_slots * num_parents, k, dtype=torch.int32)
    table = Table(tokens, torch.empty_like(tokens, dtype=torch.float32), torch.empty_like(tokens))
    _children_kernel[(batch * num_slots * num_parents,)](
        logits.contiguous(),
        candidates.contiguous(),
        *table,
        num_slots,
        num_parents,
        num_candidates,
        K=k,
        BLOCK=triton.next_power_of_2(num_candidates),
        num_warps=1,
    )
    return table


@triton.jit(do_not_specialize=["width"])
def _slots_kernel(
    roots: tl.tensor,
    embedding: tl.tensor,
    mask: tl.tensor,
    out: tl.tensor,
    width: int,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one slot."""
    slot = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    if slot % width == 0:
        vector = tl.load(embedding + tl.load(roots + slot // width).to(tl.int64) * SIZE + columns, mask=inside)
    else:
        vector = tl.load(mask + columns, mask=inside)
    tl.store(out + slot.to(tl.int64) * SIZE + columns, vector, mask=inside)


@triton.jit(do_not_specialize=["num_slots", "num_parents", "num_candidates"])
def _children_kernel(
    logits: tl.tensor,
    candidates: tl.tensor,
    tokens: tl.tensor,
    probabilities: tl.tensor,
    entries: tl.tensor,
    num_slots: int,
    num_parents: int,
    num_candidates: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one slot after one candidate of the previous token."""
    entry = tl.program_id(0)
    slot = entry // num_parents  # counted over all rows
    following = slot % num_slots + 1
    place = tl.arange(0, BLOCK)
    inside = place < num_candidates
    x = tl.load(logits + entry.to(tl.int64) * num_candidates + place, mask=inside, other=float("-inf")).to(tl.float32)
    weight = tl.exp(x - tl.max(x, axis=0))
    share = tl.where(inside, weight / tl.sum(weight, axis=0), -1.0)
    for rank in range(K):
        best = tl.max(share, axis=0)
        at = tl.minimum(tl.min(tl.where(share == best, place, BLOCK), axis=0), num_candidates - 1)  # NaN has no maximum
        has_entry = (at < num_parents) & (following < num_slots)
        tl.store(tokens + entry * K + rank, tl.load(candidates + slot * num_candidates + at).to(tl.int32))
        tl.store(probabilities + entry * K + rank, best)
        tl.store(entries + entry * K + rank, tl.where(has_entry, following * num_parents + at, -1))
        share = tl.where(place == at, -1.0, share)

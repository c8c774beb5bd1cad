"""Triton kernel of block heads: the slots of a block. Importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def slots(roots: Tensor, embedding: Tensor, mask: Tensor, width: int) -> Tensor:
    """Inputs [R * width, H] of blocks: the embeddings of roots [R] int32, each before `width` - 1 times the mask [H].

    embedding: [vocab, H].
    """
    size = len(mask)
    out = embedding.new_empty(len(roots) * width, size)
    block = triton.next_power_of_2(size)
    _slots_kernel[(len(out),)](
        roots, embedding, mask, out, width, SIZE=size, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )
    return out


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
    """One slot."""
    slot = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    if slot % width == 0:
        vector = tl.load(embedding + tl.load(roots + slot // width).to(tl.int64) * SIZE + columns, mask=inside)
    else:
        vector = tl.load(mask + columns, mask=inside)
    tl.store(out + slot.to(tl.int64) * SIZE + columns, vector, mask=inside)

"""The acceptance walk as a Triton kernel. Importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def walk(
    tokens: Tensor,  # [T] int32 of a step
    parents: Tensor,  # [T] int32 places in the row; -1 for padding
    chosen: Tensor,  # [T] integers: the token chosen after each
    starts: Tensor,  # [R or more] int32 each row's first token in the step
    sizes: Tensor,  # [R or more] int32 each row's number of tokens in the step
    counts: Tensor,  # [R] int32, written: new tokens of the round; 0 for a row without tokens
    following: Tensor,  # [R, W] int32, written: the new tokens
    nodes: Tensor,  # [R, W] int32, written: the step's token after which each was chosen
    most: int,
) -> None:
    """Walk down each tree while it contains the chosen token, as `acceptance.walk` does; at most W tokens.

    most: an upper bound of a row's tokens.
    """
    num_rows, room = following.shape
    _walk_kernel[(num_rows,)](
        *(tokens, parents, chosen, starts, sizes, counts, following, nodes),
        room,
        BLOCK=triton.next_power_of_2(most),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["room"])  # it changes from round to round
def _walk_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    chosen: tl.tensor,
    starts: tl.tensor,
    sizes: tl.tensor,
    counts: tl.tensor,
    following: tl.tensor,
    nodes: tl.tensor,
    room: int,
    BLOCK: tl.constexpr,
) -> None:
    """Walk down the tree of one row."""
    row = tl.program_id(0)
    start, size = tl.load(starts + row), tl.load(sizes + row)
    place = tl.arange(0, BLOCK)
    is_below = (place > 0) & (place < size)
    token = tl.load(tokens + start + place, mask=is_below, other=-1)
    parent = tl.load(parents + start + place, mask=is_below, other=-1)
    at = tl.where(size > 0, 0, BLOCK)
    count = 0
    while at < BLOCK:
        new = tl.load(chosen + start + at).to(tl.int32)
        tl.store(following + row * room + count, new, mask=count < room)
        tl.store(nodes + row * room + count, start + at, mask=count < room)
        count += 1
        at = tl.min(tl.where((parent == at) & (token == new), place, BLOCK), axis=0)  # of equal children, the first
    tl.store(counts + row, tl.minimum(count, room))

"""Merging and ranking on the device: equal paths become one node, and the best nodes of all rows become the step.

All nodes of a row are compared with each other. That costs less than a hash table, whose order would also depend on
which thread comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.buffers import Pool, PoolShape, Ranked, Texts
from graft.tree.device.pool import AGREED, ALONE, OPPOSED, Nodes, path_of, prob_of

_BLOCK = 16  # nodes of one program
_OTHERS = 256  # nodes that they are compared with at once


def merge(
    pool: Pool,
    shape: PoolShape,
    acceptance_probs: Tensor,
    kinds: Tensor,  # [R] int32 of rows, see `Draws`
    drafted: int,  # the source of drafted nodes; 0: nothing was drafted
) -> None:
    """Merge equal paths into the likeliest copy, and recompute its probability by agreement.

    AGREED: several sources propose the token. OPPOSED: one does, and the drafter proposes others there. Else ALONE.
    """
    _find_copies_kernel[(triton.cdiv(shape.width, _BLOCK), shape.num_rows)](
        pool.nodes,
        pool.kept,
        pool.is_agreed,
        pool.spoke,
        pool.factors,
        drafted,
        shape.width,
        BLOCK=_BLOCK,
        OTHERS=_OTHERS,
    )
    _weigh_kernel[(shape.num_rows,)](
        pool.nodes,
        pool.kept,
        pool.is_agreed,
        pool.spoke,
        acceptance_probs,
        kinds,
        drafted,
        *acceptance_probs.shape[1:],
        shape.width,
        BLOCK=triton.next_power_of_2(shape.width),
        num_warps=8,
    )


def rank(pool: Pool, shape: PoolShape, caps: Tensor, ranked: Ranked) -> None:
    """Rank the nodes of every row. caps: [R] int32 the most nodes of each row; -1 for an unused row."""
    cap = ranked.nodes.shape[1]
    ranked.paths.zero_()
    _rank_row_kernel[(triton.cdiv(shape.width, _BLOCK), shape.num_rows)](
        pool.paths,
        pool.needs,
        caps,
        ranked.nodes,
        ranked.paths,
        ranked.needs,
        pool.capacity,
        shape.width,
        CAP=cap,
        BLOCK=_BLOCK,
        OTHERS=_OTHERS,
    )


def select(ranked: Ranked, caps: Tensor, total: Tensor) -> None:
    """Count how many of each row are among the best of all rows. total: [1] int32 the most nodes of all rows."""
    num_rows, cap = ranked.nodes.shape
    ranked.counts.copy_(caps[:num_rows].clamp(max=0))
    _select_kernel[(triton.cdiv(cap, _BLOCK), num_rows)](
        ranked.paths,
        ranked.counts,
        total,
        num_rows * cap,
        CAP=cap,
        BLOCK=_BLOCK,
        OTHERS=_OTHERS,
    )


@triton.jit
def _find_copies_kernel(
    pool: Nodes,
    kept: tl.tensor,
    is_agreed: tl.tensor,
    spoke: tl.tensor,
    factors: tl.tensor,
    drafted: int,
    width: int,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    """A program compares a block of nodes with all nodes of their row.

    It writes, in place of the agreement of each node, the fewest draft passes that any of its copies needs.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    first = row.to(tl.int64) * pool.capacity
    own = block * BLOCK + tl.arange(0, BLOCK)
    path = tl.load(pool.paths + first + own, mask=own < width, other=0.0)
    is_node = path > 0
    if tl.sum(is_node.to(tl.int32), axis=0) == 0:
        return
    key = tl.load(pool.keys + first + own, mask=is_node, other=0)
    source = tl.load(pool.sources + first + own, mask=is_node, other=0)
    best = tl.zeros([BLOCK], tl.int64)
    least_need = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_path = tl.load(pool.paths + first + other, mask=other < width, other=0.0)
        is_other = other_path > 0
        if tl.sum(is_other.to(tl.int32), axis=0) > 0:
            other_key = tl.load(pool.keys + first + other, mask=is_other, other=0)
            other_source = tl.load(pool.sources + first + other, mask=is_other, other=-1)
            other_need = tl.load(pool.needs + first + other, mask=is_other, other=0)
            is_copy = is_other[None, :] & (key[:, None] == other_key[None, :])
            # The likeliest copy stays; among equals, the first. One number encodes both.
            worth = (other_path.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - other).to(tl.int64)
            best = tl.maximum(best, tl.max(tl.where(is_copy, worth[None, :], 0), axis=1))
            least_need = tl.minimum(least_need, tl.min(tl.where(is_copy, other_need[None, :], 0x7FFFFFFF), axis=1))
            # One sum counts both copies of other sources and drafted children.
            is_drafted = other_source == drafted
            depth = tl.load(pool.depths + first + other, mask=is_drafted, other=0)
            token = tl.load(pool.tokens + first + other, mask=is_drafted, other=0)
            above = other_key - (token.to(tl.int64) + 1) * tl.load(factors + depth, mask=is_drafted, other=0)
            is_child = is_drafted[None, :] & (key[:, None] == above[None, :])
            is_others = is_copy & (other_source[None, :] != source[:, None])
            found += tl.sum(is_others.to(tl.int32) + (is_child.to(tl.int32) << 16), axis=1)
    tl.store(kept + first + own, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), mask=is_node)
    tl.store(is_agreed + first + own, found & 0xFFFF, mask=is_node)
    tl.store(spoke + first + own, found >> 16, mask=is_node)
    tl.store(pool.agreement + first + own, least_need, mask=is_node)


@triton.jit
def _weigh_kernel(
    pool: Nodes,
    kept: tl.tensor,
    is_agreed: tl.tensor,
    spoke: tl.tensor,
    acceptance_probs: tl.tensor,
    kinds: tl.tensor,
    drafted: int,
    num_sources: int,
    num_buckets: int,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one row: other copies become padding, and probabilities are recomputed depth by depth."""
    row = tl.program_id(0)
    kind = tl.load(kinds + row)
    first = row.to(tl.int64) * pool.capacity
    place = tl.arange(0, BLOCK)
    path = tl.load(pool.paths + first + place, mask=place < width, other=0.0)
    is_node = path > 0
    is_kept = is_node & (tl.load(kept + first + place, mask=is_node, other=-1) == place)
    parent = tl.load(pool.parents + first + place, mask=is_node, other=0)
    parent = tl.load(kept + first + parent, mask=is_node, other=0)
    depth = tl.load(pool.depths + first + place, mask=is_node, other=0)
    source = tl.load(pool.sources + first + place, mask=is_node, other=0)
    bucket = tl.load(pool.buckets + first + place, mask=is_node, other=0)
    least_need = tl.load(pool.agreement + first + place, mask=is_node, other=0)
    agreed = tl.load(is_agreed + first + place, mask=is_node, other=0) > 0
    is_opposed = (tl.load(spoke + first + parent, mask=is_node, other=0) > 0) & (source != drafted)
    own = tl.where(is_kept & agreed, AGREED, tl.where(is_opposed, OPPOSED, ALONE))
    prob = prob_of(acceptance_probs, kind, own, source, bucket, num_sources, num_buckets, is_kept & (place > 0))
    deepest = tl.max(tl.where(is_kept, depth, 0), axis=0)
    tl.debug_barrier()  # all threads have read what is overwritten now
    tl.store(pool.parents + first + place, parent, mask=is_node)
    tl.store(pool.agreement + first + place, tl.where(is_node, own, ALONE), mask=place < width)
    tl.store(pool.needs + first + place, tl.where(is_kept, least_need, 0), mask=is_node)
    tl.store(pool.paths + first + place, 0.0, mask=is_node & (is_kept == 0))
    for level in range(1, deepest + 1):
        tl.debug_barrier()
        is_here = is_kept & (depth == level)
        above = tl.load(pool.paths + first + parent, mask=is_here, other=0.0)
        tl.store(pool.paths + first + place, path_of(above, prob), mask=is_here)


@triton.jit
def _rank_row_kernel(
    paths: tl.tensor,
    needs: tl.tensor,
    caps: tl.tensor,
    ranked_nodes: tl.tensor,
    ranked_paths: tl.tensor,
    ranked_needs: tl.tensor,
    capacity: int,
    width: int,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    """A program ranks a block of nodes: it counts the likelier nodes of their row. Among equals, the first wins."""
    block, row = tl.program_id(0), tl.program_id(1)
    first = row.to(tl.int64) * capacity
    own = block * BLOCK + tl.arange(0, BLOCK)
    path = tl.load(paths + first + own, mask=(own > 0) & (own < width), other=0.0)
    if tl.max(path, axis=0) > 0:
        rank = tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, OTHERS):
            other = start + tl.arange(0, OTHERS)
            there = tl.load(paths + first + other, mask=(other > 0) & (other < width), other=0.0)
            is_before = (there[None, :] > path[:, None]) | (
                (there[None, :] == path[:, None]) & (other[None, :] < own[:, None])
            )
            rank += tl.sum(is_before.to(tl.int32), axis=1)
        is_ranked = (path > 0) & (rank < tl.minimum(tl.load(caps + row), CAP))
        tl.store(ranked_nodes + row * CAP + rank, own, mask=is_ranked)
        tl.store(ranked_paths + row * CAP + rank, path, mask=is_ranked)
        need = tl.load(needs + first + own, mask=is_ranked, other=0)
        tl.store(ranked_needs + row * CAP + rank, need, mask=is_ranked)


@triton.jit
def _select_kernel(
    paths: tl.tensor,
    counts: tl.tensor,
    total: tl.tensor,
    size: int,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    """A program counts how many of a block of a row's best nodes are among the `total` likeliest of all rows.

    Among equals, the first wins.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    rank = block * BLOCK + tl.arange(0, BLOCK)
    own = row * CAP + rank
    path = tl.load(paths + own, mask=rank < CAP, other=0.0)
    if tl.max(path, axis=0) > 0:
        before = tl.zeros([BLOCK], tl.int32)
        for start in range(0, size, OTHERS):
            other = start + tl.arange(0, OTHERS)
            there = tl.load(paths + other, mask=other < size, other=0.0)
            is_before = (there[None, :] > path[:, None]) | (
                (there[None, :] == path[:, None]) & (other[None, :] < own[:, None])
            )
            before += tl.sum(is_before.to(tl.int32), axis=1)
        is_chosen = (path > 0) & (before < tl.load(total))
        tl.atomic_add(counts + row, tl.sum(is_chosen.to(tl.int32), axis=0))


def lay_out(
    pool: Pool,
    shape: PoolShape,
    ranked: Ranked,
    texts: Texts,
    table_rows: Tensor,  # [R] int32
    columns: Tensor,  # [6, room] int32, written: tokens, parents, places, depths, rows and strips of the step
    by_row: Tensor,  # [4, rows] int32, written: each row's first token, tokens, committed tokens and table row
    origins: Tensor,  # [room] int32, written: each token's source
    size: int,
    stride: int = 0,
) -> None:
    """Write the trees as a flat step of `size` tokens: row after row, each row's likeliest nodes first.

    Padding tokens belong to an extra row after the last, which has table row 0 and no tokens.
    stride: tokens reserved for every row; 0: a row begins where the previous one ends.
    """
    cap = ranked.nodes.shape[1]
    _lay_out_kernel[(shape.num_rows + 1,)](
        pool.nodes,
        ranked.nodes,
        ranked.counts,
        texts.lengths,
        table_rows,
        columns,
        by_row,
        origins,
        columns.shape[1],
        by_row.shape[1],
        shape.num_rows,
        size,
        CAP=cap,
        STRIDE=stride,
        BLOCK=triton.next_power_of_2(max(cap + 1, stride)),
        ROWS=triton.next_power_of_2(shape.num_rows),
        SIZE=triton.next_power_of_2(size),
        num_warps=8,
    )


@triton.jit
def _lay_out_kernel(
    pool: Nodes,
    ranked: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    columns: tl.tensor,
    by_row: tl.tensor,
    origins: tl.tensor,
    room: int,
    rows_room: int,
    num_rows: int,
    size: int,
    CAP: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """A program is one row; an extra program writes the padding after all rows."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    widths = tl.load(counts + rows, mask=rows < num_rows, other=-1) + 1
    start = tl.sum(tl.where(rows < row, widths, 0), axis=0)
    if STRIDE > 0:
        start = row * STRIDE
    if row == num_rows:
        rest = tl.arange(0, SIZE)
        is_padding = (rest >= start) & (rest < size)
        for column in tl.static_range(6):
            tl.store(columns + column * room + rest, row if column == 4 else 0, mask=is_padding)
        for part in tl.static_range(4):
            tl.store(by_row + part * rows_room + row, 0)
    else:
        first = row.to(tl.int64) * pool.capacity
        count = tl.load(counts + row)
        place = tl.arange(0, BLOCK)
        inside = place <= count
        node = tl.load(ranked + row * CAP + place - 1, mask=inside & (place > 0), other=0)
        token = tl.load(pool.tokens + first + node, mask=inside, other=0)
        above = tl.load(pool.parents + first + node, mask=inside & (place > 0), other=-1)
        depth = tl.load(pool.depths + first + node, mask=inside, other=0)
        is_parent = inside[None, :] & (above[:, None] == node[None, :]) & (place[:, None] > 0)
        parent = tl.sum(tl.where(is_parent, place[None, :], 0), axis=1)
        # A node's first child continues the node's strip; other children begin new ones.
        is_child = inside[None, :] & (place[None, :] > 0) & (parent[None, :] == place[:, None])
        first_child = tl.min(tl.where(is_child, place[None, :], BLOCK), axis=1)
        is_next = inside[:, None] & (first_child[None, :] == place[:, None])  # [node, its parent]
        strip = tl.full([BLOCK], 1, tl.int32)
        for level in range(1, tl.max(tl.where(inside, depth, 0), axis=0) + 1):
            longer = tl.sum(tl.where(is_next, strip[None, :] + 1, 0), axis=1)
            strip = tl.where((depth == level) & (longer > 0), longer, strip)
        strip = tl.where(first_child < BLOCK, strip, -strip)
        at = columns + start + place
        if STRIDE > 0:
            is_left = (place > count) & (place < STRIDE)
            for column in tl.static_range(6):
                tl.store(at + column * room, num_rows if column == 4 else 0, mask=is_left)
        tl.store(at, token, mask=inside)
        tl.store(at + room, parent, mask=inside)
        tl.store(at + 2 * room, place, mask=inside)
        tl.store(at + 3 * room, depth, mask=inside)
        tl.store(at + 4 * room, row, mask=inside)
        tl.store(at + 5 * room, strip, mask=inside)
        tl.store(origins + start + place, tl.load(pool.sources + first + node, mask=inside, other=0), mask=inside)
        table_row = tl.load(table_rows + row)
        tl.store(by_row + row, start)
        tl.store(by_row + rows_room + row, count + 1)
        tl.store(by_row + 2 * rows_room + row, tl.load(lengths + table_row) - 1)
        tl.store(by_row + 3 * rows_room + row, table_row)

"""Adds drafted nodes to the pool on the device, and decides whether another draft pass is made.

The reach of a pass is the probability that one of its beams is accepted, summed over the rows. The pass is made if its
reach is above a threshold, which the host set before the round: below it, a pass is not worth its time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.buffers import NUM_BUCKETS, Draws, Pool, PoolShape
from graft.tree.device.pool import ALONE, Nodes, bucket_of, can_be_drawn, key_of, path_of, prob_of


def add_level(
    pool: Pool,
    shape: PoolShape,
    number: int,
    tokens: Tensor,  # [R * n] integers: depth by depth, likeliest first
    parents: Tensor,  # [R * n] integers: node numbers in the drafted tree; 0 is the root
    probabilities: Tensor,  # [R * n] float32 the drafter's q; 0 is padding, after the last level
    acceptance_probs: Tensor | None,  # [kinds * agreements, sources, buckets] float32; None: q is taken as it is
    draws: Draws,
    caps: Tensor,  # [R] int32; a row with cap 0 gets no drafted nodes
    thresholds: Tensor,  # [passes + 1] float32: a pass is made if its reach is above
    reaches: Tensor,  # [passes + 1] float32, written: P(one of a row's next beams is accepted), summed over the rows
    made: Tensor,  # [passes + 1] int32: whether each pass is made; the next pass's flag is written
    source: int,
    num_beams: int,
    num_depths: int,
) -> None:
    """Add the nodes of pass `number`, if that pass was made, and decide about the next.

    num_depths: the most levels that the pass gives.
    """
    count = shape.levels[number]
    _add_level_kernel[(shape.num_rows,)](
        pool.nodes,
        tokens,
        parents,
        probabilities,
        acceptance_probs if acceptance_probs is not None else probabilities,
        pool.factors,
        pool.bucket_starts,
        draws.kinds,
        *draws.barred_and_room,
        caps,
        thresholds,
        pool.reach,
        reaches,
        made,
        pool.arrived,
        source,
        *(acceptance_probs.shape[1:] if acceptance_probs is not None else (0, 0)),
        shape.level_start(number),
        shape.first_level,
        num_beams,
        num_depths,
        NUMBER=number,
        COUNT=count,
        BLOCK=triton.next_power_of_2(count),
        ROWS=triton.next_power_of_2(shape.num_rows),
        NUM_BUCKETS=NUM_BUCKETS,
        IS_CALIBRATED=acceptance_probs is not None,
        num_warps=1,
    )


@triton.jit
def _add_level_kernel(
    pool: Nodes,
    tokens: tl.tensor,
    parents: tl.tensor,
    probabilities: tl.tensor,
    acceptance_probs: tl.tensor,
    factors: tl.tensor,
    starts: tl.tensor,
    kinds: tl.tensor,
    barred: tl.tensor,
    barred_room: int,
    caps: tl.tensor,
    thresholds: tl.tensor,
    reach: tl.tensor,
    reaches: tl.tensor,
    made: tl.tensor,
    arrived: tl.tensor,
    source: int,
    num_sources: int,
    num_buckets: int,
    level_start: int,
    first_level: int,
    num_beams: int,
    num_depths: int,
    NUMBER: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_BUCKETS: tl.constexpr,
    IS_CALIBRATED: tl.constexpr,
) -> None:
    """A program is one row; the last one to finish decides about the next pass."""
    row = tl.program_id(0)
    is_made = tl.load(made + NUMBER) != 0
    place = tl.arange(0, BLOCK)
    inside = (place < COUNT) & is_made
    q = tl.load(probabilities + row * COUNT + place, mask=inside, other=0.0)
    token = tl.load(tokens + row * COUNT + place, mask=inside, other=0).to(tl.int32)
    number = tl.load(parents + row * COUNT + place, mask=inside, other=0).to(tl.int32)
    parent = tl.where(number > 0, first_level + number - 1, 0)
    first = row.to(tl.int64) * pool.capacity
    bucket = bucket_of(q, starts, NUM_BUCKETS)
    prob = q
    if IS_CALIBRATED:
        kind = tl.load(kinds + row)
        prob = prob_of(acceptance_probs, kind, ALONE, source, bucket, num_sources, num_buckets, inside)
    prob = tl.where((q > 0) & (tl.load(caps + row) > 0), prob, 0.0)
    node = first + level_start + place
    tl.store(pool.tokens + node, token, mask=inside)
    tl.store(pool.parents + node, parent, mask=inside)
    tl.store(pool.needs + node, NUMBER + 1, mask=inside)
    tl.store(pool.sources + node, source, mask=inside)
    tl.store(pool.buckets + node, bucket, mask=inside)
    # A node needs its parent in the pool, so each iteration adds one more depth.
    num_before = level_start - first_level
    num_there = num_before
    path = tl.zeros([BLOCK], tl.float32)
    for _ in range(num_depths):
        is_next = inside & (number <= num_there)
        depth = tl.load(pool.depths + first + parent, mask=is_next, other=0) + 1
        path = path_of(tl.load(pool.paths + first + parent, mask=is_next, other=0.0), prob)
        path = tl.where(can_be_drawn(token, depth, barred, row, barred_room), path, 0.0)
        above = tl.load(pool.keys + first + parent, mask=is_next, other=0)
        tl.store(pool.depths + node, depth, mask=is_next)
        tl.store(pool.keys + node, key_of(above, token, depth, factors, is_next), mask=is_next)
        tl.store(pool.paths + node, path, mask=is_next)
        num_there = num_before + tl.sum((is_next & (q > 0)).to(tl.int32), axis=0)
        tl.debug_barrier()
    # Summed one by one, as the C code does.
    total = 0.0
    for beam in range(num_beams):
        total += tl.sum(tl.where((place == beam) & inside, path, 0.0), axis=0)
    tl.store(reach + row, tl.minimum(total, 1.0))

    tl.debug_barrier()
    if tl.atomic_add(arrived, 1) == tl.num_programs(0) - 1:
        rows = tl.arange(0, ROWS)
        reached = tl.load(reach + rows, mask=rows < tl.num_programs(0), other=0.0, cache_modifier=".cg")
        total_reach = tl.sum(reached, axis=0)
        goes_on = is_made & (total_reach > tl.load(thresholds + NUMBER + 1))
        tl.store(reaches + NUMBER + 1, total_reach)
        tl.store(made + NUMBER + 1, goes_on.to(tl.int32))
        tl.store(arrived, 0)

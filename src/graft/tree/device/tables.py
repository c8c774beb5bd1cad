"""Lookups in successor tables on the device. `outcome.learn` fills the tables."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.buffers import NUM_BUCKETS, NUM_SUCCESSORS, Draws, Nodes, Pool, PoolShape, Tables, Texts
from graft.tree.device.noise import successor_buckets
from graft.tree.device.pool import ALONE, TableRows, can_be_drawn, key_of, look_up, path_of, prob_of, write_nodes


def follow(
    pool: Pool,
    shape: PoolShape,
    tables: Tables,
    salts: Tensor,  # [R] int64 whose entries each row uses
    acceptance_probs: Tensor,
    max_depths: Tensor,  # [R] int32
    draws: Draws,
    texts: Texts,
    table_rows: Tensor,  # [R] int32
    source: int,  # of the first table
) -> None:
    """Add, wave by wave, the successors of the likeliest nodes not looked up yet, by the longest known n-gram."""
    _follow_kernel[(shape.num_rows,)](
        pool.nodes,
        pool.open,
        pool.before,
        tables.parts,
        salts,
        acceptance_probs,
        pool.factors,
        max_depths,
        draws.kinds,
        draws.seeds,
        draws.powers,
        *draws.barred_and_room,
        texts.lengths,
        table_rows,
        tables.bucket_starts,
        source,
        *acceptance_probs.shape[1:],
        pool.before.shape[1],
        shape.first_wave,
        NUM_WAVES=shape.num_waves,
        BEAM=shape.beam,
        BEAMS=triton.next_power_of_2(shape.beam),
        K=NUM_SUCCESSORS,
        NUM_TABLES=len(tables.starts),
        NUM_BUCKETS=NUM_BUCKETS,
        IS_ISOLATED=tables.isolated,
        BLOCK=triton.next_power_of_2(shape.width),
        enable_fp_fusion=False,  # the same bits as the C code
    )


@triton.jit
def _follow_kernel(
    pool: Nodes,
    open_paths: tl.tensor,
    before_roots: tl.tensor,
    tables: TableRows,
    salts: tl.tensor,
    acceptance_probs: tl.tensor,
    path_factors: tl.tensor,
    max_depths: tl.tensor,
    kinds: tl.tensor,
    seeds: tl.tensor,
    powers: tl.tensor,
    barred: tl.tensor,
    barred_room: int,
    ends: tl.tensor,
    table_rows: tl.tensor,
    starts_of_buckets: tl.tensor,
    source: int,
    num_sources: int,
    num_buckets: int,
    num_rows: int,
    first_wave: int,
    NUM_WAVES: tl.constexpr,
    BEAM: tl.constexpr,
    BEAMS: tl.constexpr,
    K: tl.constexpr,
    NUM_TABLES: tl.constexpr,
    NUM_BUCKETS: tl.constexpr,
    IS_ISOLATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one row."""
    row = tl.program_id(0)
    first = row.to(tl.int64) * pool.capacity
    salt, max_depth = tl.load(salts + row), tl.load(max_depths + row)
    kind, seed = tl.load(kinds + row), tl.load(seeds + row)
    end = tl.load(ends + tl.load(table_rows + row)).to(tl.int64)
    before_root, earlier_root = tl.load(before_roots + row), tl.load(before_roots + num_rows + row)
    place = tl.arange(0, BLOCK)
    beam, rank = tl.arange(0, BEAMS), tl.arange(0, K)
    is_there = place < first_wave
    path = tl.load(pool.paths + first + place, mask=is_there, other=0.0)
    depth = tl.load(pool.depths + first + place, mask=is_there & (path > 0), other=0)
    tl.store(open_paths + first + place, tl.where(depth < max_depth, path, 0.0), mask=place < pool.capacity)
    for wave in range(tl.minimum(NUM_WAVES, max_depth)):
        tl.debug_barrier()  # wait for the nodes of the previous wave
        closed = tl.load(open_paths + first + place, mask=place < pool.capacity, other=0.0)
        node, likely = tl.zeros([BEAMS], tl.int32), tl.zeros([BEAMS], tl.float32)
        for number in range(BEAM):
            best = tl.max(closed, axis=0)
            chosen = tl.min(tl.where(closed == best, place, BLOCK), axis=0)  # among equals, the first
            node = tl.where(beam == number, chosen, node)
            likely = tl.where(beam == number, best, likely)
            closed = tl.where(place == chosen, -1.0, closed)
        is_open = likely > 0
        at = first + node
        token = tl.load(pool.tokens + at, mask=is_open, other=0)
        parent = tl.load(pool.parents + at, mask=is_open, other=0)
        above = tl.load(pool.tokens + first + parent, mask=is_open, other=0)
        parents_parent = tl.load(pool.parents + first + parent, mask=is_open, other=0)
        twice_above = tl.load(pool.tokens + first + parents_parent, mask=is_open, other=0)
        before = tl.where(node > 0, above, before_root)
        earlier = tl.where(parent > 0, twice_above, tl.where(node > 0, before_root, earlier_root))
        # The first table that knows the n-gram gives the successors.
        known = tl.zeros([BEAMS], tl.int32) == 1
        table, table_row = tl.zeros([BEAMS], tl.int32), tl.zeros([BEAMS], tl.int64)
        for number in tl.static_range(NUM_TABLES):
            is_known, found = look_up(tables, number, token, before, earlier, salt, is_open, K, IS_ISOLATED)
            table = tl.where(known | (is_known == 0), table, number)
            table_row = tl.where(known | (is_known == 0), table_row, found)
            known = known | is_known
        entry = tl.load(tables.entries + table_row[:, None] * K + rank[None, :], mask=known[:, None], other=-1)
        is_new = entry >= 0
        new_token, bucket = entry // NUM_BUCKETS, entry % NUM_BUCKETS
        own_source = (source + table)[:, None] + tl.zeros_like(entry)
        new_depth = (tl.load(pool.depths + at, mask=is_open, other=0) + 1)[:, None] + tl.zeros_like(entry)
        position = end + new_depth - 1
        is_drawable = is_new & can_be_drawn(new_token, new_depth, barred, row, barred_room)
        bucket = successor_buckets(
            bucket, is_new, is_drawable, kind, seed, position, new_token, powers + row * NUM_BUCKETS, starts_of_buckets
        )
        prob = prob_of(acceptance_probs, kind, ALONE, own_source, bucket, num_sources, num_buckets, is_new)
        new_path = path_of(tl.load(pool.paths + at, mask=is_open, other=0.0)[:, None], prob)
        new_path = tl.where(is_drawable, new_path, 0.0)
        above_key = tl.load(pool.keys + at, mask=is_open, other=0)[:, None] + tl.zeros_like(entry)
        new_key = key_of(above_key, new_token, new_depth, path_factors, is_new)
        new = first + first_wave + (wave * BEAM + beam[:, None]) * K + rank[None, :]
        tl.debug_barrier()  # all threads have read what is overwritten now
        tl.store(open_paths + at, 0.0, mask=is_open)
        need = tl.load(pool.needs + at, mask=is_open, other=0)[:, None] + tl.zeros_like(entry)
        above = node[:, None] + tl.zeros_like(entry)
        write_nodes(pool, new, new_token, above, new_depth, need, own_source, bucket, new_key, new_path, is_new)
        tl.store(open_paths + new, tl.where(new_depth < max_depth, new_path, 0.0), mask=is_new)

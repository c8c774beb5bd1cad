"""Gates and templates of fixed trees on the device, see `fixed.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.buffers import NUM_BUCKETS, NUM_SUCCESSORS, NUM_TABLES, Draws, Pool, PoolShape, Tables
from graft.tree.device.pool import Nodes, TableRows, can_be_drawn, key_of, look_up, path_of, write_nodes

ATTACHED = tl.constexpr(0.5)  # acceptance probability of every attached node, so that paths fall with depth
_OTHERS = 32  # nodes that a block is compared with at once


def stop_rows(
    pool: Pool,
    shape: PoolShape,
    number: int,
    first_gate: int,
    end_gate: int,
    gates: Tensor,  # [G] int32 depths
    thresholds: Tensor,  # [G] float32
    stops: Tensor,  # [R] int32 the gate that stopped each row; G: none
    confidences: Tensor,  # [R, G] float32 q of the likeliest path at each gate that the row reached
    made: Tensor,  # [passes + 1] int32, see `add_level`
) -> None:
    """Stop rows at the gates that draft pass `number` has reached, and make no further pass if all have stopped."""
    count = shape.levels[number]
    _stop_rows_kernel[(1,)](
        *(pool.nodes, gates, thresholds, stops, confidences, made),
        shape.level_start(number),
        shape.num_rows,
        NUMBER=number,
        COUNT=count,
        FIRST=first_gate,
        END=end_gate,
        NUM_GATES=len(gates),
        ROWS=triton.next_power_of_2(shape.num_rows),
        BLOCK=triton.next_power_of_2(count),
    )


@triton.jit
def _stop_rows_kernel(
    pool: Nodes,
    gates: tl.tensor,
    thresholds: tl.tensor,
    stops: tl.tensor,
    confidences: tl.tensor,
    made: tl.tensor,
    level_start: int,
    num_rows: int,
    NUMBER: tl.constexpr,
    COUNT: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    NUM_GATES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program does all rows."""
    is_made = tl.load(made + NUMBER) != 0
    row, place = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    stop = tl.load(stops + row, mask=row < num_rows, other=-1)
    node = row.to(tl.int64)[:, None] * pool.capacity + level_start + place[None, :]
    path = tl.load(pool.paths + node, mask=(row < num_rows)[:, None] & (place < COUNT)[None, :] & is_made, other=0.0)
    depth = tl.load(pool.depths + node, mask=path > 0, other=0)
    for gate in tl.static_range(FIRST, END):
        going = (stop == NUM_GATES) & is_made
        likeliest = tl.max(tl.where(depth == tl.load(gates + gate), path, 0.0), axis=1)
        tl.store(confidences + row * NUM_GATES + gate, likeliest, mask=going)
        stop = tl.where(going & (likeliest <= tl.load(thresholds + gate)), gate, stop)
    tl.store(stops + row, stop, mask=row < num_rows)
    if tl.sum((stop == NUM_GATES).to(tl.int32), axis=0) == 0:
        tl.store(made + NUMBER + 1, 0)


def attach(
    pool: Pool,
    shape: PoolShape,
    stops: Tensor,  # [R] int32 numbers of splits
    splits: Tensor,  # see `FixedTree.numbers`
    at_leaf: bool,  # whether templates are attached below the last node that stays, and not below the root
    tables: Tables,  # the last one is filled in
    salts: Tensor,  # [R] int64 whose entries each row uses
    max_depths: Tensor,  # [R] int32
    draws: Draws,
    source: int,  # of attached nodes
) -> None:
    """Keep the likeliest candidates of each row's split, and attach its template.

    A candidate that stays and has the same path stands for a node of the template.
    """
    _attach_kernel[(shape.num_rows,)](
        pool.nodes,
        pool.kept,
        stops,
        splits,
        tables.parts,
        salts,
        pool.factors,
        max_depths,
        *draws.barred_and_room,
        source,
        splits.shape[1],
        shape.first_wave,
        shape.width,
        AT_LEAF=at_leaf,
        TABLE=NUM_TABLES - 1,
        K=NUM_SUCCESSORS,
        NUM_BUCKETS=NUM_BUCKETS,
        IS_ISOLATED=tables.isolated,
        BLOCK=triton.next_power_of_2(shape.width),
        TEMPLATE=triton.next_power_of_2(max(splits.shape[1] // 3 - 1, 1)),
        OTHERS=_OTHERS,
        num_warps=8,
    )


@triton.jit
def _attach_kernel(
    pool: Nodes,
    stands: tl.tensor,
    stops: tl.tensor,
    splits: tl.tensor,
    tables: TableRows,
    salts: tl.tensor,
    path_factors: tl.tensor,
    max_depths: tl.tensor,
    barred: tl.tensor,
    barred_room: int,
    source: int,
    splits_room: int,
    first_wave: int,
    width: int,
    AT_LEAF: tl.constexpr,
    TABLE: tl.constexpr,
    K: tl.constexpr,
    NUM_BUCKETS: tl.constexpr,
    IS_ISOLATED: tl.constexpr,
    BLOCK: tl.constexpr,
    TEMPLATE: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    """A program is one row."""
    row = tl.program_id(0)
    first = row.to(tl.int64) * pool.capacity
    own = splits + tl.load(stops + row) * splits_room
    num_kept, deepest, count = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    # Rank the candidates as `ranking.rank` does.
    place = tl.arange(0, BLOCK)
    inside = (place > 0) & (place < width)
    path = tl.load(pool.paths + first + place, mask=inside, other=0.0)
    path = tl.where(tl.load(pool.depths + first + place, mask=inside, other=0) <= deepest, path, 0.0)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, OTHERS):
        other = start + tl.arange(0, OTHERS)
        is_other = (other > 0) & (other < width)
        there = tl.load(pool.paths + first + other, mask=is_other, other=0.0)
        there = tl.where(tl.load(pool.depths + first + other, mask=is_other, other=0) <= deepest, there, 0.0)
        is_equal = there[None, :] == path[:, None]
        is_before = (there[None, :] > path[:, None]) | (is_equal & (other[None, :] < place[:, None]))
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    stays = (path > 0) & (rank < num_kept)
    tl.debug_barrier()  # all threads have read what is overwritten now
    tl.store(pool.paths + first + place, 0.0, mask=inside & (stays == 0))
    base = tl.max(tl.where(stays, place, 0), axis=0) if AT_LEAF else 0
    base_depth = tl.load(pool.depths + first + base)
    most, salt = splits_room // 3 - 1, tl.load(salts + row)
    node = tl.arange(0, TEMPLATE)
    is_node = node < count
    parent = tl.load(own + 3 + node, mask=is_node, other=0)
    successor = tl.load(own + 3 + most + node, mask=is_node, other=0)
    level = tl.load(own + 3 + 2 * most + node, mask=is_node, other=0)
    here = first + first_wave + node
    room = tl.load(max_depths + row) - base_depth
    for number in range(1, tl.minimum(tl.max(level, axis=0), room) + 1):
        tl.debug_barrier()  # wait for the nodes one depth up
        is_here = is_node & (level == number)
        above = tl.load(stands + first + first_wave + parent - 1, mask=is_here & (parent > 0), other=base)
        above_path = tl.load(pool.paths + first + above, mask=is_here, other=0.0)
        is_open = above_path > 0
        token = tl.load(pool.tokens + first + above, mask=is_open, other=0)
        known, table_row = look_up(tables, TABLE, token, token, token, salt, is_open, K, IS_ISOLATED)
        entry = tl.load(tables.entries + table_row * K + successor, mask=known, other=-1)
        new_token, depth = entry // NUM_BUCKETS, number + base_depth + tl.zeros_like(entry)
        is_new = (entry >= 0) & can_be_drawn(new_token, depth, barred, row, barred_room)
        key = key_of(tl.load(pool.keys + first + above, mask=is_new, other=0), new_token, depth, path_factors, is_new)
        twin = tl.zeros([TEMPLATE], tl.int32)
        for start in range(0, first_wave, OTHERS):
            other = start + tl.arange(0, OTHERS)
            is_other = tl.load(pool.paths + first + other, mask=other < first_wave, other=0.0) > 0
            other_key = tl.load(pool.keys + first + other, mask=is_other, other=0)
            is_same = is_other[None, :] & is_new[:, None] & (other_key[None, :] == key[:, None])
            twin = tl.maximum(twin, tl.max(tl.where(is_same, other[None, :], 0), axis=1))
        is_added = is_new & (twin == 0)
        tl.store(stands + here, tl.where(twin > 0, twin, first_wave + node), mask=is_here)
        need = tl.load(pool.needs + first + above, mask=is_added, other=0)
        new_path = path_of(above_path, ATTACHED)
        write_nodes(pool, here, new_token, above, depth, need, source, 0, key, new_path, is_added)

"""Tree attention and the KV cache's commit as Triton kernels. Importing this module needs Triton.

Attention here is exact: a token gets, bit for bit, the same whether it is decoded plainly or verified as a node of any
tree, in any batch. Three rules make it so:

- Keys are taken by their position in the node's own text, in blocks and splits whose borders are fixed positions. A
  split is summed block after block, and splits are combined in one fixed order.
- All tiles of query rows have one shape, so a row's numbers do not depend on where it stands or what stands beside it.
  A prefix program may have several of them, below each other and each with warps of its own: a row's sums never leave
  its warp.
- Prefix and tail do the same operations to a block, spelled so that a compiler has nothing to choose, and a block of
  which a row sees nothing leaves the row's sums as they are.

Lengths are read on the device, and no kernel is compiled for a width, a length or a batch: a launch can be captured in
a graph and replayed while the text grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_WARP_ROWS = 16  # of a warp in a matrix instruction
_VARYING = ["max_path", "width", "num_splits", "window"]  # what no kernel is compiled for


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of attention. Those above `stacked` may change the last bits of the result."""

    rows: int = 64  # query rows of a tile: nodes times the query heads that share keys
    keys: int = 64  # positions of a block
    # Short splits keep the device busy at short contexts; long ones further on keep the sums to combine few.
    short_split: int = 256
    long_split: int = 1024
    border: int = 4096  # the position from which on splits are long
    combined: int = 8192  # numbers of splits that are added up at once
    warps: int = 4
    stacked: int = 1  # tiles of a prefix program, if there are rows for so many: they read keys together
    prefix_stages: int = 3
    tail_stages: int = 1
    tail_registers: int | None = None  # a thread's at most; with fewer, more programs run at once

    def __post_init__(self) -> None:
        if any(size % self.keys for size in self.splits) or self.border % self.short_split:
            raise ValueError(
                f"splits {self.splits} do not consist of whole blocks of {self.keys} and end at the border"
            )
        if self.stacked > 1 and self.rows != _WARP_ROWS * self.warps:
            raise ValueError(f"tiles of {self.rows} rows by {self.warps} warps cannot be stacked: warps share rows")
        if self.stacked > 1 and self.warps % 4:
            raise ValueError(f"tiles of {self.warps} warps cannot be stacked: instructions of four sum otherwise")

    @property
    def splits(self) -> tuple[int, int, int]:
        return self.short_split, self.border, self.long_split

    def count_splits(self, num_positions: int) -> int:
        """Splits that hold the first positions of a text."""
        short = min(num_positions, self.border)
        return triton.cdiv(short, self.short_split) + triton.cdiv(num_positions - short, self.long_split)


# float32 is multiplied without matrix instructions, and its operands fill the registers.
_FLOAT32 = Tiles(rows=32, keys=32, warps=8, prefix_stages=2)
# By bytes of an element and the head dimension's next power of two; plain `Tiles()` for all others.
TILES: dict[tuple[int, int], Tiles] = {
    (2, 256): Tiles(warps=8, prefix_stages=2),
    (4, 16): _FLOAT32,
    (4, 32): _FLOAT32,
    (4, 64): _FLOAT32,
    (4, 128): _FLOAT32,
    (4, 256): Tiles(rows=16, keys=16, warps=8, prefix_stages=2),
}


def tiles_for(head_dim: int, dtype: torch.dtype) -> Tiles:
    return TILES.get((dtype.itemsize, _padded(head_dim)), Tiles())


def tree_attention(
    query: Tensor,  # [B, heads, W, head_dim]
    keys: Tensor,  # [B, slots, kv_heads, head_dim], one layer of the cache with the forward's own keys
    values: Tensor,
    lengths: Tensor,  # [B] int32 committed tokens, position p in slot p
    paths: Tensor,  # [B, W, P] int32 places behind the committed tokens, from the root to the node itself
    depths: Tensor,  # [B, W] int32, where in its path a node stands
    *,
    max_context: int,
    scale: float | None = None,
    window: int | None = None,
    tiles: Tiles | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Attention of every node over the committed tokens and its own path, [B, W, heads * head_dim].

    max_context: an upper bound on `lengths`, not checked. It sizes the launch and does not change the result.
    window: keys this many positions back or more are not seen.
    scratch: `scratch_size` or more float32 numbers; one will do for all layers. Made anew if not given.
    """
    batch, heads, width, head_dim = query.shape
    kv_heads = keys.shape[2]
    _check_layout(query, keys, values, lengths, paths, depths)
    tiles = tiles or tiles_for(head_dim, query.dtype)
    num_splits = tiles.count_splits(max_context + paths.shape[2])
    num_states = _num_states(batch * heads * width, num_splits)
    if scratch is None:
        scratch = query.new_empty(num_states * (head_dim + 2), dtype=torch.float32)
    sums, maxima, totals = scratch[: num_states * (head_dim + 2)].split((num_states * head_dim, num_states, num_states))
    out = query.new_empty(batch, width, heads * head_dim)

    group = heads // kv_heads
    log2_scale = (head_dim**-0.5 if scale is None else scale) * _LOG2_E
    arguments = (
        *(query, keys, values, *query.stride()[:3], *keys.stride()[:3], log2_scale),
        *(lengths, paths, depths, paths.shape[2], width, kv_heads, num_splits, window or 0),
        *(sums, maxima, totals),
    )
    cut: dict[str, Any] = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_N": tiles.keys,
        "BLOCK_D": _padded(head_dim),
        "SPLITS": tiles.splits,
        "WINDOWED": window is not None,
        "PRECISION": "ieee" if query.dtype is torch.float32 else "tf32",
    }
    if max_context >= tiles.keys:
        stacked = min(tiles.stacked, triton.next_power_of_2(triton.cdiv(width * group, tiles.rows)))
        rows = tiles.rows * stacked
        grid = (triton.cdiv(width * group, rows), tiles.count_splits(max_context), batch * kv_heads)
        _prefix_kernel[grid](
            *arguments, **cut, BLOCK_M=rows, num_warps=tiles.warps * stacked, num_stages=tiles.prefix_stages
        )
    members = min(triton.next_power_of_2(group), tiles.rows)
    _tail_kernel[width, triton.cdiv(group, tiles.rows), batch * kv_heads](
        *arguments,
        out,
        **cut,
        BLOCK_M=tiles.rows,
        BLOCK_G=members,
        BLOCK_S=max(tiles.combined // (members * _padded(head_dim)), 1),
        num_warps=tiles.warps,
        num_stages=tiles.tail_stages,
        maxnreg=tiles.tail_registers,
    )
    return out


def scratch_size(
    batch: int, heads: int, width: int, head_dim: int, max_depth: int, max_context: int, tiles: Tiles
) -> int:
    """Float32 numbers that `tree_attention` needs for its splits, with paths of at most max_depth + 1 nodes."""
    return _num_states(batch * heads * width, tiles.count_splits(max_context + max_depth + 1)) * (head_dim + 2)


def commit(keys: Tensor, values: Tensor, lengths: Tensor, places: Tensor, counts: Tensor) -> None:
    """Moves each row's accepted tokens to the slots after its root, in all layers: `TreeCache.commit` on the device.

    keys, values: [layers, B, slots, kv_heads, head_dim]. lengths: [B] int32 committed tokens, where the root is.
    places: [B, P] int32 indices of the accepted nodes below the root, increasing; the first `counts` [B] of each row.
    """
    layers, batch, _, kv_heads, head_dim = keys.shape
    entry = kv_heads * head_dim
    if keys.stride() != values.stride() or keys.stride()[3:] != (head_dim, 1):
        raise ValueError("keys and values of a token must lie together, and both in the same way")
    _check_indices(lengths, places, counts)
    block = min(triton.next_power_of_2(entry), 1024)
    grid = (triton.cdiv(entry, block), layers, batch)
    _commit_kernel[grid](
        keys, values, lengths, places, counts, places.shape[1], *keys.stride()[:3], ENTRY=entry, BLOCK=block
    )


def _num_states(num_rows: int, num_splits: int) -> int:
    """Softmax states of all rows and splits, rounded up so that what follows them is aligned."""
    return triton.cdiv(num_rows * num_splits, 16) * 16


def _padded(head_dim: int) -> int:
    """The head dimension in a tile: a power of two, and no less than a matrix instruction takes."""
    return max(triton.next_power_of_2(head_dim), 16)


def _check_layout(query: Tensor, keys: Tensor, values: Tensor, *indices: Tensor) -> None:
    if query.shape[1] % keys.shape[2]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {keys.shape[2]} key heads evenly")
    if query.stride(-1) != 1 or keys.stride(-1) != 1 or keys.stride() != values.stride():
        raise ValueError("the numbers of a head must lie together, and keys and values in the same way")
    _check_indices(*indices)


def _check_indices(*indices: Tensor) -> None:
    if any(index.dtype is not torch.int32 or not index.is_contiguous() for index in indices):
        raise ValueError("lengths, depths and places must be contiguous int32")


@triton.jit
def _split_of(position: int, SPLITS: tl.constexpr) -> int:
    short: tl.constexpr = SPLITS[0]
    border: tl.constexpr = SPLITS[1]
    long: tl.constexpr = SPLITS[2]
    return tl.where(position < border, position // short, border // short + (position - border) // long)


@triton.jit
def _start_of(split: int, SPLITS: tl.constexpr) -> int:
    short: tl.constexpr = SPLITS[0]
    border: tl.constexpr = SPLITS[1]
    long: tl.constexpr = SPLITS[2]
    return tl.where(split * short < border, split * short, border + (split - border // short) * long)


@triton.jit
def _first_block(length: int, window: int, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr) -> int:
    """Start of the first block in the root's window, and so in any node's."""
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window + 1, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _load_rows(
    base: tl.tensor,
    offsets: tl.tensor,
    real: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Head vectors [rows, BLOCK_D] at offsets [rows]; zeros past the head dimension and, if masked, in unreal rows."""
    dims = tl.arange(0, BLOCK_D)
    pointers = base + offsets[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=real[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store_state(
    sums: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    state: tl.tensor,
    real: tl.tensor,
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(sums + (state * HEAD_DIM)[:, None] + dims[None, :], acc, mask=mask)
    tl.store(maxima + state, maximum, mask=real)
    tl.store(totals + state, total, mask=real)


@triton.jit
def _add_block(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    seen: tl.tensor,
    log2_scale: float,
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One block's step of the online softmax: all that touches a number between the loads and the combination.

    Products that are added to something are written as `fma`, since a compiler may fuse them in one kernel and not in
    the other.
    """
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * log2_scale)
    # Rows that have seen nothing yet have no maximum to subtract; their weights are exp2(-inf) = 0 all the same.
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(tl.fma(scores, log2_scale, -base[:, None]))
    rescale = tl.exp2(maximum - base)
    total = tl.fma(total, rescale, tl.sum(weights, axis=1))
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_maximum, total


@triton.jit
def _combine(
    sums: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    state: tl.tensor,
    real: tl.tensor,
    first: int,
    last: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tl.tensor:
    """Combines the splits from first to last of some rows, [BLOCK_G, BLOCK_D].

    Splits are taken in groups with fixed borders too; a split of which a row sees nothing leaves its sums unchanged.
    """
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for start in range(first // BLOCK_S * BLOCK_S, last + 1, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        exists = ((split >= first) & (split <= last))[:, None] & real[None, :]
        states = state[None, :] + split[:, None]  # [BLOCK_S, BLOCK_G]
        part = tl.load(
            sums + (states * HEAD_DIM)[:, :, None] + dims[None, None, :],
            mask=exists[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        greatest = tl.load(maxima + states, mask=exists, other=float("-inf"))
        parts_total = tl.load(totals + states, mask=exists, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(greatest, axis=0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(greatest - base[None, :])
        rescale = tl.exp2(maximum - base)
        total = tl.fma(total, rescale, tl.sum(parts_total * weight, axis=0))
        acc = tl.fma(acc, rescale[:, None], tl.sum(part * weight[:, :, None], axis=0))
        maximum = new_maximum
    # Rows that are not real have no total.
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=_VARYING)
def _prefix_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_batch: tl.int64,  # strides
    query_head: int,
    query_node: int,
    cache_row: tl.int64,
    cache_slot: int,
    cache_head: int,
    log2_scale: float,
    lengths: tl.tensor,
    paths: tl.tensor,
    depths: tl.tensor,
    max_path: int,
    width: int,
    kv_heads: int,
    num_splits: int,
    window: int,
    sums: tl.tensor,  # [B * heads * W, splits, head_dim], rows by batch, key head, node and then query head
    maxima: tl.tensor,  # [B * heads * W, splits]
    totals: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Whole blocks of committed tokens, the same for all nodes: one split for one tile of query rows."""
    # The last splits are the longest and start first.
    split = tl.num_programs(1) - 1 - tl.program_id(1)
    batch, kv_head = tl.program_id(2) // kv_heads, tl.program_id(2) % kv_heads
    length = tl.load(lengths + batch)
    begin = tl.maximum(_start_of(split, SPLITS), _first_block(length, window, BLOCK_N, WINDOWED))
    end = tl.minimum(_start_of(split + 1, SPLITS), length // BLOCK_N * BLOCK_N)
    if begin >= end:
        return

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < width * GROUP
    node, head = row // GROUP, kv_head * GROUP + row % GROUP
    query += batch * query_batch
    q = _load_rows(query, head * query_head + node * query_node, real, HEAD_DIM, BLOCK_D, True)
    position = length + tl.load(depths + batch * width + node, mask=real, other=0)

    keys += batch * cache_row + kv_head * cache_head
    values += batch * cache_row + kv_head * cache_head
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        seen = slots[None, :] > position[:, None] - window
        key = _load_rows(keys, slots * cache_slot, slots >= 0, HEAD_DIM, BLOCK_D, False)
        value = _load_rows(values, slots * cache_slot, slots >= 0, HEAD_DIM, BLOCK_D, False)
        acc, maximum, total = _add_block(q, key, value, seen, log2_scale, acc, maximum, total, WINDOWED, PRECISION)
    state = (tl.program_id(2).to(tl.int64) * width * GROUP + row) * num_splits + split
    _store_state(sums, maxima, totals, state, real, acc, maximum, total, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=_VARYING)
def _tail_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_batch: tl.int64,
    query_head: int,
    query_node: int,
    cache_row: tl.int64,
    cache_slot: int,
    cache_head: int,
    log2_scale: float,
    lengths: tl.tensor,
    paths: tl.tensor,
    depths: tl.tensor,
    max_path: int,
    width: int,
    kv_heads: int,
    num_splits: int,
    window: int,
    sums: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,  # [B, W, heads * head_dim]
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A node's own last blocks, the end of the committed tokens and then its path, and all its splits together.

    Goes on where the prefix ended. Of a tile's rows only the query heads that share keys are real; to combine splits
    there are no others.
    """
    node = tl.program_id(0)
    batch, kv_head = tl.program_id(2) // kv_heads, tl.program_id(2) % kv_heads
    length = tl.load(lengths + batch)
    position = length + tl.load(depths + batch * width + node)
    prefix_end = length // BLOCK_N * BLOCK_N
    first = _first_block(length, window, BLOCK_N, WINDOWED)

    member = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = member < GROUP
    query += batch * query_batch + node * query_node
    q = _load_rows(query, (kv_head * GROUP + member) * query_head, real, HEAD_DIM, BLOCK_D, True)
    state = ((tl.program_id(2).to(tl.int64) * width + node) * GROUP + member) * num_splits

    keys += batch * cache_row + kv_head * cache_head
    values += batch * cache_row + kv_head * cache_head
    paths += (batch * width + node) * max_path
    for split in range(_split_of(prefix_end, SPLITS), _split_of(position, SPLITS) + 1):
        # What the prefix left in this split, or nothing.
        going_on = real & (tl.maximum(_start_of(split, SPLITS), first) < prefix_end)
        acc = _load_rows(sums, (state + split) * HEAD_DIM, going_on, HEAD_DIM, BLOCK_D, True)
        maximum = tl.load(maxima + state + split, mask=going_on, other=float("-inf"))
        total = tl.load(totals + state + split, mask=going_on, other=0.0)
        begin = tl.maximum(_start_of(split, SPLITS), prefix_end)
        end = tl.minimum(_start_of(split + 1, SPLITS), position + 1)
        for start in range(begin, end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            exists = positions <= position
            step = positions - length  # of the path; negative for committed tokens
            place = tl.load(paths + step, mask=(step >= 0) & exists, other=0)
            slots = tl.where(step < 0, positions, length + place)
            seen = exists
            if WINDOWED:
                seen = exists & (positions > position - window)
            key = _load_rows(keys, slots * cache_slot, exists, HEAD_DIM, BLOCK_D, True)
            value = _load_rows(values, slots * cache_slot, exists, HEAD_DIM, BLOCK_D, True)
            acc, maximum, total = _add_block(
                q, key, value, seen[None, :], log2_scale, acc, maximum, total, True, PRECISION
            )
        _store_state(sums, maxima, totals, state + split, real, acc, maximum, total, HEAD_DIM, BLOCK_D)

    tl.debug_barrier()  # what this program's other threads have stored
    member = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_G)
    real = member < GROUP
    state = ((tl.program_id(2).to(tl.int64) * width + node) * GROUP + member) * num_splits
    first_split, last_split = _split_of(first, SPLITS), _split_of(position, SPLITS)
    result = _combine(sums, maxima, totals, state, real, first_split, last_split, HEAD_DIM, BLOCK_D, BLOCK_G, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + member
    row = (batch.to(tl.int64) * width + node) * kv_heads * GROUP + head
    tl.store(
        out + (row * HEAD_DIM)[:, None] + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["max_places"])
def _commit_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    lengths: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    max_places: int,
    layer: tl.int64,  # strides
    row: tl.int64,
    slot: tl.int64,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Moves part of a token's keys and values, in one layer of one row, path node after path node.

    A node only moves to a lower slot, so in this order nothing is overwritten that is still to be moved.
    """
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = part < ENTRY
    batch = tl.program_id(2)
    offset = tl.program_id(1) * layer + batch * row + tl.load(lengths + batch) * slot + part
    for step in range(tl.load(counts + batch)):
        place = tl.load(places + batch * max_places + step)
        if place != step + 1:
            source, target = offset + place * slot, offset + (step + 1) * slot
            tl.store(keys + target, tl.load(keys + source, mask=inside), mask=inside)
            tl.store(values + target, tl.load(values + source, mask=inside), mask=inside)

"""Tree attention and the KV cache's commit as Triton kernels. Importing this module needs Triton.

Attention here is exact: a token gets the same bits whether it is decoded plainly or verified as a node of any tree, in
any batch. Three rules ensure this:

- Keys are ordered by position in the node's own text, in blocks and splits with fixed borders. A split is summed block
  after block, and splits are combined in one fixed order.
- All tiles of query rows have one shape, so a row's numbers do not depend on its place in the tile or on other rows.
- The prefix and tail kernels apply the same operations to a block, written so that the compiler cannot fuse them
  differently. A block that is fully masked for a row leaves the row's sums unchanged.

If a row's tokens are a chain (a part of a prompt, or a tree with one path), they are stored in the row's pages like
committed text. Everything before a tile's first token is then prefix for the whole tile.

A tree is cut into strips: runs of nodes down one path, one strip per leaf, with each node in exactly one strip. The
nodes of a strip see the same keys at the same positions, each up to its own, so they can share a tile.

A step is flat: tokens of many rows one after the other, with their keys in pages. This layout does not affect a sum.
Lengths are read on the device, and kernels are not specialised for a number of tokens, a length or a batch size. So a
launch can be captured in a CUDA graph and replayed while the text grows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate, overlap
from graft.model.kernels.eight_bits import fitted
from graft.model.kernels.gate import is_shut
from graft.model.kernels.overlap import start_next, wait_for_previous
from graft.model.layout import Layout

PAGE = 64  # slots per page
_PAGE = tl.constexpr(PAGE)
_LOG2_E = 1.4426950408889634
_TO_LOG2 = tl.constexpr(_LOG2_E)
# How far back a token sees: everything, a sliding window, or its chunk.
_ALL, _WINDOW, _CHUNK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_VARYING = ["max_pages", "max_path", "num_splits", "window"]  # arguments that kernels are not specialized for
# Number of programs of the prefix and tail kernels over all key heads: more than can run at once on a large GPU.
_MOST_PROGRAMS, _LEAST_PROGRAMS = 1056, 64
_PLANNED_AT_ONCE = 512  # rows, items or tokens in a block of the plan kernel


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of attention. Fields above `prefix_stages` may change the last bits of the result."""

    rows: int = 64  # query rows of a tile: nodes times the query heads that share keys
    keys: int = 64  # positions of a block
    # Short splits keep the device busy at short contexts. Long splits, further on, limit the number of sums to combine.
    short_split: int = 256
    long_split: int = 1024
    border: int = 4096  # first position of the long splits
    combined: int = 2048  # numbers added at once when splits are combined
    warps: int = 4
    prefix_stages: int = 3
    tail_stages: int = 1
    tail_registers: int | None = None  # limit per thread; with fewer, more programs run at once

    def __post_init__(self) -> None:
        if any(size % self.keys for size in self.splits) or self.border % self.short_split:
            raise ValueError(f"splits {self.splits} must be multiples of {self.keys} keys and end at the border")
        if PAGE % self.keys:
            raise ValueError(f"a page of {PAGE} slots must consist of whole blocks of {self.keys} keys")

    @property
    def splits(self) -> tuple[int, int, int]:
        return self.short_split, self.border, self.long_split

    def tokens(self, group: int) -> int:
        """Tokens in a tile, each with `group` query heads; 0 if a token needs more than one tile."""
        return self.rows // group

    def used_rows(self, group: int) -> int:
        """Query rows of a tile that are used: those of whole tokens, or all if a token needs more than one tile."""
        return self.tokens(group) * group or self.rows

    def count_splits(self, num_positions: int) -> int:
        """The number of splits of the first positions of a text."""
        short = min(num_positions, self.border)
        return triton.cdiv(short, self.short_split) + triton.cdiv(num_positions - short, self.long_split)


# float32 has no matrix instructions, and its operands fill the registers.
_FLOAT32 = Tiles(rows=32, keys=32, warps=8, prefix_stages=2)
# By bytes per element and the head dimension's next power of two; `Tiles()` for all others.
TILES: dict[tuple[int, int], Tiles] = {
    (2, 256): Tiles(short_split=128, warps=8),
    (2, 512): Tiles(rows=32, keys=32, warps=8, prefix_stages=2),
    (4, 16): _FLOAT32,
    (4, 32): _FLOAT32,
    (4, 64): _FLOAT32,
    (4, 128): _FLOAT32,
    (4, 256): Tiles(rows=16, keys=16, warps=8, prefix_stages=2),
    (4, 512): Tiles(rows=16, keys=16, warps=8, prefix_stages=1),
}


def tiles_for(head_dim: int, dtype: torch.dtype) -> Tiles:
    return TILES.get((dtype.itemsize, _padded(head_dim)), Tiles())


@dataclass(frozen=True)
class Plan:
    """The work of a step's kernels, shared by all layers with the same tiles and query heads per key head."""

    items: Tensor  # [N, 3] int32 for the prefix kernel: row, tile of the row, split
    num_items: Tensor  # [1] int32
    chains: Tensor  # [R] int32, 1 for rows that are chains: tokens before a tile's first one are prefix to the tile
    strips: Tensor  # [N, 4] int32 for the tail kernel: row, deepest token, number of tokens, split
    num_strips: Tensor  # [1] int32


class Step(NamedTuple):
    """What the plan's kernel takes of a `Layout` as one argument."""

    rows: Tensor
    starts: Tensor
    counts: Tensor
    lengths: Tensor
    places: Tensor
    depths: Tensor
    numbers: Tensor  # of the tokens in their strips


def plan(layout: Layout, group: int, tiles: Tiles) -> Plan:
    """Plan the prefix kernel's items (tile and split) and the tail kernel's strips, in pieces that fit into a tile.

    group: query heads that share a key head.
    """
    num_tokens, num_rows = len(layout.rows), len(layout.counts)
    _check_layout(layout)
    items = layout.counts.new_empty(_most_items(num_tokens, num_rows, layout.max_context, group, tiles), 3)
    strips = layout.counts.new_empty(num_tokens * _most_tail_splits(layout, tiles), 4)
    num_items, num_strips = (layout.counts.new_empty(1) for _ in range(2))
    chains = torch.empty_like(layout.counts)
    _plan_kernel[(num_rows + triton.cdiv(num_tokens, _PLANNED_AT_ONCE),)](
        Step(
            *(layout.rows, layout.starts, layout.counts, layout.lengths, layout.places, layout.depths),
            layout.rows if layout.strips is None else layout.strips,
        ),
        *(items, num_items, chains, strips, num_strips),
        num_rows,
        num_tokens,
        HAS_STRIPS=layout.strips is not None,
        GROUP=group,
        TOKENS=tiles.tokens(group),
        USED=tiles.used_rows(group),
        BLOCK_N=tiles.keys,
        SPLITS=tiles.splits,
        BLOCK=_PLANNED_AT_ONCE,
        **gate.options(),
    )
    return Plan(items, num_items, chains, strips, num_strips)


def tree_attention(
    query: Tensor,  # [T, heads, head_dim]
    keys: Tensor,  # [num_slots, kv_heads, head_dim], one layer's store with the step's own keys
    values: Tensor,  # [num_slots, kv_heads, value_dim]
    layout: Layout,
    plan: Plan,  # made with the same tiles
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
    scratch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention of every token over its row's committed tokens and its own path, [T, heads * value_dim].

    window: keys this many or more positions back are masked. chunk: keys in earlier chunks of this many positions are
    masked. At most one of the two is given.
    softcap: a score becomes softcap * tanh(score / softcap). sinks: [heads] scores of an extra key whose value is 0.
    scratch: at least `scratch_size` float32 numbers, which layers may share; None: allocated here.
    dtype: of the result; None: the queries'.
    """
    num_tokens, heads, head_dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    _check_stored(query, keys, values)
    _check_layout(layout)
    tiles = tiles or tiles_for(max(head_dim, value_dim), query.dtype)
    num_splits = _num_splits(layout, tiles)
    num_states = _num_states(num_tokens * heads, num_splits)
    if scratch is None:
        scratch = query.new_empty(num_states * (value_dim + 2), dtype=torch.float32)
    sizes = (num_states * value_dim, num_states, num_states)
    sums, maxima, totals = scratch[: sum(sizes)].split(sizes)
    out = query.new_empty(num_tokens, heads * value_dim, dtype=dtype or query.dtype)

    group = heads // kv_heads
    log2_scale = (head_dim**-0.5 if scale is None else scale) * _LOG2_E
    cap_scale = 0.0
    if softcap is not None:  # the kernel computes tanh, and the cap becomes the scale of its result
        cap_scale, log2_scale = 2 * log2_scale / softcap, softcap * _LOG2_E
    strides = (part.stride()[:2] for part in (query, keys, values))
    stored = (query, keys, values, *itertools.chain(*strides), log2_scale, cap_scale)
    by_row = (layout.lengths, layout.table_rows, layout.tables, layout.tables.shape[1])
    states = (num_splits, window or chunk or 0, sums, maxima, totals)
    reach = (_WINDOW if window is not None else _CHUNK if chunk is not None else _ALL).value
    launched = {**overlap.options(query.device), **gate.options()}
    cut: dict[str, Any] = {
        "GROUP": group,
        "TOKENS": tiles.tokens(group),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_N": tiles.keys,
        "BLOCK_D": _padded(head_dim),
        "BLOCK_V": _padded(value_dim),
        "SPLITS": tiles.splits,
        "REACH": reach,
        "CAPPED": softcap is not None,
        "PRECISION": "ieee" if query.dtype is torch.float32 else "tf32",
        **launched,
    }
    programs = max(_MOST_PROGRAMS // kv_heads, _LEAST_PROGRAMS)
    if _most_prefix(num_tokens, layout.max_context, group, tiles) > 0:
        by_token = (layout.starts, layout.counts, layout.depths)
        _prefix_kernel[min(len(plan.items), programs), kv_heads](
            *(*stored, *by_row, plan.chains, *by_token, plan.items, plan.num_items, *states),
            **cut,
            USED=tiles.used_rows(group),
            BLOCK_M=tiles.rows,
            num_warps=tiles.warps,
            num_stages=tiles.prefix_stages,
        )
    parts = triton.cdiv(group, tiles.rows)
    if not (layout.only_chains and tiles.tokens(group)):
        by_token = (layout.places, layout.depths, layout.paths)
        _tail_kernel[min(num_tokens, programs), parts, kv_heads](
            *(*stored, *by_row, *by_token, layout.paths.shape[1], plan.strips, plan.num_strips, *states),
            **cut,
            BLOCK_M=tiles.rows,
            num_warps=tiles.warps,
            num_stages=tiles.tail_stages,
            maxnreg=tiles.tail_registers,
        )
    members = min(triton.next_power_of_2(group), tiles.rows)
    _combine_kernel[num_tokens, parts, kv_heads](
        *(layout.lengths, plan.chains, layout.starts, layout.counts),
        *(layout.rows, layout.places, layout.depths, *states, out, out if sinks is None else sinks),
        GROUP=group,
        TOKENS=tiles.tokens(group),
        VALUE_DIM=value_dim,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_V=_padded(value_dim),
        BLOCK_G=members,
        BLOCK_S=max(tiles.combined // (members * _padded(value_dim)), 1),
        SPLITS=tiles.splits,
        REACH=reach,
        HAS_SINKS=sinks is not None,
        num_warps=2,
        **launched,
    )
    return out


def scratch_size(layout: Layout, heads: int, value_dim: int, tiles: Tiles) -> int:
    """The number of float32 values that `tree_attention` needs as scratch memory."""
    return _num_states(len(layout.rows) * heads, _num_splits(layout, tiles)) * (value_dim + 2)


def commit(
    keys: Tensor,  # [layers, num_slots, kv_heads, head_dim]
    values: Tensor,  # [layers, num_slots, kv_heads, value_dim]
    tables: Tensor,  # [table_rows, max_pages] int32
    table_rows: Tensor,  # [R] int32
    lengths: Tensor,  # [R] int32 committed tokens; the root follows them
    places: Tensor,  # [R, P] int32 places of the accepted tokens below the root, increasing
    counts: Tensor,  # [R] int32 number of accepted tokens below the root
) -> None:
    """Move each row's accepted tokens to the places right after its root, in all layers."""
    if not (keys[0].is_contiguous() and values[0].is_contiguous()):
        raise ValueError("a layer's keys, and its values, must be contiguous")
    _check_indices(tables, table_rows, lengths, places, counts)
    entries = keys[0, 0].numel(), values[0, 0].numel()
    block = min(triton.next_power_of_2(max(entries)), 1024)
    _commit_kernel[triton.cdiv(max(entries), block), len(keys), len(table_rows)](
        *(keys, values, tables, table_rows, lengths, places, counts, tables.shape[1], places.shape[1]),
        *(keys.stride(0), values.stride(0)),
        KEY=entries[0],
        VALUE=entries[1],
        BLOCK=block,
    )


def _most_items(num_tokens: int, num_rows: int, max_context: int, group: int, tiles: Tiles) -> int:
    """Upper bound of a plan's items: each row in use may have one tile that is not full."""
    used = tiles.used_rows(group)
    num_tiles = (num_tokens * group + min(num_rows, num_tokens) * (used - 1)) // used
    return num_tiles * tiles.count_splits(_most_prefix(num_tokens, max_context, group, tiles))


def _most_prefix(num_tokens: int, max_context: int, group: int, tiles: Tiles) -> int:
    """Upper bound of a text's positions in the prefix kernel, which takes whole committed blocks or a whole chain."""
    return max_context + num_tokens if tiles.tokens(group) else max_context // tiles.keys * tiles.keys


def _num_splits(layout: Layout, tiles: Tiles) -> int:
    """The number of splits of the longest possible text in the step."""
    return tiles.count_splits(layout.max_context + _longest_path(layout))


def _most_tail_splits(layout: Layout, tiles: Tiles) -> int:
    """Upper bound of a text's splits in the tail kernel, which takes less than a block of prefix, and the path."""
    return (tiles.keys + _longest_path(layout)) // min(tiles.short_split, tiles.long_split) + 2


def _longest_path(layout: Layout) -> int:
    """Upper bound of a path's tokens: the width of `paths`, or the number of tokens in the step."""
    return max(layout.paths.shape)


def _num_states(num_rows: int, num_splits: int) -> int:
    """The number of softmax states of all rows and splits, rounded up to keep the arrays after them aligned."""
    return triton.cdiv(num_rows * num_splits, 16) * 16


def _padded(head_dim: int) -> int:
    """The head dimension in a tile: a power of two, at least the minimum of a matrix instruction."""
    return max(triton.next_power_of_2(head_dim), 16)


def _check_layout(layout: Layout) -> None:
    _check_indices(*(part for part in vars(layout).values() if isinstance(part, Tensor)))


def _check_stored(query: Tensor, keys: Tensor, values: Tensor) -> None:
    if query.shape[1] % keys.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {keys.shape[1]} key heads evenly")
    if any(part.stride(-1) != 1 for part in (query, keys, values)):
        raise ValueError("a head's numbers must be contiguous")


def _check_indices(*indices: Tensor) -> None:
    if any(index.dtype is not torch.int32 or not index.is_contiguous() for index in indices):
        raise ValueError("lengths, places, depths, paths and block tables must be contiguous int32")


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
def slot_of(table: tl.tensor, index: tl.tensor, real: tl.tensor, max_pages: int) -> tl.tensor:
    """The slots, int64, of positions in a row's text, by its block table.

    Positions of padding may be past the end of the table; all pages of padding are page 0.
    """
    page = tl.load(table + tl.minimum(index // _PAGE, max_pages - 1), mask=real, other=0)
    return page.to(tl.int64) * _PAGE + index % _PAGE


@triton.jit
def _before_tile(place: tl.tensor, is_chain: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """In a chain: the number of the step's tokens before the tile of the token at this place; else 0."""
    if TOKENS == 0:
        return place * 0
    else:
        return is_chain * (place // TOKENS * TOKENS)


@triton.jit
def _first_block(prefix: int, window: int, BLOCK_N: tl.constexpr, REACH: tl.constexpr) -> int:
    """Start of the first block that a tile sees, given the window of the first token after the prefix."""
    first = 0
    if REACH == _WINDOW:
        first = tl.maximum(prefix - window + 1, 0) // BLOCK_N * BLOCK_N
    if REACH == _CHUNK:
        first = prefix // window * window // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _reaches(positions: tl.tensor, own: tl.tensor, window: int, REACH: tl.constexpr) -> tl.tensor:
    """Which positions are within the window or chunk of tokens at positions `own`: [rows, BLOCK_N]."""
    if REACH == _CHUNK:
        return positions[None, :] >= (own // window * window)[:, None]
    else:
        return positions[None, :] > own[:, None] - window


@triton.jit
def _load_rows(
    base: tl.tensor,
    offsets: tl.tensor,
    real: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Head vectors [rows, BLOCK_D] at offsets [rows]; zeros past the head dimension and, if MASKED, where not real."""
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
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_V)
    mask = real[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(sums + (state.to(tl.int64) * VALUE_DIM)[:, None] + dims[None, :], acc, mask=mask)
    tl.store(maxima + state, maximum, mask=real)
    tl.store(totals + state, total, mask=real)


@triton.jit
def _add_block(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    seen: tl.tensor,
    log2_scale: float,
    cap_scale: float,
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One block's step of the online softmax, between loading the block and combining the splits.

    Products that are added to something are written as `fma`. Otherwise the compiler might fuse them in one kernel but
    not in the other.
    """
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if CAPPED:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_scale) + 1.0)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * log2_scale)
    # Rows that have seen no key yet have no maximum to subtract; their weights are exp2(-inf) = 0 anyway.
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
    sink: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> tl.tensor:
    """Combine the splits from first to last of some rows, [BLOCK_G, BLOCK_V]. sink: [BLOCK_G] scores of the sinks.

    Splits are combined in groups with fixed borders. A split that is fully masked for a row leaves its sums unchanged.
    """
    dims = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for start in range(first // BLOCK_S * BLOCK_S, last + 1, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        exists = ((split >= first) & (split <= last))[:, None] & real[None, :]
        states = state[None, :] + split[:, None]  # [BLOCK_S, BLOCK_G]
        part = tl.load(
            sums + (states * VALUE_DIM)[:, :, None] + dims[None, None, :],
            mask=exists[:, :, None] & (dims < VALUE_DIM)[None, None, :],
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
    if HAS_SINKS:  # a key whose value is 0 only adds to the total
        base = tl.maximum(maximum, sink)
        rescale = tl.exp2(maximum - base)
        total = tl.fma(total, rescale, tl.exp2(sink - base))
        acc = acc * rescale[:, None]
    # The total may be 0 in rows that are not real.
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _is_chain(
    step: Step,
    row: tl.tensor,
    real: tl.tensor,
) -> tl.tensor:
    """1 for chains: rows whose other tokens are all ancestors of the last one, with places and depths 0, 1, 2, ..."""
    count = tl.load(step.counts + row, mask=real, other=0)
    last = tl.load(step.starts + row, mask=real, other=0) + count - 1
    in_use = count > 0
    place = tl.load(step.places + last, mask=in_use, other=-1)
    depth = tl.load(step.depths + last, mask=in_use, other=-1)
    return (in_use & (place == count - 1) & (depth == count - 1)).to(tl.int32)


@triton.jit
def _tiles_and_splits(
    step: Step,
    row: tl.tensor,
    real: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """By row, the number of tiles and of prefix splits, which cover whole committed blocks or a whole chain."""
    count = tl.load(step.counts + row, mask=real, other=0)
    length = tl.load(step.lengths + row, mask=real, other=0)
    end = length // BLOCK_N * BLOCK_N
    if TOKENS > 0:
        end = tl.where(_is_chain(step, row, real) > 0, length + count, end)
    return (count * GROUP + USED - 1) // USED, tl.where(end > 0, _split_of(tl.maximum(end - 1, 0), SPLITS) + 1, 0)


@triton.jit
def _plan_row(
    step: Step,
    items: tl.tensor,
    num_items: tl.tensor,
    chains: tl.tensor,
    row: int,
    num_rows: int,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the items of one row after those of earlier rows."""
    index = tl.arange(0, BLOCK)
    before, total = 0, 0
    for start in range(0, num_rows, BLOCK):
        other = start + index
        num_tiles, num_splits = _tiles_and_splits(step, other, other < num_rows, GROUP, TOKENS, USED, BLOCK_N, SPLITS)
        before += tl.sum(tl.where(other < row, num_tiles * num_splits, 0), axis=0)
        total += tl.sum(num_tiles * num_splits, axis=0)
    if row == 0:
        tl.store(num_items, total)
    tl.store(chains + row, _is_chain(step, row, row >= 0))
    num_tiles, num_splits = _tiles_and_splits(step, row, row >= 0, GROUP, TOKENS, USED, BLOCK_N, SPLITS)
    for start in range(0, num_tiles * num_splits, BLOCK):
        item = start + index
        real = item < num_tiles * num_splits
        at = items + (before + item) * 3
        tl.store(at, row + tl.zeros_like(item), mask=real)
        # Tiles that read the same keys are adjacent. The last splits are the longest, so they start first.
        tl.store(at + 1, item % num_tiles, mask=real)
        tl.store(at + 2, num_splits - 1 - item // num_tiles, mask=real)


@triton.jit
def _strips_of(
    step: Step,
    token: tl.tensor,
    num_tokens: int,
    HAS_STRIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """By token: its row; the size, the first tail split and the number of splits of the strip piece that ends there.

    The number of splits is 0 if no piece ends there, for padding, and if the prefix kernel does the whole row.
    """
    row = tl.load(step.rows + token, mask=token < num_tokens, other=0)
    in_use = (token < num_tokens) & (token - tl.load(step.starts + row) < tl.load(step.counts + row))
    length = tl.load(step.lengths + row)
    first = _split_of(length // BLOCK_N * BLOCK_N, SPLITS)
    last = _split_of(length + tl.load(step.depths + token, mask=in_use, other=0), SPLITS)
    size = tl.full(token.shape, 1, tl.int32)
    if TOKENS > 0:
        in_use = in_use & (_is_chain(step, row, in_use) == 0)
        if HAS_STRIPS:
            number = tl.load(step.numbers + token, mask=in_use, other=1)
            in_strip = tl.abs(number)  # counted from the strip's top
            in_use = in_use & ((number < 0) | (in_strip % TOKENS == 0))
            size = (in_strip - 1) % TOKENS + 1
    return row, size, first, tl.where(in_use, last - first + 1, 0)


@triton.jit
def _plan_strips(
    step: Step,
    strips: tl.tensor,
    num_strips: tl.tensor,
    first_token: int,
    num_tokens: int,
    HAS_STRIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the strips that end in a block of tokens, after those of earlier tokens."""
    index = tl.arange(0, BLOCK)
    before = 0
    for start in range(0, first_token, BLOCK):
        token = start + index
        row, size, first, count = _strips_of(step, token, num_tokens, HAS_STRIPS, TOKENS, BLOCK_N, SPLITS)
        before += tl.sum(count, axis=0)
    token = first_token + index
    row, size, first, count = _strips_of(step, token, num_tokens, HAS_STRIPS, TOKENS, BLOCK_N, SPLITS)
    at = strips + (before + tl.cumsum(count, axis=0) - count) * 4
    for number in range(tl.max(count, axis=0)):
        real = number < count
        tl.store(at + number * 4, row, mask=real)
        tl.store(at + number * 4 + 1, token, mask=real)
        tl.store(at + number * 4 + 2, size, mask=real)
        tl.store(at + number * 4 + 3, first + number, mask=real)
    if first_token + BLOCK >= num_tokens:
        tl.store(num_strips, before + tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _plan_kernel(
    step: Step,
    items: tl.tensor,
    num_items: tl.tensor,
    chains: tl.tensor,
    strips: tl.tensor,
    num_strips: tl.tensor,
    num_rows: int,
    num_tokens: int,
    HAS_STRIPS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Plan the items of one row or, in the last programs, the strips of a block of tokens."""
    if is_shut(flag):
        return
    row = tl.program_id(0)
    if row < num_rows:
        _plan_row(step, items, num_items, chains, row, num_rows, GROUP, TOKENS, USED, BLOCK_N, SPLITS, BLOCK)
    else:
        _plan_strips(
            step, strips, num_strips, (row - num_rows) * BLOCK, num_tokens, HAS_STRIPS, TOKENS, BLOCK_N, SPLITS, BLOCK
        )


@triton.jit(do_not_specialize=_VARYING)
def _prefix_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_token: tl.int64,  # strides
    query_head: int,
    key_slot: int,
    key_head: int,
    value_slot: int,
    value_head: int,
    log2_scale: float,
    cap_scale: float,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    tables: tl.tensor,
    max_pages: int,
    chains: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    depths: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    num_splits: int,
    window: int,
    sums: tl.tensor,  # [T * heads, splits, value_dim], by token, key head and then query head
    maxima: tl.tensor,  # [T * heads, splits]
    totals: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Attention over whole blocks of prefix, which all tokens of a tile share.

    A program takes some items of the plan, for one key head.
    """
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    keys += kv_head * key_head
    values += kv_head * value_head
    for item in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        batch = tl.load(items + item * 3)
        tile = tl.load(items + item * 3 + 1)
        split = tl.load(items + item * 3 + 2)
        length = tl.load(lengths + batch)
        prefix = length + _before_tile(tile * TOKENS, tl.load(chains + batch), TOKENS)
        count = tl.load(counts + batch)
        last = prefix // BLOCK_N * BLOCK_N
        begin = tl.maximum(_start_of(split, SPLITS), _first_block(prefix, window, BLOCK_N, REACH))
        end = tl.minimum(_start_of(split + 1, SPLITS), last)
        if TOKENS > 0:  # a chain's tokens see the same keys, each up to its own, so this kernel does the whole chain
            last = tl.where(tl.load(chains + batch) > 0, length + tl.minimum((tile + 1) * TOKENS, count), last)
        stop = tl.minimum(_start_of(split + 1, SPLITS), last)
        if begin < stop:  # otherwise the split is outside of the window, or after the tile
            first = tl.load(starts + batch)
            within = tl.arange(0, BLOCK_M)
            row = tile * USED + within
            real = (within < USED) & (row < count * GROUP)
            token, member = first + row // GROUP, row % GROUP
            position = length + tl.load(depths + token, mask=real, other=0)
            table = tables + tl.load(table_rows + batch).to(tl.int64) * max_pages
            # A block's page is looked up while the previous block is loaded. A lookup in the same iteration would add a
            # stage to the pipeline.
            page = tl.load(table + begin // _PAGE)
            wait_for_previous(OVERLAPS)
            q = _load_rows(
                query, token * query_token + (kv_head * GROUP + member) * query_head, real, HEAD_DIM, BLOCK_D, True
            )

            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for start in range(begin, end, BLOCK_N):
                place = tl.arange(0, BLOCK_N)
                seen = _reaches(start + place, position, window, REACH)
                index = tl.cast(start, tl.int32)  # in Triton's interpreter `start` is a plain number
                slot = page.to(tl.int64) * _PAGE + index % _PAGE
                page = tl.load(table + (index + BLOCK_N) // _PAGE, mask=index + BLOCK_N < end, other=0)
                key = _load_rows(keys + slot * key_slot, place * key_slot, place >= 0, HEAD_DIM, BLOCK_D, False)
                value = _load_rows(
                    values + slot * value_slot, place * value_slot, place >= 0, VALUE_DIM, BLOCK_V, False
                )
                acc, maximum, total = _add_block(
                    q, key, value, seen, log2_scale, cap_scale, acc, maximum, total, REACH != _ALL, CAPPED, PRECISION
                )
            if TOKENS > 0:
                for start in tl.range(tl.maximum(begin, end), stop, BLOCK_N, num_stages=1):
                    positions = start + tl.arange(0, BLOCK_N)
                    exists = positions < last
                    slots = slot_of(table, positions, exists, max_pages)
                    seen = positions[None, :] <= position[:, None]
                    if REACH != _ALL:
                        seen = seen & _reaches(positions, position, window, REACH)
                    key = _load_rows(keys, slots * key_slot, exists, HEAD_DIM, BLOCK_D, True)
                    value = _load_rows(values, slots * value_slot, exists, VALUE_DIM, BLOCK_V, True)
                    acc, maximum, total = _add_block(
                        q, key, value, seen, log2_scale, cap_scale, acc, maximum, total, True, CAPPED, PRECISION
                    )
            state = ((token.to(tl.int64) * kv_heads + kv_head) * GROUP + member) * num_splits + split
            _store_state(sums, maxima, totals, state, real, acc, maximum, total, VALUE_DIM, BLOCK_V)
    wait_for_previous(OVERLAPS)  # in programs without an item too


@triton.jit(do_not_specialize=_VARYING)
def _tail_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_token: tl.int64,
    query_head: int,
    key_slot: int,
    key_head: int,
    value_slot: int,
    value_head: int,
    log2_scale: float,
    cap_scale: float,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    tables: tl.tensor,
    max_pages: int,
    places: tl.tensor,
    depths: tl.tensor,
    paths: tl.tensor,
    max_path: int,
    strips: tl.tensor,
    num_strips: tl.tensor,
    num_splits: int,
    window: int,
    sums: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Attention of tree nodes over the end of the committed text and their paths.

    A program takes some strips, for one key head, and continues where the prefix kernel ended. A tile has the nodes of
    a strip, the deepest first, or a part of one token. Nodes that end before the split write states that are not read.
    """
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    kv_head, kv_heads = tl.program_id(2), tl.num_programs(2)
    keys += kv_head * key_head
    values += kv_head * value_head
    for strip in range(tl.program_id(0), tl.load(num_strips), tl.num_programs(0)):
        batch = tl.load(strips + strip * 4)
        deepest = tl.load(strips + strip * 4 + 1)
        split = tl.load(strips + strip * 4 + 3)
        length, depth = tl.load(lengths + batch), tl.load(depths + deepest)
        place = tl.load(places + deepest)
        table = tables + tl.load(table_rows + batch).to(tl.int64) * max_pages
        path = paths + deepest.to(tl.int64) * max_path
        branches = depth != place
        position = length + depth
        prefix_end = length // BLOCK_N * BLOCK_N

        within = tl.arange(0, BLOCK_M)
        if TOKENS > 0:
            up, member = within // GROUP, within % GROUP
            real = up < tl.load(strips + strip * 4 + 2)
            above = tl.load(path + depth - up, mask=real & branches, other=0)
            token = deepest + tl.where(branches, above - place, -up)  # a row's places are consecutive in the step
        else:
            up, member = within * 0, tl.program_id(1) * BLOCK_M + within
            real = member < GROUP
            token = deepest + up
        own = position - up
        at = token * query_token + (kv_head * GROUP + member) * query_head
        wait_for_previous(OVERLAPS)
        q = _load_rows(query, at, real, HEAD_DIM, BLOCK_D, True)

        # State indices fit into int32, which takes half the registers.
        state = ((token * kv_heads + kv_head) * GROUP + member) * num_splits + split
        begin = tl.maximum(_start_of(split, SPLITS), prefix_end)
        end = tl.minimum(_start_of(split + 1, SPLITS), position + 1)
        # Load the prefix kernel's state of this split, if it has one.
        first = tl.maximum(_start_of(split, SPLITS), _first_block(length, window, BLOCK_N, REACH))
        going_on = real & (first < prefix_end)
        acc = _load_rows(sums, state.to(tl.int64) * VALUE_DIM, going_on, VALUE_DIM, BLOCK_V, True)
        maximum = tl.load(maxima + state, mask=going_on, other=float("-inf"))
        total = tl.load(totals + state, mask=going_on, other=0.0)
        for start in range(begin, end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            exists = positions <= position
            step = positions - length  # of the path; negative for committed tokens
            is_stored = branches & (step >= 0)
            stored = tl.load(path + step, mask=is_stored & exists, other=0)
            slots = slot_of(table, tl.where(is_stored, length + stored, positions), exists, max_pages)
            seen = positions[None, :] <= own[:, None]
            if REACH != _ALL:
                seen = seen & _reaches(positions, own, window, REACH)
            key = _load_rows(keys, slots * key_slot, exists, HEAD_DIM, BLOCK_D, True)
            value = _load_rows(values, slots * value_slot, exists, VALUE_DIM, BLOCK_V, True)
            acc, maximum, total = _add_block(
                q, key, value, seen, log2_scale, cap_scale, acc, maximum, total, True, CAPPED, PRECISION
            )
        _store_state(sums, maxima, totals, state, real, acc, maximum, total, VALUE_DIM, BLOCK_V)
    wait_for_previous(OVERLAPS)  # in programs without a strip too


@triton.jit(do_not_specialize=_VARYING)
def _combine_kernel(
    lengths: tl.tensor,
    chains: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    num_splits: int,
    window: int,
    sums: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,  # [T, heads * value_dim]
    sinks: tl.tensor,  # [heads]
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    REACH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Combine all splits of one token, for the query heads that share a key head; 0 for padding."""
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    token, kv_head, kv_heads = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    batch = tl.load(rows + token)
    length = tl.load(lengths + batch)
    prefix = length + _before_tile(tl.load(places + token), tl.load(chains + batch), TOKENS)
    first = _split_of(_first_block(prefix, window, BLOCK_N, REACH), SPLITS)
    last = _split_of(length + tl.load(depths + token), SPLITS)
    member = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_G)
    inside = member < GROUP
    real = inside & (token - tl.load(starts + batch) < tl.load(counts + batch))
    head = (token.to(tl.int64) * kv_heads + kv_head) * GROUP + member
    sink = tl.zeros([BLOCK_G], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * GROUP + member, mask=inside, other=0.0).to(tl.float32) * _TO_LOG2
    at = head * num_splits
    wait_for_previous(OVERLAPS)
    result = _combine(
        sums, maxima, totals, at, real, first, last, sink, VALUE_DIM, BLOCK_V, BLOCK_G, BLOCK_S, HAS_SINKS
    )
    dims = tl.arange(0, BLOCK_V)
    mask = inside[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(out + (head * VALUE_DIM)[:, None] + dims[None, :], fitted(result, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_pages", "max_places"])
def _commit_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    table_rows: tl.tensor,
    lengths: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    max_pages: int,
    max_places: int,
    key_layer: tl.int64,  # strides
    value_layer: tl.int64,
    KEY: tl.constexpr,  # numbers of a token
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Move a part of the keys and values of one row's path in one layer, node after node.

    A node only moves to a lower place, so in this order no node is overwritten before it has moved.
    """
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(2)
    length = tl.load(lengths + row)
    table = tables + tl.load(table_rows + row).to(tl.int64) * max_pages
    keys += tl.program_id(1) * key_layer + part
    values += tl.program_id(1) * value_layer + part
    for step in range(tl.load(counts + row)):
        place = tl.load(places + row * max_places + step)
        if place != step + 1:
            source = slot_of(table, length + place, place >= 0, max_pages)
            target = slot_of(table, length + step + 1, place >= 0, max_pages)
            tl.store(keys + target * KEY, tl.load(keys + source * KEY, mask=part < KEY), mask=part < KEY)
            tl.store(values + target * VALUE, tl.load(values + source * VALUE, mask=part < VALUE), mask=part < VALUE)

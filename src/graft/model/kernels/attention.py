"""Tree attention and the KV cache's commit as Triton kernels. Importing this module needs Triton.

Attention here is exact: a token gets the same bits whether it is decoded plainly or verified as a node of any tree, in
any batch. Three rules ensure this:

- Keys are ordered by position in the node's own text, in blocks and splits with fixed borders. A split is summed block
  after block, and splits are combined in one fixed order.
- All tiles of query rows have one shape, so a row's numbers do not depend on its place in the tile or on other rows.
- Committed blocks and blocks of a path get the same operations, written so that the compiler has no choice. A block of
  which a row sees nothing leaves the row's sums unchanged.

If a row's tokens are a chain (a part of a prompt, or a tree with one path), they are stored in the row's pages like
committed text. Everything before a tile's first token is then prefix for the whole tile.

A tree is cut into strips: runs of nodes down one path, as many as there are leaves, with each node in exactly one. The
nodes of a strip see the same keys at the same positions, each up to its own, so one tile takes many of them.

All of a step's attention is one kernel. Its work is a list of tiles and a list of strips, each for one split. Tiles
take the splits that are committed as a whole, for many nodes at once. Strips take the split in which the committed text
ends, and those after it. Whoever finishes the last split of a query row combines that row's splits.

A step is flat: tokens of many rows one after the other, and keys in pages by block table. Neither affects a sum.
Lengths are read on the device, and no kernel is compiled for a number of tokens, a length or a batch. So a launch can
be captured in a graph and replayed while the text grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate, overlap
from graft.model.kernels.gate import is_shut
from graft.model.kernels.overlap import start_next, wait_for_previous
from graft.model.layout import Layout

PAGE = 64  # slots of a page
_PAGE = tl.constexpr(PAGE)
_LOG2_E = 1.4426950408889634
_TO_LOG2 = tl.constexpr(_LOG2_E)
# How far back a token sees: everything, a sliding window, or its chunk.
_ALL, _WINDOW, _CHUNK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Arguments that kernels are not specialized for.
_VARYING = ["num_tokens", "max_pages", "max_path", "num_splits", "window"]
# Programs of the attention kernel over all key heads: more than run at once on a large device.
_MOST_PROGRAMS, _LEAST_PROGRAMS = 1056, 64
_PLANNED_AT_ONCE = 512  # rows, items or tokens in a block of the plan kernel


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of attention. Fields above `stages` may change the last bits of the result."""

    rows: int = 64  # query rows of a tile: nodes times the query heads that share keys
    keys: int = 64  # positions of a block
    # Short splits keep the device busy at short contexts. Long splits, further on, limit the number of sums to combine.
    short_split: int = 256
    long_split: int = 1024
    border: int = 4096  # first position of the long splits
    warps: int = 4
    stages: int = 3

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
_FLOAT32 = Tiles(rows=32, keys=32, warps=8, stages=2)
# By bytes per element and the head dimension's next power of two; `Tiles()` for all others.
TILES: dict[tuple[int, int], Tiles] = {
    (2, 256): Tiles(warps=8, stages=2),
    (2, 512): Tiles(rows=32, keys=32, warps=8, stages=2),
    (4, 16): _FLOAT32,
    (4, 32): _FLOAT32,
    (4, 64): _FLOAT32,
    (4, 128): _FLOAT32,
    (4, 256): Tiles(rows=16, keys=16, warps=8, stages=2),
    (4, 512): Tiles(rows=16, keys=16, warps=8, stages=1),
}


def tiles_for(head_dim: int, dtype: torch.dtype) -> Tiles:
    return TILES.get((dtype.itemsize, _padded(head_dim)), Tiles())


@dataclass(frozen=True)
class Plan:
    """The work of a step's attention, shared by all layers with the same tiles and heads."""

    items: Tensor  # [N, 3] int32: row, tile of the row, split
    num_items: Tensor  # [1] int32
    chains: Tensor  # [R] int32, 1 for rows that are chains: tokens before a tile's first one are prefix to the tile
    strips: Tensor  # [N, 4] int32: row, deepest token, number of tokens, split
    num_strips: Tensor  # [1] int32
    arrived: Tensor  # [T * heads] int32, how many splits of a query row are done; 0 before and after a kernel


def plan(layout: Layout, heads: int, kv_heads: int, tiles: Tiles) -> Plan:
    """Plan the work: tiles and splits, and strips in pieces that fit into a tile."""
    num_tokens, num_rows, group = len(layout.rows), len(layout.counts), heads // kv_heads
    _check_layout(layout)
    items = layout.counts.new_empty(_most_items(num_tokens, num_rows, layout.max_context, group, tiles), 3)
    strips = layout.counts.new_empty(num_tokens * _most_tail_splits(layout, tiles), 4)
    num_items, num_strips = (layout.counts.new_empty(1) for _ in range(2))
    chains, arrived = torch.empty_like(layout.counts), layout.counts.new_empty(num_tokens * heads)
    _plan_kernel[(num_rows + triton.cdiv(num_tokens, _PLANNED_AT_ONCE),)](
        *(layout.rows, layout.starts, layout.counts, layout.lengths, layout.places, layout.depths),
        layout.rows if layout.strips is None else layout.strips,
        *(items, num_items, chains, strips, num_strips, arrived),
        num_rows,
        num_tokens,
        HAS_STRIPS=layout.strips is not None,
        HEADS=heads,
        GROUP=group,
        TOKENS=tiles.tokens(group),
        USED=tiles.used_rows(group),
        BLOCK_N=tiles.keys,
        SPLITS=tiles.splits,
        BLOCK=_PLANNED_AT_ONCE,
        **gate.options(),
    )
    return Plan(items, num_items, chains, strips, num_strips, arrived)


def tree_attention(
    query: Tensor,  # [T, heads, head_dim]
    keys: Tensor,  # [num_slots, kv_heads, head_dim], one layer's store with the step's own keys
    values: Tensor,
    layout: Layout,
    plan: Plan,  # made with the same tiles and heads
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Attention of every token over its row's committed tokens and its own path, [T, heads * head_dim].

    window: keys this many or more positions back are masked. chunk: keys in earlier chunks of this many positions are
    masked. At most one of the two is given.
    softcap: a score becomes softcap * tanh(score / softcap). sinks: [heads] scores of an extra key whose value is 0.
    scratch: at least `scratch_size` float32 numbers, which layers may share; None: allocated here.
    """
    num_tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    _check_stored(query, keys, values)
    _check_layout(layout)
    if len(plan.arrived) != num_tokens * heads:
        raise ValueError(f"the plan is for {len(plan.arrived) // num_tokens} heads, and the queries have {heads}")
    tiles = tiles or tiles_for(head_dim, query.dtype)
    num_splits = _num_splits(layout, tiles)
    num_states = _num_states(num_tokens * heads, num_splits)
    if scratch is None:
        scratch = query.new_empty(num_states * (head_dim + 2), dtype=torch.float32)
    sums, maxima, totals = scratch[: num_states * (head_dim + 2)].split((num_states * head_dim, num_states, num_states))
    out = query.new_empty(num_tokens, heads * head_dim)

    group = heads // kv_heads
    log2_scale = (head_dim**-0.5 if scale is None else scale) * _LOG2_E
    cap_scale = 0.0
    if softcap is not None:  # the kernel computes tanh, and the cap becomes the scale of its result
        cap_scale, log2_scale = 2 * log2_scale / softcap, softcap * _LOG2_E
    parts = triton.cdiv(group, tiles.rows)
    programs = max(_MOST_PROGRAMS // kv_heads, _LEAST_PROGRAMS)
    _attention_kernel[kv_heads, min(len(plan.items) + len(plan.strips) * parts, programs)](
        *(query, keys, values, *query.stride()[:2], *keys.stride()[:2], log2_scale, cap_scale),
        *(layout.rows, layout.places, layout.depths, layout.paths, num_tokens, layout.paths.shape[1]),
        *(layout.starts, layout.counts, layout.lengths, layout.table_rows, layout.tables, layout.tables.shape[1]),
        *(plan.items, plan.num_items, plan.chains, plan.strips, plan.num_strips, plan.arrived),
        *(num_splits, window or chunk or 0, sums, maxima, totals, out, out if sinks is None else sinks),
        GROUP=group,
        TOKENS=tiles.tokens(group),
        USED=tiles.used_rows(group),
        PARTS=parts,
        HEAD_DIM=head_dim,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_D=_padded(head_dim),
        SPLITS=tiles.splits,
        REACH=(_WINDOW if window is not None else _CHUNK if chunk is not None else _ALL).value,
        CAPPED=softcap is not None,
        HAS_SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **overlap.options(query.device),
        **gate.options(),
    )
    return out


def scratch_size(layout: Layout, heads: int, head_dim: int, tiles: Tiles) -> int:
    """The number of float32 values that `tree_attention` needs as scratch memory."""
    return _num_states(len(layout.rows) * heads, _num_splits(layout, tiles)) * (head_dim + 2)


def commit(
    keys: Tensor,  # [layers, num_slots, kv_heads, head_dim]
    values: Tensor,
    tables: Tensor,  # [table_rows, max_pages] int32
    table_rows: Tensor,  # [R] int32
    lengths: Tensor,  # [R] int32 committed tokens; the root follows them
    places: Tensor,  # [R, P] int32 places of the accepted tokens below the root, increasing
    counts: Tensor,  # [R] int32 number of accepted tokens below the root
) -> None:
    """Move each row's accepted tokens to the places right after its root, in all layers."""
    layers, _, kv_heads, head_dim = keys.shape
    entry = kv_heads * head_dim
    if keys.stride() != values.stride() or keys.stride()[2:] != (head_dim, 1):
        raise ValueError("a token's keys must be contiguous, and values must have the same strides")
    _check_indices(tables, table_rows, lengths, places, counts)
    block = min(triton.next_power_of_2(entry), 1024)
    grid = (triton.cdiv(entry, block), layers, len(table_rows))
    sizes = (tables.shape[1], places.shape[1])
    _commit_kernel[grid](
        keys, values, tables, table_rows, lengths, places, counts, *sizes, *keys.stride()[:2], ENTRY=entry, BLOCK=block
    )


def _most_items(num_tokens: int, num_rows: int, max_context: int, group: int, tiles: Tiles) -> int:
    """Upper bound of a plan's items: each row in use may have one tile that is not full."""
    used = tiles.used_rows(group)
    num_tiles = (num_tokens * group + min(num_rows, num_tokens) * (used - 1)) // used
    return num_tiles * tiles.count_splits(_most_prefix(num_tokens, max_context, group, tiles))


def _most_prefix(num_tokens: int, max_context: int, group: int, tiles: Tiles) -> int:
    """Upper bound of the positions of a text that tiles take: whole committed blocks, or a whole chain."""
    return max_context + num_tokens if tiles.tokens(group) else max_context // tiles.keys * tiles.keys


def _num_splits(layout: Layout, tiles: Tiles) -> int:
    """The number of splits of the longest possible text in the step."""
    return tiles.count_splits(layout.max_context + _longest_path(layout))


def _most_tail_splits(layout: Layout, tiles: Tiles) -> int:
    """Upper bound of the splits that a strip takes: less than a block before the path, and the path."""
    return (tiles.keys + _longest_path(layout)) // min(tiles.short_split, tiles.long_split) + 2


def _longest_path(layout: Layout) -> int:
    """Upper bound of a path's tokens: they are stored in `paths`, or all in the step."""
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
    if query.stride(-1) != 1 or keys.stride(-1) != 1 or keys.stride() != values.stride():
        raise ValueError("a head's numbers must be contiguous, and keys and values must have the same strides")


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

    Padding may be past the end of the table; all its pages are the same.
    """
    page = tl.load(table + tl.minimum(index // _PAGE, max_pages - 1), mask=real, other=0)
    return page.to(tl.int64) * _PAGE + index % _PAGE


@triton.jit
def _before_tile(place: tl.tensor, is_chain: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """In a chain: the number of the step's tokens that are prefix to the tile of the token at this place; else 0."""
    if TOKENS == 0:
        return place * 0
    else:
        return is_chain * (place // TOKENS * TOKENS)


@triton.jit
def _first_block(prefix: int, window: int, BLOCK_N: tl.constexpr, REACH: tl.constexpr) -> int:
    """Start of the first block that a tile sees: that of the window of the first token after the prefix."""
    first = 0
    if REACH == _WINDOW:
        first = tl.maximum(prefix - window + 1, 0) // BLOCK_N * BLOCK_N
    if REACH == _CHUNK:
        first = prefix // window * window // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _reaches(positions: tl.tensor, own: tl.tensor, window: int, REACH: tl.constexpr) -> tl.tensor:
    """Which positions are not too far back for tokens at positions `own`: [rows, BLOCK_N]."""
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
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(sums + (state.to(tl.int64) * HEAD_DIM)[:, None] + dims[None, :], acc, mask=mask)
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
    """One block's step of the online softmax: all arithmetic between the loads and the combination.

    Products that are added to something are written as `fma`. Otherwise the compiler might fuse them in one place but
    not in the other.
    """
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if CAPPED:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_scale) + 1.0)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * log2_scale)
    # Rows that have seen nothing yet have no maximum to subtract; their weights are exp2(-inf) = 0 anyway.
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
    last: tl.tensor,
    sink: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> tl.tensor:
    """Combine the splits of some rows from the first to each row's last, [BLOCK_M, BLOCK_D]. sink: [BLOCK_M] scores.

    Splits are added one after the other. One of which a row sees nothing leaves its sums unchanged. Other programs have
    just written them, so they are read from the L2 cache.
    """
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for split in range(first, tl.max(tl.where(real, last, -1), axis=0) + 1):
        exists = real & (split <= last)
        at = (state + split).to(tl.int64) * HEAD_DIM
        mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(sums + at[:, None] + dims[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        greatest = tl.load(maxima + state + split, mask=exists, other=float("-inf"), cache_modifier=".cg")
        parts_total = tl.load(totals + state + split, mask=exists, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, greatest)
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(greatest - base)
        rescale = tl.exp2(maximum - base)
        total = tl.fma(total, rescale, parts_total * weight)
        acc = tl.fma(acc, rescale[:, None], part * weight[:, None])
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
    starts: tl.tensor, counts: tl.tensor, places: tl.tensor, depths: tl.tensor, row: tl.tensor, real: tl.tensor
) -> tl.tensor:
    """1 for chains: rows whose other tokens are all ancestors of the last one, with places and depths 0, 1, 2, ..."""
    count = tl.load(counts + row, mask=real, other=0)
    last = tl.load(starts + row, mask=real, other=0) + count - 1
    in_use = count > 0
    place = tl.load(places + last, mask=in_use, other=-1)
    depth = tl.load(depths + last, mask=in_use, other=-1)
    return (in_use & (place == count - 1) & (depth == count - 1)).to(tl.int32)


@triton.jit
def _tiles_and_splits(
    starts: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    row: tl.tensor,
    real: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The number of tiles of rows, and of splits that tiles take: those before the split in which the row's last block
    begins, or all of a chain's."""
    count = tl.load(counts + row, mask=real, other=0)
    length = tl.load(lengths + row, mask=real, other=0)
    num_splits = _split_of(length // BLOCK_N * BLOCK_N, SPLITS)
    if TOKENS > 0:
        is_chain = _is_chain(starts, counts, places, depths, row, real) > 0
        num_splits = tl.where(is_chain, _split_of(tl.maximum(length + count - 1, 0), SPLITS) + 1, num_splits)
    return (count * GROUP + USED - 1) // USED, num_splits


@triton.jit
def _plan_row(
    starts: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
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
        num_tiles, num_splits = _tiles_and_splits(
            starts, counts, lengths, places, depths, other, other < num_rows, GROUP, TOKENS, USED, BLOCK_N, SPLITS
        )
        before += tl.sum(tl.where(other < row, num_tiles * num_splits, 0), axis=0)
        total += tl.sum(num_tiles * num_splits, axis=0)
    if row == 0:
        tl.store(num_items, total)
    tl.store(chains + row, _is_chain(starts, counts, places, depths, row, row >= 0))
    num_tiles, num_splits = _tiles_and_splits(
        starts, counts, lengths, places, depths, row, row >= 0, GROUP, TOKENS, USED, BLOCK_N, SPLITS
    )
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
    rows: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    numbers: tl.tensor,
    token: tl.tensor,
    num_tokens: int,
    HAS_STRIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """For tokens: the row, the size of the strip piece that ends there, its first split, and the number of its splits.
    That number is 0 if no piece ends there, for padding, and for chains, which tiles take."""
    row = tl.load(rows + token, mask=token < num_tokens, other=0)
    in_use = (token < num_tokens) & (token - tl.load(starts + row) < tl.load(counts + row))
    length = tl.load(lengths + row)
    first = _split_of(length // BLOCK_N * BLOCK_N, SPLITS)
    last = _split_of(length + tl.load(depths + token, mask=in_use, other=0), SPLITS)
    size = tl.full(token.shape, 1, tl.int32)
    if TOKENS > 0:
        in_use = in_use & (_is_chain(starts, counts, places, depths, row, in_use) == 0)
        if HAS_STRIPS:
            number = tl.load(numbers + token, mask=in_use, other=1)
            in_strip = tl.abs(number)  # counted from the strip's top
            in_use = in_use & ((number < 0) | (in_strip % TOKENS == 0))
            size = (in_strip - 1) % TOKENS + 1
    return row, size, first, tl.where(in_use, last - first + 1, 0)


@triton.jit
def _plan_strips(
    rows: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    numbers: tl.tensor,
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
        row, size, first, count = _strips_of(
            rows,
            starts,
            counts,
            lengths,
            places,
            depths,
            numbers,
            token,
            num_tokens,
            HAS_STRIPS,
            TOKENS,
            BLOCK_N,
            SPLITS,
        )
        before += tl.sum(count, axis=0)
    token = first_token + index
    row, size, first, count = _strips_of(
        rows, starts, counts, lengths, places, depths, numbers, token, num_tokens, HAS_STRIPS, TOKENS, BLOCK_N, SPLITS
    )
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
    rows: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    numbers: tl.tensor,  # of the tokens in their strips
    items: tl.tensor,
    num_items: tl.tensor,
    chains: tl.tensor,
    strips: tl.tensor,
    num_strips: tl.tensor,
    arrived: tl.tensor,
    num_rows: int,
    num_tokens: int,
    HAS_STRIPS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Plan the items of one row or, in the last programs, the strips of a block of tokens, of which none is done."""
    if is_shut(flag):
        return
    row = tl.program_id(0)
    if row < num_rows:
        _plan_row(
            starts,
            counts,
            lengths,
            places,
            depths,
            items,
            num_items,
            chains,
            row,
            num_rows,
            GROUP,
            TOKENS,
            USED,
            BLOCK_N,
            SPLITS,
            BLOCK,
        )
    else:
        first_token = (row - num_rows) * BLOCK
        for start in range(first_token * HEADS, tl.minimum(first_token + BLOCK, num_tokens) * HEADS, BLOCK):
            index = start + tl.arange(0, BLOCK)
            tl.store(arrived + index, tl.zeros_like(index), mask=index < num_tokens * HEADS)
        _plan_strips(
            rows,
            starts,
            counts,
            lengths,
            places,
            depths,
            numbers,
            strips,
            num_strips,
            first_token,
            num_tokens,
            HAS_STRIPS,
            TOKENS,
            BLOCK_N,
            SPLITS,
            BLOCK,
        )


@triton.jit
def _tile_of(
    items: tl.tensor,
    item: int,
    chains: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """A tile of a row: row, split, the prefix that all its tokens share, its end, -1, and tokens, members and which
    are real. The tokens of a chain see the same keys, each up to its own, so a tile goes on to its last token."""
    batch = tl.load(items + item * 3)
    tile = tl.load(items + item * 3 + 1)
    split = tl.load(items + item * 3 + 2)
    length, count, is_chain = tl.load(lengths + batch), tl.load(counts + batch), tl.load(chains + batch)
    prefix = length + _before_tile(tile * TOKENS, is_chain, TOKENS)
    end = prefix // BLOCK_N * BLOCK_N
    if TOKENS > 0:
        end = tl.where(is_chain > 0, length + tl.minimum((tile + 1) * TOKENS, count), end)
    within = tl.arange(0, BLOCK_M)
    row = tile * USED + within
    token = tl.load(starts + batch) + row // GROUP
    return batch, split, prefix, end, batch * 0 - 1, token, row % GROUP, (within < USED) & (row < count * GROUP)


@triton.jit
def _strip_of(
    strips: tl.tensor,
    strip: int,
    part: int,
    lengths: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    paths: tl.tensor,
    max_path: int,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The same of a strip, but in place of -1 the token whose path it goes down, if that is not a chain. Its tile has
    its nodes, the deepest first, or a part of one token."""
    batch = tl.load(strips + strip * 4)
    deepest = tl.load(strips + strip * 4 + 1)
    size = tl.load(strips + strip * 4 + 2)
    split = tl.load(strips + strip * 4 + 3)
    length, depth, place = tl.load(lengths + batch), tl.load(depths + deepest), tl.load(places + deepest)
    branches = depth != place
    within = tl.arange(0, BLOCK_M)
    if TOKENS > 0:
        up, member = within // GROUP, within % GROUP
        real = up < size
        above = tl.load(paths + deepest.to(tl.int64) * max_path + depth - up, mask=real & branches, other=0)
        token = deepest + tl.where(branches, above - place, -up)  # a row's places are consecutive in the step
    else:
        member = part * BLOCK_M + within
        real = member < GROUP
        token = deepest + within * 0
    return batch, split, length, length + depth + 1, tl.where(branches, deepest, -1), token, member, real


@triton.jit(do_not_specialize=_VARYING)
def _attention_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_token: tl.int64,  # strides
    query_head: int,
    cache_slot: int,
    cache_head: int,
    log2_scale: float,
    cap_scale: float,
    rows: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    paths: tl.tensor,
    num_tokens: int,
    max_path: int,
    starts: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    tables: tl.tensor,
    max_pages: int,
    items: tl.tensor,
    num_items: tl.tensor,
    chains: tl.tensor,
    strips: tl.tensor,
    num_strips: tl.tensor,
    arrived: tl.tensor,
    num_splits: int,
    window: int,
    sums: tl.tensor,  # [T * heads, splits, head_dim], by token, key head and then query head
    maxima: tl.tensor,  # [T * heads, splits]
    totals: tl.tensor,
    out: tl.tensor,  # [T, heads * head_dim]
    sinks: tl.tensor,  # [heads]
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    USED: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Attention of some strips and tiles of the plan, for one key head; 0 for padding."""
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    kv_head, kv_heads = tl.program_id(0), tl.num_programs(0)
    keys += kv_head * cache_head
    values += kv_head * cache_head
    dims = tl.arange(0, BLOCK_D)
    strips_end = tl.load(num_strips) * PARTS
    for item in range(tl.program_id(1), strips_end + tl.load(num_items), tl.num_programs(1)):
        item = tl.cast(item, tl.int32)  # in Triton's interpreter it is a plain number
        if item < strips_end:
            batch, split, prefix, last, branch, token, member, real = _strip_of(
                *(strips, item // PARTS, item % PARTS, lengths, places, depths, paths, max_path, GROUP, TOKENS, BLOCK_M)
            )
        else:
            batch, split, prefix, last, branch, token, member, real = _tile_of(
                *(items, item - strips_end, chains, starts, counts, lengths, GROUP, TOKENS, USED, BLOCK_M, BLOCK_N)
            )
        first = _first_block(prefix, window, BLOCK_N, REACH)
        begin = tl.maximum(_start_of(split, SPLITS), first)
        end = tl.minimum(_start_of(split + 1, SPLITS), prefix // BLOCK_N * BLOCK_N)
        stop = tl.minimum(_start_of(split + 1, SPLITS), last)
        if begin < stop:  # otherwise the split is outside of the window, or after the tile
            length = tl.load(lengths + batch)
            own = length + tl.load(depths + token, mask=real, other=0)
            table = tables + tl.load(table_rows + batch).to(tl.int64) * max_pages
            # A block's page is looked up while the previous block is loaded. A lookup in the same iteration would add a
            # stage to the pipeline.
            page = tl.load(table + begin // _PAGE)
            head = (token * kv_heads + kv_head) * GROUP + member  # these and their splits fit into int32
            wait_for_previous(OVERLAPS)
            at = token * query_token + (kv_head * GROUP + member) * query_head
            q = _load_rows(query, at, real, HEAD_DIM, BLOCK_D, True)

            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for start in range(begin, end, BLOCK_N):
                place = tl.arange(0, BLOCK_N)
                seen = _reaches(start + place, own, window, REACH)
                index = tl.cast(start, tl.int32)
                slot = page.to(tl.int64) * _PAGE + index % _PAGE
                page = tl.load(table + (index + BLOCK_N) // _PAGE, mask=index + BLOCK_N < end, other=0)
                key = _load_rows(keys + slot * cache_slot, place * cache_slot, place >= 0, HEAD_DIM, BLOCK_D, False)
                value = _load_rows(values + slot * cache_slot, place * cache_slot, place >= 0, HEAD_DIM, BLOCK_D, False)
                acc, maximum, total = _add_block(
                    q, key, value, seen, log2_scale, cap_scale, acc, maximum, total, REACH != _ALL, CAPPED, PRECISION
                )
            path = paths + tl.maximum(branch, 0).to(tl.int64) * max_path
            for start in tl.range(tl.maximum(begin, end), stop, BLOCK_N, num_stages=1):
                positions = start + tl.arange(0, BLOCK_N)
                exists = positions < last
                step = positions - length  # of the path; negative for committed tokens
                is_stored = (branch >= 0) & (step >= 0)
                stored = tl.load(path + step, mask=is_stored & exists, other=0)
                slots = slot_of(table, tl.where(is_stored, length + stored, positions), exists, max_pages)
                seen = positions[None, :] <= own[:, None]
                if REACH != _ALL:
                    seen = seen & _reaches(positions, own, window, REACH)
                key = _load_rows(keys, slots * cache_slot, exists, HEAD_DIM, BLOCK_D, True)
                value = _load_rows(values, slots * cache_slot, exists, HEAD_DIM, BLOCK_D, True)
                acc, maximum, total = _add_block(
                    q, key, value, seen, log2_scale, cap_scale, acc, maximum, total, True, CAPPED, PRECISION
                )
            _store_state(sums, maxima, totals, head * num_splits + split, real, acc, maximum, total, HEAD_DIM, BLOCK_D)

            # The program that finishes the last split of a row has seen what all others wrote for it.
            first_split, last_split = _split_of(first, SPLITS), _split_of(own, SPLITS)
            counted = real & (split <= last_split)
            tl.debug_barrier()
            num_before = tl.atomic_add(arrived + head, 1, mask=counted, sem="acq_rel")
            is_done = counted & (num_before == last_split - first_split)
            if tl.max(is_done.to(tl.int32), axis=0) > 0:
                tl.debug_barrier()
                sink = tl.zeros([BLOCK_M], tl.float32)
                if HAS_SINKS:
                    sink = tl.load(sinks + kv_head * GROUP + member, mask=real, other=0.0).to(tl.float32) * _TO_LOG2
                result = _combine(
                    *(sums, maxima, totals, head * num_splits, is_done, first_split, last_split, sink),
                    *(HEAD_DIM, BLOCK_M, BLOCK_D, HAS_SINKS),
                )
                mask = is_done[:, None] & (dims < HEAD_DIM)[None, :]
                into = out + (head.to(tl.int64) * HEAD_DIM)[:, None] + dims[None, :]
                tl.store(into, result.to(out.dtype.element_ty), mask=mask)
                tl.store(arrived + head, tl.zeros_like(head), mask=is_done)
    wait_for_previous(OVERLAPS)  # in programs without work too
    for token in range(tl.program_id(1), num_tokens, tl.num_programs(1)):
        row = tl.load(rows + token)
        if token - tl.load(starts + row) >= tl.load(counts + row):
            for member in range(GROUP):
                at = ((tl.cast(token, tl.int64) * kv_heads + kv_head) * GROUP + member) * HEAD_DIM + dims
                tl.store(out + at, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=dims < HEAD_DIM)


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
    layer: tl.int64,  # strides
    slot: tl.int64,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Move a part of the keys and values of one row's path in one layer, node after node.

    A node only moves to a lower place, so in this order no node is overwritten before it has moved.
    """
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = part < ENTRY
    row = tl.program_id(2)
    length = tl.load(lengths + row)
    table = tables + tl.load(table_rows + row).to(tl.int64) * max_pages
    offset = tl.program_id(1) * layer + part
    for step in range(tl.load(counts + row)):
        place = tl.load(places + row * max_places + step)
        if place != step + 1:
            source = offset + slot_of(table, length + place, place >= 0, max_pages) * slot
            target = offset + slot_of(table, length + step + 1, place >= 0, max_pages) * slot
            tl.store(keys + target, tl.load(keys + source, mask=inside), mask=inside)
            tl.store(values + target, tl.load(values + source, mask=inside), mask=inside)

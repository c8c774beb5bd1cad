"""After a verify on the device: append accepted tokens, count proposals for the calibration, and teach the tables."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.buffers import NUM_BUCKETS, NUM_SUCCESSORS, Pool, PoolShape, Tables, Texts
from graft.tree.device.pool import Nodes, TableRows, bucket_of, row_of

_BLOCK = 64  # nodes of a program of `learn`
_COUNTED = 128  # nodes of a program of `count`
_NUM_TERMS = tl.constexpr(11)


def advance(
    texts: Texts,
    table_rows: Tensor,  # [R] int32
    starts: Tensor,  # [R or more] int32 each row's first token in the step
    counts: Tensor,  # [R] int32 new tokens of each row; 0 for an unused row
    tokens: Tensor,  # [R, W] int32 these tokens
    nodes: Tensor,  # [R, W] int32 the token of the step after which each was chosen
    places: Tensor,  # [R, P] int32, written: places of the accepted nodes in their trees, for the commit
    num_accepted: Tensor,  # [R] int32, written
    lengths: Tensor,  # [R] int32, written: tokens that were committed before the root
    factors: Tensor,  # int64, by depth
    emitted: Tensor,  # [R, W + 1] int64, written: by depth, the key of the path of new tokens
) -> None:
    """Append the new tokens to the texts, and write which keys and values to commit."""
    num_rows, width = tokens.shape
    _advance_kernel[(num_rows,)](
        texts.own,
        texts.lengths,
        table_rows,
        starts,
        counts,
        tokens,
        nodes,
        places,
        num_accepted,
        lengths,
        factors,
        emitted,
        texts.own.shape[1],
        places.shape[1],
        W=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


def line_up(
    counts: Tensor,  # [R + 1] int32 new tokens of each row; the last one, for padding, is set to 0
    lengths: Tensor,  # [R + 1] int32, likewise
    tokens: Tensor,  # [R, W] int32
    nodes: Tensor,  # [R, W] int32
    begins: Tensor,  # [R + 1] int32, written: each row's first entry
    entry_rows: Tensor,  # [E] int32, written: each entry's row, R for padding
    entry_places: Tensor,  # [E] int32, written: its number among the row's tokens
    entry_tokens: Tensor,  # [E] int32, written
    entry_nodes: Tensor,  # [E] int32, written
) -> None:
    """Write the new tokens of all rows as one flat list of entries."""
    num_rows = len(counts) - 1
    _line_up_kernel[(num_rows + 1,)](
        *(counts, lengths, tokens, nodes, begins, entry_rows, entry_places, entry_tokens, entry_nodes),
        num_rows,
        len(entry_rows),
        tokens.shape[1],
        ROWS=triton.next_power_of_2(num_rows),
        BLOCK=triton.next_power_of_2(tokens.shape[1]),
        SIZE=triton.next_power_of_2(len(entry_rows)),
        num_warps=1,
    )


def count(
    pool: Pool,
    shape: PoolShape,
    counts: Tensor,  # [R] int32 new tokens of each row
    emitted: Tensor,  # [R, W + 1] int64 the keys of their paths, see `advance`
    kinds: Tensor,  # [R] int32 of rows, see `Draws`
    tried: Tensor,  # [kinds * agreements, sources, buckets] int32, added to
    fitted: Tensor,  # likewise
) -> None:
    """Count the proposals that were tried and those that fitted.

    A proposal is tried if its parent's path was emitted with a token after it. It fits if it is this token.
    """
    _count_kernel[(triton.cdiv(shape.width, _COUNTED), shape.num_rows)](
        pool.nodes,
        pool.factors,
        counts,
        emitted,
        kinds,
        tried,
        fitted,
        *tried.shape[1:],
        shape.width,
        emitted.shape[1],
        BLOCK=_COUNTED,
        num_warps=2,
    )


def learn(
    tables: Tables,
    step_tokens: Tensor,  # [T] int32
    step_parents: Tensor,  # [T] int32 places in the row's own tree
    step_places: Tensor,  # [T] int32
    step_rows: Tensor,  # [T] int32
    starts: Tensor,  # [rows] int32 each row's first token in the step
    before: Tensor,  # [2, rows] int32 the two tokens before each row's first, -1 for none
    salts: Tensor,  # [rows] int64
    successors: Tensor,  # [T, k] integers: the target's likeliest tokens after each, best first
    logits: Tensor,  # [T, k] float32
    num_rows: int,
    is_text: bool,
) -> None:
    """Write the successors of every n-gram of a step to all tables.

    If an n-gram occurs several times in one row, the likeliest node's successors stay; in prompt chunks (`is_text`),
    those of the last occurrence. If it occurs in several rows, the last row's stay.
    num_rows: tokens of later rows are padding.
    """
    size = len(step_tokens)
    first, end = tables.learned
    _learn_kernel[(triton.cdiv(size, _BLOCK), end - first)](
        tables.parts,
        step_tokens,
        step_parents,
        step_places,
        step_rows,
        starts,
        before,
        salts,
        successors,
        logits,
        tables.bucket_starts,
        tables.terms,
        before.shape[1],
        num_rows,
        size,
        K=NUM_SUCCESSORS,
        NUM_BUCKETS=NUM_BUCKETS,
        FIRST=first,
        IS_TEXT=is_text,
        BLOCK=_BLOCK,
        num_warps=2,
    )


@triton.jit
def _advance_kernel(
    texts: tl.tensor,
    text_lengths: tl.tensor,
    table_rows: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    tokens: tl.tensor,
    nodes: tl.tensor,
    places: tl.tensor,
    num_accepted: tl.tensor,
    lengths: tl.tensor,
    factors: tl.tensor,
    emitted: tl.tensor,
    context: tl.int64,
    places_room: int,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one row."""
    row = tl.program_id(0)
    count, table_row, start = tl.load(counts + row), tl.load(table_rows + row), tl.load(starts + row)
    end = tl.load(text_lengths + table_row)
    number = tl.arange(0, BLOCK)
    token = tl.load(tokens + row * W + number, mask=number < count, other=0)
    node = tl.load(nodes + row * W + number, mask=number < count, other=0)
    fits = (number < count) & (end + number < context)
    tl.store(texts + table_row.to(tl.int64) * context + end + number, token, mask=fits)
    tl.store(places + row * places_room + number - 1, node - start, mask=(number > 0) & (number < count))
    factor = tl.load(factors + number + 1, mask=number < count, other=0)
    key = tl.cumsum((token.to(tl.int64) + 1) * factor, axis=0)
    tl.store(emitted + row * (W + 1) + number + 1, key, mask=number < count)
    tl.store(emitted + row * (W + 1), tl.zeros([], tl.int64))
    tl.store(num_accepted + row, tl.maximum(count - 1, 0))
    tl.store(lengths + row, tl.maximum(end - 1, 0))
    if count > 0:
        tl.store(text_lengths + table_row, tl.minimum(end + count, context.to(tl.int32)))


@triton.jit
def _line_up_kernel(
    counts: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    nodes: tl.tensor,
    begins: tl.tensor,
    entry_rows: tl.tensor,
    entry_places: tl.tensor,
    entry_tokens: tl.tensor,
    entry_nodes: tl.tensor,
    num_rows: int,
    size: int,
    width: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """A program is one row; an extra program writes the padding."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    begin = tl.sum(tl.load(counts + rows, mask=(rows < row) & (rows < num_rows), other=0), axis=0)
    if row == num_rows:
        rest = tl.arange(0, SIZE)
        is_padding = (rest >= begin) & (rest < size)
        tl.store(begins + row, 0)
        tl.store(counts + row, 0)
        tl.store(lengths + row, 0)
        tl.store(entry_rows + rest, row, mask=is_padding)
        tl.store(entry_places + rest, 0, mask=is_padding)
        tl.store(entry_tokens + rest, 0, mask=is_padding)
        tl.store(entry_nodes + rest, 0, mask=is_padding)
    else:
        number = tl.arange(0, BLOCK)
        inside = (number < tl.load(counts + row)) & (begin + number < size)
        at = begin + number
        tl.store(begins + row, begin)
        tl.store(entry_rows + at, row, mask=inside)
        tl.store(entry_places + at, number, mask=inside)
        tl.store(entry_tokens + at, tl.load(tokens + row * width + number, mask=inside, other=0), mask=inside)
        tl.store(entry_nodes + at, tl.load(nodes + row * width + number, mask=inside, other=0), mask=inside)


@triton.jit
def _count_kernel(
    pool: Nodes,
    factors: tl.tensor,
    counts: tl.tensor,
    emitted: tl.tensor,
    kinds: tl.tensor,
    tried: tl.tensor,
    fitted: tl.tensor,
    num_sources: int,
    num_buckets: int,
    width: int,
    emitted_room: int,
    BLOCK: tl.constexpr,
) -> None:
    """A program is a block of a row's nodes."""
    block, row = tl.program_id(0), tl.program_id(1)
    node = row.to(tl.int64) * pool.capacity + block * BLOCK + tl.arange(0, BLOCK)
    place = block * BLOCK + tl.arange(0, BLOCK)
    is_node = tl.load(pool.paths + node, mask=(place > 0) & (place < width), other=0.0) > 0
    depth = tl.load(pool.depths + node, mask=is_node, other=0)
    is_node = is_node & (depth <= tl.load(counts + row))
    key = tl.load(pool.keys + node, mask=is_node, other=0)
    token = tl.load(pool.tokens + node, mask=is_node, other=0)
    above = key - (token.to(tl.int64) + 1) * tl.load(factors + depth, mask=is_node, other=0)
    came = emitted + row * emitted_room + depth
    is_tried = is_node & (above == tl.load(came - 1, mask=is_node, other=0))
    is_fitted = is_tried & (key == tl.load(came, mask=is_node, other=0))
    source = tl.load(pool.sources + node, mask=is_tried, other=0)
    bucket = tl.load(pool.buckets + node, mask=is_tried, other=0)
    agreed = tl.load(kinds + row) * 3 + tl.load(pool.agreement + node, mask=is_tried, other=0)
    cell = (agreed * num_sources + source) * num_buckets + bucket
    tl.atomic_add(tried + cell, 1, mask=is_tried)
    tl.atomic_add(fitted + cell, 1, mask=is_fitted)


@triton.jit
def _rows_of(
    number: tl.tensor,
    node: tl.tensor,
    is_node: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    before: tl.tensor,
    salts: tl.tensor,
    tables: TableRows,
    rows_room: int,
) -> tuple[tl.tensor, tl.tensor]:
    """The table rows of the n-grams that end at tokens of a step, and their hashes. number: of the table."""
    row = tl.load(rows + node, mask=is_node, other=0)
    start = tl.load(starts + row, mask=is_node, other=0)
    place = node - start
    token = tl.load(tokens + node, mask=is_node, other=0)
    parent = tl.load(parents + node, mask=is_node, other=0)
    above = tl.load(tokens + start + parent, mask=is_node, other=0)
    parents_parent = tl.load(parents + start + parent, mask=is_node, other=0)
    twice_above = tl.load(tokens + start + parents_parent, mask=is_node, other=0)
    before_root = tl.load(before + row, mask=is_node, other=-1)
    earlier_root = tl.load(before + rows_room + row, mask=is_node, other=-1)
    last = tl.where(place > 0, above, before_root)
    second = tl.where(parent > 0, twice_above, tl.where(place > 0, before_root, earlier_root))
    salt = tl.load(salts + row, mask=is_node, other=0)
    return row_of(number, token, last, second, salt, tables)


# Steps with prompts have many numbers of tokens and rows: do not compile the kernel for each of them.
_BY_STEP = ["tokens", "parents", "places", "rows", "starts", "before", "salts", "successors", "logits"]


@triton.jit(do_not_specialize=["rows_room", "num_rows", "size"], do_not_specialize_on_alignment=_BY_STEP)
def _learn_kernel(
    tables: TableRows,
    tokens: tl.tensor,
    parents: tl.tensor,
    places: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    before: tl.tensor,
    salts: tl.tensor,
    successors: tl.tensor,
    logits: tl.tensor,
    bucket_starts: tl.tensor,
    terms: tl.tensor,
    rows_room: int,
    num_rows: int,
    size: int,
    K: tl.constexpr,
    NUM_BUCKETS: tl.constexpr,
    FIRST: tl.constexpr,
    IS_TEXT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program is a block of tokens, for one table."""
    block, number = tl.program_id(0), FIRST + tl.program_id(1)
    own = block * BLOCK + tl.arange(0, BLOCK)
    own_row = tl.load(rows + own, mask=own < size, other=0x7FFFFFFF)
    is_own = own_row < num_rows
    if tl.sum(is_own.to(tl.int32), axis=0) == 0:
        return
    own_place = tl.load(places + own, mask=is_own, other=0)
    found, tag = _rows_of(number, own, is_own, tokens, parents, rows, starts, before, salts, tables, rows_room)
    is_overwritten = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        other = start + tl.arange(0, BLOCK)
        other_row = tl.load(rows + other, mask=other < size, other=0x7FFFFFFF)
        is_other = other_row < num_rows
        if tl.sum(is_other.to(tl.int32), axis=0) > 0:
            there, _ = _rows_of(
                number,
                other,
                is_other,
                tokens,
                parents,
                rows,
                starts,
                before,
                salts,
                tables,
                rows_room,
            )
            other_place = tl.load(places + other, mask=is_other, other=0)
            if IS_TEXT:
                is_later = other_place[None, :] > own_place[:, None]
            else:
                is_later = other_place[None, :] < own_place[:, None]
            is_later = (other_row[None, :] > own_row[:, None]) | ((other_row[None, :] == own_row[:, None]) & is_later)
            is_same = is_other[None, :] & (there[None, :] == found[:, None])
            is_overwritten = is_overwritten | tl.max((is_same & is_later).to(tl.int32), axis=1)
    is_written = is_own & (is_overwritten == 0)
    rank = tl.arange(0, K)
    at = own[:, None] * K + rank[None, :]
    token = tl.load(successors + at, mask=is_written[:, None], other=0)
    logit = tl.load(logits + at, mask=is_written[:, None], other=0.0)
    best = tl.load(logits + own * K, mask=is_written, other=0.0)
    # exp(x) for x <= 0, in units of 2^-30.
    x = logit - best[:, None]
    halvings = (x.to(tl.float64) * tl.full([], -1549082004.679870, tl.float64)).to(tl.int64)
    halvings = tl.where((x < 0) & (x > -20.0), halvings, 0)
    fraction = halvings & 0x3FFFFFFF
    weight = tl.zeros_like(halvings)
    for term in tl.static_range(_NUM_TERMS):
        weight = tl.load(terms + _NUM_TERMS - 1 - term) - ((weight * fraction) >> 30)
    weight = tl.where(x > -20.0, weight >> (halvings >> 30), 0)
    total = tl.sum(weight, axis=1)
    share = weight.to(tl.float64) / total.to(tl.float64)[:, None]
    entry = token * NUM_BUCKETS + bucket_of(share, bucket_starts, NUM_BUCKETS)
    tl.store(tables.entries + found[:, None] * K + rank[None, :], entry, mask=is_written[:, None])
    tl.store(tables.tags + found, tag, mask=is_written)

"""Triton kernels over SGLang's arrays: a round's rows, its drafts, a verify's inputs and its attention.

Importing this module needs Triton, but not SGLang. D is the number of places of a row's tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.buffers import NO_TOKEN, Texts

SETTINGS = ("seeds", "salts", "kinds", "temperatures", "powers")  # a request's settings that its tree depends on
_LIMITS = ("top_k", "top_p", "min_p")  # its other settings
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_WRITTEN_AT_ONCE = 2048  # tokens of a text
_KEYS = tl.constexpr(64)  # most keys of a block
_MOST_ROWS, _LEAST_ROWS = 64, 16  # rows of a tile: places times query heads per key head
_LEAST_SPLIT = 128  # fewest keys before the tree that one program reads
_MOST_SPLITS = 16
PROGRAMS = 528  # enough to keep a large GPU busy
_LOG2_E = 1.4426950408889634


class Rows(NamedTuple):
    """The rows of a batch, on the device."""

    slots: Tensor  # [B] each request's slot in SGLang's tables; 0 is padding
    lengths: Tensor  # [B] tokens in the KV cache
    roots: Tensor  # [B] the token to decode next


class Drafted(NamedTuple):
    """The head's drafts: M nodes by SGLang's flat ids. Level 1 has the first K, every further level K².

    The parent of a node f >= K is `beams[f // K]`, a flat id. The parent of the first K nodes is the root.
    """

    tokens: Tensor  # [B, M] target ids
    scores: Tensor  # [B, M] products of the head's q along the path
    beams: Tensor  # [B, 1 + levels * K] -1 for the root, then the flat ids of the K expanded nodes of each level


@torch.compiler.disable
def verify_attention(
    query: Tensor,  # [T, heads, head_dim], D places of each of B rows
    new_keys: Tensor,  # [T, kv_heads, head_dim] of the places
    new_values: Tensor,
    out: Tensor,  # [T, heads, head_dim]
    keys: Tensor,  # [slots, kv_heads, head_dim] of the KV cache
    values: Tensor,
    key_starts: Tensor,  # [B + 1] where each row's slots begin
    slots: Tensor,  # KV slots of the text before each row's tree
    mask: Tensor,  # flat: D x (text + D) for each row, whether the place sees it; all see the text
    mask_starts: Tensor,  # [B + 1]
    num_places: int,
    scale: float,
    cap: float = 0.0,
) -> None:
    """Attention of every place over the text before the tree and over the places that its mask allows.

    Query heads that share a key head are rows of one tile, so that keys are read once for all of them. The text is
    split among programs. Lengths are read on the device, so a captured launch can be replayed while texts grow.
    cap: if not 0, a score becomes cap * tanh(score / cap).
    """
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[1]
    group, batch = heads // kv_heads, len(key_starts) - 1
    rows = min(max(triton.next_power_of_2(num_places * group), _LEAST_ROWS), _MOST_ROWS)
    tiles = triton.cdiv(num_places * group, rows)
    splits = min(max(PROGRAMS // (batch * kv_heads * tiles), 1), _MOST_SPLITS)
    splits = 1 << (splits.bit_length() - 1)  # a kernel is compiled for each number, so there are few
    sums = out if splits == 1 else out.new_empty(len(query) * heads * splits * head_dim, dtype=torch.float32)
    states = out if splits == 1 else out.new_empty(2, len(query) * heads * splits, dtype=torch.float32)
    sizes: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "SPLITS": splits,
        "LEAST_SPLIT": _LEAST_SPLIT,
    }
    _verify_kernel[batch, kv_heads * tiles, splits](
        *(query, new_keys, new_values, out, keys, values),
        *(key_starts, slots, mask, mask_starts, sums, states, len(query) * heads * splits),
        *(*query.stride()[:2], *new_keys.stride()[:2], *new_values.stride()[:2], *out.stride()[:2]),
        *(*keys.stride()[:2], *values.stride()[:2]),
        *(scale * _LOG2_E if not cap else scale / cap, cap * _LOG2_E, num_places, tiles),
        **sizes,
        KEYS=_KEYS.value if splits > 1 else _KEYS.value // 2,  # smaller for many requests, so that more run at once
        TREE_KEYS=min(max(triton.next_power_of_2(num_places), 16), _KEYS.value),
        GROUP=group,
        CAPPED=bool(cap),
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        BLOCK_M=rows,
        num_warps=8 if rows > 32 else 4,  # four warps would lack registers
        num_stages=2 if rows > 32 else 3,
    )
    if splits > 1:
        _combine_kernel[len(query), heads](
            *(sums, states, key_starts, out, len(query) * heads * splits, num_places, *out.stride()[:2]),
            **sizes,
            num_warps=2,
        )


def write_requests(message: Mapping[str, Tensor], settings: Mapping[str, Tensor], texts: Texts) -> None:
    """Keep finished texts, and then write the texts and the settings of new requests to their slots.

    message: see `slots._message_layout`. settings: of all requests, by slot, written.
    """
    _write_requests_kernel[(len(message["slots"]),)](
        *(message[name] for name in ("slots", "kept_firsts", "kept_counts", "kept_places", "past_end")),
        *(message[name] for name in ("starts", "lengths", "tokens", *SETTINGS, *_LIMITS)),
        *(settings[name] for name in (*SETTINGS, *_LIMITS)),
        *(texts.own, texts.past, texts.past_end, texts.own.shape[1], len(texts.past)),
        NUM_BUCKETS=settings["powers"].shape[1],
        BLOCK=_WRITTEN_AT_ONCE,
        num_warps=8,
    )


@triton.jit
def _write_requests_kernel(
    slots: tl.tensor,
    kept_firsts: tl.tensor,
    kept_counts: tl.tensor,
    kept_places: tl.tensor,
    past_end: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    seeds: tl.tensor,
    salts: tl.tensor,
    kinds: tl.tensor,
    temperatures: tl.tensor,
    powers: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    slot_seeds: tl.tensor,
    slot_salts: tl.tensor,
    slot_kinds: tl.tensor,
    slot_temperatures: tl.tensor,
    slot_powers: tl.tensor,
    slot_top_k: tl.tensor,
    slot_top_p: tl.tensor,
    slot_min_p: tl.tensor,
    own: tl.tensor,
    past: tl.tensor,
    known_end: tl.tensor,
    context: tl.int64,
    ring: tl.int64,
    NUM_BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One slot. Its finished text is kept before a new one overwrites it."""
    number = tl.program_id(0)
    slot = tl.load(slots + number)
    text = own + slot * context
    each = tl.arange(0, BLOCK)
    count = tl.load(kept_counts + number)
    if count > 0:
        first, place = tl.load(kept_firsts + number), tl.load(kept_places + number)
        for begin in range(0, count + 1, BLOCK):
            at = begin + each
            token = tl.load(text + first + at, mask=at < count, other=_NO_TOKEN)
            tl.store(past + ((place + at) & (ring - 1)), token, mask=at <= count)
    if number == 0:
        end = tl.arange(0, 2)
        tl.store(known_end + end, tl.load(past_end + end))
    tl.debug_barrier()  # all threads have read the old text
    start = tl.load(starts + number)
    if start >= 0:
        length = tl.load(lengths + number)
        for begin in range(0, context, BLOCK):
            at = begin + each
            token = tl.load(tokens + start + at, mask=at < length, other=_NO_TOKEN)
            tl.store(text + at, token, mask=at < context)
        tl.store(slot_seeds + slot, tl.load(seeds + number))
        tl.store(slot_salts + slot, tl.load(salts + number))
        tl.store(slot_kinds + slot, tl.load(kinds + number))
        tl.store(slot_temperatures + slot, tl.load(temperatures + number))
        bucket = tl.arange(0, NUM_BUCKETS)
        tl.store(slot_powers + slot * NUM_BUCKETS + bucket, tl.load(powers + number * NUM_BUCKETS + bucket))
        tl.store(slot_top_k + slot, tl.load(top_k + number))
        tl.store(slot_top_p + slot, tl.load(top_p + number))
        tl.store(slot_min_p + slot, tl.load(min_p + number))


def load_rows(
    rows: Rows,
    slots: Mapping[str, Tensor],  # settings of all requests, by slot
    inputs: Mapping[str, Tensor],  # of the round, written; see `inputs_layout`
    texts: Texts,
    num_nodes: int,
    max_depth: int,
) -> None:
    """Load a batch's rows from its requests' slots, and write the tokens to decode next at the ends of its texts.

    So a text is right even if it got tokens in rounds without trees. num_nodes: the most nodes of a row.
    """
    num_rows, most = len(rows.slots), len(inputs["caps"])
    _load_rows_kernel[(1,)](
        *(*rows, num_rows, texts.own, texts.lengths, texts.own.shape[1]),
        *(slots[name] for name in SETTINGS),
        *(inputs[name] for name in ("table_rows", "caps", "max_depths", *SETTINGS)),
        *(most, num_nodes, max_depth),
        NUM_BUCKETS=inputs["powers"].shape[1],
        BLOCK=triton.next_power_of_2(max(num_rows, most)),
    )


@triton.jit(do_not_specialize=["num_rows", "num_nodes", "max_depth"])
def _load_rows_kernel(
    row_slots: tl.tensor,
    seq_lens: tl.tensor,
    roots: tl.tensor,
    num_rows: int,
    own: tl.tensor,
    lengths: tl.tensor,
    context: tl.int64,
    slot_seeds: tl.tensor,
    slot_salts: tl.tensor,
    slot_kinds: tl.tensor,
    slot_temperatures: tl.tensor,
    slot_powers: tl.tensor,
    table_rows: tl.tensor,
    caps: tl.tensor,
    max_depths: tl.tensor,
    seeds: tl.tensor,
    salts: tl.tensor,
    kinds: tl.tensor,
    temperatures: tl.tensor,
    powers: tl.tensor,
    most: int,
    num_nodes: int,
    max_depth: int,
    NUM_BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """All rows. Those behind the last are padding, of slot 0."""
    row = tl.arange(0, BLOCK)
    is_row, inside = row < num_rows, row < most
    slot = tl.load(row_slots + row, mask=is_row, other=0).to(tl.int64)
    end = tl.load(seq_lens + row, mask=is_row, other=0).to(tl.int64)
    fits = is_row & (end < context)
    tl.store(own + slot * context + end, tl.load(roots + row, mask=is_row, other=0).to(tl.int32), mask=fits)
    tl.store(lengths + slot, (end + 1).to(tl.int32), mask=fits)
    tl.store(table_rows + row, slot.to(tl.int32), mask=inside)
    tl.store(caps + row, tl.where(is_row, num_nodes, -1), mask=inside)
    tl.store(max_depths + row, tl.where(is_row, max_depth, 0), mask=inside)
    tl.store(seeds + row, tl.load(slot_seeds + slot), mask=inside)
    tl.store(salts + row, tl.load(slot_salts + slot), mask=inside)
    tl.store(kinds + row, tl.load(slot_kinds + slot), mask=inside)
    tl.store(temperatures + row, tl.load(slot_temperatures + slot), mask=inside)
    bucket = tl.arange(0, NUM_BUCKETS)[None, :]
    power = tl.load(slot_powers + slot[:, None] * NUM_BUCKETS + bucket)
    tl.store(powers + row[:, None] * NUM_BUCKETS + bucket, power, mask=inside[:, None])


def split_levels(
    drafted: Drafted,
    topk: int,
    has_head: Tensor,  # [slots] int32: whether the head has read the text
    table_rows: Tensor,  # [B or more] int32 slots
    levels: tuple[Tensor, Tensor, Tensor],  # [B * M or more] tokens, parents int32 and q float32, written
) -> None:
    """The head's nodes level by level: row after row in each, with parents numbered as in the drafted tree."""
    num_rows, num_nodes = drafted.tokens.shape
    _split_levels_kernel[(num_rows,)](
        *(drafted.tokens, drafted.scores, drafted.beams, has_head, table_rows, *levels),
        *(num_rows, num_nodes, drafted.beams.shape[1]),
        TOPK=topk,
        BLOCK=triton.next_power_of_2(num_nodes),
    )


@triton.jit
def _split_levels_kernel(
    tokens: tl.tensor,
    scores: tl.tensor,
    beams: tl.tensor,
    has_head: tl.tensor,
    table_rows: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_q: tl.tensor,
    num_rows: int,
    num_nodes: int,
    num_beams: int,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    inside = node < num_nodes
    parent = tl.load(beams + row * num_beams + node // TOPK, mask=inside, other=-1).to(tl.int32)
    score = tl.load(scores + row * num_nodes + node, mask=inside, other=0.0)
    above = tl.load(scores + row * num_nodes + parent, mask=inside & (parent >= 0), other=1.0)
    is_drafted = (tl.load(has_head + tl.load(table_rows + row)) > 0) & (above > 0)
    q = tl.where(is_drafted, tl.minimum(score / tl.where(above > 0, above, 1.0), 1.0), 0.0)
    size = tl.where(node < TOPK, TOPK, TOPK * TOPK)
    start = tl.where(node < TOPK, 0, TOPK + (node - TOPK) // (TOPK * TOPK) * (TOPK * TOPK))
    at = start * num_rows + row * size + node - start
    tl.store(out_tokens + at, tl.load(tokens + row * num_nodes + node, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(out_parents + at, parent + 1, mask=inside)
    tl.store(out_q + at, q, mask=inside)


def place_trees(
    columns: Tensor,  # [6, room] int32 trees of D places, see `ranking.lay_out`
    lengths: Tensor,  # [B or more] of the texts before the trees; -1 for padding
    numbers: Tensor,  # [5, B, D] int64, written: tokens, positions, index, first child and next sibling of each place
    mask: Tensor,  # flat bytes, written: whether each place sees what is before it
    has_texts: bool,
) -> None:
    """Write trees into the inputs of a verify.

    has_texts: the mask has D x (text + D) bytes for each row, and only the part after the text is written. Otherwise it
    has D x D bytes.
    """
    num_rows, num_places = numbers.shape[1:]
    _place_kernel[(num_rows,)](
        *(columns, lengths, numbers, mask.view(torch.uint8), columns.shape[1], num_rows, num_places),
        HAS_TEXTS=has_texts,
        BLOCK_B=triton.next_power_of_2(num_rows),
        BLOCK_N=triton.next_power_of_2(num_places),
        num_warps=8 if num_places > 32 else 2,
    )


@triton.jit(do_not_specialize=["num_rows", "places"])
def _place_kernel(
    columns: tl.tensor,
    lengths: tl.tensor,
    numbers: tl.tensor,
    mask: tl.tensor,
    room: int,
    num_rows: int,
    places: int,
    HAS_TEXTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One row. A place without a node sees itself alone, and nothing leads to it."""
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK_N)
    inside = place < places
    at = row * places + place
    is_node = tl.load(columns + 4 * room + at, mask=inside, other=-1) == row
    parent = tl.load(columns + room + at, mask=is_node, other=0)
    depth = tl.load(columns + 3 * room + at, mask=is_node, other=0)
    length = tl.maximum(tl.load(lengths + row), 0).to(tl.int64)
    is_child = (is_node & (place > 0))[None, :] & (parent[None, :] == place[:, None]) & is_node[:, None]
    child = tl.min(tl.where(is_child, place[None, :], BLOCK_N), axis=1)
    is_sibling = (is_node & (place > 0))[None, :] & (parent[None, :] == parent[:, None])
    is_sibling = is_sibling & (place[None, :] > place[:, None]) & (is_node & (place > 0))[:, None]
    sibling = tl.min(tl.where(is_sibling, place[None, :], BLOCK_N), axis=1)
    size = num_rows * places
    tl.store(numbers + at, tl.load(columns + at, mask=is_node, other=0).to(tl.int64), mask=inside)
    tl.store(numbers + size + at, length + depth, mask=inside)
    tl.store(numbers + 2 * size + at, at.to(tl.int64), mask=inside)
    tl.store(numbers + 3 * size + at, tl.where(child < BLOCK_N, child, -1).to(tl.int64), mask=inside)
    tl.store(numbers + 4 * size + at, tl.where(sibling < BLOCK_N, sibling, -1).to(tl.int64), mask=inside)
    seen = place[:, None] == place[None, :]
    above = parent
    for level in range(tl.max(depth, axis=0)):
        seen = seen | ((level < depth)[:, None] & (above[:, None] == place[None, :]))
        above = tl.load(columns + room + row * places + above, mask=is_node, other=0)
    if HAS_TEXTS:
        before = tl.arange(0, BLOCK_B)
        texts = tl.sum(tl.maximum(tl.load(lengths + before, mask=before < row, other=0), 0).to(tl.int64), axis=0)
        begin = places * (texts + row * places) + place * (length + places) + length
    else:
        begin = (row * places + place).to(tl.int64) * places
    both = inside[:, None] & inside[None, :]
    tl.store(mask + begin[:, None] + place[None, :], seen.to(tl.uint8), mask=both)


@triton.jit
def _split_length(num_keys: tl.tensor, SPLITS: tl.constexpr, LEAST_SPLIT: tl.constexpr) -> tl.tensor:
    """The number of keys of each split of a text but the last."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, SPLITS), _KEYS) * _KEYS, LEAST_SPLIT)


@triton.jit
def _scores(
    query: tl.tensor,
    key: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """The scores [rows, keys] as exponents of 2."""
    scores = tl.dot(query, key.T, input_precision=PRECISION) * scale
    if CAPPED:
        scores = cap * (1 - 2 / (tl.exp(2 * scores) + 1))
    return scores


@triton.jit
def _add_block(
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    scores: tl.tensor,
    seen: tl.tensor,
    value: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds the keys of one more block to a running softmax."""
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(maximum - base)
    total = total * shrunk + tl.sum(weights, axis=1)
    acc = acc * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return acc, highest, total


@triton.jit(do_not_specialize=["num_states", "places", "tiles"])
def _verify_kernel(
    query: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_starts: tl.tensor,
    slots: tl.tensor,
    mask: tl.tensor,
    mask_starts: tl.tensor,
    sums: tl.tensor,
    states: tl.tensor,
    num_states: int,
    query_token: tl.int64,
    query_head: tl.int64,
    new_key_token: tl.int64,
    new_key_head: tl.int64,
    new_value_token: tl.int64,
    new_value_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    key_slot: tl.int64,
    key_head: tl.int64,
    value_slot: tl.int64,
    value_head: tl.int64,
    scale: float,
    cap: float,
    places: int,
    tiles: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    TREE_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """One tile of a row's places over one split of the text. The first split also reads the tree."""
    row, split = tl.program_id(0), tl.program_id(2)
    head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    first_key = tl.load(key_starts + row)
    num_keys = tl.load(key_starts + row + 1) - first_key
    length = _split_length(num_keys, SPLITS, LEAST_SPLIT)
    begin, end = split * length, tl.minimum((split + 1) * length, num_keys)
    if (split > 0) & (begin >= end):
        return

    number = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # each query's number among the row's queries for this key head
    place, member = number // GROUP, head * GROUP + number % GROUP
    real = place < places
    token = row.to(tl.int64) * places + place
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    q = tl.load(
        query + (token * query_token + member * query_head)[:, None] + dims[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    column = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        is_key = start + column < end
        slot = tl.load(slots + first_key + start + column, mask=is_key, other=0).to(tl.int64)
        wanted = is_key[:, None] & inside[None, :]
        key = tl.load(keys + head * key_head + slot[:, None] * key_slot + dims[None, :], mask=wanted, other=0.0)
        scores = _scores(q, key, scale, cap, CAPPED, PRECISION)
        value = tl.load(values + head * value_head + slot[:, None] * value_slot + dims[None, :], mask=wanted, other=0.0)
        acc, maximum, total = _add_block(acc, maximum, total, scores, is_key[None, :], value, PRECISION)
    if split == 0:
        first_mask = tl.load(mask_starts + row).to(tl.int64)
        shown = mask + first_mask + place * (num_keys + places) + num_keys
        for start in range(0, places, TREE_KEYS):
            other = start + tl.arange(0, TREE_KEYS)
            is_key = other < places
            new = row.to(tl.int64) * places + other
            wanted = is_key[:, None] & inside[None, :]
            key = tl.load(
                new_keys + head * new_key_head + new[:, None] * new_key_token + dims[None, :], mask=wanted, other=0.0
            )
            scores = _scores(q, key, scale, cap, CAPPED, PRECISION)
            value = tl.load(
                new_values + head * new_value_head + new[:, None] * new_value_token + dims[None, :],
                mask=wanted,
                other=0.0,
            )
            seen = tl.load(shown[:, None] + other[None, :], mask=real[:, None] & is_key[None, :], other=0) != 0
            acc, maximum, total = _add_block(acc, maximum, total, scores, seen, value, PRECISION)
    stored = real[:, None] & inside[None, :]
    if SPLITS == 1:
        place_of_out = (token * out_token + member * out_head)[:, None] + dims[None, :]
        tl.store(out + place_of_out, (acc / total[:, None]).to(out.dtype.element_ty), mask=stored)
    else:
        state = (token * (tl.num_programs(1) // tiles * GROUP) + member) * SPLITS + split
        tl.store(sums + state[:, None] * HEAD_DIM + dims[None, :], acc, mask=stored)
        tl.store(states + state, maximum, mask=real)
        tl.store(states + num_states + state, total, mask=real)


@triton.jit(do_not_specialize=["num_states", "places"])
def _combine_kernel(
    sums: tl.tensor,
    states: tl.tensor,
    key_starts: tl.tensor,
    out: tl.tensor,
    num_states: int,
    places: int,
    out_token: tl.int64,
    out_head: tl.int64,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
) -> None:
    """Combines all splits of the text for one head of one place."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token // places
    num_keys = tl.load(key_starts + row + 1) - tl.load(key_starts + row)
    used = tl.maximum(tl.cdiv(num_keys, _split_length(num_keys, SPLITS, LEAST_SPLIT)), 1)
    split, dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    is_used, inside = split < used, dims < HEAD_DIM
    state = (token * tl.num_programs(1) + head) * SPLITS + split
    maximum = tl.load(states + state, mask=is_used, other=float("-inf"))
    shares = tl.exp2(maximum - tl.max(maximum, axis=0))
    total = tl.sum(tl.load(states + num_states + state, mask=is_used, other=0.0) * shares, axis=0)
    parts = tl.load(
        sums + state[:, None] * HEAD_DIM + dims[None, :], mask=is_used[:, None] & inside[None, :], other=0.0
    )
    result = tl.sum(parts * shares[:, None], axis=0) / total
    tl.store(out + token * out_token + head * out_head + dims, result.to(out.dtype.element_ty), mask=inside)

"""A Triton kernel that norms and rotates a step's queries and keys, and stores keys and values. Needs Triton.

As in `layer`, it rounds where transformers' modules round, and a token's result does not depend on other tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate, overlap
from graft.model.kernels.attention import slot_of
from graft.model.kernels.gate import is_shut
from graft.model.kernels.layer import parts_of, scale_of, scaled
from graft.model.kernels.overlap import start_next, wait_for_previous
from graft.model.layout import Layout
from graft.model.network import Attention

# Heads of a program, and its warps; where one program takes all heads, heads of a block.
_HEADS_AT_ONCE, _ALL_AT_ONCE = (8, 2), (32, 8)


def rotate_and_store(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim], or [layers, T, ...]
    keys: Tensor,  # [num_slots, kv_heads, head_dim], one layer's store, or [layers, num_slots, ...]
    values: Tensor,
    layout: Layout,
    cos: Tensor | None,  # [positions, dims / 2]; None: no rotation
    sin: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    *,
    attention: Attention | None = None,
    growth: Tensor | None = None,
) -> None:
    """Rotate queries in place, and write rotated keys, and values, to the KV cache.

    Positions past the end of the rotary tables take the last entry.
    norms: weights [head_dim], or [layers, head_dim], of an RMS norm of queries and of keys before the rotation, and its
    eps. attention: what else there is; None: a Llama's. growth: [positions] numbers that multiply rotated queries.
    """
    kv_heads, head_dim = keys.shape[-2:]
    if not qkv.is_contiguous() or keys.stride() != values.stride() or keys.stride()[-2:] != (head_dim, 1):
        raise ValueError("queries, and a token's keys and values, must be contiguous")
    copied = attention is not None and attention.values_are_keys
    reads_others = attention is not None and attention.kv_of is not None
    kv_heads = 0 if reads_others else kv_heads
    heads = qkv.shape[-1] // head_dim - (1 if copied else 2) * kv_heads
    rotary = attention.rotary if attention is not None else None
    half = cos.shape[1] if cos is not None else head_dim // 2
    query_norm, key_norm, eps = norms or (qkv, qkv, 0.0)
    query_flags = key_flags = (False, True, False, 0, True) if norms is not None else None
    over_all = norms_turned = False
    value_eps = -1.0
    if attention is not None:
        query_norm, _, eps, query_flags = parts_of(attention.q_norm, 0.0, qkv)
        key_norm, _, _, key_flags = parts_of(attention.k_norm, 0.0, qkv)
        over_all = attention.q_norm is not None and attention.q_norm.over_all
        norms_turned = attention.norms_turned
        value_eps = attention.v_norm.eps if attention.v_norm is not None else -1.0
    num_layers, num_tokens = qkv.shape[:-1] if qkv.dim() == 3 else (1, len(qkv))
    at_once, warps = _ALL_AT_ONCE if over_all else _HEADS_AT_ONCE
    blocks = triton.cdiv(heads + 2 * kv_heads, at_once)
    rest = head_dim - 2 * half
    _rotate_kernel[(num_tokens, 1 if over_all else blocks, num_layers)](
        *(qkv, keys, values),
        *(layout.rows, layout.places, layout.depths, layout.lengths, layout.table_rows, layout.tables),
        *(qkv if cos is None else cos, qkv if sin is None else sin, qkv if growth is None else growth),
        *(query_norm, key_norm, eps, value_eps),
        layout.tables.shape[1],
        (len(cos) if cos is not None else len(growth) if growth is not None else 1) - 1,
        keys.stride(-3),
        keys.stride(0),  # of layers, if there are several
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        REST=rest,
        TURNS=cos is not None,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        WIDE=rotary is not None and rotary.wide,
        GROWS=growth is not None,
        NORM=query_flags or key_flags,
        NORMS_TURNED=norms_turned,
        OVER_ALL=over_all,
        BY_HEAD=query_norm.numel() > head_dim if attention is not None and attention.q_norm is not None else False,
        NORMS_VALUES=value_eps >= 0,
        COPIES_KEYS=copied,
        BLOCKS=blocks,
        BLOCK_H=at_once,
        BLOCK_D=triton.next_power_of_2(half),
        BLOCK_R=triton.next_power_of_2(max(rest, 1)),
        BLOCK_ALL=triton.next_power_of_2(max(heads, 1) * head_dim),
        num_warps=warps,
        **overlap.options(qkv.device),
        **gate.options(),
    )


@triton.jit(do_not_specialize=["max_pages", "last_position"])
def _rotate_kernel(
    qkv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    tables: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    growth: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: float,
    value_eps: float,
    max_pages: int,
    last_position: int,
    cache_slot: tl.int64,  # strides
    cache_layer: tl.int64,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    TURNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    GROWS: tl.constexpr,
    NORM: tl.constexpr,
    NORMS_TURNED: tl.constexpr,
    OVER_ALL: tl.constexpr,
    BY_HEAD: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    COPIES_KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Rotate and store some heads of one token in one layer. If norms are over all heads, a program takes them all.

    A head is cut into the two numbers of each pair that the rotation mixes, and the rest. So whoever overwrites a
    query's number has read its pair.
    """
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    WIDTH: tl.constexpr = (HEADS + (1 if COPIES_KEYS else 2) * KV_HEADS) * HEAD_DIM
    token, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    keys += layer * cache_layer
    values += layer * cache_layer
    query_norm += layer * HEAD_DIM
    key_norm += layer * HEAD_DIM
    row = tl.load(rows + token)
    length = tl.load(lengths + row)
    position = tl.minimum(length + tl.load(depths + token), last_position)
    pairs = tl.arange(0, BLOCK_D)[None, :]
    real = pairs < HALF
    low = pairs * 2 if INTERLEAVED else pairs
    high = low + 1 if INTERLEAVED else low + HALF
    others = 2 * HALF + tl.arange(0, BLOCK_R)[None, :]
    c = tl.zeros([1, BLOCK_D], tl.float32)
    s = c
    if TURNS:
        c = tl.load(cos + position * HALF + pairs, mask=real, other=0.0).to(tl.float32)
        s = tl.load(sin + position * HALF + pairs, mask=real, other=0.0).to(tl.float32)
    grown = 1.0
    if GROWS:
        grown = tl.load(growth + position).to(tl.float32)
    place = tl.load(places + token)
    table = tables + tl.load(table_rows + row).to(tl.int64) * max_pages
    slot = slot_of(table, length + place, place >= 0, max_pages) * cache_slot
    wait_for_previous(OVERLAPS)

    qkv += (layer * tl.num_programs(0) + token) * WIDTH
    all_queries = 0.0
    all_keys = 0.0
    if OVER_ALL:
        columns = tl.arange(0, BLOCK_ALL)
        all_queries = _mean_square(qkv, columns, HEADS * HEAD_DIM)
        all_keys = _mean_square(qkv + HEADS * HEAD_DIM, columns, KV_HEADS * HEAD_DIM)
    for block in range(tl.program_id(1), BLOCKS, tl.num_programs(1)):
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        inside = head < HEADS + 2 * KV_HEADS
        is_query = head < HEADS
        is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
        source = head
        if COPIES_KEYS:
            source = tl.where(head < HEADS + KV_HEADS, head, head - KV_HEADS)
        at = source * HEAD_DIM
        first = tl.load(qkv + at + low, mask=inside & real, other=0.0)
        second = tl.load(qkv + at + high, mask=inside & real, other=0.0)
        third = first
        if REST > 0:
            third = tl.load(qkv + at + others, mask=inside & (others < HEAD_DIM), other=0.0)
        x, y, z = first, second, third
        if NORM is not None and not NORMS_TURNED:
            mean = _mean_squares(x, y, z, HALF, REST)
            if OVER_ALL:
                mean = tl.where(is_query, all_queries, all_keys)
            own = (query_norm, key_norm, head, is_query, is_key)
            x, y, z = _normed_heads(x, y, z, mean, own, (low, high, others), eps, HEADS, HEAD_DIM, NORM, BY_HEAD)
        if TURNS:
            x, y = turned(x, y, c, s, WIDE)
        if NORM is not None and NORMS_TURNED:
            mean = _mean_squares(x, y, z, HALF, REST)
            own = (query_norm, key_norm, head, is_query, is_key)
            x, y, z = _normed_heads(x, y, z, mean, own, (low, high, others), eps, HEADS, HEAD_DIM, NORM, BY_HEAD)
        if GROWS:
            x = tl.where(is_query, scaled(x, grown), x)
            y = tl.where(is_query, scaled(y, grown), y)
            z = tl.where(is_query, scaled(z, grown), z)
        if NORMS_VALUES:
            inverse = tl.rsqrt(_mean_squares(first, second, third, HALF, REST) + value_eps)
            first, second, third = scaled(first, inverse), scaled(second, inverse), scaled(third, inverse)
        to_query = qkv + at
        to_key = keys + slot + (head - HEADS) * HEAD_DIM
        to_value = values + slot + (head - HEADS - KV_HEADS) * HEAD_DIM
        is_value = inside & (head >= HEADS + KV_HEADS)
        _store_heads(to_query, to_key, to_value, low, real, x, first, is_query, is_key, is_value)
        _store_heads(to_query, to_key, to_value, high, real, y, second, is_query, is_key, is_value)
        if REST > 0:
            _store_heads(to_query, to_key, to_value, others, others < HEAD_DIM, z, third, is_query, is_key, is_value)


@triton.jit
def _mean_square(x: tl.tensor, columns: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    wide = tl.load(x + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    return tl.sum(wide * wide, axis=0) / SIZE


@triton.jit
def _mean_squares(x: tl.tensor, y: tl.tensor, z: tl.tensor, HALF: tl.constexpr, REST: tl.constexpr) -> tl.tensor:
    """The mean square of each head, [heads, 1]."""
    squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1) + tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
    if REST > 0:
        squares += tl.sum(z.to(tl.float32) * z.to(tl.float32), axis=1)
    return (squares / (2 * HALF + REST))[:, None]


@triton.jit
def _normed_heads(
    x: tl.tensor,
    y: tl.tensor,
    z: tl.tensor,
    mean: tl.tensor,
    own: tl.tuple,
    parts: tl.tuple,
    eps: float,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    BY_HEAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The RMS norm of queries and keys, each with its own weights."""
    inverse = tl.rsqrt(mean + eps)
    low, high, others = parts
    x = _normed_part(x, inverse, own, low, HEADS, HEAD_DIM, NORM, BY_HEAD)
    y = _normed_part(y, inverse, own, high, HEADS, HEAD_DIM, NORM, BY_HEAD)
    z = _normed_part(z, inverse, own, others, HEADS, HEAD_DIM, NORM, BY_HEAD)
    return x, y, z


@triton.jit
def _normed_part(
    x: tl.tensor,
    inverse: tl.tensor,
    own: tl.tuple,
    dims: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    BY_HEAD: tl.constexpr,
) -> tl.tensor:
    query_norm, key_norm, head, is_query, is_key = own
    ROUNDS: tl.constexpr = NORM[4]
    at = dims
    if BY_HEAD:
        at = tl.where(is_query, head, tl.maximum(head - HEADS, 0)) * HEAD_DIM + dims
    real = dims < HEAD_DIM
    scale = tl.where(
        is_query,
        scale_of(query_norm, at, real & is_query, NORM),
        scale_of(key_norm, at, real & is_key, NORM),
    )
    wide = x.to(tl.float32) * inverse
    if ROUNDS:
        wide = wide.to(x.dtype).to(tl.float32)
    return (wide * scale).to(x.dtype)


@triton.jit
def turned(x: tl.tensor, y: tl.tensor, c: tl.tensor, s: tl.tensor, WIDE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Rotate pairs. Unless WIDE, each product is rounded before the sum."""
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    xc, ys, yc, xs = x32 * c, y32 * s, y32 * c, x32 * s
    if not WIDE:
        xc, ys = xc.to(x.dtype).to(tl.float32), ys.to(x.dtype).to(tl.float32)
        yc, xs = yc.to(x.dtype).to(tl.float32), xs.to(x.dtype).to(tl.float32)
    return (xc - ys).to(x.dtype), (yc + xs).to(x.dtype)


@triton.jit
def _store_heads(
    to_query: tl.tensor,
    to_key: tl.tensor,
    to_value: tl.tensor,
    dims: tl.tensor,
    real: tl.tensor,
    turned: tl.tensor,
    plain: tl.tensor,
    is_query: tl.tensor,
    is_key: tl.tensor,
    is_value: tl.tensor,
) -> None:
    tl.store(to_query + dims, turned, mask=real & is_query)
    tl.store(to_key + dims, turned, mask=real & is_key)
    tl.store(to_value + dims, plain, mask=real & is_value)

"""Triton kernels of a decoder layer between its matrix products: norms, rotary positions, SiLU. Needs Triton.

Each kernel rounds where transformers' modules round, so results differ only by the order of sums. A token's result
does not depend on other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate, overlap
from graft.model.kernels.attention import slot_of
from graft.model.kernels.eight_bits import fitted
from graft.model.kernels.gate import is_shut
from graft.model.kernels.overlap import start_next, wait_for_previous
from graft.model.layout import Layout

_HEADS_AT_ONCE = 8
_NEURONS_AT_ONCE = 1024


def lay_out(parents: Tensor, places: Tensor, depths: Tensor, starts: Tensor, rows: Tensor, max_path: int) -> Tensor:
    """Paths [T, max_path] of a step's tokens for a `Layout`; only written where depth and place differ.

    parents: [T] int32 places in the same row. Tokens whose path is written are at most max_path - 1 deep.
    """
    paths = parents.new_empty(len(parents), max_path)
    numbers = (parents, places, depths, starts, rows, paths)
    _lay_out_kernel[(len(parents),)](*numbers, max_path, num_warps=1, **gate.options())
    return paths


def add_norm(
    stream: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    total: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """stream + delta, and its RMS norm times the weight; all [tokens, size] but the weight, [size] or [weights, size].

    Several weights take turns: the first is that of token 0, the second that of token 1, and so on.
    total, normed: where to write the two results; None: new tensors. Without a delta, the total is the stream itself.
    `normed` may be in 8 bits.

    The first kernel of a stack of layers has no delta. Its launch does not overlap, so it sees all earlier writes (see
    `overlap`).
    """
    num_tokens, size = stream.shape
    if delta is None:
        total = stream
    elif total is None:
        total = torch.empty_like(stream)
    if normed is None:
        normed = torch.empty_like(stream)
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(num_tokens,)](
        stream,
        stream if delta is None else delta,
        weight,
        total,
        normed,
        eps,
        HAS_DELTA=delta is not None,
        NUM_WEIGHTS=weight.numel() // size,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **(overlap.USUAL if delta is None else overlap.options(stream.device)),
        **gate.options(),
    )
    return total, normed


def rotate_and_store(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim], or [layers, T, ...]
    keys: Tensor,  # [num_slots, kv_heads, head_dim], one layer's store, or [layers, num_slots, ...]
    values: Tensor,
    layout: Layout,
    cos: Tensor,  # [positions, head_dim / 2]
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """Rotate queries in place, and write rotated keys, and values, to the KV cache.

    Positions past the end of the rotary tables take the last entry.
    norms: weights [head_dim], or [layers, head_dim], of an RMS norm of queries and of keys before the rotation, and its
    eps.
    """
    kv_heads, head_dim = keys.shape[-2:]
    num_heads = qkv.shape[-1] // head_dim  # of all three kinds
    if not qkv.is_contiguous() or keys.stride() != values.stride() or keys.stride()[-2:] != (head_dim, 1):
        raise ValueError("queries, and a token's keys and values, must be contiguous")
    query_norm, key_norm, eps = norms or (qkv, qkv, 0.0)
    num_layers, num_tokens = qkv.shape[:-1] if qkv.dim() == 3 else (1, len(qkv))
    _rotate_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS_AT_ONCE), num_layers)](
        *(qkv, keys, values),
        *(layout.rows, layout.places, layout.depths, layout.lengths, layout.table_rows, layout.tables),
        *(cos, sin, query_norm, key_norm, eps),
        layout.tables.shape[1],
        len(cos) - 1,
        keys.stride(-3),
        keys.stride(0),  # of layers, if there are several
        HEADS=num_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        NORMED=norms is not None,
        BLOCK_H=_HEADS_AT_ONCE,
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
        **overlap.options(qkv.device),
        **gate.options(),
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [tokens, 2 * neurons], gates first."""
    num_tokens, both = gate_up.shape
    out = gate_up.new_empty(num_tokens, both // 2)
    block = min(triton.next_power_of_2(both // 2), _NEURONS_AT_ONCE)
    grid = (num_tokens, triton.cdiv(both // 2, block))
    _silu_mul_kernel[grid](gate_up, out, SIZE=both // 2, BLOCK=block, **gate.options())
    return out


@triton.jit(do_not_specialize=["max_path"])
def _lay_out_kernel(
    parents: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    paths: tl.tensor,
    max_path: int,
    flag: tl.tensor | None = None,
) -> None:
    """Walk from one token up to the root, and write its path from the end."""
    if is_shut(flag):
        return
    token = tl.program_id(0)
    place = tl.load(places + token)
    depth = tl.load(depths + token)
    if depth != place:
        parents += tl.load(starts + tl.load(rows + token))
        paths += token.to(tl.int64) * max_path
        while place > 0:
            tl.store(paths + depth, place)
            place = tl.load(parents + place)
            depth -= 1
        tl.store(paths, 0)


@triton.jit
def rms_normed(x: tl.tensor, weight: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """RMS norm, rounded before and after the weight, as in transformers' modules."""
    scaled = (x.to(tl.float32) * inverse).to(x.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _add_norm_kernel(
    stream: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    eps: float,
    HAS_DELTA: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    token = tl.program_id(0)
    start = token.to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scale = tl.load(weight + token % NUM_WEIGHTS * SIZE + columns, mask=inside, other=0.0)
    wait_for_previous(OVERLAPS)
    x = tl.load(stream + start + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + start + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total + start + columns, x, mask=inside)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    tl.store(normed + start + columns, fitted(rms_normed(x, scale, inverse), normed.dtype.element_ty), mask=inside)


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
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: float,
    max_pages: int,
    last_position: int,
    cache_slot: tl.int64,  # strides
    cache_layer: tl.int64,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Rotate and store some heads of one token in one layer, as two halves that the rotation mixes."""
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    token, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    keys += layer * cache_layer
    values += layer * cache_layer
    row = tl.load(rows + token)
    length = tl.load(lengths + row)
    position = tl.minimum(length + tl.load(depths + token), last_position)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    real = dims < HALF
    inside = (head < HEADS + 2 * KV_HEADS) & real
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    c = tl.load(cos + position * HALF + dims, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + position * HALF + dims, mask=real, other=0.0).to(tl.float32)
    place = tl.load(places + token)
    table = tables + tl.load(table_rows + row).to(tl.int64) * max_pages
    slot = slot_of(table, length + place, place >= 0, max_pages) * cache_slot
    wait_for_previous(OVERLAPS)

    qkv += (layer * tl.num_programs(0) + token) * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    at = head * (2 * HALF) + dims
    first = tl.load(qkv + at, mask=inside, other=0.0)
    second = tl.load(qkv + at + HALF, mask=inside, other=0.0)
    x, y = first, second
    if NORMED:
        query_norm += layer * (2 * HALF)
        key_norm += layer * (2 * HALF)
        squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1) + tl.sum(
            y.to(tl.float32) * y.to(tl.float32), axis=1
        )
        inverse = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        low = tl.where(
            is_query,
            tl.load(query_norm + dims, mask=real, other=0.0),
            tl.load(key_norm + dims, mask=real, other=0.0),
        )
        high = tl.where(
            is_query,
            tl.load(query_norm + HALF + dims, mask=real, other=0.0),
            tl.load(key_norm + HALF + dims, mask=real, other=0.0),
        )
        x, y = rms_normed(x, low, inverse), rms_normed(y, high, inverse)
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    # Each product is rounded before the sum.
    turned_x = ((x32 * c).to(first.dtype).to(tl.float32) - (y32 * s).to(first.dtype).to(tl.float32)).to(first.dtype)
    turned_y = ((y32 * c).to(first.dtype).to(tl.float32) + (x32 * s).to(first.dtype).to(tl.float32)).to(first.dtype)

    tl.store(qkv + at, turned_x, mask=inside & is_query)
    tl.store(qkv + at + HALF, turned_y, mask=inside & is_query)
    stored = keys + slot + (head - HEADS) * (2 * HALF) + dims
    tl.store(stored, turned_x, mask=inside & is_key)
    tl.store(stored + HALF, turned_y, mask=inside & is_key)
    is_value = head >= HEADS + KV_HEADS
    stored = values + slot + (head - HEADS - KV_HEADS) * (2 * HALF) + dims
    tl.store(stored, first, mask=inside & is_value)
    tl.store(stored + HALF, second, mask=inside & is_value)


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up, rounded before and after the product."""
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, flag: tl.tensor | None = None
) -> None:
    if is_shut(flag):
        return
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + token * (2 * SIZE) + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + token * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0)
    tl.store(out + token * SIZE + columns, gated(gate, up), mask=inside)

"""Triton kernels of a decoder layer between its matrix products: norms, rotary positions, SiLU. Needs Triton.

Each kernel rounds where transformers' modules round, so that only sums in another order can differ from theirs. A
token's numbers depend on the token alone, whatever stands beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.attention import Paths

_HEADS_AT_ONCE = 8
_NEURONS_AT_ONCE = 1024


def lay_out(tokens: Tensor, parents: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Trees as a forward needs them: tokens [B, W] int64, depths [B, W] int32 and paths [B, W, W] int32.

    tokens, parents: [B, W] int32, of which the first `width` [1] are real. The others are padding: they repeat the
    root, see what it sees, and no node sees them.
    """
    rows, room = tokens.shape
    out = torch.empty_like(tokens, dtype=torch.int64)
    depths, paths = torch.empty_like(tokens), tokens.new_empty(rows, room, room)
    _lay_out_kernel[(room, rows)](tokens, parents, width, out, depths, paths, room)
    return out, depths, paths


def add_norm(stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """stream + delta, and its RMS norm times the weight; all [tokens, size] but the weight."""
    num_tokens, size = stream.shape
    total = stream if delta is None else torch.empty_like(stream)
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
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return total, normed


def rotate_and_store(
    qkv: Tensor,  # [B * W, (heads + 2 * kv_heads) * head_dim]
    keys: Tensor,  # [B, slots, kv_heads, head_dim], one layer of the cache
    values: Tensor,
    seen: Paths,
    cos: Tensor,  # [positions, head_dim / 2]
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
    before: Tensor | None = None,  # [B] int32
) -> None:
    """Applies rotary positions to queries in place, and writes rotated keys and values to the KV cache.

    A node's slot is its index after the committed tokens, plus `before`, the uncommitted entries of earlier forwards.
    Positions past the tables take their last entry.
    norms: weights [head_dim] of the queries' and the keys' RMS norm, which comes first, and its eps.
    """
    kv_heads, head_dim = keys.shape[2:]
    num_tokens, width = qkv.shape[0], seen.depths.shape[1]
    num_heads = qkv.shape[1] // head_dim  # of all three kinds
    if not qkv.is_contiguous() or keys.stride() != values.stride() or keys.stride()[2:] != (head_dim, 1):
        raise ValueError("queries and the keys and values of a token must lie together")
    query_norm, key_norm, eps = norms or (qkv, qkv, 0.0)
    _rotate_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS_AT_ONCE))](
        qkv,
        keys,
        values,
        seen.lengths,
        seen.depths,
        seen.lengths if before is None else before,
        cos,
        sin,
        query_norm,
        key_norm,
        eps,
        width,
        len(cos) - 1,
        *keys.stride()[:2],
        HEADS=num_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        NORMED=norms is not None,
        FOLLOWS=before is not None,
        BLOCK_H=_HEADS_AT_ONCE,
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [tokens, 2 * neurons], gates first."""
    num_tokens, both = gate_up.shape
    out = gate_up.new_empty(num_tokens, both // 2)
    block = min(triton.next_power_of_2(both // 2), _NEURONS_AT_ONCE)
    _silu_mul_kernel[(num_tokens, triton.cdiv(both // 2, block))](gate_up, out, SIZE=both // 2, BLOCK=block)
    return out


@triton.jit(do_not_specialize=["room"])
def _lay_out_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    width: tl.tensor,
    out: tl.tensor,
    depths: tl.tensor,
    paths: tl.tensor,
    room: int,
) -> None:
    """One node: walks up to the root to find its depth, and once more to write its path."""
    place = tl.program_id(0)
    tokens += tl.program_id(1) * room
    parents += tl.program_id(1) * room
    node = tl.where(place < tl.load(width), place, 0)
    target = tl.program_id(1) * room + place
    tl.store(out + target, tl.load(tokens + node).to(tl.int64))
    depth = 0
    above = node
    while above > 0:
        above = tl.load(parents + above)
        depth += 1
    tl.store(depths + target, depth)
    paths += target * room
    while node > 0:
        tl.store(paths + depth, node)
        node = tl.load(parents + node)
        depth -= 1
    tl.store(paths, 0)


@triton.jit
def rms_normed(x: tl.tensor, weight: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """RMS norm, rounded before the weight and after it, as transformers' modules do."""
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
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    x = tl.load(stream + start + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + start + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total + start + columns, x, mask=inside)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(normed + start + columns, rms_normed(x, scale, inverse), mask=inside)


@triton.jit(do_not_specialize=["width", "last_position"])
def _rotate_kernel(
    qkv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    lengths: tl.tensor,
    depths: tl.tensor,
    before: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: float,
    width: int,
    last_position: int,
    cache_row: tl.int64,  # strides
    cache_slot: int,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    FOLLOWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Some query, key or value heads of one token, as two halves that the rotation mixes."""
    token = tl.program_id(0)
    batch, node = token // width, token % width
    length = tl.load(lengths + batch)
    position = tl.minimum(length + tl.load(depths + token), last_position)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    real = dims < HALF
    inside = (head < HEADS + 2 * KV_HEADS) & real
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)

    qkv += token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    places = head * (2 * HALF) + dims
    first = tl.load(qkv + places, mask=inside, other=0.0)
    second = tl.load(qkv + places + HALF, mask=inside, other=0.0)
    x, y = first, second
    if NORMED:
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
    c = tl.load(cos + position * HALF + dims, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + position * HALF + dims, mask=real, other=0.0).to(tl.float32)
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    # Each product is rounded before they are added.
    turned_x = ((x32 * c).to(first.dtype).to(tl.float32) - (y32 * s).to(first.dtype).to(tl.float32)).to(first.dtype)
    turned_y = ((y32 * c).to(first.dtype).to(tl.float32) + (x32 * s).to(first.dtype).to(tl.float32)).to(first.dtype)

    tl.store(qkv + places, turned_x, mask=inside & is_query)
    tl.store(qkv + places + HALF, turned_y, mask=inside & is_query)
    place = length + node
    if FOLLOWS:
        place += tl.load(before + batch)
    slot = batch * cache_row + place * cache_slot
    stored = keys + slot + (head - HEADS) * (2 * HALF) + dims
    tl.store(stored, turned_x, mask=inside & is_key)
    tl.store(stored + HALF, turned_y, mask=inside & is_key)
    is_value = head >= HEADS + KV_HEADS
    stored = values + slot + (head - HEADS - KV_HEADS) * (2 * HALF) + dims
    tl.store(stored, first, mask=inside & is_value)
    tl.store(stored + HALF, second, mask=inside & is_value)


@triton.jit
def _silu_mul_kernel(gate_up: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + token * (2 * SIZE) + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + token * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + token * SIZE + columns, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)

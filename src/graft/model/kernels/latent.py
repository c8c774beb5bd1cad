"""A Triton kernel that puts queries, keys and values of latent attention together, and stores keys and values.

As in `rotary`, it rounds where transformers' modules round, and a token's result does not depend on other tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate, overlap
from graft.model.kernels.attention import slot_of
from graft.model.kernels.gate import is_shut
from graft.model.kernels.overlap import start_next, wait_for_previous
from graft.model.kernels.rotary import turned
from graft.model.layout import Layout
from graft.model.network import Attention

_HEADS_AT_ONCE = 8  # of a program


def turn_and_store(
    query: Tensor,  # [T, heads * head_dim]
    turning: Tensor,  # [T, dims], the part of keys that turns
    expanded: Tensor,  # [T, heads * (head_dim - dims + value_dim)], each head's own part of its key, and its value
    keys: Tensor,  # [num_slots, heads, head_dim], one layer's store
    values: Tensor,  # [num_slots, heads, value_dim]
    layout: Layout,
    cos: Tensor | None,  # [positions, dims / 2]
    sin: Tensor | None,
    attention: Attention,
) -> Tensor:
    """Turned queries [T, heads, head_dim]. Keys and values are written to the KV cache.

    Positions past the end of the rotary tables take the last entry.
    """
    rotary = attention.rotary
    assert cos is not None and sin is not None and rotary is not None
    if not (keys[0].is_contiguous() and values[0].is_contiguous() and expanded.is_contiguous()):
        raise ValueError("a token's keys and values must be contiguous")
    out = query.new_empty(len(query), attention.heads, attention.head_dim)
    own = attention.head_dim - rotary.dims
    _turn_kernel[len(query), triton.cdiv(attention.heads, _HEADS_AT_ONCE)](
        *(query, turning, expanded, keys, values, out),
        *(layout.rows, layout.places, layout.depths, layout.lengths, layout.table_rows, layout.tables, cos, sin),
        *(layout.tables.shape[1], len(cos) - 1, query.stride(0), turning.stride(0), keys.stride(0), values.stride(0)),
        HEADS=attention.heads,
        OWN=own,
        HALF=rotary.dims // 2,
        VALUE_DIM=attention.value_dim,
        INTERLEAVED=rotary.interleaved,
        SPREADS=rotary.spreads,
        WIDE=rotary.wide,
        BLOCK_H=_HEADS_AT_ONCE,
        BLOCK_O=triton.next_power_of_2(own),
        BLOCK_D=triton.next_power_of_2(rotary.dims // 2),
        BLOCK_V=triton.next_power_of_2(attention.value_dim),
        num_warps=4,
        **overlap.options(query.device),
        **gate.options(),
    )
    return out


@triton.jit(do_not_specialize=["max_pages", "last_position"])
def _turn_kernel(
    query: tl.tensor,
    turning: tl.tensor,
    expanded: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    tables: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    max_pages: int,
    last_position: int,
    query_token: int,  # strides
    turning_token: int,
    key_slot: tl.int64,
    value_slot: tl.int64,
    HEADS: tl.constexpr,
    OWN: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SPREADS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Some heads of one token."""
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    HEAD_DIM: tl.constexpr = OWN + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    row = tl.load(rows + token)
    length, place = tl.load(lengths + row), tl.load(places + token)
    position = tl.minimum(length + tl.load(depths + token), last_position)
    table = tables + tl.load(table_rows + row).to(tl.int64) * max_pages
    slot = slot_of(table, length + place, place >= 0, max_pages)
    own = tl.arange(0, BLOCK_O)[None, :]
    dims = tl.arange(0, BLOCK_V)[None, :]
    pairs = tl.arange(0, BLOCK_D)[None, :]
    is_pair = pairs < HALF
    low = pairs * 2 if INTERLEAVED else pairs
    high = low + 1 if INTERLEAVED else low + HALF
    to_low = pairs if SPREADS else low
    to_high = pairs + HALF if SPREADS else high
    c = tl.load(cos + position * HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    s = tl.load(sin + position * HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)

    inside = head < HEADS
    is_own, is_turning, is_value = inside & (own < OWN), inside & is_pair, inside & (dims < VALUE_DIM)
    source = query + token * query_token + head * HEAD_DIM
    target = out + (token * HEADS + head) * HEAD_DIM
    tl.store(target + own, tl.load(source + own, mask=is_own, other=0.0), mask=is_own)
    x = tl.load(source + OWN + low, mask=is_turning, other=0.0)
    y = tl.load(source + OWN + high, mask=is_turning, other=0.0)
    x, y = turned(x, y, c, s, WIDE)
    tl.store(target + OWN + to_low, x, mask=is_turning)
    tl.store(target + OWN + to_high, y, mask=is_turning)

    source = expanded + (token * HEADS + head) * (OWN + VALUE_DIM)
    target = keys + slot * key_slot + head * HEAD_DIM
    tl.store(target + own, tl.load(source + own, mask=is_own, other=0.0), mask=is_own)
    x = tl.load(turning + token * turning_token + low, mask=is_pair, other=0.0)
    y = tl.load(turning + token * turning_token + high, mask=is_pair, other=0.0)
    x, y = turned(x, y, c, s, WIDE)
    none = tl.zeros([BLOCK_H, BLOCK_D], x.dtype)
    tl.store(target + OWN + to_low, x + none, mask=is_turning)
    tl.store(target + OWN + to_high, y + none, mask=is_turning)
    target = values + slot * value_slot + head * VALUE_DIM
    tl.store(target + dims, tl.load(source + OWN + dims, mask=is_value, other=0.0), mask=is_value)

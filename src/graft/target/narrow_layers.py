"""Whole pieces of a decoder layer as Triton kernels, matrix products and all, for models whose steps cost launches
rather than memory. Importing this module needs Triton.

With the two kernels of attention a layer is six. They round where the generic layers do: products are summed in float32
and rounded once, norms before and after their weight. Tiles have one shape and sums one order whatever the number of
tokens, so a token's bits do not depend on what it is computed with: such steps are exact at every width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.target.attention import Paths
from graft.target.layer_kernels import head_inverse, rms_normed, silu_times, turned

MAX_HIDDEN = 1024  # a program holds tokens' whole hidden states, and reads them for every few outputs
MAX_TOKENS = 128  # of a step: all weights are read again for every 16
_MULTIPLE = 16  # of all sizes: what a matrix instruction takes at a time
_LONGEST_BLOCK = 128
_MAX_AHEAD = 98304  # bytes in shared memory: two programs have room beside each other


@dataclass(frozen=True)
class Tile:
    """What a program computes: some outputs of some tokens. Inputs are added up block after block."""

    tokens: int
    outputs: int
    warps: int
    stages: int  # blocks of inputs and weights on their way at once, and one in use

    def stages_for(self, outputs: int, inputs: Tensor) -> int:
        """At most so many that they fit in shared memory, with a block of that many outputs."""
        block_bytes = (2 * self.tokens + outputs) * _block(inputs.shape[1]) * inputs.element_size()
        return min(self.stages, max(_MAX_AHEAD // block_bytes, 1) + 1)


# Few outputs a program, so that many programs share a weight, and many blocks ahead: little else hides the memory.
NORMED = Tile(tokens=16, outputs=32, warps=4, stages=6)  # gates, and as many beside them
ADDED = Tile(tokens=16, outputs=16, warps=2, stages=8)
# The vocabulary is too large to be read for every 16 tokens.
LOGITS = Tile(tokens=64, outputs=128, warps=4, stages=3)
LOGITS_FLOAT32 = Tile(tokens=16, outputs=64, warps=4, stages=3)


def fits(hidden: int, intermediate: int, attended: int, num_tokens: int) -> bool:
    """Whether a step of so many tokens, rows times width, is better run by these kernels.

    attended: what the output product takes, heads times head_dim.
    """
    whole = all(size % _MULTIPLE == 0 for size in (hidden, intermediate, attended))
    return whole and hidden <= MAX_HIDDEN and num_tokens <= MAX_TOKENS


def norm_qkv(
    stream: Tensor,  # [B * W, H]
    norm: Tensor,
    eps: float,
    weight: Tensor,  # [(heads + 2 * kv_heads) * head_dim, H]
    bias: Tensor | None,
    keys: Tensor,  # [B, slots, kv_heads, head_dim], one layer of the cache
    values: Tensor,
    seen: Paths,
    cos: Tensor,  # [positions, head_dim / 2]
    sin: Tensor,
    head_norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """RMS norm, product and `layer_kernels.rotate_and_store`: gives the turned queries [B * W, heads * head_dim]."""
    num_tokens, size = stream.shape
    kv_heads, head_dim = keys.shape[2:]
    num_heads = len(weight) // head_dim  # of all three kinds
    if keys.stride() != values.stride() or keys.stride()[2:] != (head_dim, 1):
        raise ValueError("keys and values of a token must lie together, and both in the same way")
    heads = num_heads - 2 * kv_heads
    queries = stream.new_empty(num_tokens, heads * head_dim)
    query_norm, key_norm, head_eps = head_norms or (norm, norm, 0.0)
    half = max(triton.next_power_of_2(head_dim // 2), _MULTIPLE)
    _qkv_kernel[triton.cdiv(num_tokens, NORMED.tokens), num_heads](
        stream,
        norm,
        eps,
        weight,
        weight if bias is None else bias,
        query_norm,
        key_norm,
        head_eps,
        queries,
        keys,
        values,
        seen.lengths,
        seen.depths,
        cos,
        sin,
        num_tokens,
        seen.depths.shape[1],
        len(cos) - 1,
        *keys.stride()[:2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        SIZE=size,
        BIASED=bias is not None,
        NORMED=head_norms is not None,
        PRECISION=_precision(stream),
        BLOCK_M=NORMED.tokens,
        BLOCK_D=half,
        BLOCK_H=triton.next_power_of_2(size),
        BLOCK_K=_block(size),
        num_warps=NORMED.warps,
        num_stages=NORMED.stages_for(2 * half, stream),
    )
    return queries


def norm_mlp(stream: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    """RMS norm, gates and what they let through [tokens, neurons]. gate_up: [2 * neurons, H], gates first."""
    num_tokens, size = stream.shape
    neurons = len(gate_up) // 2
    out = stream.new_empty(num_tokens, neurons)
    _mlp_kernel[triton.cdiv(num_tokens, NORMED.tokens), triton.cdiv(neurons, NORMED.outputs)](
        stream,
        norm,
        eps,
        gate_up,
        out,
        num_tokens,
        NEURONS=neurons,
        SIZE=size,
        PRECISION=_precision(stream),
        BLOCK_M=NORMED.tokens,
        BLOCK_N=NORMED.outputs,
        BLOCK_H=triton.next_power_of_2(size),
        BLOCK_K=_block(size),
        num_warps=NORMED.warps,
        num_stages=NORMED.stages_for(2 * NORMED.outputs, stream),
    )
    return out


def add_product(stream: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """stream + inputs @ weight.T, all of them [tokens, size] but the weight [outputs, inputs]."""
    return _product(stream, inputs, weight, ADDED)


def logits(inputs: Tensor, weight: Tensor) -> Tensor:
    """inputs @ weight.T"""
    return _product(None, inputs, weight, LOGITS_FLOAT32 if inputs.dtype is torch.float32 else LOGITS)


def _product(stream: Tensor | None, inputs: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    num_tokens, size = inputs.shape
    out = inputs.new_empty(num_tokens, len(weight))
    _product_kernel[triton.cdiv(num_tokens, tile.tokens), triton.cdiv(len(weight), tile.outputs)](
        out if stream is None else stream,
        inputs,
        weight,
        out,
        num_tokens,
        OUTPUTS=len(weight),
        SIZE=size,
        ADDED=stream is not None,
        PRECISION=_precision(inputs),
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.outputs,
        BLOCK_K=_block(size),
        num_warps=tile.warps,
        num_stages=tile.stages_for(tile.outputs, inputs),
    )
    return out


def _block(size: int) -> int:
    """Inputs added up at once: a power of two that goes into their number."""
    return min(size & -size, _LONGEST_BLOCK)


def _precision(inputs: Tensor) -> str:
    return "ieee" if inputs.dtype is torch.float32 else "tf32"


@triton.jit
def _inverse_rms(
    stream: tl.tensor, token: tl.tensor, real: tl.tensor, eps: float, SIZE: tl.constexpr, BLOCK_H: tl.constexpr
) -> tl.tensor:
    columns = tl.arange(0, BLOCK_H)
    mask = real[:, None] & (columns < SIZE)[None, :]
    wide = tl.load(stream + token[:, None] * SIZE + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)[:, None]


@triton.jit
def _load_block(
    matrix: tl.tensor, rows: tl.tensor, real: tl.tensor, start: int, SIZE: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """[rows, BLOCK_K] from the column start on; zeros in unreal rows."""
    columns = start + tl.arange(0, BLOCK_K)
    return tl.load(matrix + rows[:, None] * SIZE + columns[None, :], mask=real[:, None], other=0.0)


@triton.jit
def _normed_block(
    stream: tl.tensor,
    norm: tl.tensor,
    token: tl.tensor,
    real: tl.tensor,
    inverse: tl.tensor,
    start: int,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    x = _load_block(stream, token, real, start, SIZE, BLOCK_K)
    # As a whole tile, since a mere row is too small to be read ahead.
    scale = _load_block(norm, token * 0, real, start, SIZE, BLOCK_K)
    return rms_normed(x, scale, inverse)


@triton.jit(do_not_specialize=["num_tokens", "width", "last_position"])
def _qkv_kernel(
    stream: tl.tensor,
    norm: tl.tensor,
    eps: float,
    weight: tl.tensor,
    bias: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    head_eps: float,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    lengths: tl.tensor,
    depths: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_tokens: int,
    width: int,
    last_position: int,
    cache_row: tl.int64,  # strides
    cache_slot: int,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One head, of whatever kind, of some tokens; as two halves, since a number turns with that in the other half."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = token < num_tokens
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HALF
    output = head * (2 * HALF) + dims
    inverse = _inverse_rms(stream, token, real, eps, SIZE, BLOCK_H)
    x = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    y = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        normed = _normed_block(stream, norm, token, real, inverse, start, SIZE, BLOCK_K)
        low = _load_block(weight, output, inside, start, SIZE, BLOCK_K)
        high = _load_block(weight, output + HALF, inside, start, SIZE, BLOCK_K)
        x = tl.dot(normed, tl.trans(low), x, input_precision=PRECISION)
        y = tl.dot(normed, tl.trans(high), y, input_precision=PRECISION)
    if BIASED:
        x += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
        y += tl.load(bias + output + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    first, second = x.to(stream.dtype.element_ty), y.to(stream.dtype.element_ty)

    mask = real[:, None] & inside[None, :]
    batch, node = token // width, token % width
    length = tl.load(lengths + batch, mask=real, other=0)
    slot = batch * cache_row + (length + node) * cache_slot
    if head >= HEADS + KV_HEADS:
        stored = values + (slot + (head - HEADS - KV_HEADS) * (2 * HALF))[:, None] + dims[None, :]
        tl.store(stored, first, mask=mask)
        tl.store(stored + HALF, second, mask=mask)
    else:
        if NORMED:
            own_inverse = head_inverse(first, second, head_eps, HALF)
            is_query = head < HEADS
            low_scale = tl.where(
                is_query,
                tl.load(query_norm + dims, mask=inside, other=0.0),
                tl.load(key_norm + dims, mask=inside, other=0.0),
            )
            high_scale = tl.where(
                is_query,
                tl.load(query_norm + HALF + dims, mask=inside, other=0.0),
                tl.load(key_norm + HALF + dims, mask=inside, other=0.0),
            )
            first = rms_normed(first, low_scale[None, :], own_inverse)
            second = rms_normed(second, high_scale[None, :], own_inverse)
        position = tl.minimum(length + tl.load(depths + token, mask=real, other=0), last_position)
        angles = position[:, None] * HALF + dims[None, :]
        c = tl.load(cos + angles, mask=mask, other=0.0)
        s = tl.load(sin + angles, mask=mask, other=0.0)
        turned_x, turned_y = turned(first, second, c, s)
        if head < HEADS:
            stored = queries + (token * (HEADS * 2 * HALF) + head * (2 * HALF))[:, None] + dims[None, :]
            tl.store(stored, turned_x, mask=mask)
            tl.store(stored + HALF, turned_y, mask=mask)
        else:
            stored = keys + (slot + (head - HEADS) * (2 * HALF))[:, None] + dims[None, :]
            tl.store(stored, turned_x, mask=mask)
            tl.store(stored + HALF, turned_y, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _mlp_kernel(
    stream: tl.tensor,
    norm: tl.tensor,
    eps: float,
    gate_up: tl.tensor,
    out: tl.tensor,
    num_tokens: int,
    NEURONS: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = token < num_tokens
    neuron = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = neuron < NEURONS
    inverse = _inverse_rms(stream, token, real, eps, SIZE, BLOCK_H)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        normed = _normed_block(stream, norm, token, real, inverse, start, SIZE, BLOCK_K)
        gates = _load_block(gate_up, neuron, inside, start, SIZE, BLOCK_K)
        ups = _load_block(gate_up, NEURONS + neuron, inside, start, SIZE, BLOCK_K)
        gate = tl.dot(normed, tl.trans(gates), gate, input_precision=PRECISION)
        up = tl.dot(normed, tl.trans(ups), up, input_precision=PRECISION)
    active = silu_times(gate.to(out.dtype.element_ty), up.to(out.dtype.element_ty))
    tl.store(out + token[:, None] * NEURONS + neuron[None, :], active, mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    stream: tl.tensor,
    inputs: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_tokens: int,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    ADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = token < num_tokens
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = output < OUTPUTS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        x = _load_block(inputs, token, real, start, SIZE, BLOCK_K)
        weights = _load_block(weight, output, inside, start, SIZE, BLOCK_K)
        acc = tl.dot(x, tl.trans(weights), acc, input_precision=PRECISION)
    places = token[:, None] * OUTPUTS + output[None, :]
    mask = real[:, None] & inside[None, :]
    result = acc.to(out.dtype.element_ty)
    if ADDED:
        before = tl.load(stream + places, mask=mask, other=0.0)
        result = (before.to(tl.float32) + result.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + places, result, mask=mask)

"""Exact products of a mixture of experts as Triton kernels. Importing this module needs Triton.

A token's result does not depend on the other tokens. A product is one chain of matrix instructions, whatever the tile
(see `matmul`). Where results are added up: `mixed`.

Nothing waits for the host: grids have the most programs that a step of this size may need, and those without work
return. So all of it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graft.model.kernels import gate, overlap
from graft.model.kernels.gate import is_shut
from graft.model.kernels.layer import ACTIVATIONS, gated
from graft.model.kernels.overlap import after_previous, start_next, wait_for_previous
from graft.model.kernels.routing import Choice, Groups
from graft.model.network import Activation

_SHARED_MEMORY, _BARRIERS = 227 * 1024, 1024  # bytes: an H200's, and what a program needs beside its blocks


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes. The choice changes no bit of the result."""

    tokens: int  # of an item
    outputs: int
    inputs: int  # of a block
    warps: int
    stages: int  # blocks that are loaded at once


@cache
def tiles_for(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, dtype: torch.dtype, shared_memory: int = _SHARED_MEMORY
) -> tuple[Tile, Tile]:
    """The tiles of gate and up, and of down, measured on an H200. Both have as many tokens."""
    both = Tile(16, 64, 32, 4, 3), Tile(16, 64, 32, 4, 3)
    by_expert = num_tokens * top_k / num_experts
    tokens = 16 if by_expert <= 10 else 32 if by_expert <= 20 else 64 if by_expert <= 80 else 128
    if tokens <= 32 and dtype is not torch.float32:
        stages = 5 if tokens == 32 else 6 if num_tokens == 1 and hidden > 2048 else 3
        both = Tile(tokens, 64, 128, 4, stages), Tile(tokens, 64, 128, 4, 4)
    elif dtype is not torch.float32:
        both = Tile(tokens, 64, 64, 4, 4), Tile(tokens, 128, 64, 4, 4)
    return _fitted(both[0], 2, dtype.itemsize, shared_memory), _fitted(both[1], 1, dtype.itemsize, shared_memory)


def _fitted(tile: Tile, parts: int, itemsize: int, shared_memory: int) -> Tile:
    """A tile with as many stages as there is memory for, in smaller blocks if these are fewer than two."""
    inputs, row = tile.inputs, (parts * tile.outputs + tile.tokens) * itemsize
    while inputs > 32 and 2 * inputs * row > shared_memory - _BARRIERS:
        inputs //= 2
    stages = min(tile.stages, max((shared_memory - _BARRIERS) // (inputs * row), 2))
    return replace(tile, inputs=inputs, stages=stages)


@cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return _SHARED_MEMORY
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 2**16)


def multiply(
    x: Tensor,  # [T, inputs], or [T * top_k, inputs] by pair
    weight: Tensor,  # [num_experts, 1 or 2, outputs, inputs]; 2: gates and ups. Inputs must be contiguous
    choice: Choice,
    groups: Groups | None,
    tile: Tile,
    bias: Tensor | None = None,  # [num_experts, 1 or 2, outputs]
    activation: Activation = "silu",
    clamp: tuple[float, float] | None = None,
    by_descriptor: bool | None = None,
) -> Tensor:
    """Each pair's product with its expert's weight, [T * top_k, outputs] by pair. Gates and ups become activations.

    clamp: limit and alpha of GPT-OSS's activation, (up + 1) * gate * sigmoid(alpha * gate), in place of `activation`.
    """
    _, parts, num_outputs, num_inputs = weight.shape
    num_pairs = choice.experts.numel()
    assert x.is_contiguous() and weight.stride(3) == 1
    out = x.new_empty(num_pairs, num_outputs)
    source: Tensor | TensorDescriptor = weight
    by_descriptor = _has_descriptors(x.device) if by_descriptor is None else by_descriptor
    if by_descriptor:
        source = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [1, 1, tile.outputs, tile.inputs])
    num_items = num_pairs if groups is None else groups.items.shape[1]
    _expert_kernel[num_items, triton.cdiv(num_outputs, tile.outputs)](
        *(x, source, bias, out, choice.experts),
        *((groups.members, groups.items, groups.count) if groups is not None else (None, None, None)),
        *(
            num_items,
            num_outputs,
            num_inputs,
            *weight.stride()[:3],
            *(bias.stride() if bias is not None else (0, 0, 0)),
        ),
        *(clamp or (0.0, 0.0)),
        PAIRS_BY_ROW=num_pairs // len(x),
        PARTS=parts,
        ACTIVATION=ACTIVATIONS[activation],
        IS_CLAMPED=clamp is not None,
        BY_DESCRIPTOR=by_descriptor,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        IS_EVEN=num_inputs % tile.inputs == 0,
        BLOCK_T=tile.tokens,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap.options(x.device),
        **gate.options(),
    )
    return out


@cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether blocks are loaded by tensor descriptors, which newer devices support."""
    return device.type != "cuda" or torch.cuda.get_device_properties(device).major >= 9


@triton.jit(do_not_specialize=["num_items", "limit", "alpha"])
def _expert_kernel(
    x: tl.tensor,
    weight: tl.tensor_descriptor,
    bias: tl.tensor | None,
    out: tl.tensor,
    experts: tl.tensor,
    members: tl.tensor | None,
    items: tl.tensor | None,
    count: tl.tensor | None,
    num_items: int,
    num_outputs: int,
    num_inputs: int,
    expert_stride: tl.int64,
    part_stride: int,
    output_stride: int,
    bias_expert: int,
    bias_part: int,
    bias_output: int,
    limit: float,
    alpha: float,
    PAIRS_BY_ROW: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Compute some outputs of one item.

    Gates and ups must wait for the choice of experts. They let the next kernel, down, start only then, so it may read
    the choice at once, and load its first weights before it waits. It reads past caches that earlier kernels filled.
    """
    if is_shut(flag):
        return
    if PARTS == 2:
        wait_for_previous(OVERLAPS)
    start_next(OVERLAPS)
    item = tl.program_id(0)
    output = tl.program_id(1) * BLOCK_N
    places = tl.arange(0, BLOCK_T)
    if items is None:
        expert = tl.load(experts + item, cache_modifier=".cg")
        real = places < 1
        pairs = item + places
    else:
        if item >= tl.load(count, cache_modifier=".cg"):
            return
        expert = tl.load(items + item, cache_modifier=".cg")
        places += tl.load(items + num_items + item, cache_modifier=".cg")
        real = places < tl.load(items + 2 * num_items + item, cache_modifier=".cg")
        pairs = tl.load(members + places, mask=real, other=0, cache_modifier=".cg")
    rows = pairs // PAIRS_BY_ROW
    strides = expert_stride, part_stride, output_stride
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    ups = acc
    for place in range(0, num_inputs, BLOCK_K):
        columns = place + tl.arange(0, BLOCK_K)
        inside = real[:, None]
        if not IS_EVEN:
            inside &= (columns < num_inputs)[None, :]
        sizes = num_outputs, num_inputs
        w = _weights(weight, expert, 0, output, place, sizes, strides, IS_EVEN, BY_DESCRIPTOR, BLOCK_N, BLOCK_K)
        own = rows
        if OVERLAPS and PARTS == 1:  # the first weights are loaded before the wait
            own += after_previous(item * 0, place)
        tokens = tl.load(x + own.to(tl.int64)[:, None] * num_inputs + columns[None, :], mask=inside, other=0.0)
        acc = tl.dot(w, tokens.T, acc, input_precision=PRECISION)
        if PARTS == 2:
            w = _weights(weight, expert, 1, output, place, sizes, strides, IS_EVEN, BY_DESCRIPTOR, BLOCK_N, BLOCK_K)
            ups = tl.dot(w, tokens.T, ups, input_precision=PRECISION)
    outputs = output + tl.arange(0, BLOCK_N)
    stored: tl.constexpr = out.dtype.element_ty
    result = acc.to(stored)
    up = ups.to(stored)
    if bias is not None:  # transformers' modules round before they add it
        bias += expert * bias_expert + outputs * bias_output
        result = _plus(result, tl.load(bias, mask=outputs < num_outputs, other=0.0)[:, None])
        if PARTS == 2:
            up = _plus(up, tl.load(bias + bias_part, mask=outputs < num_outputs, other=0.0)[:, None])
    if IS_CLAMPED:
        result = _clamped_gated(result, up, limit, alpha)
    elif PARTS == 2:
        result = gated(result, up, ACTIVATION)
    at = pairs.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(out + at, result, mask=real[None, :] & (outputs < num_outputs)[:, None])


@triton.jit
def _weights(
    weight: tl.tensor_descriptor,
    expert: tl.tensor,
    part: tl.constexpr,
    output: tl.tensor,
    place: tl.tensor,
    sizes: tl.tuple,
    strides: tl.tuple,
    IS_EVEN: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Load a block of an expert's weights, [outputs, inputs]. What is outside is 0."""
    if BY_DESCRIPTOR:
        block = weight.load([expert, part, output, place]).reshape(BLOCK_N, BLOCK_K)
    else:
        num_outputs, num_inputs = sizes
        rows, columns = output + tl.arange(0, BLOCK_N), place + tl.arange(0, BLOCK_K)
        inside = (rows < num_outputs)[:, None]
        if not IS_EVEN:
            inside &= (columns < num_inputs)[None, :]
        start = weight + expert * strides[0] + part * strides[1]
        block = tl.load(start + rows.to(tl.int64)[:, None] * strides[2] + columns[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def _plus(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x + y, rounded to x's type, as PyTorch adds."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def _clamped_gated(gates: tl.tensor, ups: tl.tensor, limit: float, alpha: float) -> tl.tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped gates and ups, rounded after every operation."""
    kind: tl.constexpr = gates.dtype
    wide = tl.minimum(gates.to(tl.float32), limit).to(kind).to(tl.float32)
    up = tl.minimum(tl.maximum(ups.to(tl.float32), -limit), limit).to(kind).to(tl.float32)
    scaled = (wide * alpha).to(kind).to(tl.float32)
    active = (wide * (1.0 / (1.0 + tl.exp(-scaled))).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    return ((up + 1.0).to(kind).to(tl.float32) * active).to(kind)

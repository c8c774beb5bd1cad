"""Exact matrix products of few tokens and large weights, as a Triton kernel. Importing this module needs Triton.

A token's result does not depend on the other tokens: every sum is one chain of matrix instructions, from the first
input to the last. The tile size changes no bit, so tiles are chosen only for speed. PyTorch splits its sums depending
on the number of tokens, which changes the last bits.

The first product of an MLP includes the activation, and rounds as if its results were stored in between. With gates, a
program computes gate and up of the same neurons.

Weights and inputs in 8 bits (`EightBits`) take half the memory traffic. They change what is computed, so only drafts,
which change no text, use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear
from triton.tools.tensor_descriptor import TensorDescriptor

from graft.model.kernels import gate, overlap
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels.eight_bits import EIGHT_BITS, fitted
from graft.model.kernels.gate import is_shut
from graft.model.kernels.layer import ACTIVATIONS, activated, gated
from graft.model.kernels.overlap import after_previous, start_next
from graft.model.network import Activation

FEW = 2048  # the kernel is about as fast as PyTorch's for up to this many tokens
_LARGE = 2**22  # and weights of at least this many numbers
_LEAST_OF_EIGHT_BITS = (8, 9)  # compute capability
_PROCESSORS, _SHARED_MEMORY = 132, 227 * 1024  # an H200's, used without a GPU
# (outputs, tokens) of a tile: (inputs of a block, warps). Instructions add a block's inputs one after the other.
_TILES = {
    (64, 16): (256, 4),
    (128, 16): (128, 4),
    (64, 32): (256, 4),
    (128, 32): (128, 4),
    (64, 64): (128, 4),
    (64, 128): (64, 4),
    (128, 64): (64, 4),
    (128, 128): (64, 8),
    (256, 128): (64, 8),
}
_FLOAT32_TILES = {(64, tokens): (32, 4) for tokens in (16, 32, 64, 128)}


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes. The choice changes no bit of the result."""

    outputs: int  # with gates and ups: half are gates, half the ups of the same neurons
    tokens: int
    inputs: int  # of a block
    warps: int
    stages: int  # blocks that are loaded at once
    num_whole: int  # rows of such tiles; the rows after them have half the outputs


def can_multiply(shape: Sequence[int]) -> bool:
    """Whether the kernel can multiply by a weight [outputs, inputs], of any number of outputs."""
    return shape[1] % 64 == 0


def can_gate(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply by gates and ups [2 * neurons, inputs] and apply the activation."""
    return can_multiply(shape) and shape[0] % _least_outputs(dtype, True) == 0  # or ups would begin within a tile


def _least_outputs(dtype: torch.dtype, is_gated: bool) -> int:
    """The fewest outputs of a tile. Matrix instructions, which float32 does not use, take 64 gates or 64 ups."""
    return 128 if is_gated and dtype is not torch.float32 else 64


@cache
def tile_for(
    num_tokens: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    processors: int = _PROCESSORS,
    shared_memory: int = _SHARED_MEMORY,
    is_gated: bool = False,
) -> Tile:
    """The fastest tile for a product, by estimated time."""
    rated = _rated_tiles(num_tokens, shape, dtype, processors, shared_memory, _least_outputs(dtype, is_gated))
    return min(rated, key=lambda each: each[0])[1]


def _rated_tiles(
    num_tokens: int, shape: tuple[int, int], dtype: torch.dtype, processors: int, shared_memory: int, least: int
) -> Iterator[tuple[float, Tile]]:
    """All possible tiles with at least `least` outputs, each with its estimated time."""
    num_outputs, num_inputs = shape
    for (outputs, tokens), (inputs, warps) in (_FLOAT32_TILES if dtype is torch.float32 else _TILES).items():
        fits = num_outputs % outputs == 0 or num_outputs % 64  # no tile does: the last has outputs that do not exist
        if outputs < least or not fits or tokens > max(triton.next_power_of_2(num_tokens), 16):
            continue
        missing = max(tokens - num_tokens, 0)
        columns, rows = triton.cdiv(num_tokens, tokens), triton.cdiv(num_outputs, outputs)
        rounds, left = divmod(columns * rows, processors)
        time, num_whole = rounds * _time_of(outputs, tokens, missing), rows
        if num_tokens >= 128 and rounds and 0 < left <= processors // 2 and outputs > least:
            # The last wave would have few tiles, and is faster with twice as many half tiles. (With few tokens, reading
            # the weights dominates, and halves do not help.)
            num_whole = rounds * processors // columns
            time += _time_of(outputs // 2, tokens, missing)
        elif left:
            time += _time_of(outputs, tokens, missing)
        # If a processor has one program, it should load many blocks ahead. If it has two, they share the memory, and
        # one works while the other starts or ends.
        memory = shared_memory if columns * rows <= processors or outputs > 128 else shared_memory // 2
        size = (outputs + tokens) * dtype.itemsize
        if dtype is EIGHT_BITS:
            inputs *= 2
        while inputs > 64 and (num_inputs % inputs or memory < 3 * size * inputs):
            inputs //= 2
        stages = max(min(memory // (size * inputs), 8), 2)
        yield time, Tile(outputs, tokens, inputs, warps, stages, num_whole)


def _time_of(outputs: int, tokens: int, missing: int) -> float:
    """Nanoseconds for a block of 64 inputs, measured on an H200. Loads past the last token are slow."""
    return 80 + 0.12 * (outputs + tokens) + 0.015 * outputs * tokens + 2.5 * missing


@dataclass(frozen=True)
class EightBits:
    """A weight in 8 bits, and what the products with it are to be multiplied by."""

    values: Tensor  # [outputs, inputs] float8
    factors: Tensor  # [outputs] float32
    dtype: torch.dtype  # of the products

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> EightBits:
        largest = torch.finfo(EIGHT_BITS).max
        factors = (weight.abs().amax(dim=1).float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
        values = torch.empty_like(weight, dtype=EIGHT_BITS)
        for part, own, factor in zip(*(t.split(4096) for t in (values, weight, factors)), strict=True):
            part.copy_(own.float() / factor[:, None])  # in parts, since float32 copies are large
        return cls(values, factors, weight.dtype)

    @staticmethod
    def why_not(weight: Tensor) -> str | None:
        """Why products with this weight cannot be in 8 bits, or should not; None if they can."""
        if any(size % 64 for size in weight.shape):
            return "its sizes are not multiples of 64"
        if weight.dtype is torch.float32:
            return "whoever wants float32 wants all its bits"
        if weight.is_cuda and (
            torch.version.hip is not None
            or torch.cuda.get_device_capability(weight.device) < _LEAST_OF_EIGHT_BITS  # other numbers with ROCm
        ):
            return "the GPU has no products in 8 bits"
        return None


class Products:
    """Matrix products of one device, by the kernel or by PyTorch."""

    def __init__(self, device: torch.device, always: bool = False) -> None:
        """always: use the kernel whenever it can run. Otherwise only behind gates, or if it is as fast as PyTorch."""
        self._always = always
        self._processors, self._shared_memory = _PROCESSORS, _SHARED_MEMORY
        self._by_descriptor = True  # load blocks by tensor descriptors, which newer devices support
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._by_descriptor = properties.major >= 9
            self._processors = properties.multi_processor_count
            self._shared_memory = getattr(properties, "shared_memory_per_block_optin", 2**16)

    def __call__(self, x: Tensor, weight: Tensor | EightBits, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] by weight [outputs, inputs], plus bias [outputs]. Inputs are in 8 bits if the weight is."""
        if isinstance(weight, EightBits) or (can_multiply(weight.shape) and self._is_ours(x, weight)):
            return self.multiply(x, weight, bias)
        return linear(x, weight, bias)

    def activate(
        self,
        x: Tensor,
        up: Tensor | EightBits,
        bias: Tensor | None = None,
        activation: Activation = "silu",
        is_gated: bool = True,
    ) -> Tensor:
        """activation(gate) * up [T, neurons] of x [T, inputs] by weights [2 * neurons, inputs], gates first.

        Not gated: activation(up), by weights [neurons, inputs]. bias: of the product. With weights in 8 bits, the
        result is in 8 bits too.
        """
        is_possible = isinstance(up, EightBits) or (
            (can_gate(up.shape, x.dtype) if is_gated else can_multiply(up.shape)) and self._is_ours(x, up)
        )
        if is_possible:
            return self.multiply(x, up, bias, None, is_gated, activation)
        return layer_kernels.activate(self(x, up, bias), activation, is_gated)

    def multiply(
        self,
        x: Tensor,
        weight: Tensor | EightBits,
        bias: Tensor | None = None,
        tile: Tile | None = None,
        is_gated: bool = False,
        activation: Activation | None = None,
    ) -> Tensor:
        """The product by the kernel. tile: None: the fastest. is_gated, activation: see `activate`."""
        activation = "silu" if is_gated and activation is None else activation
        factors, dtype = None, x.dtype
        if isinstance(weight, EightBits):
            factors, dtype = weight.factors, x.dtype if activation is not None else weight.dtype
            weight = weight.values
        assert x.is_contiguous() and weight.is_contiguous()
        num_tokens, (num_outputs, num_inputs) = len(x), weight.shape
        shape = (num_outputs, num_inputs)
        tile = tile or tile_for(num_tokens, shape, x.dtype, self._processors, self._shared_memory, is_gated)
        rows, parts = triton.cdiv(num_outputs, tile.outputs), 2 if is_gated else 1
        has_halves = tile.num_whole < rows
        out = x.new_empty(num_tokens, num_outputs // parts, dtype=dtype)
        block = tile.outputs // parts
        weight_blocks = self._blocks_of(weight, block, tile.inputs)
        _product_kernel[triton.cdiv(num_tokens, tile.tokens), 2 * rows - tile.num_whole](
            self._blocks_of(x, tile.tokens, tile.inputs),
            weight_blocks,
            self._blocks_of(weight, block // 2, tile.inputs) if has_halves else weight_blocks,
            out if bias is None else bias,
            factors,
            out,
            num_tokens,
            num_outputs,
            num_inputs,
            tile.num_whole,
            HAS_BIAS=bias is not None,
            HAS_HALVES=has_halves,
            IS_GATED=is_gated,
            ACTIVATION=ACTIVATIONS[activation],
            IS_UNEVEN=num_outputs % tile.outputs != 0,
            BY_DESCRIPTOR=self._by_descriptor,
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            BLOCK_T=tile.tokens,
            BLOCK_N=block,
            BLOCK_K=tile.inputs,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **overlap.options(x.device),
            **gate.options(),
        )
        return out

    def _is_ours(self, x: Tensor, weight: Tensor) -> bool:
        return self._always or gate.is_set() or (len(x) <= FEW and self.is_quick(weight))

    def _blocks_of(self, matrix: Tensor, rows: int, columns: int) -> TensorDescriptor | Tensor:
        if not self._by_descriptor:
            return matrix
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])

    @staticmethod
    def is_quick(weight: Tensor) -> bool:
        return weight.dtype is not torch.float32 and weight.numel() >= _LARGE


@triton.jit(do_not_specialize=["num_tokens", "num_whole"])
def _product_kernel(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    weight_halves: tl.tensor_descriptor,
    bias: tl.tensor,
    factors: tl.tensor | None,
    out: tl.tensor,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    num_whole: int,
    HAS_BIAS: tl.constexpr,
    HAS_HALVES: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_UNEVEN: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Compute one tile. The last tile ends at the last token, since loads past it are slow.

    So it may overlap with the previous tile; the shared tokens get the same bits twice.
    """
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    token = tl.maximum(tl.minimum(tl.program_id(0) * BLOCK_T, num_tokens - BLOCK_T), 0)
    row = tl.program_id(1)
    sizes = num_tokens, num_outputs, num_inputs
    flags: tl.constexpr = (HAS_BIAS, IS_GATED, BY_DESCRIPTOR, PRECISION, OVERLAPS, ACTIVATION, IS_UNEVEN)
    if HAS_HALVES:
        if row < num_whole:
            _tile(x, weight, bias, factors, out, token, row * BLOCK_N, sizes, flags, BLOCK_T, BLOCK_N, BLOCK_K)
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            output = (num_whole + row) * HALF
            _tile(x, weight_halves, bias, factors, out, token, output, sizes, flags, BLOCK_T, HALF, BLOCK_K)
    else:
        _tile(x, weight, bias, factors, out, token, row * BLOCK_N, sizes, flags, BLOCK_T, BLOCK_N, BLOCK_K)


@triton.jit
def _tile(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    bias: tl.tensor,
    factors: tl.tensor | None,
    out: tl.tensor,
    token: tl.tensor,  # the first
    output: tl.tensor,
    sizes: tl.tuple,
    flags: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute a tile. Weights are the rows of the matrix instructions, tokens the columns.

    Instructions have at least 64 rows and at least 8 columns. Only instructions of one kind give the same bits, so no
    tile has fewer than 64 outputs or gates.
    """
    num_tokens, num_outputs, num_inputs = sizes
    HAS_BIAS: tl.constexpr = flags[0]
    IS_GATED: tl.constexpr = flags[1]
    BY_DESCRIPTOR: tl.constexpr = flags[2]
    PRECISION: tl.constexpr = flags[3]
    OVERLAPS: tl.constexpr = flags[4]
    ACTIVATION: tl.constexpr = flags[5]
    IS_UNEVEN: tl.constexpr = flags[6]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    ups = acc
    for place in range(0, num_inputs, BLOCK_K):
        w = _block(weight, output, place, num_outputs, num_inputs, BLOCK_N, BLOCK_K, BY_DESCRIPTOR)
        first = token
        if OVERLAPS:  # the first weights are loaded before the wait
            first = after_previous(token, place)
        tokens = _block(x, first, place, num_tokens, num_inputs, BLOCK_T, BLOCK_K, BY_DESCRIPTOR)
        acc = tl.dot(w, tokens.T, acc, input_precision=PRECISION)
        if IS_GATED:
            up = num_outputs // 2 + output
            w = _block(weight, up, place, num_outputs, num_inputs, BLOCK_N, BLOCK_K, BY_DESCRIPTOR)
            ups = tl.dot(w, tokens.T, ups, input_precision=PRECISION)
    token += tl.arange(0, BLOCK_T)
    output += tl.arange(0, BLOCK_N)
    mask = (token < num_tokens)[None, :]
    if IS_UNEVEN:
        mask = mask & (output < num_outputs)[:, None]
        output = tl.minimum(output, num_outputs - 1)
    if factors is not None:
        acc *= tl.load(factors + output)[:, None]
        if IS_GATED:
            ups *= tl.load(factors + num_outputs // 2 + output)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + output).to(tl.float32)[:, None]
        if IS_GATED:
            ups += tl.load(bias + num_outputs // 2 + output).to(tl.float32)[:, None]
    stored: tl.constexpr = out.dtype.element_ty
    result = acc
    if stored != tl.float8e4nv:
        result = acc.to(stored)
    if IS_GATED:
        result = gated(result, ups.to(result.dtype), ACTIVATION)
        num_outputs = num_outputs // 2
    elif ACTIVATION != 0:
        result = activated(result, ACTIVATION)
    at = token[None, :].to(tl.int64) * num_outputs + output[:, None]
    tl.store(out + at, fitted(result, stored), mask=mask)


@triton.jit
def _block(
    matrix: tl.tensor_descriptor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: int,
    num_columns: int,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
) -> tl.tensor:
    """Load a block of a matrix; rows past the last are 0."""
    if BY_DESCRIPTOR:
        block = matrix.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)[:, None]
        at = rows.to(tl.int64) * num_columns + column + tl.arange(0, COLUMNS)[None, :]
        block = tl.load(matrix + at, mask=rows < num_rows, other=0.0)
    return block

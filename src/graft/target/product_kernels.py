"""Products of few tokens and large weights, as a Triton kernel. Importing this module needs Triton.

A token's numbers depend on the token alone, whatever is multiplied with it: the weight's shape decides into which
blocks and parts a sum is cut, and parts are added up in their order. PyTorch's products cut sums by the number of
tokens, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

_PROCESSORS = 132  # of the GPUs that the cuts were chosen on; elsewhere others may be faster
FEW = 64  # tokens, up to which the kernel is no slower than PyTorch's
_LARGE = 2**22  # numbers of a weight, from which on it is no slower
_MOST_ROWS = 128  # tokens of a tile
_MAX_TILES = 2**16


@dataclass(frozen=True)
class Cut:
    """The pieces of a product."""

    outputs: int  # of a tile
    inputs: int  # of a block, which one instruction after the other adds
    parts: int  # of the inputs, each summed by a program of its own
    stages: int  # blocks that are under way; this does not change a bit


def cut_of(shape: Sequence[int], dtype: torch.dtype) -> Cut | None:
    """By the weight alone, [outputs, inputs]; None for one that cannot be cut."""
    num_outputs, num_inputs = shape
    if num_outputs % 64 or num_inputs % 64:
        return None
    if dtype is torch.float32:
        return Cut(64, 32, 1, 2)
    if num_outputs % 128 == 0 and num_outputs >= 128 * _PROCESSORS:
        return Cut(128, 64, 1, 4)
    tiles = num_outputs // 64
    # One program on every processor, with much under way; or two, if that leaves too many without.
    parts = max(_PROCESSORS // tiles, 1)
    if tiles * parts < 0.75 * _PROCESSORS:
        parts = 2 * _PROCESSORS // tiles
    parts = min(parts, num_inputs // 64)
    is_one = tiles * parts <= _PROCESSORS and num_inputs % 128 == 0
    return Cut(64, 128, parts, 4) if is_one else Cut(64, 64, parts, 5)


class Products:
    """Multiplies, one product after the other."""

    def __init__(self, device: torch.device, always: bool = False) -> None:
        """always: by the kernel wherever it can; else only where it is no slower than PyTorch."""
        self._always = always
        self._arrived = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)  # parts of each tile; 0 in between
        self._shared_memory = 2**17
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._shared_memory = getattr(properties, "shared_memory_per_block_optin", self._shared_memory)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, most: int = FEW) -> Tensor:
        """x [T, inputs] by weight [outputs, inputs], and the bias [outputs] added. most: tokens for the kernel."""
        cut = cut_of(weight.shape, weight.dtype)
        if cut is None or not (self._always or (len(x) <= most and self.is_quick(weight))):
            return linear(x, weight, bias)
        return self.multiply(x, weight, bias, cut)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
        num_tokens, (num_outputs, num_inputs) = len(x), weight.shape
        rows = min(max(triton.next_power_of_2(num_tokens), 16), _MOST_ROWS)
        grid = (triton.cdiv(num_tokens, rows), num_outputs // cut.outputs, cut.parts)
        assert x.is_contiguous() and weight.is_contiguous()
        assert cut.parts == 1 or grid[0] * grid[1] <= _MAX_TILES
        out = x.new_empty(num_tokens, num_outputs)
        parts = out if cut.parts == 1 else out.new_empty(cut.parts, num_tokens, num_outputs, dtype=torch.float32)
        stage = (rows + cut.outputs) * cut.inputs * x.element_size()
        _product_kernel[grid](
            x,
            weight,
            out if bias is None else bias,
            out,
            parts,
            self._arrived,
            num_tokens,
            num_outputs,
            num_inputs,
            triton.cdiv(num_inputs // cut.inputs, cut.parts) * cut.inputs,
            HAS_BIAS=bias is not None,
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            PARTS=cut.parts,
            BLOCK_T=rows,
            BLOCK_N=cut.outputs,
            BLOCK_K=cut.inputs,
            num_warps=4,
            num_stages=max(min(cut.stages, self._shared_memory // stage), 2),
        )
        return out

    @staticmethod
    def is_quick(weight: Tensor) -> bool:
        return weight.dtype is not torch.float32 and weight.numel() >= _LARGE


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,  # [parts, T, outputs] float32
    arrived: tl.tensor,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    part_size: int,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One part of one tile; whoever is the last of a tile adds up its parts. Weights are the rows of the instructions:
    these have many rows and take any number of columns."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    begin = part * part_size
    end = tl.minimum(begin + part_size, num_inputs)
    is_real = (token < num_tokens)[None, :]
    places = begin + tl.arange(0, BLOCK_K)
    x += token[None, :].to(tl.int64) * num_inputs + places[:, None]
    weight += output[:, None].to(tl.int64) * num_inputs + places[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for _ in range(begin, end, BLOCK_K):
        w = tl.load(weight, eviction_policy="evict_first")  # nobody else needs it, and all need x
        acc = tl.dot(w, tl.load(x, mask=is_real, other=0.0), acc, input_precision=PRECISION)
        x += BLOCK_K
        weight += BLOCK_K
    place = token[None, :].to(tl.int64) * num_outputs + output[:, None]
    is_last = True
    if PARTS > 1:
        size = tl.cast(num_tokens, tl.int64) * num_outputs
        tl.store(parts + part * size + place, acc, mask=is_real)
        tl.debug_barrier()  # all threads have stored when one of them says so
        arrived += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            tl.debug_barrier()
            tl.store(arrived, 0)
            acc = tl.load(parts + place, mask=is_real, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                acc += tl.load(parts + other * size + place, mask=is_real, other=0.0, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias + output).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_real)

"""Numbers in 8 bits (float8 with 3 bits of mantissa), for inputs of products with weights in 8 bits. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate
from graft.model.kernels.gate import is_shut

EIGHT_BITS = torch.float8_e4m3fn
_LARGEST = tl.constexpr(torch.finfo(EIGHT_BITS).max)
_AT_ONCE = 1024


def in_eight_bits(x: Tensor) -> Tensor:
    """x [tokens, size] in 8 bits."""
    out = torch.empty_like(x, dtype=EIGHT_BITS)
    num_tokens, size = x.shape
    block = min(triton.next_power_of_2(size), _AT_ONCE)
    _in_eight_bits_kernel[num_tokens, triton.cdiv(size, block)](x, out, SIZE=size, BLOCK=block, **gate.options())
    return out


@triton.jit
def fitted(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x in another dtype. Numbers too large for 8 bits become the largest that fits."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -_LARGEST), _LARGEST)
    return x.to(dtype)


@triton.jit
def _in_eight_bits_kernel(
    x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, flag: tl.tensor | None = None
) -> None:
    if is_shut(flag):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    tl.store(out + at, fitted(tl.load(x + at, mask=inside, other=0.0), out.dtype.element_ty), mask=inside)

"""Gates: kernels that return at once if a flag on the device says so. Importing this module needs Triton.

The host does not need to know the flag, so a CUDA graph can contain optional work, such as later draft passes. Each
kernel reads the flag when it runs. A skipped kernel costs only its launch and writes nothing, so whatever reads its
outputs must be behind the same gate, or accept any content.

Only our kernels have gates; PyTorch's operations always run. So behind a gate they must not write to memory that is
used later, nor take indices from memory that a skipped kernel would have written.

The first launch behind a gate must be a usual one, which does not overlap (see `overlap`). So the kernel that wrote the
flag has ended before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_OPEN: dict[str, Any] = {}

_flag: ContextVar[Tensor | None] = ContextVar("graft_gate", default=None)


@contextmanager
def under(flag: Tensor) -> Iterator[None]:
    """Context whose kernels return at once if the flag, one int32 on the device, is 0 when they run.

    Of nested gates, only the inner one counts. Kernels are compiled a second time for flags whose address is not a
    multiple of 16.
    """
    if flag.dtype is not torch.int32 or flag.numel() != 1:
        raise ValueError("a gate's flag must be one int32")
    token = _flag.set(flag)
    try:
        yield
    finally:
        _flag.reset(token)


def is_set() -> bool:
    """Whether launches are behind a gate now."""
    return _flag.get() is not None


def options() -> dict[str, Any]:
    """Options of a launch, for a kernel with an argument `flag` that is None by default."""
    flag = _flag.get()
    return _OPEN if flag is None else {"flag": flag}


@triton.jit
def is_shut(flag: tl.tensor | None) -> tl.tensor | tl.constexpr:
    """Whether the kernel should return now. Without a gate, this is a compile-time constant."""
    if flag is None:
        return False
    else:
        return tl.load(flag) == 0

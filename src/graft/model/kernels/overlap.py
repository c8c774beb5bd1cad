"""Launches that overlap: kernels start while those before them still run. Importing this module needs Triton.

A small kernel takes longer to start and to end than to work. On GPUs from Hopper on, a kernel may be launched before
the one in front of it has ended (programmatic dependent launch). Such a kernel

- says at once that the next one may start (`start_next`), on the processors that are left over;
- first does what depends on no other kernel: it finds its part of the work and loads its first weights;
- waits in all its programs, whatever they do, before it reads what others wrote and before it writes anything
  (`wait_for_previous`).

As each waits for the one in front of it, which has waited too, all that was launched earlier has ended behind the wait.
Before it, none of that need have ended, back to the last kernel that was launched in the usual way: that one starts
when all before it have ended, and those behind it start when it has.

Results have the same bits with and without. It pays where layers are small (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

is_on = True  # where it can be; benchmarks switch it off, to compare
_LEAST_CAPABILITY = 9
_LEAST_CUDA = (12, 4)  # from which on graphs keep such launches
USUAL: dict[str, Any] = {"OVERLAPS": False}  # options of a launch that starts when all before it have ended

_is_worth_it: ContextVar[bool] = ContextVar("graft_overlapping_launches", default=False)


@contextmanager
def launches(are_worth_it: bool) -> Iterator[None]:
    """Within it launches overlap where they can, if that is worth it. Kernels look at layout and plan before they wait:
    these must have been written before, and the first launch within must be a usual one, which settles them."""
    token = _is_worth_it.set(are_worth_it)
    try:
        yield
    finally:
        _is_worth_it.reset(token)


def options(device: torch.device) -> dict[str, Any]:
    """Options of a launch that may overlap with the one before it, for a kernel with the flag OVERLAPS."""
    return {"OVERLAPS": True, "launch_pdl": True} if is_on and _is_worth_it.get() and _is_possible(device) else USUAL


@cache
def _is_possible(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if not isinstance(wait_for_previous, triton.JITFunction):  # the interpreter's
        return False
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return (
        hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
        and torch.cuda.get_device_capability(device)[0] >= _LEAST_CAPABILITY
        and cuda >= _LEAST_CUDA
    )


@triton.jit
def start_next(OVERLAPS: tl.constexpr) -> None:
    """Lets the next kernel start as soon as all programs of this one have."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """Waits until all kernels before this one have ended; once is enough, and more does no harm."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def after_previous(index: tl.tensor, place: tl.tensor) -> tl.tensor:
    """The index, once all kernels before this one have ended: for loads within a loop whose `place` is 0 at first.

    Only what takes its address from the result comes behind the wait, and other loads of a pipelined loop do not. So it
    is pure to the compiler; a kernel that waits like this must write nothing that does not depend on such loads.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p griddepcontrol.wait; mov.u32 $0, $1; }",
        "=r,r,r",
        [index, tl.cast(place, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )

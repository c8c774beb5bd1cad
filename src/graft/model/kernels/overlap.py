"""Overlapping launches: kernels start while earlier ones still run. Importing this module needs Triton.

A small kernel takes longer to start and end than to work. On GPUs from Hopper on, a kernel can be launched before the
previous one has ended (programmatic dependent launch). Such a kernel

- lets the next kernel start at once (`start_next`), on processors that are free;
- first does what depends on no other kernel: it finds its part of the work and loads its first weights;
- waits, in all its programs, before it reads what other kernels wrote and before it writes anything
  (`wait_for_previous`).

Each kernel waits for the previous one, which has waited too. So after the wait, all earlier kernels have ended. A usual
launch starts when all earlier kernels have ended, and later ones start when it has ended. So before the wait, at most
the kernels since the last usual launch may still run.

Results have the same bits with and without overlap. It is faster if layers are small, or in steps of 8
to 64 tokens (docs/benchmarks.md).
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

FASTER = range(8, 65)  # tokens of the steps in which launches overlap in layers of any size
is_on = True  # benchmarks switch it off to compare
_LEAST_CAPABILITY = 9
_LEAST_CUDA = (12, 4)  # graphs preserve such launches from this version on
USUAL: dict[str, Any] = {"OVERLAPS": False}  # options of a launch that starts when all earlier kernels have ended

_is_worth_it: ContextVar[bool] = ContextVar("graft_overlapping_launches", default=False)


@contextmanager
def launches(are_worth_it: bool) -> Iterator[None]:
    """Context in which launches overlap if possible and worth it.

    Kernels read layout, plan and their gate's flag before they wait. So between the kernels that write these and the
    first launch that overlaps there must be a usual launch, behind the same gate: it waits until they are written.
    """
    token = _is_worth_it.set(are_worth_it)
    try:
        yield
    finally:
        _is_worth_it.reset(token)


def options(device: torch.device) -> dict[str, Any]:
    """Options of a launch that may overlap with the previous one, for a kernel with the flag OVERLAPS."""
    overlaps = is_on and _is_worth_it.get() and _is_possible(device)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else USUAL


@cache
def _is_possible(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if not isinstance(wait_for_previous, triton.JITFunction):  # Triton's interpreter is in use
        return False
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return (
        hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
        and torch.cuda.get_device_capability(device)[0] >= _LEAST_CAPABILITY
        and cuda >= _LEAST_CUDA
    )


@triton.jit
def start_next(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel start as soon as all programs of this one have started."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """Wait until all earlier kernels have ended. Repeated waits do no harm."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def after_previous(index: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Return the index after all earlier kernels have ended: for loads in a loop whose first `place` is 0.

    Only loads whose address depends on the result come after the wait; the compiler may move other loads of the loop
    before it. A kernel that waits like this must write nothing that does not depend on such loads.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p griddepcontrol.wait; mov.u32 $0, $1; }",
        "=r,r,r",
        [index, tl.cast(place, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )

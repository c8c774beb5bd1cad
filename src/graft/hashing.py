"""A counter-based mixing function on int64 tensors, the same on every device.

It keys the sampling noise (`model.sampler`) and names paths (`candidates`) and n-grams (`successor_table`).
"""

from __future__ import annotations

from torch import Tensor

# Odd 64-bit constants of the SplitMix64 finalizer, as the signed numbers that int64 tensors hold.
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def mix64(x: Tensor) -> Tensor:
    """Scrambles every bit of int64 `x`; int64 arithmetic wraps, as the mixing needs."""
    x = x + GOLDEN
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own is arithmetic and would drag the sign bit along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

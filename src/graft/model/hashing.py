"""A counter-based mixing function on int64 tensors, the same on every device.

It makes the sampling noise (`model/sampler.py`), the keys of paths (`tree/candidates.py`) and those of n-grams
(`drafters/successor_table.py`).
"""

from __future__ import annotations

from torch import Tensor

# Odd 64-bit constants of the SplitMix64 finalizer, as the signed numbers that int64 tensors hold.
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def mix64(x: Tensor) -> Tensor:
    """Mix the bits of int64 `x`; int64 arithmetic wraps, as SplitMix64 needs."""
    x = x + GOLDEN
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own is arithmetic, so it would copy the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

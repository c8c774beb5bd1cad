"""Garbage is looked for among what tests make only: what imports make stays, and looking through it takes seconds.
Import it before everything that is large."""

from __future__ import annotations

import gc

gc.disable()


def begin() -> None:
    """Everything is imported."""
    gc.freeze()
    gc.enable()

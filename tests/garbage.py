"""The collector looks at what tests make only: what imports make stays, and to look through it takes half a second.
Import it before everything that is large."""

from __future__ import annotations

import gc

gc.disable()


def begin() -> None:
    """Everything is imported."""
    gc.freeze()
    gc.unfreeze = lambda: None  # a server that stops would thaw the imports as well, for all tests after it
    gc.enable()

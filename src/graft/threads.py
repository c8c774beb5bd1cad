"""Threads that wait for each other sleep soon, so that they are not in each other's way on a busy machine."""

from __future__ import annotations

import os
import sys

_SPIN = "GOMP_SPINCOUNT"  # how often a waiting thread of OpenMP looks again before it sleeps; read when torch is loaded
_SPINS = "1000"  # some microseconds


def sleep_when_waiting() -> None:
    """For torch, if it is not loaded yet and the user has not said otherwise.

    A product is shared by all cores and waits for the last. A thread that spins all the time has used up its share of
    a core when another process wants that core too, and is then the last by milliseconds, at every product. One that
    sleeps is woken before the other process.
    """
    if "torch" not in sys.modules and not {_SPIN, "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ[_SPIN] = _SPINS

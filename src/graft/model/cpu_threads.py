"""All threads or one? On busy cores threads wait long for each other, at every layer, so calls are timed.

The results have the same bits either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from graft.model.cpu_linear import threads

_FIRST, _LONGEST = 64, 512  # calls until the other way is tried again; the number doubles while it is slower
_SLOW, _NUM_SLOW = 3.0, 2  # after so many calls in a row that take so many times the usual, it is tried at once
_SHARE = 1 / 8  # of the last call in the usual time
_T = TypeVar("_T")


class ThreadChoice:
    """The faster way for calls of one kind."""

    def __init__(self) -> None:
        self.is_single = False
        self._seconds: list[float | None] = [None, None]  # the usual time with all threads, and with one
        self._wait, self._interval, self._num_slow = 1, _FIRST // 2, 0

    def run(self, call: Callable[[Any], _T], size: float) -> _T:
        """The result of `call`, which gets the functions of threads, or None for one. Its time grows with `size`."""
        tries_other = self._wait == 0
        is_single = self.is_single != tries_other
        start = time.perf_counter()
        result = call(None if is_single else threads())
        seconds = (time.perf_counter() - start) / size
        usual = self._seconds[is_single]
        if tries_other:
            self._seconds[is_single] = seconds
            now = self._seconds[not is_single]
            is_faster = now is not None and seconds < now
            self.is_single = is_single if is_faster else self.is_single
            self._interval = _FIRST if is_faster else min(2 * self._interval, _LONGEST)
            self._wait, self._num_slow = self._interval, 0
            return result
        self._wait -= 1
        self._num_slow = self._num_slow + 1 if usual is not None and seconds > _SLOW * usual else 0
        self._seconds[is_single] = seconds if usual is None else usual + _SHARE * (seconds - usual)
        if self._num_slow >= _NUM_SLOW:
            self._wait = 0
        return result

"""What a verify costs by its width on this machine, measured, and which width that makes best."""

from __future__ import annotations

import math
import time
from bisect import bisect_left

import torch
from torch import Tensor

from graft.target import TargetRunner, TreeCache
from graft.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_HOPELESS = 6.0  # a width that costs this many plain steps is not tried, nor are larger ones
_MARGIN = 1.05  # expected gain below which plain decoding is kept: estimates are not that good
_BLEND = 0.3  # weight of a new observation
_DOUBT = 0.999  # by which an estimate that is not put to the test shrinks, look by look, until it is


class VerifyCost:
    """Seconds of a verify of W tokens, for a few widths W, kept up to date by what rounds really take."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    @property
    def measured(self) -> bool:
        return bool(self._seconds)

    def measure(self, target: TargetRunner, context: int = 64) -> None:
        """Times a few trees on a scratch cache, twice over, and keeps the better: one hiccup spoils nothing."""
        cache = target.open(1, context + max(WIDTHS))
        for _ in target.prefill(cache, 0, [0] * context):
            pass
        self._time_once(target, cache, 1)  # the first forward of a process pays for one-time set-up
        seconds: dict[int, float] = {}
        for _ in range(2):
            for width in WIDTHS:
                seconds[width] = min(self._time_once(target, cache, width), seconds.get(width, math.inf))
                if seconds[width] > _HOPELESS * seconds[1]:
                    break
        self._seconds = {width: s for width, s in seconds.items() if s <= _HOPELESS * seconds[1]}

    def observe(self, width: int, seconds: float) -> None:
        """Takes in what a round's verify took. A hiccup of the machine counts for little."""
        known = self._seconds.get(width)
        if known is not None:
            self._seconds[width] += _BLEND * (min(seconds, 2 * known) - known)

    def best_width(self, gains: Tensor, num_rows: int = 1) -> int:
        """The width, root included, with the most expected tokens per second.

        gains [N]: expected accepted tokens that each further node adds, all rows together, best first.
        """
        expected = torch.cat([gains.new_zeros(1), gains.cumsum(0)]).tolist()
        best, best_rate = 1, _MARGIN * num_rows / self._predict(num_rows)
        for width in self._seconds:
            rate = (num_rows + expected[min(width, len(expected)) - 1]) / self._predict(num_rows * width)
            if width > 1 and rate > best_rate:
                best, best_rate = width, rate
        for width in self._seconds:
            if width not in (1, best):
                self._seconds[width] *= _DOUBT
        return best

    def _predict(self, num_tokens: int) -> float:
        """Straight lines between the measured widths, and on from the last."""
        known = self._seconds.get(num_tokens)
        if known is not None:
            return known
        widths = sorted(self._seconds)
        if len(widths) == 1:
            return self._seconds[1] * num_tokens
        right = min(bisect_left(widths, num_tokens), len(widths) - 1)
        low, high = widths[right - 1], widths[right]
        slope = (self._seconds[high] - self._seconds[low]) / (high - low)
        return self._seconds[high] + slope * (num_tokens - high)

    @staticmethod
    def _time_once(target: TargetRunner, cache: TreeCache, width: int) -> float:
        chain = DraftTree.chain(torch.zeros(1, width, dtype=torch.int64, device=target.device))
        start = time.perf_counter()
        target.verify(cache, chain)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        return time.perf_counter() - start

"""What a verify costs by its width on this machine, measured, and which width that makes best."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.target import TargetRunner, TreeCache
from graft.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_HOPELESS = 6.0  # a width that costs this many plain steps is the last that is timed
_MARGIN = 1.05  # expected gain below which plain decoding is kept: estimates are not that good
_BLEND = 0.3  # weight of a new observation
_DOUBT = 0.999  # by which an estimate that is not put to the test shrinks, look by look, until it is


@dataclass(frozen=True)
class Plan:
    """A round: how wide its verify is, root included, what it should bring and what it should take."""

    width: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class VerifyCost:
    """Seconds of a verify of W tokens, for a few widths W, kept up to date by what rounds really take."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    @property
    def measured(self) -> bool:
        return bool(self._seconds)

    def measure(self, target: TargetRunner, context: int = 64) -> None:
        """Times a few trees on a scratch cache, twice over, and keeps the better: one hiccup spoils nothing.

        Where wider trees cannot pay, they are not timed but guessed; should a guess ever look good it is tried.
        """
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
        widest = max(seconds)
        self._seconds = {width: seconds.get(width, seconds[widest] * width / widest) for width in WIDTHS}

    def observe(self, width: int, seconds: float) -> None:
        """Takes in what a round's verify took. A hiccup of the machine counts for little."""
        known = self._seconds.get(width)
        if known is not None:
            self._seconds[width] += _BLEND * (min(seconds, 2 * known) - known)

    def best_plan(self, gains: Tensor, num_rows: int = 1, spent: float = 0.0) -> Plan:
        """The plan with the most expected tokens per second; plain decoding unless another is clearly better.

        gains [N]: expected accepted tokens that each further node adds, all rows together, best first.
        spent: seconds already gone into this round's drafting.
        """
        expected = [0.0, *gains.cumsum(0).tolist()]
        best = plain = Plan(1, num_rows, self._predict(num_rows) + spent)
        for width in self._seconds:
            tokens = num_rows + expected[min(width, len(expected)) - 1]
            plan = Plan(width, tokens, self._predict(num_rows * width) + spent)
            if plan.rate > max(best.rate, _MARGIN * plain.rate):
                best = plan
        return best

    def doubt(self, used: int) -> None:
        """Estimates of widths that the round does not use lose a little of their weight, until one is tried again."""
        for width in self._seconds:
            if width not in (1, used):
                self._seconds[width] *= _DOUBT

    def widened(self, plan: Plan, num_rows: int) -> list[Plan]:
        """The plan at every measured width from its own up, with the same tokens."""
        spent = plan.seconds - self._predict(num_rows * plan.width)
        return [
            Plan(width, plan.tokens, self._predict(num_rows * width) + spent)
            for width in self._seconds
            if width >= plan.width
        ]

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
        slope = max(0.0, self._seconds[high] - self._seconds[low]) / (high - low)
        return self._seconds[high] + slope * (num_tokens - high)

    @staticmethod
    def _time_once(target: TargetRunner, cache: TreeCache, width: int) -> float:
        chain = DraftTree.chain(torch.zeros(1, width, dtype=torch.int64, device=target.device))
        start = time.perf_counter()
        target.verify(cache, chain)
        target.synchronize()
        return time.perf_counter() - start

"""What a verify costs by its width on this machine, measured, and which width that makes best."""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graft.model import TargetRunner, TreeCache
from graft.spec_decode.native import native, plain
from graft.spec_decode.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_HOPELESS = 6.0  # a width that costs this many plain steps is the last that is timed
_BLEND = 0.3  # weight of a new observation
HICCUP = 2.0  # times the known seconds: the most that an observation counts for
_DOUBT = 0.999  # by which an estimate that is not put to the test shrinks, look by look, until it is


class Plan(NamedTuple):
    """A round: how wide its verify is, root included, what it should bring and what it should take."""

    width: int
    tokens: float
    seconds: float

    def worth(self, rate: float) -> float:
        """Tokens beyond those that the same time brings at the usual rate, in tokens per second."""
        return self.tokens - rate * self.seconds


class MeansBySize:
    """Running means by the size of the batch; of a size that was not seen yet, what its neighbours say, if they do."""

    def __init__(
        self, blend: float = _BLEND, hiccup: float = HICCUP, growth: Callable[[int], float] | None = None
    ) -> None:
        """blend: weight of a new observation; hiccup: times what is known, the most that it counts for; growth: of the
        rows, to what values are about proportional; None if a size tells nothing of others."""
        self._blend, self._hiccup, self._growth = blend, hiccup, growth
        self._means: dict[int, float] = {}

    def get(self, num_rows: int, estimate: float = 0.0) -> float:
        """estimate: what it is as long as nothing was seen that tells it."""
        size = size_of(num_rows)
        if size in self._means or not self._means or self._growth is None:
            return self._means.get(size, estimate)
        nearest = min(max(size, min(self._means)), max(self._means))
        grown = self._growth(1 << size) / self._growth(1 << nearest) if nearest != size else 1.0
        return between(self._means, nearest) * grown

    def observe(self, num_rows: int, value: float, estimate: float | None = None) -> None:
        # What was seen once to take half the time took long for reasons of its own: a first use, other work beside.
        known = min(self.get(num_rows, value if estimate is None else estimate), self._hiccup * value)
        self._means[size_of(num_rows)] = known + self._blend * (min(value, self._hiccup * known) - known)

    def restart(self, of_one_row: float = 0.0) -> None:
        """Forgets what was seen, and knows at most that of a row alone."""
        self._means = {0: of_one_row} if of_one_row else {}


def between(seen: Mapping[int, float], size: int) -> float:
    """The value of a size: straight lines, by the number of rows, between those that were seen; level beyond them."""
    low = max((other for other in seen if other <= size), default=min(seen))
    high = min((other for other in seen if other >= size), default=max(seen))
    if low >= high:
        return seen[high]
    return seen[low] + (seen[high] - seen[low]) * ((1 << size) - (1 << low)) / ((1 << high) - (1 << low))


def total_gains(paths: Tensor) -> list[float]:
    """Expected accepted tokens of the 1, 2, 3 ... best nodes of all rows. paths [B, n]: of each its own, best first."""
    paths, gains = plain(paths, torch.float32), array("d", bytes(8 * paths.shape[1]))
    native().graft_gains(*paths.shape, paths.data_ptr(), gains.buffer_info()[0])
    return gains.tolist()


def plans_for(choices: Sequence[tuple[int, float]], gains: Sequence[float], num_rows: int = 1) -> list[Plan]:
    """A plan for every choice of width. gains: expected accepted tokens of the 1, 2, 3 ... best nodes of all rows."""
    most = len(gains)
    return [
        Plan(width, num_rows + (gains[min(width - 1, most) - 1] if width > 1 and gains else 0.0), seconds)
        for width, seconds in choices
    ]


class VerifyCost:
    """Seconds of a verify of W tokens a row, for a few widths W, kept up to date by what rounds really take."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of one row
        # Rows have caches of their own, so that many of them cost more than one row as wide: by how much, was seen.
        self._factors: dict[tuple[int, int], float] = {}  # (size of the batch, width)

    @property
    def measured(self) -> bool:
        return bool(self._seconds)

    def measure(self, target: TargetRunner, widths: Sequence[int] = WIDTHS, context: int = 64) -> None:
        """Times a few trees on a scratch cache, twice over, and keeps the better: one hiccup spoils nothing.

        Where wider trees cannot pay, they are not timed but guessed; should a guess ever look good it is tried.
        """
        cache = target.open(1, context + max(widths))
        for _ in target.prefill(cache, 0, [0] * context):
            pass
        self._time_once(target, cache, 1)  # the first forward of a process pays for one-time set-up
        seconds: dict[int, float] = {}
        for _ in range(2):
            for width in widths:
                seconds[width] = min(self._time_once(target, cache, width), seconds.get(width, math.inf))
                if seconds[width] > _HOPELESS * seconds[widths[0]]:
                    break
        widest = max(seconds)
        self._seconds = {width: seconds.get(width, seconds[widest] * width / widest) for width in widths}

    @classmethod
    def fixed(cls, width: int) -> VerifyCost:
        """The cost of rounds that all have one width: it is the unit."""
        cost = cls()
        cost._seconds = {width: 1.0}
        return cost

    def state(self) -> dict[str, Tensor]:
        widths, seconds = list(self._seconds), list(self._seconds.values())
        return {"widths": torch.tensor(widths), "seconds": torch.tensor(seconds, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._seconds = dict(zip(state["widths"].tolist(), state["seconds"].tolist(), strict=True))

    @property
    def widths(self) -> list[int]:
        return list(self._seconds)

    def observe(self, width: int, seconds: float, num_rows: int = 1) -> None:
        """Takes in what a round's verify took. A hiccup of the machine counts for little."""
        if width not in self._seconds:
            return
        known, place = self.seconds(width, num_rows), (size_of(num_rows), width)
        is_guess = num_rows > 1 and place not in self._factors
        new = known + (1.0 if is_guess else _BLEND) * (min(seconds, HICCUP * known) - known)
        if num_rows == 1:
            self._seconds[width] = new
        else:
            self._factors[place] = new / self._predict(num_rows * width)
            # Plain rounds may have become rare, but they take no longer than wider ones.
            plain = next(iter(self._seconds))
            if self.seconds(plain, num_rows) > new:
                self._factors[size_of(num_rows), plain] = new / self._predict(num_rows * plain)

    def seconds(self, width: int, num_rows: int = 1) -> float:
        """Of a verify of that many tokens in each of the rows."""
        return self._predict(num_rows * width) * self._factor(size_of(num_rows), width)

    def plain_seconds(self, num_rows: int) -> float:
        """Of a round of the least width."""
        return self.seconds(next(iter(self._seconds)), num_rows)

    def choices(self, num_rows: int = 1, overhead: float = 0.0) -> list[tuple[int, float]]:
        """Every width, and what a round of it takes. overhead: seconds of one with a tree beside its verify."""
        return [(width, self.seconds(width, num_rows) + (overhead if width > 1 else 0.0)) for width in self._seconds]

    def doubt(self, used: int, num_rows: int = 1) -> None:
        """Estimates of widths that the round does not use lose a little of their weight, until one is tried again."""
        for width in self._seconds:
            if width in (1, used):
                continue
            if num_rows == 1:
                self._seconds[width] *= _DOUBT
            elif (size_of(num_rows), width) in self._factors:
                self._factors[size_of(num_rows), width] *= _DOUBT

    def _factor(self, size: int, width: int) -> float:
        """By how much a verify of many rows is off: as it was seen, else as with more and with fewer rows."""
        own = self._factors.get((size, width)) if size else 1.0
        if own is not None:
            return own
        seen = {other: factor for (other, its_width), factor in self._factors.items() if its_width == width}
        plain = next(iter(self._seconds))
        if not seen and width != plain:  # never tried: as far off as plain steps
            return self._factor(size, plain)
        return between({0: 1.0, **seen}, size)

    def _predict(self, num_tokens: int) -> float:
        """Straight lines between the measured widths, and on from the last."""
        known = self._seconds.get(num_tokens)
        if known is not None:
            return known
        widths = sorted(self._seconds)
        if len(widths) == 1:  # a unit, however many rows share it
            return self._seconds[widths[0]]
        right = min(bisect_left(widths, num_tokens), len(widths) - 1)
        low, high = widths[right - 1], widths[right]
        slope = max(0.0, self._seconds[high] - self._seconds[low]) / (high - low)
        return self._seconds[high] + slope * (num_tokens - high)

    @staticmethod
    def _time_once(target: TargetRunner, cache: TreeCache, width: int) -> float:
        chain = DraftTree.chain(torch.zeros(1, width, dtype=torch.int64))
        target.warm_up(cache, width)
        start = time.perf_counter()
        target.verify(cache, chain)
        target.synchronize()
        return time.perf_counter() - start


def size_of(num_rows: int) -> int:
    """Batches of about the same size are one: 1, 2, 3 to 4, 5 to 8 ..."""
    return (num_rows - 1).bit_length()

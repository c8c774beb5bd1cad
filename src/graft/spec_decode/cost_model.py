"""Cost model: seconds of a verify by its width (tokens a row) and batch size, measured on this machine, and plans of
rounds made from them."""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graft.model import KVCache, TargetRunner
from graft.spec_decode.native import native, plain
from graft.spec_decode.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_HOPELESS = 6.0  # a width that costs this many plain steps is the last that is timed
_BLEND = 0.3  # weight of a new observation in a running mean
HICCUP = 2.0  # an observation counts for at most this many times the known seconds
_DOUBT = 0.999  # by which the estimate of an unused width shrinks every round, until it looks best and is tried


class Plan(NamedTuple):
    """A width for the round's verify, with the expected tokens and seconds of all rows together."""

    width: int  # tokens a row, the root included
    tokens: float  # accepted ones, and one of the target's own a row
    seconds: float

    def worth(self, rate: float) -> float:
        """Expected tokens beyond those that the same time brings at the usual `rate`, in tokens per second."""
        return self.tokens - rate * self.seconds


class MeansBySize:
    """Running means by batch size; a size not seen yet is estimated from those that were."""

    def __init__(
        self, blend: float = _BLEND, hiccup: float = HICCUP, growth: Callable[[int], float] | None = None
    ) -> None:
        """blend: weight of a new observation; hiccup: an observation counts for at most this many times the mean.

        growth: a function of the number of rows that values are about proportional to; None if sizes tell nothing of
        each other.
        """
        self._blend, self._hiccup, self._growth = blend, hiccup, growth
        self._means: dict[int, float] = {}

    def get(self, num_rows: int, estimate: float = 0.0) -> float:
        """The mean of this batch size; `estimate` if nothing is known of it."""
        size = size_of(num_rows)
        if size in self._means or not self._means or self._growth is None:
            return self._means.get(size, estimate)
        nearest = min(max(size, min(self._means)), max(self._means))
        grown = self._growth(1 << size) / self._growth(1 << nearest) if nearest != size else 1.0
        return between(self._means, nearest) * grown

    def observe(self, num_rows: int, value: float, estimate: float | None = None) -> None:
        # A mean far above the new value was inflated by something that has passed, such as a first use.
        known = min(self.get(num_rows, value if estimate is None else estimate), self._hiccup * value)
        self._means[size_of(num_rows)] = known + self._blend * (min(value, self._hiccup * known) - known)

    def restart(self, of_one_row: float = 0.0) -> None:
        """Forgets all means; `of_one_row`, unless 0, becomes that of a batch of one."""
        self._means = {0: of_one_row} if of_one_row else {}


def between(seen: Mapping[int, float], size: int) -> float:
    """The value of a size, interpolated linearly in the number of rows between sizes seen; constant beyond them."""
    low = max((other for other in seen if other <= size), default=min(seen))
    high = min((other for other in seen if other >= size), default=max(seen))
    if low >= high:
        return seen[high]
    return seen[low] + (seen[high] - seen[low]) * ((1 << size) - (1 << low)) / ((1 << high) - (1 << low))


def total_gains(paths: Tensor) -> list[float]:
    """Expected accepted tokens, in all rows together, of each row's 1, 2, 3 ... best nodes.

    paths [B, n]: path probabilities, each row's best first.
    """
    paths, gains = plain(paths, torch.float32), array("d", bytes(8 * paths.shape[1]))
    native().graft_gains(*paths.shape, paths.data_ptr(), gains.buffer_info()[0])
    return gains.tolist()


def plans_for(choices: Sequence[tuple[int, float]], gains: Sequence[float], num_rows: int = 1) -> list[Plan]:
    """A plan for every choice (width, seconds). gains: as `total_gains` gives them."""
    most = len(gains)
    return [
        Plan(width, num_rows + (gains[min(width - 1, most) - 1] if width > 1 and gains else 0.0), seconds)
        for width, seconds in choices
    ]


class VerifyCost:
    """Running means of the seconds of a verify, by width (tokens a row) and batch size, for a few widths."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of one row
        # Rows have KV caches of their own, so many rows cost more than one row of as many tokens: by this factor.
        self._factors: dict[tuple[int, int], float] = {}  # by (batch size, width)

    @property
    def measured(self) -> bool:
        return bool(self._seconds)

    def measure(self, target: TargetRunner, widths: Sequence[int] = WIDTHS, context: int = 64) -> None:
        """Times a verify of every width on a scratch KV cache, twice, and keeps the lesser.

        Widths too slow to pay are not timed but extrapolated; `doubt` has them tried some time.
        """
        cache = target.open(1, context + max(widths))
        for _ in target.prefill(cache, 0, [0] * context):
            pass
        self._time_once(target, cache, 1)  # warm-up
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
        """The cost model of rounds that all have one width: a verify takes 1, as the unit of time."""
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
        """Updates the running mean with the seconds of a round's verify; an outlier counts for little."""
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
        """Expected seconds of a verify of `width` tokens in each of the rows."""
        return self._predict(num_rows * width) * self._factor(size_of(num_rows), width)

    def plain_seconds(self, num_rows: int) -> float:
        """Expected seconds of a plain decoding step: a verify of the least width."""
        return self.seconds(next(iter(self._seconds)), num_rows)

    def choices(self, num_rows: int = 1, overhead: float = 0.0) -> list[tuple[int, float]]:
        """(width, seconds of a round) for every width. overhead: what a round with a tree takes beside its verify."""
        return [(width, self.seconds(width, num_rows) + (overhead if width > 1 else 0.0)) for width in self._seconds]

    def doubt(self, used: int, num_rows: int = 1) -> None:
        """Lowers the estimates of unused widths a little, so that one that once was slow is tried again."""
        for width in self._seconds:
            if width in (1, used):
                continue
            if num_rows == 1:
                self._seconds[width] *= _DOUBT
            elif (size_of(num_rows), width) in self._factors:
                self._factors[size_of(num_rows), width] *= _DOUBT

    def _factor(self, size: int, width: int) -> float:
        """A verify's seconds in a batch over those of one row of as many tokens: seen, or interpolated from others."""
        own = self._factors.get((size, width)) if size else 1.0
        if own is not None:
            return own
        seen = {other: factor for (other, its_width), factor in self._factors.items() if its_width == width}
        plain = next(iter(self._seconds))
        if not seen and width != plain:  # never tried: as for plain steps
            return self._factor(size, plain)
        return between({0: 1.0, **seen}, size)

    def _predict(self, num_tokens: int) -> float:
        """Seconds of a verify of one row of so many tokens, by linear interpolation, and extrapolation beyond."""
        known = self._seconds.get(num_tokens)
        if known is not None:
            return known
        widths = sorted(self._seconds)
        if len(widths) == 1:  # the unit of time, however many rows there are
            return self._seconds[widths[0]]
        right = min(bisect_left(widths, num_tokens), len(widths) - 1)
        low, high = widths[right - 1], widths[right]
        slope = max(0.0, self._seconds[high] - self._seconds[low]) / (high - low)
        return self._seconds[high] + slope * (num_tokens - high)

    @staticmethod
    def _time_once(target: TargetRunner, cache: KVCache, width: int) -> float:
        chain = DraftTree.chain(torch.zeros(1, width, dtype=torch.int64))
        target.verify(cache, chain)  # the first of a width may include set-up
        target.synchronize()
        start = time.perf_counter()
        target.verify(cache, chain)
        target.synchronize()
        return time.perf_counter() - start


def size_of(num_rows: int) -> int:
    """The class of a batch size, its log2 rounded up: 1, 2, 3 to 4, 5 to 8 ... rows."""
    return (num_rows - 1).bit_length()

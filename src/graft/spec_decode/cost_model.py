"""Cost model: a table of step times by number of tokens, and times of other work by number of rows.

Times are learned from rounds. Before the first round, step times follow the usual shape for the kind of device. A
server measures them at start-up instead.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graft.tree.tree import DraftTree

if TYPE_CHECKING:
    from graft.model import TargetRunner
    from graft.spec_decode.proposers.drafter import Drafter

WEIGHT = 0.05  # of each new round in running means
CLIP = 2.0  # an observation counts for at most this many times the expected value, and at least this fraction of it
OPTIMISM = 0.003  # how much better an untried choice looks after every round; a well-known one far less
HASTE = 10  # factor on OPTIMISM for sizes observed before a SHIFT: perhaps they were slow because the machine was busy
SHIFT = 0.2  # change of the level (a logarithm) after which earlier observations of a size count as only one
FIRST = 3  # if one of so many first observations is far below the others, it replaces them: other work only adds time
# Without padding, times are kept for these sizes and interpolated between them.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FLAT, _STEEP = 64, 256  # a GPU's steps cost the same up to _FLAT tokens, then one plain step more per _STEEP tokens
_WIDEST = 128  # tokens that one row may have in a step
_SLOPE = 0.05  # plain steps that one more token costs on a CPU


def usual_shape(device: str) -> Callable[[int], float]:
    """A guess of the cost of a step by its number of tokens, in plain steps, until steps are timed."""
    if device == "cpu":
        return lambda num_tokens: 1 + _SLOPE * (num_tokens - 1)
    return lambda num_tokens: 1 + max(0, num_tokens - _FLAT) / _STEEP


class StepCost:
    """The table of step times: expected seconds of a step by its number of tokens.

    A time is the product of a shape (usual or measured), a correction for the size, and one level for all sizes. Long
    contexts and a busy machine raise the level, so they do not count against the size that was tried at that time. A
    size that was not observed takes its correction from its neighbours.

    With optimism, expected times of untried sizes fall a little every round. So a size that was slow once is tried
    again, even the plain step. They fall faster after the level has changed, as when other work on the machine ends.
    """

    def __init__(self, sizes: Sequence[int] = (), shape: Callable[[int], float] = float) -> None:
        """sizes: those that steps are padded to; empty: no padding. shape: see `usual_shape`."""
        self.is_padded = bool(sizes)
        self.sizes = tuple(sizes) or SIZES
        self._shape = [shape(size) for size in self.sizes]
        self._corrections: dict[int, float] = {}  # logarithms, by index of an observed size
        self._counts = [0] * len(self.sizes)
        self._guesses: set[int] = set()  # sizes whose time a restored state only guesses
        self._levels = [0.0] * len(self.sizes)  # the level when each was last observed
        self._optimism = [0.0] * len(self.sizes)  # logarithms, at most 0
        self._level: float | None = None  # logarithm; None before the first observation
        self._num_observed = 0  # at most FIRST
        self.largest = self.sizes[0]  # the largest size that was timed
        self._seconds, self._unbiased = list(self._shape), list(self._shape)  # with optimism, and without

    @property
    def is_known(self) -> bool:
        """Whether any step was timed. Until then, times are in units of a plain step."""
        return self._level is not None

    @property
    def is_sure(self) -> bool:
        """Whether enough steps were timed to rule out outliers. On a GPU, with padded steps, one is enough."""
        return self._num_observed >= (1 if self.is_padded else FIRST)

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds of a step of `num_tokens` tokens."""
        return self._at(self._seconds, num_tokens)

    def _at(self, values: Sequence[float], num_tokens: int) -> float:
        sizes = self.sizes
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes):  # beyond the table: in proportion
            return values[-1] * num_tokens / sizes[-1]
        if self.is_padded or at == 0 or sizes[at] == num_tokens:
            return values[at]
        share = (num_tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return values[at - 1] + share * (values[at] - values[at - 1])

    def observe(self, num_tokens: int, seconds: float, least: int = 1) -> None:
        """Learn the seconds of a round's step; outliers count for little.

        least: the tokens of a plain step; smaller sizes could not have been tried.
        """
        if self._level is None:
            self._level = math.log(seconds / self.seconds(num_tokens))
            self._update()
        sizes, limit = self.sizes, math.log(CLIP)
        at = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
        if not self.is_padded and at > 0 and num_tokens - sizes[at - 1] < sizes[at] - num_tokens:
            at -= 1  # the nearest size
        usual = min(self._corrections.values(), default=0.0)
        for place in range(len(sizes)):
            if sizes[place] >= least:
                is_stale = self._counts[place] > 0 and abs(self._level - self._levels[place]) > SHIFT
                if is_stale:
                    self._counts[place] = 1
                more = (HASTE if is_stale else 1) * OPTIMISM / (1 + self._counts[place])
                # If it was far slower than other sizes, optimism may make up for all of the difference.
                most = limit + (max(self._correction(place) - usual, 0.0) if is_stale else 0.0)
                self._optimism[place] = max(self._optimism[place] - more, -most)
        self._optimism[at] = 0.0
        error = math.log(seconds / self._at(self._unbiased, num_tokens))
        self._level += WEIGHT * _clipped(error, limit)
        # The first observation of a size is taken as it is. Later ones are averaged, and the better a size is known,
        # the more outliers are clipped. But if one of the first was far too slow, a faster one replaces it.
        weight = max(1 / (1 + self._counts[at]), WEIGHT)
        if error < -SHIFT and self._counts[at] < FIRST:
            own = (1 - WEIGHT) * error
        else:
            own = weight * (1 - WEIGHT) * _clipped(error, limit * math.sqrt(weight))
        self._corrections[at] = self._correction(at) + own
        self._counts[at] = min(self._counts[at] + 1, round(1 / WEIGHT))
        self._levels[at], self._num_observed = self._level, min(self._num_observed + 1, FIRST)
        self.largest = max(self.largest, sizes[at])
        self._update()

    def measure(self, target: TargetRunner) -> None:
        """Time a step of every size. Sizes too slow to pay, or larger than the KV cache, are extrapolated."""
        seconds = [time_step(target, self.sizes[0])]
        for size in self.sizes[1:]:
            if seconds[-1] > CLIP * CLIP * seconds[0]:
                break
            try:
                seconds.append(time_step(target, size))
            except torch.OutOfMemoryError:  # perhaps of pages: then no step can have that size
                break
        timed = torch.tensor(self.sizes[: len(seconds)])
        self.restore({"step_sizes": timed, "step_seconds": torch.tensor(seconds).double()})

    def state(self) -> dict[str, Tensor]:
        """By size, the seconds without optimism and how well they are known; empty if none is known."""
        if not self.is_known:
            return {}
        monotonic = list(accumulate(reversed(self._unbiased), min))[::-1]
        return {
            "step_sizes": torch.tensor(self.sizes),
            "step_seconds": torch.tensor(monotonic).double(),
            "step_counts": torch.tensor(self._counts),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `state`, which may be of other sizes. Without counts, its sizes are well known."""
        if "step_sizes" not in state or "step_seconds" not in state:
            return
        known = StepCost(state["step_sizes"].tolist())
        known.is_padded, known._seconds = self.is_padded, state["step_seconds"].tolist()
        self._shape = [known.seconds(size) for size in self.sizes]
        counts = state["step_counts"].tolist() if "step_counts" in state else [round(1 / WEIGHT)] * len(known.sizes)
        by_size = dict(zip(known.sizes, counts, strict=True))
        self._counts = [by_size.get(size, 0) for size in self.sizes]
        self._guesses = {place for place, count in enumerate(self._counts) if count == 0}
        self._corrections, self._level, self._num_observed = {}, 0.0, FIRST
        self.largest = max((size for size, count in by_size.items() if count), default=self.sizes[0])
        self._levels, self._optimism = [0.0] * len(self.sizes), [0.0] * len(self.sizes)
        self._update()

    def _update(self) -> None:
        """Compute the table. Times are monotonic: no step takes longer than an observed one with more tokens."""
        assert self._level is not None
        least = math.inf
        for place in reversed(range(len(self.sizes))):
            own = self._shape[place] * math.exp(self._level + self._correction(place))
            self._unbiased[place] = own
            self._seconds[place] = min(own * math.exp(self._optimism[place]), least)
            if place in self._corrections:
                least = min(own, least)

    def _correction(self, place: int) -> float:
        """The logarithmic correction of a size: its own, or interpolated between the nearest observed sizes.

        What was observed of guesses says nothing about sizes that were known before.
        """
        known = self._corrections
        if self._guesses and place not in known and place not in self._guesses:
            known = {other: correction for other, correction in known.items() if other not in self._guesses}
        if place in known or not known:
            return known.get(place, 0.0)
        low = max((other for other in known if other < place), default=min(known))
        high = min((other for other in known if other > place), default=max(known))
        if low >= high:
            return known[high]
        return known[low] + (known[high] - known[low]) * (place - low) / (high - low)


def _clipped(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


class UnitCost(StepCost):
    """Step times for a fixed budget: every step takes 1."""

    def seconds(self, num_tokens: int) -> float:
        return 1.0

    def observe(self, num_tokens: int, seconds: float, least: int = 1) -> None:
        """Learn nothing."""


def row_class(num_rows: int) -> int:
    """The class of row counts with similar costs: up to 1, 2, 4, 8 ..."""
    return (num_rows - 1).bit_length()


class SecondsByRows:
    """Running means of seconds for each `row_class`. A class without observations takes those of the nearest class.

    On a GPU most times do not depend on the number of rows, and on a CPU they grow with it. So no shape is assumed.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, int]] = {}  # mean, and number of observations

    @property
    def is_known(self) -> bool:
        return bool(self._means)

    def at(self, num_rows: int) -> float:
        if not self._means:
            return 0.0
        own = row_class(num_rows)
        return self._means[own if own in self._means else min(self._means, key=lambda other: abs(other - own))][0]

    def observe(self, num_rows: int, seconds: float, most: float = math.inf) -> None:
        """Learn from an observation. most: the upper limit of a first one, which may be an outlier."""
        mean, count = self._means.get(row_class(num_rows), (0.0, 0))
        clipped = min(seconds, CLIP * mean if count else most)
        self._means[row_class(num_rows)] = (mean + max(1 / (1 + count), WEIGHT) * (clipped - mean), count + 1)

    def state(self) -> Tensor:
        """[n, 3] class, mean and count."""
        return torch.tensor([(own, *known) for own, known in self._means.items()]).double()

    def restore(self, state: Tensor) -> None:
        self._means = {int(own): (mean, int(count)) for own, mean, count in state.view(-1, 3).tolist()}


def time_pass(drafter: Drafter, target: TargetRunner) -> float:
    """Seconds of a draft pass for one row, on a scratch state: the best of three, since the first includes set-up."""
    cache, best = target.open(1, num_slots=8), math.inf
    try:
        state = drafter.open(cache)
        for _ in range(3):
            passes = drafter.passes(state, torch.zeros(1, dtype=torch.int64))
            if drafter.max_passes > 1:  # the first expands no beams yet, so the others cost more
                float(next(passes)[-1].probabilities[0, 0])  # waits for the device
            start = time.perf_counter()
            float(next(passes)[-1].probabilities[0, 0])
            best = min(best, time.perf_counter() - start)
    finally:
        cache.release()
    return best


def time_step(target: TargetRunner, num_tokens: int) -> float:
    """Seconds of a step of `num_tokens` tokens after short texts, on a scratch cache: the best of two."""
    context, best = 64, math.inf
    num_rows = -(-num_tokens // _WIDEST)
    width = -(-num_tokens // num_rows)
    cache = target.open(num_rows, context + width)
    try:
        for row in range(num_rows):
            for _ in target.prefill(cache, row, [0] * context):
                pass
        chains = DraftTree.chain(torch.zeros(num_rows, width, dtype=torch.int64))
        for number in range(3):  # the first may include set-up
            start = time.perf_counter()
            target.verify(cache, chains)
            target.synchronize()
            best = min(best, time.perf_counter() - start) if number else best
    finally:
        cache.release()
    return best

"""Step times: what steps, draft passes and the host's work cost, learned from rounds.

Each number is the median of its last few observations, because other programs make single rounds slow. `planner`
decides with these numbers; nothing here decides.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from graft.tree.tree import DraftTree

if TYPE_CHECKING:
    from graft.model import TargetRunner
    from graft.spec_decode.proposers.drafter import Drafter

RECENT = 9  # observations whose median counts: four slow ones change nothing, and common noise little
FORGOTTEN = 200  # rounds after which a size that is not tried is unknown again: its two new tries cost at most 1 %
TOO_SLOW = 4.0  # a step that takes so many plain steps can hardly pay, so larger ones are not measured
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


def row_class(num_rows: int) -> int:
    """The class of row counts with similar costs: up to 1, 2, 4, 8 ..."""
    return (num_rows - 1).bit_length()


class Recent:
    """The median of the last observations; of an even number the lower one, since other work only adds time."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values = deque(values, RECENT)

    def median(self, guess: float | None = None) -> float:
        """The median. Until there are enough observations, the guess is one of them: a slow one does not replace it."""
        known = sorted(self.values if guess is None or len(self.values) == RECENT else [guess, *self.values])
        return known[(len(known) - 1) // 2]


class StepTimes:
    """Expected seconds of a step by its number of tokens.

    A time is the product of a usual or measured shape, a correction for the size, and one level for all sizes. Long
    contexts and a busy machine raise the level, so they do not count against the size that was tried at that time. A
    size that was not observed takes its correction from its neighbours.
    """

    def __init__(self, sizes: Sequence[int] = (), shape: Callable[[int], float] = float) -> None:
        """sizes: those that steps are padded to; empty: no padding. shape: see `usual_shape`."""
        self.is_padded = bool(sizes)
        self.sizes = tuple(sizes) or SIZES
        self._shape = np.log([shape(size) for size in self.sizes])
        self._corrections: dict[int, Recent] = {}  # logarithms, by index of an observed size
        self._observed: dict[int, int] = {}  # by the same index, the number of the last observation
        self._num_observed = 0
        self._levels = Recent()  # logarithms, as the last observations of all sizes have it
        self._level: float | None = None  # their median; None before the first observation
        self.largest = self.sizes[0]  # the largest size that was timed
        self._seconds = np.exp(self._shape).tolist()

    @property
    def is_known(self) -> bool:
        """Whether any step was timed. Until then, times are in units of a plain step."""
        return self._level is not None

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds of a step of `num_tokens` tokens."""
        sizes, values = self.sizes, self._seconds
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes):  # beyond the table: in proportion
            return values[-1] * num_tokens / sizes[-1]
        if self.is_padded or at == 0 or sizes[at] == num_tokens:
            return values[at]
        share = (num_tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return values[at - 1] + share * (values[at] - values[at - 1])

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn the seconds of a step. Beyond the table, which is extrapolated, nothing is learned."""
        sizes = self.sizes
        if num_tokens > sizes[-1]:
            return
        level = math.log(seconds / self.seconds(num_tokens)) + (self._level or 0.0)
        self._levels.values.append(level)
        self._level = self._levels.median()
        at = bisect_left(sizes, num_tokens)
        if not self.is_padded and at > 0 and num_tokens - sizes[at - 1] < sizes[at] - num_tokens:
            at -= 1  # the nearest size
        seconds *= self._seconds[at] / self.seconds(num_tokens)  # as if it had that size
        self._corrections.setdefault(at, Recent()).values.append(math.log(seconds) - self._shape[at] - self._level)
        self._num_observed += 1
        self._observed[at] = self._num_observed
        for place in [place for place, when in self._observed.items() if self._num_observed - when > FORGOTTEN]:
            del self._observed[place], self._corrections[place]
        self.largest = max(self.largest, sizes[at])
        self._update()

    def _update(self) -> None:
        """Compute the table. Times are monotonic: no step takes longer than a known one with more tokens."""
        assert self._level is not None
        own = {place: recent.median() for place, recent in sorted(self._corrections.items())}
        known = {}
        for place, recent in sorted(self._corrections.items()):
            others = {other: value for other, value in own.items() if other != place}
            guess = float(np.interp(place, list(others), list(others.values()))) if others else 0.0
            known[place] = recent.median(guess)
        places = list(known) or [0]
        corrections = np.interp(np.arange(len(self.sizes)), places, list(known.values()) or [0.0])
        seconds = np.exp(self._shape + corrections + self._level)
        most = np.full(len(seconds), np.inf)
        most[places] = seconds[places]
        self._seconds = np.minimum(seconds, np.minimum.accumulate(most[::-1])[::-1]).tolist()

    def measure(self, target: TargetRunner) -> None:
        """Time a step of every size. Sizes too slow to pay, or larger than the KV cache, are extrapolated."""
        seconds = [time_step(target, self.sizes[0])]
        for size in self.sizes[1:]:
            if seconds[-1] > TOO_SLOW * seconds[0]:
                break
            try:
                seconds.append(time_step(target, size))
            except torch.OutOfMemoryError:  # perhaps of pages: then no step can have that size
                break
        timed = torch.tensor(self.sizes[: len(seconds)])
        self.restore({"step_sizes": timed, "step_seconds": torch.tensor(seconds).double()})

    def state(self) -> dict[str, Tensor]:
        """The seconds of the sizes up to the largest that was timed; empty if none was."""
        timed = [place for place, size in enumerate(self.sizes) if self.is_known and size <= self.largest]
        return {
            "step_sizes": torch.tensor([self.sizes[place] for place in timed], dtype=torch.int64),
            "step_seconds": torch.tensor([self._seconds[place] for place in timed], dtype=torch.float64),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the shape from `state`, which may be of other sizes. Beyond them the usual shape goes on."""
        if not len(state.get("step_sizes", ())):
            return
        sizes, seconds = state["step_sizes"].tolist(), state["step_seconds"].tolist()
        known, own = StepTimes(sizes), np.exp(self._shape)
        known.is_padded, known._seconds = self.is_padded, seconds
        last = float(np.interp(sizes[-1], self.sizes, own))
        timed = [
            known.seconds(size) if size <= sizes[-1] else seconds[-1] * usual / last
            for size, usual in zip(self.sizes, own, strict=True)
        ]
        self._shape, self._level, self.largest = np.log(timed), 0.0, max(self.largest, sizes[-1])
        self._corrections, self._observed, self._levels = {}, {}, Recent([0.0] * RECENT)
        self._update()


class TimesByRows:
    """Seconds of other work by number of rows and of draft passes: a fixed part, and a part for each pass.

    Of row counts (`row_class`) that were not observed, those of the nearest class are taken. On a GPU most times do not
    depend on the number of rows, and on a CPU they grow with it. So no shape is assumed.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int, Recent]] = {}  # by class of rows, by number of passes

    @property
    def has_passes(self) -> bool:
        """Whether a draft pass was ever timed."""
        return any(any(by_passes) for by_passes in self._known.values())

    def observe(self, num_rows: int, num_passes: int, seconds: float) -> None:
        by_passes = self._known.setdefault(row_class(num_rows), {})
        by_passes.setdefault(num_passes, Recent()).values.append(seconds)

    def set(self, num_rows: int, by_passes: Mapping[int, float]) -> None:
        """Set measured seconds by number of passes."""
        self._known[row_class(num_rows)] = {passes: Recent([own] * RECENT) for passes, own in by_passes.items()}

    def at(self, num_rows: int, guess: float = 0.0) -> tuple[float, float]:
        """Seconds without a pass, and of each pass. guess: of a pass, until one was observed.

        While all rounds had the same number of passes, these take all the time: fewer are tried then.
        """
        if not self._known:
            return 0.0, guess
        own = row_class(num_rows)
        by_passes = self._known[min(self._known, key=lambda other: abs(other - own))]
        # A single observation, which may be an outlier, counts only while there is nothing better.
        sure = {passes: recent for passes, recent in by_passes.items() if len(recent.values) > 1} or by_passes
        x, y = np.array(list(sure), dtype=np.float64), np.array([recent.median() for recent in sure.values()])
        if len(x) > 1:  # the straight line through the medians
            spread = x - x.mean()
            slope = max(float(spread @ y / (spread @ spread)), 0.0)
        else:
            slope = float(y[0] / x[0]) if x[0] else guess
        return max(float(y.mean() - slope * x.mean()), 0.0), slope

    def state(self) -> Tensor:
        """[n, 3] class of rows, passes, seconds."""
        known = [
            (rows, passes, recent.median())
            for rows, by_passes in self._known.items()
            for passes, recent in by_passes.items()
        ]
        return torch.tensor(known, dtype=torch.float64).view(-1, 3)

    def restore(self, state: Tensor) -> None:
        self._known = {}
        for rows, passes, seconds in state.view(-1, 3).tolist():
            self._known.setdefault(int(rows), {})[int(passes)] = Recent([seconds] * RECENT)


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
    """Seconds of a step of `num_tokens` tokens after short texts, on a scratch cache: the best of two.

    The tokens differ, since a mixture of experts reads few weights for equal ones.
    """
    context, best = 64, math.inf
    num_rows = -(-num_tokens // _WIDEST)
    width = -(-num_tokens // num_rows)
    random = torch.Generator().manual_seed(num_tokens)  # the global one is the user's
    tokens = torch.randint(target.vocab_size, (num_rows, context + width), generator=random)
    cache = target.open(num_rows, context + width)
    try:
        for row in range(num_rows):
            for _ in target.prefill(cache, row, tokens[row, :context].tolist()):
                pass
        chains = DraftTree.chain(tokens[:, context:])
        for number in range(3):  # the first may include set-up
            start = time.perf_counter()
            target.verify(cache, chains)
            target.synchronize()
            best = min(best, time.perf_counter() - start) if number else best
    finally:
        cache.release()
    return best

"""Planner: how many nodes a round verifies, all rows together, and which draft passes are made, on any processor.

One rule decides everything: maximise expected tokens - price x seconds, where the price of a second is the tokens that
it usually brings. What is expected to lose tokens is tried again from time to time, because it may have changed: once
in so many rounds that this costs at most WASTE of the time. Nothing here can change a text.

Before a round, `plan` decides from running means. Where the host sees the round's candidates, `choose` decides how many
of them are verified. `learn` takes in what came of it. Times are in `step_times`; calibrations in `calibration`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.model.noise import NUM_KINDS
from graft.spec_decode.calibration import Calibration, PathCalibration
from graft.spec_decode.policy_settings import USUAL_PASS_COST
from graft.spec_decode.step_times import StepTimes, WorkTimes, row_class

WASTE = 0.01  # share of the time that trying in vain may cost
WEIGHT = 0.05  # of each new round in running means: a text is known after some twenty rounds
_NODES = np.array([0.0, *2.0 ** np.arange(-1, 7.5, 0.5)])  # a row's, for which gains are kept
_FEW = np.array([3.0])  # where the host chooses their number
_FIRST_GAINS = np.log2(1 + _NODES) / 2  # accepted tokens of a row without draft passes, until they are learned
_FIRST_PASS_GAIN = 0.6  # of a draft pass until it is tried: high, since what is tried is soon known
# A pass confirms or refutes what is proposed, so the best of it looks worth more than before: on training prompts of
# the default model, retrieval 0.45 tokens a round instead of 0.26. Where the host sees it, a pass is credited with it.
_CONFIRMED = 0.2
_PRIOR = 4  # rounds that first gains count for: a single round says little
_PASS_STRIDE = 3  # rounds are captured for every third number of draft passes, to save memory
_SELDOM = 0.2  # share of rounds below which a pass is not captured: skipping one costs a sixth of making it


class Plan(NamedTuple):
    """The plan of the next round."""

    tokens: int  # of the step, with padding; a plain round has as many as rows. See `choose`
    max_passes: int  # draft passes; 0: none
    thresholds: Sequence[float]  # by draft pass: it is made if the reach of its beams is above


@dataclass(frozen=True)
class Outcome:
    """A finished round, as the device reports it."""

    num_rows: int
    is_plain: bool  # whether nothing was proposed
    tokens: int  # of the step, with padding, without prompts
    num_prefill_tokens: int
    kinds: Sequence[int]  # by row, see `RowDraws.kind`
    paths: np.ndarray  # [rows, cap] path probabilities of the likeliest nodes, best first
    needs: np.ndarray  # [rows, cap] draft passes that each of them needed
    num_nodes: np.ndarray  # [rows] how many of these were verified
    nodes: Sequence[Sequence[int]]  # by row: the accepted nodes, counted from 1
    reaches: Sequence[float]  # reach of the beams of each pass that was made, and of the next one
    max_passes: int  # that could be made
    num_passes: int  # that were made
    tried: np.ndarray  # candidates whose parents were accepted, by cell of the calibration table
    fitted: np.ndarray  # how many of these were accepted
    step_seconds: float  # 0 if unknown
    work_seconds: float  # of all else: proposing, accepting, and the pause before the round; 0 if unknown
    confidences: np.ndarray | None = None  # [rows, gates] see `results_layout`


class Planner:
    """Plans the rounds of one engine."""

    def __init__(
        self,
        steps: StepTimes,
        num_passes: int,
        calibration: Calibration | None,
        path_calibration: PathCalibration,
        sees_candidates: bool = False,
        fixed: int | None = None,
        fixed_passes: int | None = None,
        pass_cost: float | None = None,
    ) -> None:
        """num_passes: the most draft passes of a round. calibration: None: q is the acceptance probability, and nothing
        is learned. sees_candidates: whether `choose` is called in every round.

        fixed: nodes of every row in every round; the step is then the unit of time, and `pass_cost` the cost of a pass.
        fixed_passes: draft passes of every round. None: what pays.
        """
        self.steps, self.num_passes, self.fixed, self.pass_cost = steps, num_passes, fixed, pass_cost
        self.fixed_passes = min(fixed_passes, num_passes) if fixed_passes is not None else None
        self.calibration, self.path_calibration = calibration, path_calibration
        self.sees_candidates = sees_candidates
        self.padded: Callable[[int], int] = int  # from a number of tokens to the size of their step
        self.work = WorkTimes(steps)
        self.restart()

    def restart(self) -> None:
        """Forget how rounds went, but keep times."""
        self._known: dict[_Key, Gains] = {}
        self._since_trees = 0  # plain rounds since the last one with a tree

    # The next round

    def plan(self, kinds: Sequence[int], padded_rows: int, sizes: Sequence[int], num_prefill_tokens: int) -> Plan:
        """Plan a round from what rounds usually bring.

        kinds: by row, see `RowDraws.kind`. sizes: of steps with trees, ascending, without prompts; a plain step has
        `padded_rows` tokens. Where the host sees the candidates, the plan's size is the largest that `choose` may take.
        """
        num_rows, plain = len(kinds), Plan(padded_rows, 0, [0.0] * (self.num_passes + 2))
        base = padded_rows + num_prefill_tokens
        if self.fixed is not None and sizes:
            return self._with_passes(self.fixed_size(num_rows, sizes), kinds)
        if not self.sees_candidates:
            sizes = [size for size in sizes if self._is_near(size + num_prefill_tokens, base)] or sizes[:1]
        if not sizes or not self.steps.is_known:
            return plain
        gains, work = self._gains(kinds), self.work.at(num_rows, self._pass_guess(num_rows))
        price, plain_price = self._price(kinds), num_rows / self.plain_seconds(num_rows)
        num_nodes = (np.array(sizes) - num_rows) / num_rows
        tokens, passes = gains.expected(num_nodes, price * work.each / num_rows)
        seconds = work.start - work.plain + work.each * passes
        if not self.sees_candidates:
            seconds += self._more_seconds(base, [size + num_prefill_tokens for size in sizes])
        at = int(np.argmax(num_rows * tokens - price * seconds))
        loss = plain_price * seconds[at] - num_rows * tokens[at]
        self._since_trees += 1
        if loss > WASTE * self._since_trees * num_rows:
            return plain
        self._since_trees = 0
        return self._with_passes(sizes[-1] if self.sees_candidates else sizes[at], kinds)

    def _with_passes(self, size: int, kinds: Sequence[int]) -> Plan:
        thresholds, limit = self.thresholds(kinds, size), self.num_passes
        if not self.sees_candidates:  # captured
            limit = 0
            if thresholds and thresholds[0] < len(kinds):
                *less, limit = [own for own in self.pass_limits if own]
                wanted = self._gains(kinds).made
                limit = next((own for own in less if wanted[own] < _SELDOM), limit)
        return Plan(size, limit, [*thresholds[:limit], *[math.inf] * (self.num_passes + 2 - limit)])

    def fixed_size(self, num_rows: int, sizes: Sequence[int]) -> int:
        """The smallest of the ascending `sizes` that holds the fixed number of nodes for every row."""
        assert self.fixed is not None
        most = num_rows * (1 + self.fixed)
        return next((size for size in sizes if size >= most), sizes[-1])

    @property
    def pass_limits(self) -> list[int]:
        """Numbers of draft passes to capture rounds for, ascending. With 0, only retrieval proposes."""
        if self.fixed_passes is not None:
            return [self.fixed_passes]
        return [0, *range(_PASS_STRIDE, self.num_passes, _PASS_STRIDE), self.num_passes] if self.num_passes else [0]

    def thresholds(self, kinds: Sequence[int], size: int) -> list[float]:
        """By draft pass, the reach above which it pays in a round whose step has `size` tokens.

        The reach is P(one of a row's beams is accepted), summed over the rows.
        """
        if self.fixed_passes is not None:
            return [-1.0] * self.fixed_passes + [math.inf] * (self.num_passes - self.fixed_passes)
        num_rows, gains = len(kinds), self._gains(kinds)
        rests = self._price(kinds) * self.pass_seconds(num_rows) - WASTE * num_rows * gains.since
        known = [
            rest / gain if gain > 0 else math.copysign(math.inf, rest)
            for rest, gain in zip(rests.tolist(), gains.by_pass((size - num_rows) / num_rows).tolist(), strict=True)
        ]
        is_timed = self.fixed is not None or self.work.has_passes or not self.sees_candidates
        # The first pass tells what passes cost; on a GPU all are cheap.
        return known if is_timed else [*known[:1], *[math.inf] * (self.num_passes - 1)]

    def choose(self, paths: np.ndarray, kinds: Sequence[int], num_prefill_tokens: int) -> int:
        """How many of this round's candidates are verified, all rows together.

        paths: [rows, cap] path probabilities, best first. kinds: by row. Proposing is already paid.
        """
        if self.fixed is not None:
            return int(np.count_nonzero(paths))
        probs = self.path_calibration.probabilities(paths, self.path_calibration.cells(paths, kinds))
        probs = np.sort(probs, axis=None)[::-1]
        counts, costs = self._node_costs(kinds, num_prefill_tokens)
        return int(min(counts[int(np.argmax(_sums(probs, counts) - costs))], np.count_nonzero(paths)))

    # Times and the price

    def plain_seconds(self, num_rows: int) -> float:
        """Expected seconds of a plain round; with a fixed number of nodes, of any round without a draft pass."""
        if self.fixed is not None:
            return 1.0
        return self.steps.seconds(self.padded(num_rows)) + self.work.at(num_rows).plain

    def pass_seconds(self, num_rows: int) -> float:
        if self.fixed is not None:
            return self.pass_cost or 0.0
        return self.work.at(num_rows, self._pass_guess(num_rows)).each

    def _pass_guess(self, num_rows: int) -> float:
        return USUAL_PASS_COST * self.steps.seconds(self.padded(num_rows))

    def _more_seconds(self, base: int, sizes: Sequence[int]) -> np.ndarray:
        """What steps of these sizes take longer than one of `base` tokens."""
        times = np.array([self.steps.seconds(self.padded(size)) for size in (base, *sizes)])
        return times[1:] - times[0]

    def _is_near(self, num_tokens: int, base: int) -> bool:
        """Whether a step is at most two sizes larger than a plain one and all timed ones; else its time is a guess.

        base: tokens of the plain step.
        """
        sizes = self.steps.sizes
        place = bisect_right(sizes, self.padded(max(self.steps.largest, base))) + 1
        return self.padded(num_tokens) <= sizes[min(place, len(sizes) - 1)]

    def _price(self, kinds: Sequence[int]) -> float:
        """Tokens per second of recent rounds, at least of a plain one.

        Prompts in a step do not count: they must be read anyway.
        """
        gains, num_rows = self._gains(kinds), len(kinds)
        return num_rows / self.plain_seconds(num_rows) * max((1 + gains.gain) / (1 + gains.time), 1.0)

    def _node_costs(self, kinds: Sequence[int], num_prefill_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of nodes that a round may verify, from 0 on, and the cost of each in tokens.

        A number of nodes fills a step of one of the sizes. The limit is lower where times are guesses.
        """
        base = len(kinds) + num_prefill_tokens
        sizes = [size for size in self.steps.sizes if size > base and self._is_near(size, base)]
        costs = self._price(kinds) * self._more_seconds(base, (base, *sizes))
        return np.array([0, *(size - base for size in sizes)]), costs

    def _gains(self, kinds: Sequence[int]) -> Gains:
        """What rounds like this one bring: with rows of the commonest kind, and about as many."""
        key = max(range(NUM_KINDS), key=kinds.count), row_class(len(kinds))
        if key not in self._known:
            near = min(self._known, key=lambda other: (other[0] != key[0], abs(other[1] - key[1])), default=None)
            nodes = _FEW if self.sees_candidates or self.fixed is not None else _NODES
            self._known[key] = Gains(self.num_passes, nodes, self._known[near] if near is not None else None)
        return self._known[key]

    # Learning

    def learn(self, outcome: Outcome) -> None:
        """Learn from a round."""
        if self.calibration is None:
            return
        if outcome.step_seconds > 0 and self.fixed is None:
            size = self.padded(outcome.tokens + outcome.num_prefill_tokens)
            self.steps.observe(size, outcome.step_seconds)
            self.work.observe(outcome.num_rows, -1 if outcome.is_plain else outcome.num_passes, outcome.work_seconds)
        gains = self._gains(outcome.kinds)
        if outcome.is_plain:
            gains.count_round(0.0, 0.0)
            return
        self.calibration.add(torch.from_numpy(outcome.tried), torch.from_numpy(outcome.fitted), outcome.kinds)
        cells = self.path_calibration.cells(outcome.paths, outcome.kinds)
        probs = self.path_calibration.probabilities(outcome.paths, cells)
        is_verified = np.arange(probs.shape[1]) < outcome.num_nodes[:, None]
        self._learn_gains(gains, outcome, probs, float(probs[is_verified].sum()))
        self.path_calibration.observe(outcome.paths, cells, is_verified, outcome.nodes, outcome.kinds)

    def _learn_gains(self, gains: Gains, outcome: Outcome, probs: np.ndarray, accepted: float) -> None:
        """Learn what this round's candidates are worth, without the draft passes and with each of them."""
        num_rows, num_nodes = outcome.num_rows, int(outcome.num_nodes.sum())
        order = np.argsort(-probs, axis=None)
        probs, needs = probs.ravel()[order], outcome.needs.ravel()[order]
        if self.fixed is not None:
            counts, costs = np.array([num_nodes]), np.zeros(1)
            seconds = outcome.num_passes * self.pass_seconds(num_rows)
        else:
            base = num_rows + outcome.num_prefill_tokens
            work = self.work.at(num_rows)
            seconds = work.start - work.plain + outcome.num_passes * work.each
            seconds += float(self._more_seconds(base, [base + num_nodes])[0])
            if self.sees_candidates:
                counts, costs = self._node_costs(outcome.kinds, outcome.num_prefill_tokens)
            else:
                counts, costs = num_rows * _NODES, np.zeros(len(_NODES))
        values = [_sums(probs[needs <= number], counts) - costs for number in range(outcome.num_passes + 1)]
        if len(gains.nodes) == 1:
            values = [value.max(keepdims=True) for value in values]
        if self.sees_candidates and self.fixed is None:
            reached = np.cumsum([0.0, *outcome.reaches[: outcome.num_passes]])
            values = [value + _CONFIRMED * own for value, own in zip(values, reached, strict=True)]
        gains.observe(np.array(values) / num_rows, np.array(outcome.reaches) / num_rows, outcome.max_passes)
        gains.count_round(accepted / num_rows, seconds / self.plain_seconds(num_rows))

    # Times as they are kept

    def times(self) -> dict[str, Tensor]:
        """Seconds, which belong to this machine; only what is known."""
        state = self.steps.state() | {"work": self.work.state()}
        return {name: value for name, value in state.items() if len(value)}

    def restore_times(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `times`; missing values start anew."""
        self.steps.restore(state)
        if "work" in state:
            self.work.restore(state["work"])


_Key = tuple[int, int]  # kind of row, and class of row counts


class Gains:
    """Running means of what rounds bring a row: candidates without a draft pass, each pass, and whole rounds.

    Kept for some numbers of nodes of a row. Where the host sees the candidates, and so verifies the best number of
    them, there is one value, less the cost of verifying.
    """

    def __init__(self, num_passes: int, nodes: np.ndarray, prior: Gains | None = None) -> None:
        self.nodes = nodes
        shape = num_passes, len(nodes)
        self._without: np.ndarray = np.interp(nodes, _NODES, _FIRST_GAINS) if prior is None else prior._without.copy()
        # Of each pass: what it adds, and the reach of its beams in rounds in which it came next.
        self._added: np.ndarray = np.full(shape, _FIRST_PASS_GAIN) if prior is None else prior._added.copy()
        self._reached: np.ndarray = np.ones(num_passes) if prior is None else prior._reached.copy()
        self._next: np.ndarray = np.ones(num_passes) if prior is None else prior._next.copy()
        # How often each is made, if it may be.
        self.made: np.ndarray = np.full(num_passes, 0.5) if prior is None else prior.made.copy()
        self._counts = np.full(num_passes, _PRIOR)  # of each pass
        self.since = np.zeros(num_passes)  # rounds in which each pass came next and was not made, since it was
        self.gain = self.time = 0.0  # of whole rounds: accepted tokens, and what they take longer, in plain rounds
        self._num_rounds = 0.0

    def by_pass(self, num_nodes: float) -> np.ndarray:
        """What each pass adds to the tokens of a row whose beams are reached for certain."""
        return np.array([np.interp(num_nodes, self.nodes, added) for added in self._added]) / self._reached

    def expected(self, num_nodes: np.ndarray, cost: float) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens and draft passes of a row, by number of nodes, if passes are made where they pay.

        A pass is made as often as before, or whenever it comes next, or never, whichever is best for this number of
        nodes. cost: of a pass, in tokens of a row.
        """
        tokens, passes = np.interp(num_nodes, self.nodes, self._without), np.zeros(len(num_nodes))
        before = 1.0
        for number, (share, added) in enumerate(zip(self.made, self._added, strict=True)):
            gain = np.interp(num_nodes, self.nodes, added)
            always = gain * self._next[number] / self._reached[number]
            is_always = before * (always - cost) > share * (gain - cost)
            gain, often = np.where(is_always, always, gain), np.where(is_always, before, share)
            often = np.where(gain > cost, often, 0.0)
            tokens, passes, before = tokens + often * gain, passes + often, share
        return tokens, passes

    def observe(self, values: np.ndarray, reaches: np.ndarray, max_passes: int) -> None:
        """Learn from a round.

        values: [passes made + 1, nodes] of the candidates with 0, 1, 2 ... passes. reaches, max_passes: see `Outcome`.
        """
        made = len(values) - 1
        self._without += (values[0] - self._without) / min(self._num_rounds + 1 + _PRIOR, 1 / WEIGHT)
        came = reaches[: len(self._next)]
        self._next[: len(came)] += WEIGHT * (came - self._next[: len(came)])
        self._counts[:made] = np.minimum(self._counts[:made] + 1, 1 / WEIGHT)
        share = 1 / self._counts[:made]
        self._added[:made] += share[:, None] * (np.diff(values, axis=0) - self._added[:made])
        self._reached[:made] += share * (reaches[:made] - self._reached[:made])
        if max_passes:  # where all were made that could be, more might have been
            self.made += WEIGHT * (((np.arange(len(self.made)) < made) | (made == max_passes)) - self.made)
        self.since[:made] = 0
        self.since[made : made + 1] += 1

    def count_round(self, gain: float, time: float) -> None:
        """Count a round's accepted tokens of a row, and what it took longer than a plain round, in plain rounds."""
        self._num_rounds = min(self._num_rounds + 1, 1 / WEIGHT)
        self.gain += (gain - self.gain) / self._num_rounds
        self.time += (time - self.time) / self._num_rounds


def _sums(probs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sums of the first `counts` probabilities; a part of the next one counts in part."""
    return np.interp(counts, np.arange(len(probs) + 1), np.concatenate([[0.0], np.cumsum(probs)]))

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
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from graft.model.noise import NUM_KINDS
from graft.spec_decode.calibration import Calibration, PathCalibration
from graft.spec_decode.policy_settings import USUAL_PASS_COST
from graft.spec_decode.step_times import StepTimes, TimesByRows, row_class

WASTE = 0.01  # share of the time that trying in vain may cost
WEIGHT = 0.05  # of each new round in running means: a text is known after some twenty rounds
# A draft pass adds less where retrieval has proposed much: gains are kept by retrieval's own expected tokens of a row.
RETRIEVED = (0.02, 0.2, 0.6)  # limits between the classes
_ANY = len(RETRIEVED) + 1  # the class of all rounds together, for plans that do not know this round's retrieval
# Gains of a draft pass until it is tried, by class. High, since what is tried is soon known; less beside likely copies.
_FIRST_PASS_GAINS = (0.6, 0.5, 0.4, 0.1, 0.6)
# After a pass, what retrieval proposed is confirmed or refuted, and so looks worth more than before: on training
# prompts of the default model, 0.45 tokens a round instead of 0.26. A pass is credited with that, unless retrieval was
# sure.
_CONFIRMED = 0.2
_PASS_STRIDE = 3  # rounds are captured for every third number of draft passes, to save memory
_PASS_MARGIN = 0.5  # passes that a captured round may make beyond the running mean
_NODES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 127.0]
)  # a row's, for which gains are kept
_FIRST_GAINS = np.log2(1 + _NODES) / 2  # accepted tokens of a row by number of nodes, until they are learned


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
    paths: np.ndarray | None  # [rows, cap] path probabilities of the likeliest nodes, best first; None: not known
    num_nodes: np.ndarray  # [rows] how many of these were verified
    nodes: Sequence[Sequence[int]]  # by row: the accepted nodes, counted from 1
    needs: np.ndarray  # [rows, at most cap] draft passes that each node of `paths` needed; of further ones unknown
    reaches: Sequence[float]  # reach of the beams of each pass that was made
    num_passes: int
    tried: np.ndarray | None  # candidates whose parents were accepted, by cell of the calibration table; None: counted
    fitted: np.ndarray | None  # how many of these were accepted
    propose_seconds: float  # 0 if unknown
    step_seconds: float  # 0 if unknown
    rest_seconds: float | None  # of the accept phase, and of the pause before the round; None: unknown, or in the above
    confidences: np.ndarray | None = None  # [rows, gates] see `results_layout`
    retrieved: float | None = None  # expected tokens of a row by retrieval alone, if the passes were planned with it


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
        self.proposing, self.rest, self.plain_rest = TimesByRows(), TimesByRows(), TimesByRows()
        self.restart()

    def restart(self) -> None:
        """Forget how rounds went, but keep times."""
        self._gains: dict[_Key, np.ndarray] = {}  # [_NODES] accepted tokens of a row
        # Of a row: accepted tokens, time and profit; the last two in plain rounds.
        self._rounds: dict[_Key, np.ndarray] = {}
        self._passes: dict[_Key, PassGains] = {}
        self._since_trees = 0  # plain rounds since the last one with a tree
        self._usual_passes = self.num_passes / 2  # running mean over rounds with trees

    # The next round

    def plan(self, kinds: Sequence[int], padded_rows: int, sizes: Sequence[int], num_prefill_tokens: int) -> Plan:
        """Plan a round from what rounds usually bring.

        kinds: by row, see `RowDraws.kind`. sizes: of steps with trees, ascending, without prompts; a plain step has
        `padded_rows` tokens. Where the host sees the candidates, the plan's size is the largest that `choose` may take.
        """
        num_rows, plain = len(kinds), Plan(padded_rows, 0, [0.0] * (self.num_passes + 2))
        if self.fixed is not None and sizes:
            return self._with_passes(self.fixed_size(num_rows, sizes), kinds, sizes)
        if not self.sees_candidates:
            base = padded_rows + num_prefill_tokens
            sizes = [size for size in sizes if self._is_near(size + num_prefill_tokens, base)] or sizes[:1]
        if not sizes or not self.steps.is_known:
            return plain
        price = self._price(kinds, sizes)
        if self.sees_candidates:
            size = sizes[-1]
            usual = _nearest(self._rounds, _key(kinds))
            loss = -num_rows * float(usual[2]) if usual is not None else 0.0
        else:
            net = [
                self._tokens(kinds, size) - price * self._seconds(num_rows, size, num_prefill_tokens) for size in sizes
            ]
            size = sizes[int(np.argmax(net))]
            loss = num_rows - price * self._plain_seconds(num_rows, num_prefill_tokens) - max(net)
        self._since_trees += 1
        if loss > WASTE * self._since_trees * num_rows:
            return plain
        self._since_trees = 0
        return self._with_passes(size, kinds, sizes)

    def _with_passes(self, size: int, kinds: Sequence[int], sizes: Sequence[int]) -> Plan:
        thresholds = self.thresholds(kinds, sizes)
        limit = self.num_passes
        if not self.sees_candidates:  # captured
            most = self._usual_passes + _PASS_MARGIN
            limit = next((limit for limit in self.pass_limits if limit >= most), self.pass_limits[-1])
            if not thresholds or thresholds[0] >= len(kinds):
                limit = 0
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

    def thresholds(
        self, kinds: Sequence[int], sizes: Sequence[int] = (), retrieved: float | None = None
    ) -> list[float]:
        """By draft pass, the reach above which it pays.

        The reach is P(one of a row's beams is accepted), summed over the rows. sizes: see `plan`. retrieved: expected
        tokens of a row by retrieval alone, where it is known before the passes.
        """
        if self.fixed_passes is not None:
            return [-1.0] * self.fixed_passes + [math.inf] * (self.num_passes - self.fixed_passes)
        cost = self._price(kinds, sizes) * self.pass_seconds(len(kinds))
        known = self._known_passes(kinds).thresholds(cost, len(kinds), _class_of(retrieved))
        is_timed = self.fixed is not None or self.proposing.has_passes or not self.sees_candidates
        # The first pass tells what passes cost; on a GPU all are cheap.
        return known if is_timed else [*known[:1], *[math.inf] * (self.num_passes - 1)]

    def choose(self, paths: np.ndarray, kinds: Sequence[int], num_prefill_tokens: int) -> int:
        """How many of this round's candidates are verified, all rows together.

        paths: [rows, cap] path probabilities, best first. kinds: by row. Proposing is already paid.
        """
        gains = np.cumsum(self._expected(paths, kinds)[0])
        if self.fixed is not None:
            return int(np.count_nonzero(paths))
        counts, costs = self._node_costs(kinds, num_prefill_tokens)
        return int(min(counts[int(np.argmax(_at(gains, counts) - costs))], np.count_nonzero(paths)))

    # What is expected

    def plain_seconds(self, num_rows: int) -> float:
        """Expected seconds of a plain round; with a fixed number of nodes, of any round without a draft pass."""
        return 1.0 if self.fixed is not None else self._plain_seconds(num_rows, 0)

    def _plain_seconds(self, num_rows: int, num_prefill_tokens: int) -> float:
        return self._step_seconds(num_rows + num_prefill_tokens) + self.plain_rest.at(num_rows)[0]

    def _seconds(self, num_rows: int, size: int, num_prefill_tokens: int) -> float:
        """Expected seconds of a round with trees and the usual number of passes."""
        return self._step_seconds(size + num_prefill_tokens) + self._work_seconds(num_rows, self._usual_passes)

    def _step_seconds(self, num_tokens: int) -> float:
        return self.steps.seconds(self.padded(num_tokens))

    def _work_seconds(self, num_rows: int, num_passes: float) -> float:
        """Expected seconds of a round with trees, except the step."""
        start, own = self.proposing.at(num_rows, USUAL_PASS_COST * self._step_seconds(num_rows))
        return start + num_passes * own + self.rest.at(num_rows)[0]

    def pass_seconds(self, num_rows: int) -> float:
        if self.fixed is not None:
            return self.pass_cost or 0.0
        return self.proposing.at(num_rows, USUAL_PASS_COST * self._step_seconds(num_rows))[1]

    def _is_near(self, num_tokens: int, base: int) -> bool:
        """Whether a step is at most two sizes larger than a plain one and all timed ones; else its time is a guess.

        base: tokens of the plain step.
        """
        sizes = self.steps.sizes
        place = bisect_right(sizes, self.padded(max(self.steps.largest, base))) + 1
        return self.padded(num_tokens) <= sizes[min(place, len(sizes) - 1)]

    def _tokens(self, kinds: Sequence[int], size: int) -> float:
        """Expected tokens of a round with this size."""
        gains, num_rows = _nearest(self._gains, _key(kinds)), len(kinds)
        gain = np.interp((size - num_rows) / num_rows, _NODES, _FIRST_GAINS if gains is None else gains)
        return num_rows * (1 + float(gain))

    def _price(self, kinds: Sequence[int], sizes: Sequence[int]) -> float:
        """Tokens per second of the best usual round without prompts, at least of a plain one.

        Prompts must be read anyway, and tokens decoded beside them save later rounds.
        """
        num_rows = len(kinds)
        plain = num_rows / self.plain_seconds(num_rows)
        if self.sees_candidates or self.fixed is not None:
            usual = _nearest(self._rounds, _key(kinds))
            return plain if usual is None else plain * max(float((1 + usual[0]) / usual[1]), 1.0)
        sizes = sizes or [size for size in self.steps.sizes if size > num_rows]
        return max(plain, *(self._tokens(kinds, size) / self._seconds(num_rows, size, 0) for size in sizes))

    def _node_costs(self, kinds: Sequence[int], num_prefill_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of nodes that a round may verify, from 0 on, and the cost of each in tokens.

        A number of nodes fills a step of one of the sizes. The limit is lower where times are guesses.
        """
        base = len(kinds) + num_prefill_tokens
        sizes = [size for size in self.steps.sizes if size > base and self._is_near(size, base)]
        times = np.array([self._step_seconds(size) for size in (base, *sizes)])
        return np.array([0, *(size - base for size in sizes)]), self._price(kinds, ()) * (times - times[0])

    def _expected(self, paths: np.ndarray, kinds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Acceptance probabilities of all rows' nodes, the likeliest first, and their order: flat places in `paths`."""
        ratios = np.array(self.path_calibration.ratios)
        num_powers = len(ratios) // NUM_KINDS
        powers = np.clip(-np.frexp(paths)[1], 0, num_powers - 1) + num_powers * np.array(kinds)[:, None]
        order = np.argsort(-paths.ravel(), kind="stable")
        return (paths * ratios[powers]).ravel()[order], order

    # Learning

    def learn(self, outcome: Outcome) -> None:
        """Learn from a round."""
        if self.calibration is None:
            return
        if outcome.step_seconds > 0 and self.fixed is None:
            self._learn_times(outcome)
        if outcome.is_plain or outcome.paths is None:
            return
        if outcome.tried is not None and outcome.fitted is not None:
            self.calibration.add(torch.from_numpy(outcome.tried), torch.from_numpy(outcome.fitted))
        self._usual_passes += WEIGHT * (outcome.num_passes - self._usual_passes)
        expected, order = self._expected(outcome.paths, outcome.kinds)
        self._learn_gains(outcome, expected)
        self._learn_passes(outcome, expected, order)
        is_verified = np.arange(outcome.paths.shape[1]) < outcome.num_nodes[:, None]
        verified = np.where(is_verified, outcome.paths, 0.0)[:, : int(outcome.num_nodes.max())]
        paths = np.concatenate([np.ones((len(verified), 1), verified.dtype), verified], axis=1)
        self.path_calibration.observe(torch.from_numpy(paths), outcome.nodes, outcome.kinds)

    def _learn_times(self, outcome: Outcome) -> None:
        num_rows = outcome.num_rows
        self.steps.observe(self.padded(outcome.tokens + outcome.num_prefill_tokens), outcome.step_seconds)
        # The host's work counts for no more than a step at first: the round before may have ended long ago.
        rest = self.plain_rest if outcome.is_plain else self.rest
        if outcome.rest_seconds is not None:
            rest.observe(num_rows, 0, min(outcome.rest_seconds, outcome.step_seconds))
        if outcome.propose_seconds > 0:
            self.proposing.observe(num_rows, outcome.num_passes, outcome.propose_seconds)

    def _learn_gains(self, outcome: Outcome, expected: np.ndarray) -> None:
        num_rows, key = outcome.num_rows, _key(outcome.kinds)
        gains = np.concatenate([[0.0], np.cumsum(expected)]) / num_rows
        if not self.sees_candidates and self.fixed is None:
            curve = np.interp(_NODES, np.arange(len(gains)) / num_rows, gains)
            self._gains[key] = _mean(self._gains.get(key), curve)
            return
        gain, plain = gains[min(int(outcome.num_nodes.sum()), len(gains) - 1)], self.plain_seconds(num_rows)
        if self.fixed is not None:
            start, passes, verifying = 0.0, outcome.num_passes * self.pass_seconds(num_rows), 0.0
        else:
            base = num_rows + outcome.num_prefill_tokens
            start = self._work_seconds(num_rows, 0) - self.plain_rest.at(num_rows)[0]
            passes = self._work_seconds(num_rows, outcome.num_passes) - self._work_seconds(num_rows, 0)
            verifying = self._step_seconds(base + int(outcome.num_nodes.sum())) - self._step_seconds(base)
        time = (start + passes + verifying) / plain
        own = np.array([gain, 1 + time, gain - time])
        first = np.array([*own[:2], 0.0])  # one round says little about the profit of others
        self._rounds[key] = _mean(self._rounds.get(key, first), own)

    def _learn_passes(self, outcome: Outcome, expected: np.ndarray, order: np.ndarray) -> None:
        """Learn the gain of each pass: the value of this round's candidates with it, less that without it.

        Without the pass, others would have been verified. Of those that were not, only a host knows the passes that
        they needed, and could have verified fewer or more.
        """
        assert outcome.paths is not None
        needs = np.zeros_like(outcome.paths, dtype=np.int64)
        width = min(needs.shape[1], outcome.needs.shape[1])
        needs[:, :width] = outcome.needs[:, :width]
        ordered = needs.ravel()[order]
        if self.sees_candidates and self.fixed is None:
            counts, costs = self._node_costs(outcome.kinds, outcome.num_prefill_tokens)
        else:
            counts, costs = np.array([int(outcome.num_nodes.sum())]), np.zeros(1)
        values = [
            float((_at(np.cumsum(expected[ordered <= number]), counts) - costs).max())
            for number in range(outcome.num_passes + 1)
        ]
        retrieved = outcome.retrieved
        confirmed = _CONFIRMED * max(1 - retrieved, 0.0) if retrieved is not None else 0.0
        self._known_passes(outcome.kinds).observe(outcome.reaches, values, _class_of(retrieved), confirmed)

    def _known_passes(self, kinds: Sequence[int]) -> PassGains:
        key = _key(kinds)
        if key not in self._passes:
            self._passes[key] = PassGains(self.num_passes, _nearest(self._passes, key))
        return self._passes[key]

    # State

    def times(self) -> dict[str, Tensor]:
        """Seconds, which belong to this machine; only what is known."""
        state = self.steps.state() | {name: times.state() for name, times in self._times_by_rows.items()}
        return {name: value for name, value in state.items() if len(value)}

    def restore_times(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `times`; missing values start anew."""
        self.steps.restore(state)
        for name, times in self._times_by_rows.items():
            if name in state:
                times.restore(state[name])

    @property
    def _times_by_rows(self) -> dict[str, TimesByRows]:
        return {"proposing": self.proposing, "rest": self.rest, "plain_rest": self.plain_rest}

    def state(self) -> dict[str, Tensor]:
        """What nodes and passes bring: by table, [n, 2 + width] kind of row, class of rows, and numbers."""
        tables = {"gains": self._gains, "passes": {key: gains.means.ravel() for key, gains in self._passes.items()}}
        return {
            name: torch.tensor([[*key, *own] for key, own in table.items()], dtype=torch.float64)
            for name, table in tables.items()
            if table
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `state`, which may be of trees of another depth; missing parts start anew."""
        self.restart()
        for name, width in (("gains", len(_NODES)), ("passes", (_ANY + 1) * self.num_passes)):
            for kind, rows, *values in state[name].tolist() if name in state else []:
                key, own = (int(kind), int(rows)), np.array(values)
                if len(own) != width:
                    continue
                if name == "gains":
                    self._gains[key] = own
                else:
                    self._passes[key] = PassGains(self.num_passes)
                    self._passes[key].means = own.reshape(_ANY + 1, self.num_passes)


class PassGains:
    """Running means of what each draft pass brings, by class of what retrieval alone brings.

    A pass's gain is the value that it adds to a round's candidates, divided by the reach of its beams.
    """

    def __init__(self, num_passes: int, prior: PassGains | None = None) -> None:
        self.means: np.ndarray = (
            np.tile(np.array(_FIRST_PASS_GAINS)[:, None], num_passes) if prior is None else prior.means.copy()
        )
        self._counts = np.ones(self.means.shape)  # a prior counts for one observation
        self._since = np.zeros(self.means.shape)  # rounds in which the pass came next and was not made, since it was

    def thresholds(self, cost: float, num_rows: int, its_class: int) -> list[float]:
        """By pass, the reach above which it pays. cost: of a pass, in tokens.

        A pass that does not pay is made once in so many rounds that its cost is at most WASTE of the time.
        """
        rests = cost - WASTE * num_rows * self._since[its_class]
        return [
            rest / gain if gain > 0 else math.copysign(math.inf, rest)
            for rest, gain in zip(rests.tolist(), self.means[its_class].tolist(), strict=True)
        ]

    def observe(
        self, reaches: Sequence[float], values: Sequence[float], its_class: int, confirmed: float = 0.0
    ) -> None:
        """Learn from a round.

        reaches: before each pass. values: of the candidates with 0, 1, 2 ... passes. confirmed: see `_CONFIRMED`.
        """
        num_made = len(values) - 1
        for own in {its_class, _ANY}:
            self._since[own, :num_made] = 0
            self._since[own, num_made : num_made + 1] += 1
            for number, reach in enumerate(reaches[:num_made]):
                if reach > 1e-3:
                    self._counts[own, number] = min(self._counts[own, number] + 1, 1 / WEIGHT)
                    gain = (values[number + 1] - values[number]) / reach + confirmed
                    self.means[own, number] += (gain - self.means[own, number]) / self._counts[own, number]


_Key = tuple[int, int]  # kind of row, and class of row counts
_T = TypeVar("_T")


def _key(kinds: Sequence[int]) -> _Key:
    """What running means are kept by. A round with rows of several kinds counts for its commonest kind."""
    return max(range(NUM_KINDS), key=kinds.count), row_class(len(kinds))


def _nearest(known: Mapping[_Key, _T], key: _Key) -> _T | None:
    """What is known for a key: of the same kind, if possible, and about as many rows."""
    if key in known or not known:
        return known.get(key)
    return known[min(known, key=lambda other: (other[0] != key[0], abs(other[1] - key[1])))]


def _mean(mean: np.ndarray | None, value: np.ndarray) -> np.ndarray:
    return value if mean is None else mean + WEIGHT * (value - mean)


def _class_of(retrieved: float | None) -> int:
    return _ANY if retrieved is None else bisect_right(RETRIEVED, retrieved)


def _at(gains: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The gain of the first `counts` nodes. gains: of the first 1, 2, 3 ... nodes."""
    return np.concatenate([[0.0], gains])[np.minimum(counts, len(gains))]

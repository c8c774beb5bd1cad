"""Controller: plans device rounds on the host.

It chooses the size of the next step, and thresholds for draft passes, from expected accepted tokens and measured
seconds. Its knowledge is one round old. The device fills the step using this round's acceptance probabilities. Nothing
here can change a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from graft.model.noise import NUM_KINDS
from graft.spec_decode.budget import WASTE, Budget, TreeSize
from graft.spec_decode.calibration import Calibration, PathCalibration
from graft.spec_decode.cost_model import WEIGHT, SecondsByRows, row_class
from graft.spec_decode.policy_settings import USUAL_PASS_COST

_FIRST_STEP_COST = 1.1  # before any gain is known: the highest cost of a step, in plain steps
_PASS_STRIDE = 3  # rounds are captured for every third number of draft passes
_PASS_MARGIN = 0.5  # passes that a round may make beyond the running mean


class Plan(NamedTuple):
    """The plan of the next device round."""

    tokens: int  # of the step, with padding; a plain round has as many as rows
    max_passes: int  # draft passes; 0: none
    thresholds: Sequence[float]  # by draft pass: it is made if the reach of its beams is above


@dataclass(frozen=True)
class Outcome:
    """A finished round, as the device reports it."""

    num_rows: int
    is_plain: bool  # whether nothing was proposed
    tokens: int  # of the step, with padding, without prompts
    num_prefill_tokens: int
    paths: np.ndarray  # [rows, cap] path probabilities of the likeliest nodes, best first
    num_nodes: np.ndarray  # [rows] how many of these were verified
    nodes: Sequence[Sequence[int]]  # by row: the accepted nodes
    needs: np.ndarray  # [rows, most nodes + 1] draft passes that each verified node needed; the root comes first
    reaches: Sequence[float]  # reach of the beams of each pass that was made
    num_passes: int
    kinds: Sequence[int]  # by row, see `RowDraws.kind`
    tried: np.ndarray  # candidates whose parents were accepted, by cell of the calibration table
    fitted: np.ndarray  # how many of these were accepted
    propose_seconds: float  # 0 if unknown
    step_seconds: float
    rest_seconds: float  # of the accept phase, and of the pause before the round
    draft_seconds: float = 0.0  # of all draft passes, if the host makes them


class PassSeconds:
    """Seconds before a step by number of rows: a fixed part, and a part per draft pass (linear regression)."""

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}  # of 1, passes, seconds, passes squared, passes times seconds

    def observe(self, num_rows: int, num_passes: int, seconds: float) -> None:
        own = np.array([1.0, num_passes, seconds, num_passes**2, num_passes * seconds])
        known = self._sums.get(row_class(num_rows))
        self._sums[row_class(num_rows)] = own if known is None else (1 - WEIGHT) * known + own

    def at(self, num_rows: int, guess: float) -> tuple[float, float]:
        """Seconds without a pass, and of each pass. guess: of a pass, if all rounds had the same number of passes."""
        if not self._sums:
            return 0.0, guess
        own = row_class(num_rows)
        count, x, y, xx, xy = self._sums[min(self._sums, key=lambda other: abs(other - own))]
        spread = xx * count - x * x
        slope = (xy * count - x * y) / spread if spread > 0.1 * count * count else guess
        slope = min(max(slope, 0.0), y / max(x, 1e-9))
        return max((y - slope * x) / count, 0.0), slope


class Controller:
    """Plans the device rounds of one engine."""

    def __init__(
        self,
        budget: Budget,
        calibration: Calibration | None,
        path_calibration: PathCalibration,
        padded: Callable[[int], int] = int,
    ) -> None:
        """calibration: None: the drafter's q is the acceptance probability, and nothing is learned.

        padded: from a number of tokens to the size of their step.
        """
        self.budget, self.step, self._padded = budget, budget.step, padded
        self.num_passes, self.fixed, self.fixed_passes = budget.max_passes, budget.fixed, budget.fixed_passes
        self.calibration, self.path_calibration = calibration, path_calibration
        self.proposing = PassSeconds()
        self.rest, self.plain_rest = SecondsByRows(), SecondsByRows()
        self._gains: dict[int, np.ndarray] = {}  # by `row_class`: accepted tokens of a row by mean number of nodes
        self._since_trees = 0  # plain rounds since the last one with a tree
        self._usual_passes = self.num_passes / 2  # running mean over rounds with trees

    # The next round

    def plan(self, kinds: Sequence[int], padded_rows: int, sizes: Sequence[int], num_prefill_tokens: int) -> Plan:
        """Choose the round with the most expected tokens minus time x tokens per second.

        Tokens per second are those of the best round without prompts. Prefill must be done anyway, and tokens decoded
        beside it save later rounds.

        kinds: by row, see `RowDraws.kind`. sizes: of captured steps with trees, ascending; a plain step has
        `padded_rows` tokens.
        """
        num_rows = len(kinds)
        plain = Plan(padded_rows, 0, [0.0] * (self.num_passes + 2))
        if not sizes:
            return plain
        if self.fixed is not None:
            size = self.fixed_size(num_rows, sizes)
            return self._plan_tree(size, kinds, self.budget.rate(num_rows) * self.budget.pass_seconds(num_rows))
        if not self.step.is_known:
            return plain
        plain_seconds = self._seconds(num_rows, padded_rows, num_prefill_tokens)
        rate = num_rows / self._seconds(num_rows, padded_rows)
        if not self._gains:
            limit = _FIRST_STEP_COST * self._step_seconds(padded_rows + num_prefill_tokens)
            cheap = [size for size in sizes if self._step_seconds(size + num_prefill_tokens) <= limit] or sizes[:1]
            return self._plan_tree(cheap[-1], kinds, rate * self._proposing(num_rows)[1])
        ratio = self.budget.acceptance_ratio
        tokens = [num_rows + ratio * num_rows * self._gain(num_rows, (size - num_rows) / num_rows) for size in sizes]
        by_size = list(zip(sizes, tokens, strict=True))
        rate = max(rate, *(own / self._seconds(num_rows, size, is_plain=False) for size, own in by_size))
        net, size = max(
            (own - rate * self._seconds(num_rows, size, num_prefill_tokens, False), size) for size, own in by_size
        )
        loss = num_rows - rate * plain_seconds - net  # of the best tree against a plain round, in tokens
        if loss > 0:
            self._since_trees += 1
            if loss > WASTE * self._since_trees * num_rows:
                return plain
        return self._plan_tree(size, kinds, rate * self._proposing(num_rows)[1])

    def fixed_size(self, num_rows: int, sizes: Sequence[int]) -> int:
        """The smallest of the ascending `sizes` that holds the fixed number of nodes for every row."""
        assert self.fixed is not None
        most = num_rows * (1 + self.fixed)
        return next((size for size in sizes if size >= most), sizes[-1])

    def _plan_tree(self, size: int, kinds: Sequence[int], pass_tokens: float) -> Plan:
        """Plan a round with a tree. pass_tokens: tokens that could be decoded in the time of a pass."""
        self._since_trees = 0
        passes = range(self.num_passes)
        thresholds = [self.budget.least_reach(len(kinds), number, kinds, pass_tokens) for number in passes]
        limit = 0
        if thresholds and len(kinds) > thresholds[0]:
            most = self._usual_passes + _PASS_MARGIN
            limit = next((limit for limit in self.pass_limits if limit >= most), self.pass_limits[-1])
        never = [math.inf] * (self.num_passes + 2 - limit)
        return Plan(size, limit, [*thresholds[:limit], *never])

    def _step_seconds(self, num_tokens: int) -> float:
        return self.step.seconds(self._padded(num_tokens))

    def _seconds(self, num_rows: int, size: int, num_prefill_tokens: int = 0, is_plain: bool = True) -> float:
        """Expected seconds of a round."""
        step = self._step_seconds(size + num_prefill_tokens)
        if is_plain:
            return step + self.plain_rest.at(num_rows)
        start, own = self._proposing(num_rows)
        return step + start + self._usual_passes * own + self.rest.at(num_rows)

    def _proposing(self, num_rows: int) -> tuple[float, float]:
        """Expected seconds of proposing without a draft pass, and of each pass."""
        return self.proposing.at(num_rows, USUAL_PASS_COST * self.step.seconds(num_rows))

    def _gain(self, num_rows: int, num_nodes: float) -> float:
        """Expected accepted tokens of a row, without the target's own, with `num_nodes` nodes per row on average."""
        own = row_class(num_rows)
        curve = self._gains[min(self._gains, key=lambda other: abs(other - own))]
        return float(np.interp(num_nodes, _NODES, curve))

    @property
    def pass_limits(self) -> list[int]:
        """Numbers of draft passes to capture rounds for, ascending. With 0, only retrieval proposes."""
        if self.fixed_passes is not None:
            return [self.fixed_passes]
        return [0, *range(_PASS_STRIDE, self.num_passes, _PASS_STRIDE), self.num_passes] if self.num_passes else [0]

    # Learning

    def learn(self, outcome: Outcome) -> None:
        """Learn from a round."""
        if self.calibration is None:
            return
        self._learn_seconds(outcome)
        if not outcome.is_plain:
            expected = self._learn_candidates(outcome)
            self._learn_acceptance(outcome, expected)

    def _learn_seconds(self, outcome: Outcome) -> None:
        num_rows, is_plain = outcome.num_rows, outcome.is_plain
        if outcome.step_seconds > 0 and self.fixed is None:
            num_tokens = self._padded(outcome.tokens + outcome.num_prefill_tokens)
            if num_tokens <= self.step.sizes[-1]:  # longer steps are extrapolated
                self.step.observe(num_tokens, outcome.step_seconds, least=num_rows)
            rest = self.plain_rest if is_plain else self.rest
            rest.observe(num_rows, outcome.rest_seconds, most=outcome.step_seconds)
            if not is_plain:
                self.proposing.observe(num_rows, outcome.num_passes, outcome.propose_seconds)

    def _learn_candidates(self, outcome: Outcome) -> np.ndarray:
        """Learn from what was proposed. Returns [rows, cap] the expected tokens of the likeliest nodes."""
        assert self.calibration is not None
        self.calibration.add(torch.from_numpy(outcome.tried), torch.from_numpy(outcome.fitted))
        self._usual_passes += WEIGHT * (outcome.num_passes - self._usual_passes)
        ratios = np.array(self.path_calibration.ratios)
        num_powers = len(ratios) // NUM_KINDS
        powers = np.clip(-np.frexp(outcome.paths)[1], 0, num_powers - 1) + num_powers * np.array(outcome.kinds)[:, None]
        expected = np.where(outcome.paths > 0, outcome.paths * ratios[powers], 0.0)
        self._learn_gains(outcome.num_rows, expected)
        self._learn_passes(outcome, expected)
        self._learn_paths(outcome)
        return expected

    def _learn_gains(self, num_rows: int, expected: np.ndarray) -> None:
        gains = np.concatenate([[0.0], np.cumsum(np.sort(expected.ravel())[::-1])]) / num_rows
        curve = np.interp(_NODES, np.arange(len(gains)) / num_rows, gains)
        known = self._gains.get(row_class(num_rows))
        self._gains[row_class(num_rows)] = curve if known is None else known + WEIGHT * (curve - known)

    def _learn_passes(self, outcome: Outcome, expected: np.ndarray) -> None:
        """Learn the gain of each pass: the expected tokens of the verified nodes that needed it.

        Without the pass, other nodes would have been verified instead. So the gain is reduced by the expected tokens
        of the likeliest nodes that were not verified.
        """
        is_verified = np.arange(expected.shape[1]) < outcome.num_nodes[:, None]
        needs = outcome.needs[:, 1:][is_verified[:, : outcome.needs.shape[1] - 1]]
        size = outcome.num_passes + 1
        values = np.cumsum(np.bincount(needs, expected[is_verified], minlength=size))[:size]
        num_replaced = len(needs) - np.cumsum(np.bincount(needs, minlength=size))[:size]
        others = np.sort(expected[~is_verified])[::-1]
        values = values + np.concatenate([[0.0], np.cumsum(others)])[np.minimum(num_replaced, len(others))]
        self.budget.passes.of(outcome.num_rows, outcome.kinds).observe(outcome.reaches, values.tolist())

    def _learn_acceptance(self, outcome: Outcome, expected: np.ndarray) -> None:
        is_verified = np.arange(expected.shape[1]) < outcome.num_nodes[:, None]
        hoped, num_accepted = float(expected[is_verified].sum()), sum(map(len, outcome.nodes))
        if self.fixed is None:
            self.budget.observe_acceptance(hoped, num_accepted)
        else:  # the rate, in tokens of a step
            num_rows, num_nodes = outcome.num_rows, int(outcome.num_nodes.sum())
            size = TreeSize(num_nodes, num_rows, hoped, 1.0)
            self.budget.observe(num_rows, num_rows + num_accepted, size, outcome.num_passes)

    def _learn_paths(self, outcome: Outcome) -> None:
        is_verified = np.arange(outcome.paths.shape[1]) < outcome.num_nodes[:, None]
        verified = np.where(is_verified, outcome.paths, 0.0)[:, : int(outcome.num_nodes.max())]
        paths = np.concatenate([np.ones((len(verified), 1), verified.dtype), verified], axis=1)
        self.path_calibration.observe(torch.from_numpy(paths), outcome.nodes, outcome.kinds)


# Gains are kept for these mean numbers of nodes per row.
_NODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 127.0])

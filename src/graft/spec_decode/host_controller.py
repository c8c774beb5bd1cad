"""Plans rounds whose candidates the host sees: the number of nodes is chosen from them, and not from running means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from graft.model.noise import NUM_KINDS
from graft.spec_decode.budget import TreeSize
from graft.spec_decode.controller import Controller, Outcome, Plan


class HostController(Controller):
    """Plans the rounds of one engine whose steps are not padded."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller.budget, controller.calibration, controller.path_calibration)
        self._size: TreeSize | None = None  # of the current round; None: plain

    def plan(self, kinds: Sequence[int], padded_rows: int, sizes: Sequence[int], num_prefill_tokens: int) -> Plan:
        """`sizes` has only the most tokens of a step."""
        num_rows, self._size = len(kinds), None
        most = min(self.budget.max_nodes(num_rows, num_prefill_tokens), max(sizes, default=0) - num_rows)
        if most <= 0 or not self.budget.may_propose(num_rows):
            return Plan(num_rows, 0, ())
        thresholds = [self.budget.least_reach(num_rows, number, kinds) for number in range(self.num_passes)]
        limit = self.num_passes if thresholds and num_rows > thresholds[0] else 0
        return Plan(num_rows + most, limit, [*thresholds, math.inf, math.inf])

    def choose(self, paths: np.ndarray, kinds: Sequence[int], num_prefill_tokens: int) -> int:
        """How many nodes to verify, all rows together. paths: [R, cap] path probabilities, best first."""
        flat, expected = paths.ravel(), self._expected(paths, kinds).ravel()
        order = np.argsort(-flat, kind="stable")[: int((flat > 0).sum())]
        gains = expected[order].cumsum().tolist()
        self._size = self.budget.best(self.budget.tree_sizes(gains, len(kinds), num_prefill_tokens))
        return self._size.num_nodes

    def _expected(self, paths: np.ndarray, kinds: Sequence[int]) -> np.ndarray:
        if self.fixed is not None:
            return paths
        ratios = np.array(self.path_calibration.ratios)
        num_powers = len(ratios) // NUM_KINDS
        powers = np.clip(-np.frexp(paths)[1], 0, num_powers - 1) + num_powers * np.array(kinds)[:, None]
        expected: np.ndarray = paths * ratios[powers]
        return expected

    def learn(self, outcome: Outcome) -> None:
        budget, num_rows, size = self.budget, outcome.num_rows, self._size
        prefill = outcome.num_prefill_tokens
        if outcome.step_seconds > 0 and self.fixed is None:
            base = num_rows + prefill
            budget.step.observe(base + int(outcome.num_nodes.clip(min=0).sum()), outcome.step_seconds, least=base)
            if not prefill:
                host = budget.plain_host if size is None else budget.host
                own = outcome.propose_seconds - outcome.draft_seconds + outcome.rest_seconds
                host.observe(num_rows, max(own, 0.0), most=outcome.step_seconds)
            if outcome.num_passes:
                budget.drafting.observe(num_rows, outcome.draft_seconds / outcome.num_passes, most=outcome.step_seconds)
        if self.calibration is not None and size is not None:
            self._learn_candidates(outcome)
        num_tokens = num_rows + sum(map(len, outcome.nodes))
        budget.observe(num_rows, num_tokens, size, outcome.num_passes, prefill)

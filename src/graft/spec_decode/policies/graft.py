"""graft: candidates of all proposers, ranked by acceptance probability, within the budget that pays best.

The decisions are in `grafter`, which does not depend on an engine. This policy connects it to our engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from graft.model import KVCache, TargetRunner
from graft.request.batch import Batch
from graft.request.stats import Clock
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.controller import Controller
from graft.spec_decode.cost_model import StepCost, time_pass, time_step, usual_shape
from graft.spec_decode.grafter import Grafter, Round
from graft.spec_decode.policies.base import DraftResult, Policy
from graft.spec_decode.policy_settings import MAX_BUDGET, PolicySettings
from graft.spec_decode.proposers.drafter import KEPT_OF_A_LEVEL, Drafter, DraftState, num_setups_of
from graft.tree.tree import DraftTree


class LearnedOnDevice(Protocol):
    """What device rounds have learned."""

    def state(self) -> dict[str, Tensor]: ...

    def reload(self) -> None:
        """Load the state of the policy's retrievers."""


class Graft(Policy):
    """Ranks the proposals of the drafter and all retrievers, and verifies the nodes that pay."""

    kept_of_a_level = KEPT_OF_A_LEVEL
    knows_draws = True
    grafter_class: type[Grafter] = Grafter

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        self.drafter, self._target = drafter, target
        self.isolated = settings.isolated
        shape = usual_shape(getattr(getattr(target, "device", None), "type", "cpu"))
        step = StepCost(getattr(target, "step_sizes", ()), shape)
        num_passes = drafter.max_passes if drafter is not None else 0
        self.grafter = self.grafter_class(target.vocab_size, num_passes, settings, step)
        self.retrievers, self.sources = self.grafter.retrievers, self.grafter.sources
        self.budget = self.grafter.budget
        self._round: Round | None = None  # the current one; None if plain
        self._num_prefill_tokens = 0  # in the current step
        self._setups_before = 0
        self._ended = 0.0  # when the last round ended
        self.on_device: LearnedOnDevice | None = None

    @property
    def runs_on_device(self) -> bool:  # type: ignore[override]
        return self.grafter.runs_on_device

    def controller(self, padded: Callable[[int], int]) -> Controller:
        grafter = self.grafter
        return Controller(grafter.budget, grafter.calibration, grafter.path_calibration, padded)

    def prepare(self) -> None:
        budget = self.budget
        if budget.fixed is not None and budget.pass_cost is None:
            seconds = time_pass(self.drafter, self._target) if self.drafter is not None else 0.0
            budget.pass_cost = seconds / time_step(self._target, budget.fixed + 1)

    def measure(self) -> None:
        if self.grafter.adapts and not self.budget.step.is_known:
            self.budget.step.measure(self._target)
            if self.drafter is not None:
                self.budget.drafting.observe(1, time_pass(self.drafter, self._target))

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]]) -> DraftState | None:
        self._ended = 0.0  # prefill and idle time do not count as a round's
        return super().open(cache, texts)

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftResult:
        self._num_prefill_tokens = batch.num_prefill_tokens
        self._setups_before = num_setups_of(self._target, self.drafter)
        most = MAX_BUDGET if self.budget.fixed is None else self.budget.fixed
        caps = [most if sequence.speculates else 0 for sequence in batch.sequences]
        limits = (batch.max_depth, batch.num_prefill_tokens)
        if not self.grafter.may_begin(caps, *limits):
            self._round = None
            return DraftResult.without_drafts(DraftTree.roots(roots))
        draws = self.coming_draws(batch)
        with clock("graft"):
            round = self._round = self.grafter.begin(roots, batch.sequences, caps, *limits, draws=draws)
        assert round is not None
        if self.drafter is not None:
            passes = self.drafter.passes(batch.draft, roots, keep=self.kept_of_a_level, draws=draws)
            with clock("draft"):
                self.grafter.draft(round, passes, self.drafter.num_beams)
        with clock("graft"):
            tree = self.grafter.graft(round)
        is_watched = any(sequence.is_recorded for sequence in batch.sequences)
        return DraftResult(tree, round.passes, self.grafter.considered(round) if is_watched else tree, draws)

    def learn_accepted(self, tree: DraftTree, accepted: Accepted, seconds: float) -> None:
        ended, self._ended = self._ended, time.perf_counter()
        round_seconds = self._ended - ended if ended else 0.0
        # The time of a round with one-time work, such as a graph capture, says nothing about other rounds.
        is_usual = seconds > 0 and num_setups_of(self._target, self.drafter) == self._setups_before
        prefill = self._num_prefill_tokens
        self.grafter.learn(self._round, tree, accepted, seconds, round_seconds, is_usual, prefill)

    def state(self) -> dict[str, Tensor]:
        return self.grafter.state() | (self.on_device.state() if self.on_device is not None else {})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.grafter.restore(state)
        if self.on_device is not None:
            self.on_device.reload()

    def costs(self) -> dict[str, Tensor]:
        return self.grafter.costs()

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        self.grafter.restore_costs(costs)

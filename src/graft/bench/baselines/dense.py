"""dense: the drafter's whole tree, as EAGLE-3 builds it. prune: the same with gates that stop drafting."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graft.bench.baselines.gates import ALL_DEPTHS, GATES, PUBLISHED, THRESHOLDS
from graft.drafters.drafter import Drafter
from graft.model import TargetRunner
from graft.spec_decode.calibration import PathCalibration
from graft.spec_decode.planner import Planner
from graft.spec_decode.policies.base import Policy
from graft.spec_decode.policy_settings import USUAL_BUDGET, PolicySettings
from graft.spec_decode.step_times import StepTimes
from graft.tree.device.fixed import FixedTree, Split


class Dense(Policy):
    """The likeliest nodes of the whole drafted tree, without pruning and grafting.

    It is a round of `graft` with a single source whose q is taken as it is, a fixed number of nodes, and all draft
    passes.
    """

    drafts = True
    sources: tuple[str, ...] = ("root", "drafted")
    planner_class: type[Planner] = Planner

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        assert drafter is not None
        self.drafter, self.isolated = drafter, settings.isolated
        self.budget = self._budget(drafter, settings)
        self.fixed = self._rules(drafter)
        self.planner = self.planner_class(
            StepTimes(),
            drafter.max_passes,
            None,
            PathCalibration(),
            fixed=self.budget,
            fixed_passes=drafter.max_passes,
            pass_cost=0.0,
        )

    def _budget(self, drafter: Drafter, settings: PolicySettings) -> int:
        return settings.budget or min(drafter.num_nodes, USUAL_BUDGET)

    def _rules(self, drafter: Drafter) -> FixedTree:
        return FixedTree()


class DenseWithNoise(Dense):
    """`dense` with drafts that know the noise of coming draws."""

    knows_draws = True


class Prune(Dense):
    """The published method without its grafts: only the draft depth is dynamic."""

    thresholds_key = THRESHOLDS
    thresholds: Sequence[float] = PUBLISHED

    def _rules(self, drafter: Drafter) -> FixedTree:
        return FixedTree(GATES, tuple(Split(self.budget, depth) for depth in (*GATES, ALL_DEPTHS)))

    def state(self) -> dict[str, Tensor]:
        return {self.thresholds_key: torch.tensor(self.thresholds)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.thresholds = state[self.thresholds_key].tolist() if self.thresholds_key in state else PUBLISHED

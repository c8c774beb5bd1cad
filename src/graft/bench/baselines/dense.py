"""dense: the drafter's whole tree, as EAGLE-3 builds it. prune: the same with gates that stop drafting."""

from collections.abc import Mapping

from torch import Tensor

from graft.bench.baselines.gates import Drafted, Gates, draft_through_gates
from graft.bench.baselines.host_rounds import DraftResult, HostBatch, HostPolicy
from graft.model import TargetRunner
from graft.request.stats import Clock
from graft.spec_decode.calibration import PathCalibration
from graft.spec_decode.planner import Planner
from graft.spec_decode.policies.base import Policy
from graft.spec_decode.policy_settings import USUAL_BUDGET, PolicySettings
from graft.spec_decode.proposers.drafter import Drafter
from graft.spec_decode.step_times import StepTimes


class Dense(Policy):
    """The likeliest nodes of the whole drafted tree, without pruning and grafting.

    It is a round of `graft` with a single source whose q is taken as it is, a fixed number of nodes, and all draft
    passes.
    """

    drafts = True
    sources = ("root", "drafted")

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        assert drafter is not None
        self.drafter = drafter
        self.planner = Planner(
            StepTimes(),
            drafter.max_passes,
            None,
            PathCalibration(),
            fixed=settings.budget or min(drafter.num_nodes, USUAL_BUDGET),
            fixed_passes=drafter.max_passes,
            pass_cost=0.0,
        )


class DenseWithNoise(Dense):
    """`dense` with drafts that know the noise of coming draws."""

    knows_draws = True


class HostDense(HostPolicy):
    """`dense` in rounds of the host: base of the policies that draft through gates, or a chain."""

    drafts = True
    sources = ("root", "drafted")

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        assert drafter is not None
        self.drafter = drafter
        self._budget = settings.budget or min(drafter.num_nodes, USUAL_BUDGET)
        self.drafted: Drafted | None = None  # the drafts of the last round

    def grow(self, batch: HostBatch, roots: Tensor, clock: Clock) -> DraftResult:
        assert self.drafter is not None
        candidates = self.new_candidates(batch, roots)
        self.drafted = draft_through_gates(
            self.drafter, batch, candidates, self._thresholds(), clock, self.kept_of_a_level, self.coming_draws(batch)
        )
        with clock("graft"):
            candidates.merge()
            return DraftResult(candidates.best(self._budget, max(self.drafted.depths))[0], self.drafted.passes)

    def _thresholds(self) -> Tensor | None:
        return None


class Prune(HostDense):
    """The published method without its grafts: only the draft depth is dynamic."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        super().__init__(target, drafter, settings)
        self.gates = Gates()

    def _thresholds(self) -> Tensor | None:
        return self.gates.thresholds

    def state(self) -> dict[str, Tensor]:
        return super().state() | self.gates.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.gates.restore(state)

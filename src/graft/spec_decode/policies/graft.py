"""graft: candidates of all proposers, ranked by acceptance probability, within the budget that pays best.

`tree/device/round.py` makes the trees. This policy holds what they are made with: acceptance probabilities, costs, and
the memory of texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graft.drafters.drafter import Drafter, time_pass
from graft.model import TargetRunner
from graft.spec_decode.calibration import PathCalibration
from graft.spec_decode.expert_costs import shape_for
from graft.spec_decode.memory import Memory
from graft.spec_decode.planner import Planner
from graft.spec_decode.policies.base import Policy
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.sources import TABLES, calibrated
from graft.spec_decode.states import named, part_of
from graft.spec_decode.step_times import StepTimes, time_step, usual_shape


class Graft(Policy):
    """Ranks the proposals of the drafter and all retrievers, and verifies the nodes that pay."""

    knows_draws = True
    copies = past = True  # of this text, and of finished texts, it retrieves
    tables: Sequence[str] = TABLES  # that it retrieves from
    memory: Memory
    planner: Planner

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        self.drafter, self._target, self.settings = drafter, target, settings
        self.isolated = settings.isolated
        num_passes = drafter.max_passes if drafter is not None else 0
        self.sources, self.calibration = calibrated(num_passes > 0, self.copies, bool(self.tables))
        self.path_calibration = PathCalibration()
        self.planner = Planner(
            StepTimes(target.step_sizes, shape_for(target.model, usual_shape(target.device.type))),
            num_passes,
            self.calibration,
            self.path_calibration,
            fixed=settings.budget,
            fixed_passes=settings.passes,
            pass_cost=settings.pass_cost,
        )
        keeps_past = self.copies and self.past
        self.memory = Memory(target.vocab_size, self.isolated, lambda: target.device, keeps_past, self.tables)
        if not self.isolated:
            self.common_sources = frozenset(name for name in self.sources if name in ("past", *TABLES))

    def prepare(self) -> None:
        planner = self.planner
        if planner.fixed is not None and planner.pass_cost is None:
            seconds = time_pass(self.drafter, self._target) if self.drafter is not None else 0.0
            planner.pass_cost = seconds / time_step(self._target, planner.fixed + 1)

    def measure(self) -> None:
        if self.planner.fixed is None and not self.planner.steps.is_known:
            self.planner.steps.measure(self._target)
            if self.drafter is not None:
                self.planner.work.set(1, {0: 0.0, 1: time_pass(self.drafter, self._target)})

    def state(self) -> dict[str, Tensor]:
        counts = self.calibration.state().values()
        by_source = {name: torch.stack([c[:, number] for c in counts]) for number, name in enumerate(self.sources)}
        return self.memory.state() | named("calibration", by_source) | named("paths", self.path_calibration.state())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.memory.restore(state)
        self._restore_calibration(part_of(state, "calibration"))
        self.path_calibration.restore(part_of(state, "paths"))
        self.planner.restart()

    def _restore_calibration(self, by_source: Mapping[str, Tensor]) -> None:
        """Restore counts source by source. The state may have other sources and buckets, or only greedy rows."""
        self.calibration.restore({})
        new = self.calibration.state()
        for number, name in enumerate(self.sources):
            if name in by_source:
                for own, known in zip(new.values(), by_source[name], strict=True):
                    num_groups, width = (min(sizes) for sizes in zip(own[:, number].shape, known.shape, strict=True))
                    own[:num_groups, number, :width] = known[:num_groups, :width]
        self.calibration.restore(new)

    def costs(self) -> dict[str, Tensor]:
        return self.planner.times() if self.settings.budget is None else {}

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        if self.settings.budget is None and self.settings.pass_cost is None:  # otherwise the user has given the costs
            self.planner.restore_times(costs)

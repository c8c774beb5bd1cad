"""dense: the drafter's whole tree, as EAGLE-3 builds it. prune: the same, but drafting stops where it is unsure."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.batch import Batch
from graft.draft.base import Drafter
from graft.policy.base import USUAL_BUDGET, Grown, Policy, PolicySettings
from graft.policy.gates import PUBLISHED, draft_through_gates
from graft.stats import Clock
from graft.target import TargetRunner


class Dense(Policy):
    """Nothing pruned, nothing grafted."""

    drafts = True
    sources = ("root", "drafted")
    thresholds: Tensor | None = None

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        assert drafter is not None
        self.drafter = drafter
        self._budget = settings.budget or min(drafter.settings.total_token, USUAL_BUDGET)

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> Grown:
        assert self.drafter is not None
        pool = self.new_pool(batch, roots)
        drafted = draft_through_gates(self.drafter, batch, pool, self.thresholds, clock)
        with clock("graft"):
            return Grown(pool.best(self._budget, max(drafted.passes))[0], drafted.passes)


class Prune(Dense):
    """Dynamic depth only: what the published method is without its grafts."""

    thresholds = torch.tensor(PUBLISHED)

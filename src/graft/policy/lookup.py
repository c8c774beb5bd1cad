"""lookup: what followed the text's own end before, and nothing else; no drafter, no tables."""

from __future__ import annotations

from torch import Tensor

from graft.batch import Batch
from graft.draft.base import Drafter
from graft.learn.calibration import Calibration
from graft.policy.base import USUAL_BUDGET, Grown, Policy, PolicySettings
from graft.retrieve import SuffixLookup
from graft.stats import Clock
from graft.target import TargetRunner
from graft.tree import ROOT


class Lookup(Policy):
    """The suffix lookup in the context alone: no finished texts, no calibration beyond its prior."""

    sources = ("root", *SuffixLookup.names)

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        self._suffix = SuffixLookup(keep_past=False)
        self._prior = Calibration(list(self._suffix.prior))
        self._budget = settings.budget or USUAL_BUDGET

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> Grown:
        with clock("graft"):
            pool = self.new_pool(batch, roots)
            first = ROOT + 1
            self._suffix.propose(pool, batch.sequences, first, self._prior.chances, batch.max_depth)
            pool.merge()
            return Grown.without_drafts(pool.best(self._budget, batch.max_depth)[0].trimmed())

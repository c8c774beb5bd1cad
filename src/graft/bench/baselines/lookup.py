"""lookup: suffix lookup in the text itself only, without drafter and tables."""

from torch import Tensor

from graft.bench.baselines.host_rounds import DraftResult, HostBatch, HostPolicy
from graft.model import TargetRunner
from graft.request.stats import Clock
from graft.spec_decode.calibration import Calibration
from graft.spec_decode.policy_settings import USUAL_BUDGET, PolicySettings
from graft.spec_decode.proposers import SuffixLookup
from graft.spec_decode.proposers.drafter import Drafter
from graft.tree.tree import ROOT


class Lookup(HostPolicy):
    """Copies of what followed earlier occurrences of the text's end, with the prior as calibration."""

    sources = ("root", *SuffixLookup.names)

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        self._suffix = SuffixLookup(keep_past=False)
        self._prior = Calibration(list(self._suffix.prior))
        self._budget = settings.budget or USUAL_BUDGET

    def grow(self, batch: HostBatch, roots: Tensor, clock: Clock) -> DraftResult:
        with clock("graft"):
            candidates = self.new_candidates(batch, roots)
            first = ROOT + 1
            self._suffix.propose(candidates, batch.sequences, first, self._prior.acceptance_probs, batch.max_depth)
            candidates.merge()
            return DraftResult.without_drafts(candidates.best(self._budget, batch.max_depth)[0].trimmed())

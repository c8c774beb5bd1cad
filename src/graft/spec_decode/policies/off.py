"""off: plain decoding, by the same engine with trees of one node."""

from __future__ import annotations

from torch import Tensor

from graft.model import TargetRunner
from graft.request.batch import Batch
from graft.request.stats import Clock
from graft.spec_decode.policies.base import DraftResult, Policy
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers.drafter import Drafter
from graft.tree.tree import DraftTree


class Off(Policy):
    """Verifies only roots."""

    runs_on_device = True

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        pass

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftResult:
        return DraftResult.without_drafts(DraftTree.roots(roots))

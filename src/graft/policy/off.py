"""off: plain decoding, a tree of one node in the same engine."""

from __future__ import annotations

from torch import Tensor

from graft.batch import Batch
from graft.draft.base import Drafter
from graft.policy.base import Grown, Policy, PolicySettings
from graft.stats import Clock
from graft.target import TargetRunner
from graft.tree import DraftTree


class Off(Policy):
    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        pass

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> Grown:
        return Grown.without_drafts(DraftTree.roots(roots))

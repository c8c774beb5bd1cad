"""off: plain decoding, a tree of one node in the same engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from graft.policy.base import Policy
from graft.retrieve.base import History
from graft.stats import Clock
from graft.target import TargetRunner
from graft.tree import DraftTree


class Off(Policy):
    def __init__(self, target: TargetRunner, budget: int | None = None) -> None:
        pass

    def grow(self, histories: Sequence[History], roots: Tensor, max_depth: int, clock: Clock) -> DraftTree:
        return DraftTree.roots(roots)

"""dense: the drafter's whole tree, as EAGLE-3 builds it; nothing pruned, nothing grafted."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from graft.accept import Accepted
from graft.batch import Batch
from graft.draft.base import Drafter, DraftState, Level
from graft.errors import GraftError
from graft.policy.base import MAX_BUDGET, Grown, Policy
from graft.settings import require
from graft.stats import Clock
from graft.target import TargetRunner, Verified
from graft.tree import ROOT, DraftTree

_DRAFTED = ROOT + 1


class Dense(Policy):
    sources = ("root", "drafted")

    def __init__(self, target: TargetRunner, drafter: Drafter | None = None, budget: int | None = None) -> None:
        if drafter is None:
            raise GraftError("policy 'dense' drafts with a head: name one with draft=")
        self._drafter = drafter
        self._budget = budget or drafter.settings.total_token
        require(self._budget <= MAX_BUDGET, f"total_token must be at most {MAX_BUDGET}, not {self._budget}")

    def open(self, num_rows: int, num_slots: int) -> DraftState:
        return self._drafter.open(num_rows, num_slots)

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> Grown:
        with clock("draft"):
            num_passes = min(self._drafter.settings.depth + 1, batch.max_depth)
            levels = list(islice(self._drafter.levels(batch.draft, roots), num_passes))
            return Grown(drafted_tree(roots, levels).best(self._budget), [len(levels)] * len(roots))

    def read(self, batch: Batch, row: int, verified: Verified, following: list[int]) -> None:
        self._drafter.read(batch.draft, row, verified, following)

    def learn(self, batch: Batch, tree: DraftTree, verified: Verified, accepted: Accepted, seconds: float) -> None:
        self._drafter.learn(batch.draft, verified, accepted.nodes, accepted.tokens)


def drafted_tree(roots: Tensor, levels: list[Level]) -> DraftTree:
    """All that was drafted, as one tree."""
    tree = DraftTree.roots(roots)
    tokens = torch.cat([tree.tokens, *(level.tokens for level in levels)], dim=1)
    sources = torch.full_like(tokens, _DRAFTED)
    sources[:, 0] = ROOT
    return DraftTree(
        max_depth=len(levels),
        tokens=tokens,
        parents=torch.cat([tree.parents, *(level.parents for level in levels)], dim=1),
        probabilities=torch.cat([tree.probabilities, *(level.probabilities for level in levels)], dim=1),
        sources=sources,
        evidence=torch.zeros_like(tokens),
    )

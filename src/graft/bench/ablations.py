"""Ablations: `graft` with one thing left out, to see what it is worth. Methods of the benchmark, not policies."""

from __future__ import annotations

from torch import Tensor

from graft.model import TargetRunner
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.candidates import Candidates
from graft.spec_decode.policies import DEFAULT_POLICY, POLICIES, Policy, PolicySettings
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.proposers import NgramTables, Retriever, SuffixLookup
from graft.spec_decode.tree import DraftTree


class WithoutSuffix(Graft):
    """No copies, neither of the text itself nor of finished ones."""

    def make_retrievers(self, target: TargetRunner, settings: PolicySettings) -> list[Retriever]:
        return [r for r in super().make_retrievers(target, settings) if not isinstance(r, SuffixLookup)]


class WithoutPast(Graft):
    """Copies of the text itself only."""

    def make_retrievers(self, target: TargetRunner, settings: PolicySettings) -> list[Retriever]:
        usual = super().make_retrievers(target, settings)
        return [SuffixLookup(keep_past=False) if isinstance(r, SuffixLookup) else r for r in usual]


class _OtherOrders(Graft):
    orders: tuple[int, ...]

    def make_retrievers(self, target: TargetRunner, settings: PolicySettings) -> list[Retriever]:
        usual = [r for r in super().make_retrievers(target, settings) if not isinstance(r, NgramTables)]
        if not self.orders:
            return usual
        return [*usual, NgramTables(target.vocab_size, self.orders, isolated=settings.isolated)]


class WithoutNgrams(_OtherOrders):
    """The adjacency matrix alone of what the target judged."""

    orders = (1,)


class WithoutAdjacency(_OtherOrders):
    """N-grams alone of what the target judged."""

    orders = (3, 2)


class WithoutRecall(_OtherOrders):
    """Nothing of what the target judged."""

    orders = ()


class WithoutCalibration(Graft):
    """Proposers are believed as their priors say, whatever becomes of what they propose."""

    def calibrate(self, candidates: Candidates, accepted: Accepted) -> None:
        """Nothing is learned."""


class WithoutPruning(Graft):
    """Every draft pass is made, whether or not it pays."""

    def goes_on(self, candidates: Candidates, num_done: int, reach: list[float], going: list[bool]) -> list[bool]:
        return going


class WithoutMerging(Graft):
    """A path that several proposed takes a place of the budget for each of them."""

    def best_of(self, candidates: Candidates, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
        candidates.keep_best([budget] * candidates.num_rows)
        return super().best_of(candidates, budget, max_depth)


ABLATIONS: dict[str, type[Graft]] = {
    f"{DEFAULT_POLICY}-without-{what}": ablation
    for what, ablation in (
        ("suffix", WithoutSuffix),
        ("past", WithoutPast),
        ("ngrams", WithoutNgrams),
        ("adjacency", WithoutAdjacency),
        ("recall", WithoutRecall),
        ("calibration", WithoutCalibration),
        ("pruning", WithoutPruning),
        ("merging", WithoutMerging),
    )
}
CONTENDERS: dict[str, type[Policy]] = {**POLICIES, **ABLATIONS}

"""Ablations: `graft` with one thing left out, to see what it is worth. Methods of the benchmark, not policies."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from torch import Tensor

from graft.accept import Accepted
from graft.draft.base import Drafter
from graft.policy import DEFAULT_POLICY, Policy, PolicySettings, make_policy
from graft.policy.gates import keep_best_drafted
from graft.policy.graft import Graft
from graft.pool import Pool
from graft.retrieve import Recall, Retriever, SuffixLookup
from graft.retrieve.base import History
from graft.target import TargetRunner
from graft.tree import DraftTree


class WithoutSuffix(Graft):
    """No copies, neither of the text itself nor of finished ones."""

    def make_retrievers(self, target: TargetRunner) -> list[Retriever]:
        return [Recall(target.vocab_size, target.device)]


class _OwnText(SuffixLookup):
    def finish(self, history: History) -> None:
        """Finished texts are not kept."""


class WithoutPast(Graft):
    """Copies of the text itself only."""

    def make_retrievers(self, target: TargetRunner) -> list[Retriever]:
        return [_OwnText(), Recall(target.vocab_size, target.device)]


class WithoutNgrams(Graft):
    """The adjacency matrix alone of what the target judged."""

    def make_retrievers(self, target: TargetRunner) -> list[Retriever]:
        return [SuffixLookup(), Recall(target.vocab_size, target.device, orders=(1,))]


class WithoutAdjacency(Graft):
    """N-grams alone of what the target judged."""

    def make_retrievers(self, target: TargetRunner) -> list[Retriever]:
        return [SuffixLookup(), Recall(target.vocab_size, target.device, orders=(3, 2))]


class WithoutRecall(Graft):
    """Nothing of what the target judged."""

    def make_retrievers(self, target: TargetRunner) -> list[Retriever]:
        return [SuffixLookup()]


class WithoutCalibration(Graft):
    """Proposers are believed as their priors say, whatever becomes of what they propose."""

    def calibrate(self, pool: Pool, accepted: Accepted) -> None:
        """Nothing is learned."""


class WithoutPruning(Graft):
    """Every draft pass is made, whether or not it pays."""

    def goes_on(self, pool: Pool, num_done: int, reach: list[float], going: list[bool]) -> list[bool]:
        return going


class WithoutMerging(Graft):
    """A path that several proposed takes a place of the budget for each of them."""

    def best_of(self, pool: Pool, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
        crowded = copy(pool)
        crowded.nodes = replace(pool.nodes, paths=pool.nodes.paths.clone())
        keep_best_drafted(crowded, [budget] * len(pool.nodes.tokens))
        return crowded.best(budget, max_depth)


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


def make_contender(
    name: str,
    target: TargetRunner,
    drafter: Drafter | None = None,
    budget: int | None = None,
    pass_cost: float | None = None,
) -> Policy:
    """The policy or the ablation of that name, with nothing learned."""
    if name in ABLATIONS:
        return ABLATIONS[name](target, drafter, PolicySettings(budget, pass_cost))
    return make_policy(name, target, drafter, budget, pass_cost)

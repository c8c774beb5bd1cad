"""Ablations: the policy `graft` with one part left out, to measure what that part contributes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graft.bench.baselines.native import keep_best
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.grafter import Grafter
from graft.spec_decode.policies import DEFAULT_POLICY, PolicySettings
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.proposers import NgramTables, Retriever, SuffixLookup
from graft.tree.candidates import Candidates, Ranking


class WithoutSuffix(Grafter):
    """`graft` without suffix lookup: no copies of the text itself or of finished texts."""

    def make_retrievers(self, vocab_size: int, settings: PolicySettings) -> list[Retriever]:
        return [r for r in super().make_retrievers(vocab_size, settings) if not isinstance(r, SuffixLookup)]


class WithoutPast(Grafter):
    """`graft` whose suffix lookup copies from the text itself only, not from finished texts."""

    runs_on_device = False

    def make_retrievers(self, vocab_size: int, settings: PolicySettings) -> list[Retriever]:
        usual = super().make_retrievers(vocab_size, settings)
        return [SuffixLookup(keep_past=False) if isinstance(r, SuffixLookup) else r for r in usual]


class _OtherOrders(Grafter):
    """`graft` with n-gram tables of other orders: 1 is the adjacency matrix."""

    orders: tuple[int, ...]
    runs_on_device = False

    def make_retrievers(self, vocab_size: int, settings: PolicySettings) -> list[Retriever]:
        usual = [r for r in super().make_retrievers(vocab_size, settings) if not isinstance(r, NgramTables)]
        if not self.orders:
            return usual
        return [*usual, NgramTables(vocab_size, self.orders, isolated=settings.isolated)]


class WithoutNgrams(_OtherOrders):
    """`graft` without 2- and 3-gram tables, but with the adjacency matrix."""

    orders = (1,)


class WithoutAdjacency(_OtherOrders):
    """`graft` without the adjacency matrix, but with 2- and 3-gram tables."""

    orders = (3, 2)


class WithoutRecall(_OtherOrders):
    """`graft` without any table of the target's top-k tokens."""

    orders = ()
    runs_on_device = True


class WithoutCalibration(Grafter):
    """`graft` without calibration: acceptance probabilities stay at their priors."""

    runs_on_device = False

    def calibrate(self, candidates: Candidates, accepted: Accepted) -> None:
        """Learns nothing."""


class WithoutPruning(Grafter):
    """`graft` without early stopping: every draft pass is made, whether or not it pays."""

    def __init__(self, vocab_size: int, num_passes: int, settings: PolicySettings, *rest: Any) -> None:
        super().__init__(vocab_size, num_passes, replace(settings, passes=num_passes), *rest)


class WithoutMerging(Grafter):
    """`graft` without merging: a path that several sources propose takes several nodes of the budget."""

    runs_on_device = False

    def best_of(self, candidates: Candidates, total: int, caps: Sequence[int]) -> Ranking:
        keep_best(candidates, caps)
        return super().best_of(candidates, total, caps)


class WithoutEightBits(Graft):
    """`graft` whose draft head has weights of 16 bits on a GPU too. `runs` makes its drafter."""


class WithoutNoise(Graft):
    """`graft` that does not know the noise of coming draws: sampled rows are drafted by probability alone."""

    knows_draws = False


def _policy(ablation: type[Grafter]) -> type[Graft]:
    """The policy `graft` with this grafter."""
    return type(ablation.__name__, (Graft,), {"grafter_class": ablation, "__doc__": ablation.__doc__})


ABLATIONS: dict[str, type[Graft]] = {
    f"{DEFAULT_POLICY}-without-{what}": _policy(ablation)
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
} | {f"{DEFAULT_POLICY}-without-noise": WithoutNoise, f"{DEFAULT_POLICY}-without-8-bits": WithoutEightBits}

"""Ablations: the policy `graft` with one part left out, to measure what that part contributes."""

from collections.abc import Sequence
from dataclasses import replace

from graft.bench.baselines.host_rounds import HostGraft
from graft.bench.baselines.native import keep_best
from graft.model import TargetRunner
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.grafter import Grafter
from graft.spec_decode.policies import DEFAULT_POLICY, Policy, PolicySettings
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.proposers import NgramTables, Retriever, SuffixLookup
from graft.spec_decode.proposers.drafter import Drafter
from graft.tree.candidates import Candidates, Ranking


class WithoutSuffix(Graft):
    """`graft` without suffix lookup: no copies of the text itself or of finished texts."""

    copies = False


class WithoutRecall(Graft):
    """`graft` without any table of the target's top-k tokens."""

    tables = False


class WithoutPruning(Graft):
    """`graft` without early stopping: every draft pass is made, whether or not it pays."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        passes = drafter.max_passes if drafter is not None else 0
        super().__init__(target, drafter, replace(settings, passes=passes))


class WithoutPast(Grafter):
    """`graft` whose suffix lookup copies from the text itself only, not from finished texts."""

    def make_retrievers(self, vocab_size: int, settings: PolicySettings) -> list[Retriever]:
        usual = super().make_retrievers(vocab_size, settings)
        return [SuffixLookup(keep_past=False) if isinstance(r, SuffixLookup) else r for r in usual]


class _OtherOrders(Grafter):
    """`graft` with n-gram tables of other orders: 1 is the adjacency matrix."""

    orders: tuple[int, ...]

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


class WithoutCalibration(Grafter):
    """`graft` without calibration: acceptance probabilities stay at their priors."""

    def calibrate(self, candidates: Candidates, accepted: Accepted) -> None:
        """Learns nothing."""


class WithoutMerging(Grafter):
    """`graft` without merging: a path that several sources propose takes several nodes of the budget."""

    def best_of(self, candidates: Candidates, total: int, caps: Sequence[int]) -> Ranking:
        keep_best(candidates, caps)
        return super().best_of(candidates, total, caps)


class WithoutEightBits(Graft):
    """`graft` whose draft head has weights of 16 bits on a GPU too. `runs` makes its drafter."""


class WithoutNoise(Graft):
    """`graft` that does not know the noise of coming draws: sampled rows are drafted by probability alone."""

    knows_draws = False


def _policy(ablation: type[Grafter]) -> type[HostGraft]:
    """The policy `graft` with this grafter."""
    return type(ablation.__name__, (HostGraft,), {"grafter_class": ablation, "__doc__": ablation.__doc__})


_BY_PART: dict[str, type[Policy]] = {
    "suffix": WithoutSuffix,
    "past": _policy(WithoutPast),
    "ngrams": _policy(WithoutNgrams),
    "adjacency": _policy(WithoutAdjacency),
    "recall": WithoutRecall,
    "calibration": _policy(WithoutCalibration),
    "pruning": WithoutPruning,
    "merging": _policy(WithoutMerging),
    "noise": WithoutNoise,
    "8-bits": WithoutEightBits,
}
ABLATIONS = {f"{DEFAULT_POLICY}-without-{part}": ablation for part, ablation in _BY_PART.items()}

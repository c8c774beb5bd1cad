"""Ablations: the policy `graft` with one part left out, to measure what that part contributes."""

from dataclasses import replace

from graft.bench.baselines.gates import ALL_DEPTHS
from graft.model import TargetRunner
from graft.spec_decode.policies import DEFAULT_POLICY, MAX_BUDGET, Policy, PolicySettings
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.proposers.drafter import Drafter
from graft.spec_decode.sources import TABLES
from graft.tree.device.fixed import FixedTree, Split


class WithoutSuffix(Graft):
    """`graft` without suffix lookup: no copies of the text itself or of finished texts."""

    copies = False


class WithoutPast(Graft):
    """`graft` whose suffix lookup copies from the text itself only, not from finished texts."""

    past = False


class WithoutRecall(Graft):
    """`graft` without any table of the target's top-k tokens."""

    tables = ()


class WithoutNgrams(Graft):
    """`graft` without 2- and 3-gram tables, but with the adjacency matrix."""

    tables = TABLES[2:]


class WithoutAdjacency(Graft):
    """`graft` without the adjacency matrix, but with 2- and 3-gram tables."""

    tables = TABLES[:2]


class WithoutCalibration(Graft):
    """`graft` without calibration: acceptance probabilities stay at their priors."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        super().__init__(target, drafter, settings)
        self.calibration.is_frozen = True


class WithoutPruning(Graft):
    """`graft` without early stopping: every draft pass is made, whether or not it pays."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        passes = drafter.max_passes if drafter is not None else 0
        super().__init__(target, drafter, replace(settings, passes=passes))


class WithoutMerging(Graft):
    """`graft` without merging: a path that several sources propose takes several nodes of the budget."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        super().__init__(target, drafter, settings)
        # Equal paths are counted one by one before they are merged.
        self.fixed = FixedTree(splits=(Split(settings.budget or MAX_BUDGET, ALL_DEPTHS),))


class WithoutEightBits(Graft):
    """`graft` whose draft head has weights of 16 bits on a GPU too. `runs` makes its drafter."""


class WithoutNoise(Graft):
    """`graft` that does not know the noise of coming draws: sampled rows are drafted by probability alone."""

    knows_draws = False


_PARTS = {
    "suffix": WithoutSuffix,
    "past": WithoutPast,
    "ngrams": WithoutNgrams,
    "adjacency": WithoutAdjacency,
    "recall": WithoutRecall,
    "calibration": WithoutCalibration,
    "pruning": WithoutPruning,
    "merging": WithoutMerging,
    "noise": WithoutNoise,
    "8-bits": WithoutEightBits,
}
ABLATIONS: dict[str, type[Policy]] = {f"{DEFAULT_POLICY}-without-{part}": kind for part, kind in _PARTS.items()}

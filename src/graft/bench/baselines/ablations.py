"""Ablations: the policy `graft` with one part left out, to measure what that part contributes."""

from dataclasses import replace

from graft.bench.baselines.gates import ALL_DEPTHS
from graft.drafters.drafter import Drafter
from graft.model import TargetRunner
from graft.spec_decode.policies import DEFAULT_POLICY, MAX_BUDGET, Policy, PolicySettings
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.sources import TABLES
from graft.tree.device.fixed import FixedTree, Split


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


def _with(**choices: object) -> type[Policy]:
    """`graft` with other choices of its class."""
    return type("Ablated", (Graft,), choices)


EIGHT_BITS = f"{DEFAULT_POLICY}-without-8-bits"
_PARTS: dict[str, type[Policy]] = {
    "suffix": _with(copies=False),  # neither of the text itself nor of finished texts
    "past": _with(past=False),  # copies of the text itself only
    "ngrams": _with(tables=TABLES[2:]),
    "adjacency": _with(tables=TABLES[:2]),
    "recall": _with(tables=()),  # no table of the target's likeliest tokens
    "calibration": WithoutCalibration,
    "pruning": WithoutPruning,
    "merging": WithoutMerging,
    "noise": _with(knows_draws=False),  # sampled rows are drafted by probability alone
    "8-bits": Graft,  # `runs` makes its drafter, whose head has weights of 16 bits on a GPU too
}
ABLATIONS: dict[str, type[Policy]] = {f"{DEFAULT_POLICY}-without-{part}": kind for part, kind in _PARTS.items()}

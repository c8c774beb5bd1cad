"""paper: the published prune-and-graft with its gates, splits and widths.

We decided what the publication leaves open. Empty rows of the matrix give no node. A token that is both drafted and
retrieved is one node, and its second place stays empty. The root does not count in the budget. `template` decides
which ranks a template has.
"""

from collections.abc import Mapping

from torch import Tensor

from graft.bench.baselines.dense import Prune
from graft.bench.baselines.gates import ALL_DEPTHS, GATES
from graft.bench.baselines.template import make_template, scaled
from graft.drafters.drafter import Drafter
from graft.model import TargetRunner
from graft.spec_decode.memory import Memory
from graft.spec_decode.policy_settings import USUAL_BUDGET, PolicySettings
from graft.tree.device.fixed import FixedTree, Split

KEPT = (8, 24, 40, 60)  # drafted nodes kept of 60, by the gate that stopped drafting
WIDTHS = (
    (8, 10, 8, 6, 5, 4, 4, 4, 3),
    (6, 7, 5, 4, 4, 3, 3, 2, 2),
    (4, 3, 3, 2, 2, 2, 2, 1, 1),
    (),
)  # retrieved, by depth
ADJACENCY = "adjacency"


class Paper(Prune):
    """Gates after depths 1, 2 and 6. The gate that stops a row decides how its budget is split."""

    sources = ("root", "drafted", ADJACENCY)
    memory: Memory

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        super().__init__(target, drafter, settings)
        self.memory = Memory(
            target.vocab_size, settings.isolated, lambda: target.device, keeps_past=False, tables=(ADJACENCY,)
        )
        if not settings.isolated:
            self.common_sources = frozenset((ADJACENCY,))

    def _budget(self, drafter: Drafter, settings: PolicySettings) -> int:
        return settings.budget or USUAL_BUDGET

    def _rules(self, drafter: Drafter) -> FixedTree:
        splits = []
        for kept, depth, widths in zip(KEPT, (*GATES, ALL_DEPTHS), WIDTHS, strict=True):
            count = round(kept * self.budget / 60)
            template = make_template(scaled(widths, self.budget - count)) if widths else ()
            splits.append(Split(count, depth, template))
        return FixedTree(GATES, tuple(splits))

    def state(self) -> dict[str, Tensor]:
        return self.memory.state() | super().state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.memory.restore(state)


class PaperWithNoise(Paper):
    """`paper` with drafts that know the noise of coming draws. Its matrix does not: it has only ranks."""

    knows_draws = True

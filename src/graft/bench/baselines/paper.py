"""paper: the published prune-and-graft with its gates, splits and widths.

We decided what the publication leaves open. Empty rows of the matrix give no node. A token that is both drafted and
retrieved is one node, and its second place stays empty. The root does not count in the budget. `template` decides
which ranks a template has.
"""

from collections.abc import Mapping

from torch import Tensor

from graft.bench.baselines import native
from graft.bench.baselines.gates import DRAFTED, Gates, draft_through_gates
from graft.bench.baselines.template import LIKELY, NOTHING, make_template, scaled
from graft.model import TargetRunner
from graft.request.batch import Batch
from graft.request.stats import Clock
from graft.spec_decode.policies.base import DraftResult, Policy
from graft.spec_decode.policy_settings import USUAL_BUDGET, PolicySettings
from graft.spec_decode.proposers.base import History, TargetTopK, named, part_of
from graft.spec_decode.proposers.drafter import Drafter
from graft.spec_decode.proposers.successor_table import SuccessorTables, adjacency_table
from graft.tree.candidates import Candidates

KEPT = (8, 24, 40, 60)  # drafted nodes kept of 60, by the gate that stopped drafting
WIDTHS = (
    (8, 10, 8, 6, 5, 4, 4, 4, 3),
    (6, 7, 5, 4, 4, 3, 3, 2, 2),
    (4, 3, 3, 2, 2, 2, 2, 1, 1),
)  # retrieved, by depth
ADJACENCY = DRAFTED + 1


class AdjacencyMatrix:
    """M[vocab, k]: the target's top-k successors of each token. `tables` holds this one table."""

    names: tuple[str, ...] = ("adjacency",)

    def __init__(self, vocab_size: int, isolated: bool = False) -> None:
        self.tables = SuccessorTables([adjacency_table(vocab_size, isolated)])
        self.common: tuple[str, ...] = () if isolated else self.names

    def learn(self, top_k: TargetTopK) -> None:
        self.tables.learn(top_k)

    def finish(self, history: History) -> None:
        """Do nothing: every token was learned when it was verified."""

    def state(self) -> dict[str, Tensor]:
        return named(self.names[0], self.tables.tables[0].state())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.tables.tables[0].restore(part_of(state, self.names[0]))


class Paper(Policy):
    """Gates after passes 1, 2 and 6. The gate that stops a row decides how its budget is split."""

    drafts = True
    sources = ("root", "drafted", "adjacency")

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        assert drafter is not None
        self.drafter = drafter
        self._matrix = AdjacencyMatrix(target.vocab_size, settings.isolated)
        self.retrievers = [self._matrix]
        self.isolated = settings.isolated
        self._budget = settings.budget or USUAL_BUDGET
        self._kept = [round(kept * self._budget / 60) for kept in KEPT]
        self._templates = [
            make_template(scaled(widths, self._budget - kept)) for widths, kept in zip(WIDTHS, self._kept, strict=False)
        ]
        self._templates.append(NOTHING)
        self.gates = Gates()

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftResult:
        assert self.drafter is not None
        candidates = self.new_candidates(batch, roots)
        drafted = draft_through_gates(
            self.drafter,
            batch,
            candidates,
            self.gates.thresholds,
            clock,
            self.kept_of_a_level,
            self.coming_draws(batch),
        )
        with clock("graft"):
            native.keep_best(candidates, [self._kept[stop] for stop in drafted.stops])
            self._retrieve(candidates, drafted.stops, batch.max_depth)
            candidates.merge()
            return DraftResult(candidates.best(self._budget, batch.max_depth)[0].trimmed(), drafted.passes)

    def _retrieve(self, candidates: Candidates, stops: list[int], max_depth: int) -> None:
        templates = [self._templates[stop] for stop in stops]
        native.fill(candidates, self._matrix.tables.structs, templates, LIKELY, ADJACENCY, max_depth)

    def state(self) -> dict[str, Tensor]:
        return super().state() | self.gates.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.gates.restore(state)


class PaperWithNoise(Paper):
    """`paper` with drafts that know the noise of coming draws. Its matrix does not: it has only ranks."""

    knows_draws = True

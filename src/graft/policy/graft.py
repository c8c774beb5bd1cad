"""graft: all proposals in one currency, the probability that the target accepts, and the width that pays best."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from graft.accept import Accepted
from graft.batch import Batch
from graft.draft.base import Drafter
from graft.learn.calibration import Calibration
from graft.learn.cost import VerifyCost
from graft.policy.base import Policy
from graft.retrieve import Adjacency, Retriever, SuffixLookup
from graft.stats import Clock
from graft.target import TargetRunner, Verified
from graft.tree import PADDING, ROOT, DraftTree, join

_MAX_RESTS = 3


class Graft(Policy):
    """Pools what every retriever proposes, merges it, and keeps the nodes worth their verification."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None = None, budget: int | None = None) -> None:
        # Ordered by trust: of equal proposals the first is credited.
        self._retrievers: list[Retriever] = [SuffixLookup(), Adjacency(target.vocab_size, target.device)]
        self.sources = ("root", *(retriever.name for retriever in self._retrievers))
        self._calibration = Calibration([r.prior for r in self._retrievers], target.device)
        self._target = target
        self._budget = budget
        self._cost = VerifyCost()
        self._pool: DraftTree | None = None  # this round's proposals, judged when the round is over
        self._num_idle_looks = 0  # looks in a row that found nothing worth verifying
        self._num_rests = 0  # rounds to come without a look

    def prepare(self) -> None:
        if self._budget is None and not self._cost.measured:
            self._cost.measure(self._target)

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftTree:
        with clock("graft"):
            tree = DraftTree.roots(roots)
            self._pool = None
            if batch.max_depth < 1 or self._is_resting():
                return tree
            proposals = [
                self._calibrated(r.propose(batch.sequences, roots, batch.max_depth), source)
                for source, r in enumerate(self._retrievers, start=ROOT + 1)
            ]
            self._pool = join([tree, *proposals])
            ranked, probabilities = self._pool.merged().ranked()
            return ranked.first(self._width(probabilities))

    def read(self, batch: Batch, row: int, verified: Verified, following: list[int]) -> None:
        for retriever in self._retrievers:
            retriever.learn(verified)

    def learn(self, batch: Batch, tree: DraftTree, verified: Verified, accepted: Accepted, seconds: float) -> None:
        for retriever in self._retrievers:
            retriever.learn(verified)
        if self._pool is not None:
            self._calibration.observe(self._pool, accepted.tokens)
        if len(accepted) == 1:
            self._cost.observe(tree.width, seconds)

    def _width(self, probabilities: Tensor) -> int:
        """How many of the ranked nodes, [B, N] with the root first, are worth their verification."""
        if self._budget is not None:
            return self._budget + 1
        width = self._cost.best_width(probabilities[:, 1:].sum(dim=0), num_rows=len(probabilities))
        self._num_idle_looks = self._num_idle_looks + 1 if width == 1 else 0
        self._num_rests = min(self._num_idle_looks, _MAX_RESTS)
        return width

    def _is_resting(self) -> bool:
        """Looking costs time too: after looks that found nothing worth verifying, a few rounds are left alone."""
        self._num_rests -= 1
        return self._num_rests >= 0

    def _calibrated(self, proposal: DraftTree, source: int) -> DraftTree:
        sources = proposal.sources.masked_fill(proposal.sources != PADDING, source)
        return replace(
            proposal,
            sources=sources,
            probabilities=self._calibration.probability(sources, proposal.evidence),
        )

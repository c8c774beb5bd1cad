"""graft: all proposals in one currency, the probability that the target accepts, and the width that pays best."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from graft.accept import Accepted
from graft.batch import Batch
from graft.draft.base import Drafter, DraftState, Level
from graft.learn.calibration import BUCKET_PROBABILITIES, Calibration, probability_bucket
from graft.learn.cost import Plan, VerifyCost
from graft.learn.prospect import Prospect
from graft.policy.base import Grown, Policy
from graft.policy.dense import drafted_tree
from graft.retrieve import Adjacency, Retriever, SuffixLookup
from graft.stats import Clock
from graft.target import TargetRunner, Verified
from graft.tree import PADDING, ROOT, DraftTree, join

_MAX_RESTS = 3


class Graft(Policy):
    """Pools what the drafter and every retriever propose, merges it, and keeps the nodes worth their verification."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None = None, budget: int | None = None) -> None:
        self._retrievers: list[Retriever] = [SuffixLookup(), Adjacency(target.vocab_size, target.device)]
        self._drafter = drafter
        # Ordered by trust: of equal proposals the first is credited.
        drafted = [("drafted", BUCKET_PROBABILITIES)] if drafter is not None else []
        names, priors = zip(*drafted, *((r.name, r.prior) for r in self._retrievers), strict=True)
        self.sources = ("root", *names)
        self._calibration = Calibration(priors, target.device)
        self._target = target
        self._budget = budget
        self._cost = VerifyCost()
        self._prospect = Prospect()
        self._pool: DraftTree | None = None  # this round's proposals, judged when the round is over
        self._num_idle_looks = 0  # looks in a row that found nothing worth verifying
        self._num_rests = 0  # rounds to come without a look

    def prepare(self) -> None:
        if self._budget is None and not self._cost.measured:
            self._cost.measure(self._target)
            if self._drafter is not None:
                self._prospect.measure(self._drafter)

    def open(self, num_rows: int, num_slots: int) -> DraftState | None:
        return self._drafter.open(num_rows, num_slots) if self._drafter is not None else None

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> Grown:
        self._pool = None
        if batch.max_depth < 1 or self._is_resting():
            return Grown.without_drafts(DraftTree.roots(roots))
        with clock("graft"):
            pool = join([DraftTree.roots(roots), *self._retrieved(batch, roots)])
            tree, plan = self._pruned(pool)
        num_passes = 0
        if self._drafter is not None:
            pool, tree, plan, num_passes = self._with_drafts(batch, roots, pool, tree, plan, clock)
        self._pool = pool
        self._num_idle_looks = self._num_idle_looks + 1 if plan.width == 1 else 0
        self._num_rests = min(self._num_idle_looks, _MAX_RESTS)
        self._cost.doubt(used=plan.width)
        return Grown(tree.first(plan.width), [num_passes] * len(roots))

    def read(self, batch: Batch, row: int, verified: Verified, following: list[int]) -> None:
        for retriever in self._retrievers:
            retriever.learn(verified)
        if self._drafter is not None:
            self._drafter.read(batch.draft, row, verified, following)

    def learn(self, batch: Batch, tree: DraftTree, verified: Verified, accepted: Accepted, seconds: float) -> None:
        for retriever in self._retrievers:
            retriever.learn(verified)
        if self._drafter is not None:
            self._drafter.learn(batch.draft, verified, accepted.nodes, accepted.tokens)
        if self._pool is not None:
            self._calibration.observe(self._pool, accepted.tokens)
        if len(accepted) == 1:
            self._cost.observe(tree.width, seconds)

    def _retrieved(self, batch: Batch, roots: Tensor) -> list[DraftTree]:
        first = len(self.sources) - len(self._retrievers)
        return [
            self._calibrated(r.propose(batch.sequences, roots, batch.max_depth), source)
            for source, r in enumerate(self._retrievers, start=first)
        ]

    def _with_drafts(
        self, batch: Batch, roots: Tensor, retrieved: DraftTree, tree: DraftTree, plan: Plan, clock: Clock
    ) -> tuple[DraftTree, DraftTree, Plan, int]:
        """Adds draft passes to the retrieved pool for as long as another is worth its time."""
        assert self._drafter is not None
        passes = self._drafter.levels(batch.draft, roots)
        levels: list[Level] = []
        pool, spent, reach = retrieved, 0.0, 1.0  # reach: probability that the target comes as far as the best beam
        num_rows, most = len(roots), min(self._drafter.settings.depth + 1, batch.max_depth)
        while len(levels) < most and (
            self._budget is not None
            or self._prospect.is_worth_a_pass(self._cost, plan, num_rows, reach, most - len(levels))
        ):
            with clock("draft") as draft_time:
                levels.append(next(passes))
                best_path = float(levels[-1].path_probabilities.amax(dim=1).mean())
            spent += draft_time()
            with clock("graft"):
                drafted = drafted_tree(roots, levels)
                drafted = replace(drafted, evidence=probability_bucket(drafted.probabilities))
                pool = join([self._calibrated(drafted, ROOT + 1), retrieved])
                before = plan.tokens
                tree, plan = self._pruned(pool, spent)
            self._prospect.observe(draft_time(), (plan.tokens - before) / num_rows, reach, best_path)
            reach = best_path
        return pool, tree, plan, len(levels)

    def _pruned(self, pool: DraftTree, spent: float = 0.0) -> tuple[DraftTree, Plan]:
        """The pool merged and ranked, and how much of it a round should verify."""
        ranked, probabilities = pool.merged().ranked()
        gains = probabilities[:, 1:].sum(dim=0)
        if self._budget is not None:
            return ranked, Plan(self._budget + 1, 0.0, 1.0)
        return ranked, self._cost.best_plan(gains, len(probabilities), spent)

    def _is_resting(self) -> bool:
        """Looking costs time too: after looks that found nothing worth verifying, a few rounds are left alone."""
        if self._num_rests == 0:
            return False
        self._num_rests -= 1
        return True

    def _calibrated(self, proposal: DraftTree, source: int) -> DraftTree:
        """The proposal under its source's number, with probabilities as they have proved to be."""
        sources = proposal.sources.masked_fill(proposal.sources != PADDING, source)
        sources[:, 0] = ROOT
        probabilities = self._calibration.probability(sources, proposal.evidence)
        return replace(proposal, sources=sources, probabilities=probabilities)

"""graft: candidates of all proposers, ranked by acceptance probability, and the budget that pays best.

Draft while another pass is worth its time (prune), attach what was retrieved at the nodes likeliest to be accepted
(graft), and verify as many of the best nodes of all rows together as are worth their cost (`budget`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from graft.core.batch import Batch
from graft.model import TargetRunner, VerifyOutput
from graft.spec_decode.acceptance import Accepted, Choices
from graft.spec_decode.buckets import BUCKET_PROBABILITIES
from graft.spec_decode.budget import Budget, Plan
from graft.spec_decode.calibration import Calibration, PathCalibration
from graft.spec_decode.candidates import Candidates, Ranking
from graft.spec_decode.cost_model import StepCost, UnitCost, time_pass, time_step, usual_shape
from graft.spec_decode.policies.base import MAX_BUDGET, USUAL_PASS_COST, DraftResult, Policy, PolicySettings
from graft.spec_decode.policies.gates import DRAFTED
from graft.spec_decode.proposers import DatastoreLookup, NgramTables, Retriever, SuffixLookup
from graft.spec_decode.proposers.base import named, part_of
from graft.spec_decode.proposers.drafter import Drafter, num_setups_of
from graft.spec_decode.tree import DraftTree
from graft.stats import Clock

KEPT_OF_A_LEVEL = 24  # drafted nodes of a depth that become candidates; further ones are never among the best
_SHOWN = 8  # pruned candidates shown at least, where there are as many, to those who watch a round


class _Drafted(NamedTuple):
    """The draft passes of a round, and how long it waited for them."""

    passes: list[int]  # by row
    reaches: list[float]  # by pass: P(one of the beams that it expanded is accepted), summed over the rows it was for
    num_ahead: int  # passes that were made ahead
    ahead_seconds: float  # until these were there
    further_seconds: float  # of all others

    @property
    def num_further(self) -> int:
        return max(max(self.passes) - self.num_ahead, 0)


class _Look(NamedTuple):
    """A round's candidates, how they were drafted, and what was chosen of them."""

    candidates: Candidates
    caps: list[int]  # by row: the most nodes that it may get
    drafted: _Drafted
    plan: Plan
    tree: DraftTree
    paths: Tensor  # [B, W] path probabilities of its nodes
    num_others: int  # tokens of the step that are no rows'


class _Round(NamedTuple):
    """A finished round, as the budget learns from it."""

    tree: DraftTree
    accepted: Accepted
    look: _Look | None  # None if plain
    num_others: int  # tokens of its step that were no rows'
    seconds: float  # of the step
    took: float  # from the end of the round before to that of this one, 0 if there was none
    is_time_usual: bool  # whether these times may be learned from


class Graft(Policy):
    """Ranks what the drafter and all retrievers propose, and verifies the nodes worth their cost."""

    kept_of_a_level = KEPT_OF_A_LEVEL

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        self.drafter = drafter
        self.retrievers: Sequence[Retriever] = self.make_retrievers(target, settings)
        # Copies of earlier text cost nothing and may suffice: they are looked up before anything is drafted. The tables
        # come last: they look up successors of whatever the others have proposed.
        self._tables: list[Retriever] = [
            retriever for retriever in self.retrievers if isinstance(retriever, NgramTables)
        ]
        self._copies = [retriever for retriever in self.retrievers if retriever not in self._tables]
        self._target, self._settings = target, settings
        self.isolated = settings.isolated
        self.budget = self._make_budget()
        # By source number, the drafter first.
        names, priors = ["root"], []
        if drafter is not None:
            names.append("drafted")
            priors.append(BUCKET_PROBABILITIES)
        for retriever in self.retrievers:
            names.extend(retriever.names)
            priors.extend(retriever.prior)
        self.sources = tuple(names)
        self._calibration, self._path_calibration = Calibration(priors), PathCalibration()
        self._look: _Look | None = None  # this round's; None if plain
        self._uncounted: tuple[Candidates, Accepted] | None = None  # the last round's, not yet in the calibration
        self._unjudged: _Look | None = None  # the last round's, whose passes are not yet judged
        self._unobserved: _Round | None = None  # the last round, of which the budget does not know yet
        self._num_others = 0  # tokens of this round's step that are no rows'
        self._drafts_ahead = False  # whether it was decided already, in the last round, that this one drafts
        self._setups_before = 0
        self._ended = 0.0  # when the last round had been learned from

    def _make_budget(self) -> Budget:
        settings, num_passes = self._settings, self.drafter.max_passes if self.drafter is not None else 0
        if settings.budget is not None:  # a step is the unit of time
            return Budget(UnitCost(), num_passes, settings.pass_cost, settings.budget)
        shape = usual_shape(getattr(getattr(self._target, "device", None), "type", "cpu"))
        step = StepCost(getattr(self._target, "step_sizes", ()), shape)
        return Budget(step, num_passes, USUAL_PASS_COST)

    # What ablations override

    def make_retrievers(self, target: TargetRunner, settings: PolicySettings) -> list[Retriever]:
        datastore = [DatastoreLookup(settings.datastore)] if settings.datastore is not None else []
        return [
            SuffixLookup(isolated=settings.isolated),
            *datastore,
            NgramTables(target.vocab_size, isolated=settings.isolated),
        ]

    def calibrate(self, candidates: Candidates, accepted: Accepted) -> None:
        """Updates the acceptance probabilities with a round's outcome."""
        self._calibration.observe(candidates, accepted.tokens)

    def best_of(self, candidates: Candidates, total: int, caps: Sequence[int]) -> Ranking:
        """The likeliest candidates of all rows together, of each row at most `caps[row]`."""
        candidates.merge(DRAFTED, self._calibration.chances)
        return candidates.ranked(total, caps, self._truths)

    # The round

    def prepare(self) -> None:
        budget = self.budget
        if budget.fixed is not None and budget.pass_cost is None:
            seconds = time_pass(self.drafter, self._target) if self.drafter is not None else 0.0
            budget.pass_cost = seconds / time_step(self._target, budget.fixed + 1)

    def measure(self) -> None:
        if self.adapts and not self.budget.step.is_known:
            self.budget.step.measure(self._target)
            if self.drafter is not None:
                self.budget.drafting.observe(1, time_pass(self.drafter, self._target))

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftResult:
        num_rows = len(batch.sequences)
        self._look = None
        self._num_others = batch.num_other_tokens
        self._setups_before = num_setups_of(self._target, self.drafter)
        caps = self._caps(batch)
        most = min(self.budget.max_nodes(num_rows, self._num_others), sum(caps))
        if most < 1 or batch.max_depth < 1 or not self.budget.may_look(num_rows):
            return DraftResult.without_drafts(DraftTree.roots(roots))
        candidates = self.new_candidates(batch, roots)
        if self.adapts:  # what no row can get need not be looked for
            candidates.most_nodes = max(2 * most // num_rows, 1)
        with clock("graft"):
            self._retrieve(candidates, batch, self._copies)
        drafted = _Drafted([0] * num_rows, [], 0, 0.0, 0.0)
        if self.drafter is not None:
            drafted = self._draft(candidates, batch, roots, caps, clock)
        with clock("graft"):
            self._retrieve(candidates, batch, self._copies + self._tables if any(drafted.passes) else self._tables)
            ranking = self.best_of(candidates, most, caps)
            plan = self.budget.best(self.budget.plans(ranking.gains, num_rows, self._num_others))
            tree, paths = ranking.tree(batch.max_depth, plan.num_nodes)
        considered = tree
        if any(sequence.is_recorded for sequence in batch.sequences):
            more = [sum(counts[1:]) + _SHOWN for counts in tree.counts_by_source]
            considered, _ = candidates.ranked(sum(more), more).tree(batch.max_depth)
        self._look = _Look(candidates, caps, drafted, plan, tree, paths, self._num_others)
        return DraftResult(tree, drafted.passes, considered)

    def learn(self, batch: Batch, tree: DraftTree, verified: VerifyOutput, accepted: Accepted, seconds: float) -> None:
        super().learn(batch, tree, verified, accepted, seconds)
        ended, self._ended = self._ended, time.perf_counter()
        took = self._ended - ended if ended else 0.0
        is_usual = self.adapts and self._is_time_usual
        self._unobserved = _Round(tree, accepted, self._look, self._num_others, seconds, took, is_usual)

    def _observe(self, round: _Round) -> None:
        """Takes a round into the budget."""
        num_rows, look = len(round.accepted), round.look
        if look is not None and look.tree is round.tree:  # or a grammar has cut the tree
            self._path_calibration.observe(look.paths, round.accepted.nodes)
        if round.is_time_usual:
            self._learn_costs(round)
        num_tokens = sum(map(len, round.accepted.tokens))
        if look is None:
            self.budget.observe(num_rows, num_tokens, None, 0, round.num_others)
        else:
            further, has_ahead = look.drafted.num_further, look.drafted.num_ahead > 0
            self.budget.observe(num_rows, num_tokens, look.plan, further, round.num_others, has_ahead)

    def _learn_costs(self, round: _Round) -> None:
        budget, num_rows, look, seconds = self.budget, len(round.accepted), round.look, round.seconds
        base = num_rows + round.num_others
        budget.step.observe(base + sum(round.tree.num_nodes), seconds, least=base)
        drafted = look.drafted if look is not None else None
        drafting = drafted.ahead_seconds + drafted.further_seconds if drafted is not None else 0.0
        if round.took and not round.num_others:  # all that is neither the step nor drafting
            host = budget.host if look is not None else budget.plain_host
            host.observe(num_rows, max(round.took - seconds - drafting, 0.0), most=seconds)
        if drafted is None:
            return
        if drafted.num_ahead:
            budget.ahead.observe(num_rows, drafted.ahead_seconds, most=seconds)
        # Where passes are made ahead, a first one that was not includes what else was to be done before it.
        if drafted.num_further and (drafted.num_ahead or not budget.ahead.is_known):
            budget.drafting.observe(num_rows, drafted.further_seconds / drafted.num_further, most=seconds)

    def draft_ahead(self, batch: Batch, verified: VerifyOutput, choices: Choices) -> None:
        num_rows = len(batch.sequences)
        self._drafts_ahead = self.budget.may_look(num_rows) and (
            not self.adapts or self.budget.num_passes(num_rows, 0, reach=num_rows) > 0
        )
        if self._drafts_ahead:
            super().draft_ahead(batch, verified, choices)
        elif self.drafter is not None:
            self.drafter.gather_ahead(batch.draft, verified)

    def catch_up(self) -> None:
        super().catch_up()
        self._learn_last_round()

    def _learn_last_round(self) -> None:
        # Cleared first, so that what fails is not tried again in every round.
        uncounted, unjudged, unobserved = self._uncounted, self._unjudged, self._unobserved
        self._uncounted = self._unjudged = self._unobserved = None
        if uncounted is not None:
            self.calibrate(*uncounted)
        if unjudged is not None:
            self._judge_passes(unjudged)
        if unobserved is not None:
            self._observe(unobserved)

    def learn_accepted(self, tree: DraftTree, accepted: Accepted, seconds: float) -> None:
        self._learn_last_round()
        if self._look is not None:
            self._uncounted, self._unjudged = (self._look.candidates, accepted), self._look

    def state(self) -> dict[str, Tensor]:
        self.catch_up()
        counts = self._calibration.state().values()
        by_source = {name: torch.stack([c[:, number] for c in counts]) for number, name in enumerate(self.sources)}
        return (
            super().state()
            | named("calibration", by_source)
            | named("prospect", self.budget.passes.state())
            | named("paths", self._path_calibration.state())
        )

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._uncounted = self._unjudged = self._unobserved = None
        self._restore_calibration(part_of(state, "calibration"))
        self._path_calibration.restore(part_of(state, "paths"))
        self.budget.passes.restore(part_of(state, "prospect"))
        self.budget.restart()

    def _restore_calibration(self, by_source: Mapping[str, Tensor]) -> None:
        """Restores counts source by source: the policy that learned them may have had other sources and buckets."""
        self._calibration.restore({})
        new = self._calibration.state()
        for number, name in enumerate(self.sources):
            if name in by_source:
                for own, known in zip(new.values(), by_source[name], strict=True):
                    width = min(own.shape[2], known.shape[1])
                    own[:, number, :width] = known[:, :width]
        self._calibration.restore(new)

    def costs(self) -> dict[str, Tensor]:
        self.catch_up()
        return self.budget.costs()

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        if self._settings.budget is None and self._settings.pass_cost is None:  # else the user has given the costs
            self.budget.restore_costs(costs)

    # Draft and prune

    def _draft(
        self, candidates: Candidates, batch: Batch, roots: Tensor, caps: Sequence[int], clock: Clock
    ) -> _Drafted:
        """Adds drafted levels to the candidates: those of passes made ahead, and of further ones for as long as another
        pass is worth its time."""
        assert self.drafter is not None
        num_rows = len(batch.sequences)
        # The step waits for what the device is making already, whether or not it is used.
        num_ahead = self.drafter.num_prefetched(batch.draft) if self.adapts else 0
        is_decided, self._drafts_ahead = num_ahead > 0 and self._drafts_ahead, False
        passes, reach = [0] * num_rows, [1.0] * num_rows
        reaches: list[float] = []
        drafted = self.drafter.passes(batch.draft, roots, keep=self.kept_of_a_level)
        depth = 0
        first = candidates.width - 1  # a level's parents are numbers in the drafted tree: retrieved nodes lie between
        start, ahead_until = time.perf_counter(), None
        for number in range(self.drafter.max_passes):
            if number == num_ahead:
                ahead_until = time.perf_counter()
            going = [count == number and cap > 0 for count, cap in zip(passes, caps, strict=True)]
            if number >= num_ahead or (number == 0 and not is_decided):
                going = self.goes_on(number, reach, going)
            if depth >= batch.max_depth or not any(going):
                break
            with clock("draft"):
                for level in next(drafted)[: batch.max_depth - depth]:
                    depth += 1
                    reached = candidates.add_level(
                        level, self._calibration.chances, DRAFTED, number + 1, first, going, self.drafter.num_beams
                    )
            reaches.append(sum(compress(reach, going)))
            for row in compress(range(num_rows), going):
                passes[row] += 1
                reach[row] = reached[row]
        end = time.perf_counter()
        ahead_until = ahead_until or end
        if not any(passes):
            self.budget.doubt_passes(num_rows)
            num_ahead = 0
        return _Drafted(passes, reaches, min(num_ahead, max(passes)), ahead_until - start, end - ahead_until)

    def goes_on(self, num_done: int, reach: list[float], going: list[bool]) -> list[bool]:
        """By row: whether some number of further draft passes is expected to be worth more than stopping here.

        num_done: passes so far. reach: by row, the probability that one of its beams is accepted.
        """
        num_rows = len(going)
        if self.adapts:  # rows share the nodes, and wait for each other's passes
            return (
                going if self.budget.num_passes(num_rows, num_done, sum(compress(reach, going))) else [False] * num_rows
            )
        # The step costs the same whatever is drafted: rows decide separately, as if all were alike.
        return [
            is_going and self.budget.num_passes(num_rows, num_done, num_rows * own) > 0
            for own, is_going in zip(reach, going, strict=True)
        ]

    def _judge_passes(self, look: _Look) -> None:
        """Learns what the round's candidates would have been worth with fewer passes."""
        passes, reaches = look.drafted.passes, look.drafted.reaches
        if reaches:
            prices = self.budget.prices(len(passes), look.num_others)
            values = look.candidates.values_by_need(len(reaches), *prices, look.caps, self._truths)
            self.budget.passes_of(len(passes)).observe(reaches, values)

    # Graft

    def _retrieve(self, candidates: Candidates, batch: Batch, retrievers: Sequence[Retriever]) -> None:
        for retriever in retrievers:
            first = self.sources.index(retriever.names[0])
            retriever.propose(candidates, batch.sequences, first, self._calibration.chances, batch.max_depth)

    # Small parts

    def _caps(self, batch: Batch) -> list[int]:
        """By row, the most nodes that it may get: none where it is to be decoded plainly."""
        most = MAX_BUDGET if self.budget.fixed is None else self.budget.fixed
        return [most if sequence.speculates else 0 for sequence in batch.sequences]

    @property
    def adapts(self) -> bool:
        """Whether it chooses the budget, and so learns costs from rounds' times."""
        return self._settings.budget is None

    @property
    def _truths(self) -> array[float] | None:
        """What of path probabilities comes true; where the number of nodes is given, nobody asks."""
        return self._path_calibration.truths if self.adapts else None

    @property
    def _is_time_usual(self) -> bool:
        """Whether the round's time may be learned from: not if it included one-time work such as a graph capture."""
        return num_setups_of(self._target, self.drafter) == self._setups_before

"""graft: candidates of all proposers, ranked by acceptance probability, and the budget that pays best.

Draft while another pass is worth its time (prune), attach what was retrieved at the nodes likeliest to be accepted
(graft), and verify as many of the best nodes as are worth their cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from graft.core.batch import Batch
from graft.model import TargetRunner, VerifyOutput
from graft.spec_decode.acceptance import Accepted, Choices
from graft.spec_decode.buckets import BUCKET_PROBABILITIES
from graft.spec_decode.calibration import Calibration
from graft.spec_decode.candidates import Candidates
from graft.spec_decode.cost_model import HICCUP, WIDTHS, MeansBySize, Plan, VerifyCost, plans_for, total_gains
from graft.spec_decode.credit import Credit, Hopes
from graft.spec_decode.policies.base import DraftResult, Policy, PolicySettings
from graft.spec_decode.policies.gates import DRAFTED
from graft.spec_decode.proposers import DatastoreLookup, NgramTables, Retriever, SuffixLookup
from graft.spec_decode.proposers.base import named, part_of
from graft.spec_decode.proposers.drafter import Drafter, num_setups_of
from graft.spec_decode.prospect import Prospect
from graft.spec_decode.tree import DraftTree
from graft.stats import Clock

_MAX_WIDTH = 64
_FREE = 3  # prefetched levels that are taken without asking whether they pay: they are ready when the host needs them
KEPT_OF_A_LEVEL = 24  # drafted nodes of a depth that become candidates; further ones are never among the best
_SHOWN = 8  # pruned candidates shown at least, where there are as many, to those who watch a round
_OBSERVE_EVERY = 4  # rounds between two updates of what passes bring: it changes slowly, and computing it takes time
_BLEND = 0.05  # weight of a round in the usual rate
_MOST_OVERHEAD = 0.25  # of a plain step: the most that the first round with a tree counts as overhead
_MARGIN = 0.03  # tokens by which another plan must beat plain decoding: estimates are not that good
_BATCH_MARGIN = 0.1  # of each of several rows: what they take together is less certain, and there is less to gain


class _ProposalResult(NamedTuple):
    """A round's candidates, how they were drafted, and the plans made from them."""

    candidates: Candidates
    passes: list[int]  # by row
    reaches: list[list[float]]  # by row and pass: P(one of the beams that it expanded is accepted)
    plans: list[Plan]
    plan: Plan  # the chosen one


class Graft(Policy):
    """Ranks what the drafter and all retrievers propose, and verifies the nodes worth their cost."""

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
        self._cost = VerifyCost()
        self._prospect = Prospect(drafter.settings.depth + 1 if drafter is not None else 0)
        # By source number, the drafter first.
        names, priors = ["root"], []
        if drafter is not None:
            names.append("drafted")
            priors.append(BUCKET_PROBABILITIES)
        for retriever in self.retrievers:
            names.extend(retriever.names)
            priors.extend(retriever.prior)
        self.sources = tuple(names)
        self._calibration = Calibration(priors)
        self._candidates: Candidates | None = None  # this round's, for calibration when it is over; None if plain
        self._uncounted: tuple[Candidates, Accepted] | None = None  # the last round's, not yet in the calibration
        self._found: _ProposalResult | None = None  # this round's, not yet learned from
        self._choices: list[tuple[int, float]] = []  # this round's widths and their seconds
        self._current_rate = 0.0  # tokens per second of the usual round: what time is worth
        self._planned_seconds = 0.0
        self._setups_before = 0
        self._tokens = MeansBySize(_BLEND, math.inf)  # new tokens of a row in a round
        self._seconds = MeansBySize(_BLEND, math.inf)  # planned ones of a round
        self._retrieve_seconds = 0.0  # of this round's retrieving and merging
        self._draft_seconds = 0.0  # of this round's drafting
        self._overheads = MeansBySize(growth=float)  # seconds of a round with a tree beside drafting and verifying
        self._pass_seconds = MeansBySize(growth=self._plain_seconds)  # of a draft pass
        self._num_proposed = 0  # rounds with candidates
        self._credit, self._hopes = Credit(), Hopes()
        self._expected = 0.0  # tokens that a row is expected to accept of this round's tree

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

    def best_of(self, candidates: Candidates, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
        """The tree of the likeliest candidates and their path probabilities."""
        candidates.merge(DRAFTED, self._calibration.chances)
        return candidates.best(budget, max_depth)

    # The round

    def prepare(self) -> None:
        if self._cost.measured:
            return
        budget, pass_cost = self._settings.budget, self._settings.pass_cost
        if budget is not None and (pass_cost is not None or self.drafter is None):
            self._cost = VerifyCost.fixed(budget + 1)
            self._prospect.seconds = pass_cost or 0.0
        else:
            self._cost.measure(self._target, WIDTHS if budget is None else (budget + 1,))
            if self.drafter is not None:
                self._prospect.measure(self.drafter, self._target)
        self._pass_seconds.restart(self._prospect.seconds)

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftResult:
        num_rows = len(batch.sequences)
        self._candidates = None
        self._setups_before = num_setups_of(self._target, self.drafter)
        self._planned_seconds = self._plain_seconds(num_rows)
        if not self._may_propose(num_rows) or batch.max_depth < 1:
            return DraftResult.without_drafts(DraftTree.roots(roots))
        self._choices = self._cost.choices(num_rows, self._overheads.get(num_rows))
        self._current_rate = self._rate(num_rows)
        candidates = self.new_candidates(batch, roots)
        with clock("graft") as copying_time:
            self._retrieve(candidates, batch, self._copies)
        passes: list[int] = [0] * num_rows
        reaches: list[list[float]] = []
        self._draft_seconds = 0.0
        if self.drafter is not None:
            start = time.perf_counter()
            passes, reaches = self._draft(candidates, batch, roots, clock)
            self._draft_seconds = time.perf_counter() - start
        with clock("graft") as grafting_time:
            self._retrieve(candidates, batch, self._copies + self._tables if any(passes) else self._tables)
            widest = max(self._cost.widths)
            num_shown = _SHOWN if any(sequence.is_recorded for sequence in batch.sequences) else 0
            tree, paths = self.best_of(candidates, widest - 1 + num_shown, batch.max_depth)
            plans = plans_for(self._choices, total_gains(paths[:, 1:widest]), num_rows)
            plan = self._best_of(plans, num_rows)
            width = min(plan.width, paths.shape[1])
        self._candidates, self._found = candidates, _ProposalResult(candidates, passes, reaches, plans, plan)
        self._retrieve_seconds = copying_time() + grafting_time()
        if self._is_time_usual and any(passes):
            self._pass_seconds.observe(num_rows, self._draft_seconds / max(passes))
        self._planned_seconds = plan.seconds + sum(passes) / num_rows * self._seconds_of_pass(num_rows)
        if self.adapts:
            self._cost.doubt(width, num_rows)
        return DraftResult(tree.first(width), passes, considered=tree)

    def learn(self, batch: Batch, tree: DraftTree, verified: VerifyOutput, accepted: Accepted, seconds: float) -> None:
        start, num_rows = time.perf_counter(), len(accepted)
        super().learn(batch, tree, verified, accepted, seconds)
        if not self.adapts:
            return
        if self._candidates is None or not self._is_time_usual:
            self._credit.book(num_rows, 0.0, is_plain=tree.width == 1)
            return
        took = self._retrieve_seconds + time.perf_counter() - start
        self._book(num_rows, tree.width, accepted, self._draft_seconds + took, seconds)
        # The first round may include set-up.
        self._overheads.observe(num_rows, took, min(took, _MOST_OVERHEAD * self._plain_seconds(num_rows)))

    def draft_ahead(self, batch: Batch, verified: VerifyOutput, choices: Choices) -> None:
        if self._may_propose(len(batch.sequences)) and not self._credit.is_plain_next(len(batch.sequences)):
            super().draft_ahead(batch, verified, choices)

    def reconsider(self, num_rows: int) -> None:
        self._credit.close(num_rows)

    def catch_up(self) -> None:
        # Cleared first, so that what fails is not tried again in every round.
        uncounted, found, self._uncounted, self._found = self._uncounted, self._found, None, None
        if uncounted is not None:
            self.calibrate(*uncounted)
        if found is not None:
            self._prospect_from(found)
            self._hope_from(found)

    def learn_accepted(self, tree: DraftTree, accepted: Accepted, seconds: float) -> None:
        self.catch_up()
        if self._candidates is not None:
            self._uncounted = (self._candidates, accepted)
        if self._is_time_usual:
            self._cost.observe(tree.width, seconds, len(accepted))
        num_tokens = sum(map(len, accepted.tokens)) / len(accepted)
        # The first estimate is plain decoding: one token in a plain step.
        self._tokens.observe(len(accepted), num_tokens, estimate=1.0)
        self._seconds.observe(len(accepted), self._planned_seconds, self._plain_seconds(len(accepted)))

    def state(self) -> dict[str, Tensor]:
        self.catch_up()
        counts = self._calibration.state().values()
        by_source = {name: torch.stack([c[:, number] for c in counts]) for number, name in enumerate(self.sources)}
        return super().state() | named("calibration", by_source) | named("prospect", self._prospect.state())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._uncounted = self._found = None
        self._restore_calibration(part_of(state, "calibration"))
        self._prospect.restore(part_of(state, "prospect"))
        self._tokens.restart()
        self._seconds.restart()
        self._num_proposed = 0

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
        seconds = {"pass": self._prospect.seconds, "host": self._overheads.get(1)}
        return {**self._cost.state(), **{name: torch.tensor(value).double() for name, value in seconds.items()}}

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        if self._settings.budget is None and self._settings.pass_cost is None:  # else the user has given the costs
            self._cost.restore(costs)
            self._prospect.seconds = float(costs["pass"])
            self._pass_seconds.restart(self._prospect.seconds)
            self._overheads.restart(float(costs.get("host", 0.0)))

    # Draft and prune

    def _draft(
        self, candidates: Candidates, batch: Batch, roots: Tensor, clock: Clock
    ) -> tuple[list[int], list[list[float]]]:
        """Adds drafted levels to the candidates for as long as another pass is worth its time, row by row.

        Returns the passes of each row, and by row and pass the probability that one of the beams it expanded is
        accepted.
        """
        assert self.drafter is not None
        num_rows = len(batch.sequences)
        passes, reach = [0] * num_rows, [1.0] * num_rows
        reaches: list[list[float]] = [[] for _ in range(num_rows)]
        levels = self.drafter.levels(batch.draft, roots, keep=KEPT_OF_A_LEVEL)
        first = candidates.width - 1  # a level's parents are numbers in the drafted tree: retrieved nodes lie between
        num_free = min(self.drafter.num_prefetched(batch.draft), _FREE) if self.adapts else 0
        for number in range(min(self.drafter.settings.depth + 1, batch.max_depth)):
            going = [count == number for count in passes]
            if number == 0 or number >= num_free:  # before the first pass: whether to draft at all
                going = self.goes_on(candidates, number, reach, going)
            if not any(going):
                break
            with clock("draft"):
                level = next(levels)
                reached = candidates.add_level(
                    level, self._calibration.chances, DRAFTED, number + 1, first, going, self.drafter.settings.topk
                )
            for row in (row for row in range(num_rows) if going[row]):
                passes[row] += 1
                reaches[row].append(reach[row])
                reach[row] = reached[row]
        if not any(passes):
            self._prospect.hope()
        return passes, reaches

    def goes_on(self, candidates: Candidates, num_done: int, reach: list[float], going: list[bool]) -> list[bool]:
        """By row: whether some number of further draft passes is expected to be worth more than stopping here.

        num_done: passes so far. reach: by row, the probability that one of its beams is accepted.
        """
        num_rows, rate = len(going), self._current_rate
        pass_price = rate * self._seconds_of_pass(num_rows)
        if len(self._cost.widths) == 1:  # the verify costs the same whatever is drafted: rows decide separately
            gains = (self._prospect.gains(num_done, own) for own in reach)
            return [
                is_going and any(num_rows * gain >= count * pass_price for count, gain in enumerate(own, start=1))
                for own, is_going in zip(gains, going, strict=True)
            ]
        # Rows share a width and wait for each other's passes: a pass is worth what it brings all of them together.
        plans = plans_for(self._choices, candidates.best_gains(_MAX_WIDTH), num_rows)
        further = self._prospect.gains(num_done, sum(compress(reach, going)))
        now = self._least_worth(plans, num_rows)
        priced = [(plan.tokens - rate * plan.seconds, num_rows * plan.width - plan.tokens) for plan in plans]
        pays = any(
            worth + min(gain, room) - count * pass_price > now
            for count, gain in enumerate(further, start=1)
            for worth, room in priced
        )
        return [is_going and pays for is_going in going]

    def _prospect_from(self, found: _ProposalResult) -> None:
        """Tells the prospect what the round's candidates would have been worth with fewer passes."""
        self._num_proposed += 1
        if not any(found.passes) or self._num_proposed % _OBSERVE_EVERY:
            return
        values = found.candidates.values_by_need(max(found.passes), found.plan.width - 1 or _MAX_WIDTH)
        for row, count in enumerate(found.passes):
            self._prospect.observe(found.reaches[row], values[row][: count + 1])

    # Graft

    def _retrieve(self, candidates: Candidates, batch: Batch, retrievers: Sequence[Retriever]) -> None:
        for retriever in retrievers:
            first = self.sources.index(retriever.names[0])
            retriever.propose(candidates, batch.sequences, first, self._calibration.chances, batch.max_depth)

    # The budget

    def _best_of(self, plans: list[Plan], num_rows: int) -> Plan:
        """The plan worth most; plain decoding unless it is clearly better than that."""
        best = max(plans, key=lambda plan: plan.worth(self._current_rate))
        return best if best.worth(self._current_rate) >= self._least_worth(plans, num_rows) else plans[0]

    def _least_worth(self, plans: list[Plan], num_rows: int) -> float:
        """What a plan must be worth to be chosen: as much as any other, and more than plain decoding by a margin."""
        worths = [plan.worth(self._current_rate) for plan in plans]
        margin = _MARGIN if num_rows == 1 else _BATCH_MARGIN * num_rows
        return max([worths[0] + margin, *worths[1:]])

    def _rate(self, num_rows: int) -> float:
        """Tokens per second of the usual round of so many rows; at least those of plain decoding."""
        plain_seconds = self._plain_seconds(num_rows)
        usual = self._tokens.get(num_rows, 1.0) / self._seconds.get(num_rows, plain_seconds)
        return num_rows * max(usual, 1 / plain_seconds)

    def _seconds_of_pass(self, num_rows: int) -> float:
        """Expected seconds of a draft pass for so many rows."""
        return self._pass_seconds.get(num_rows)

    @property
    def adapts(self) -> bool:
        """Whether it chooses the budget, and so learns costs from rounds' times."""
        return self._settings.budget is None

    @property
    def _is_time_usual(self) -> bool:
        """Whether the round's time may be learned from: not if it included one-time work such as a graph capture."""
        return self.adapts and num_setups_of(self._target, self.drafter) == self._setups_before

    # Whether to propose at all

    def _may_propose(self, num_rows: int) -> bool:
        """Whether the round may have candidates: proposing must not have cost much more than it brought."""
        if not self.adapts:
            return True
        if not self._credit.knows(num_rows):
            self._credit.open(num_rows, self._gain_of_proposing(num_rows))
        return self._credit.allows(num_rows)

    def _gain_of_proposing(self, num_rows: int) -> float:
        """The plain rounds that a round with candidates should save in a batch of this size, known from others."""
        num_passes = self._hopes.num_passes if self.drafter is not None else 0.0
        proposing = self._overheads.get(num_rows) + num_passes * self._seconds_of_pass(num_rows)
        plain = self._plain_seconds(num_rows)
        return max(
            1 + self._hopes.accepted(width) - (proposing + seconds) / plain
            for width, seconds in self._cost.choices(num_rows)
        )

    def _hope_from(self, found: _ProposalResult) -> None:
        """Tells the hopes how many tokens the round's plans expect a row to accept."""
        if self.adapts:
            num_rows = len(found.passes)
            expected = {plan.width: plan.tokens / num_rows - 1 for plan in found.plans}
            self._hopes.observe(expected, max(found.passes))
            self._expected = expected[found.plan.width]

    def _book(self, num_rows: int, width: int, accepted: Accepted, proposing: float, verifying: float) -> None:
        """Books the seconds of a round's proposing and verifying against the tokens it was expected to bring.

        What it really brought counts through the running mean of how much of the expected is accepted.
        """
        plain = took = self._plain_seconds(num_rows)
        if width > 1:
            took = verifying
            self._hopes.judge(num_rows * self._expected, sum(map(len, accepted.nodes)))
        planned = self._planned_seconds
        if width == 1:  # the plan of a tree includes the overhead
            planned += self._overheads.get(num_rows, proposing)
        gain = 1 + self._hopes.true_of(self._expected) - min(proposing + took, HICCUP * planned) / plain
        self._credit.book(num_rows, gain, is_plain=width == 1)

    def _plain_seconds(self, num_rows: int) -> float:
        return self._cost.plain_seconds(num_rows)

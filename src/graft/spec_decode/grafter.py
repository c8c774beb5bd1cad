"""Grafter: what Graft decides in a round, free of any engine and of any model's code.

In come the texts, drafted levels and the target's likeliest tokens; out goes a tree to verify. A round:

    round = grafter.begin(roots, histories, caps, max_depth)     # copies of earlier text
    grafter.draft(round, passes)                                 # prune: a pass while it is worth its time
    tree = grafter.graft(round)                                  # graft, rank, and choose how many nodes to verify
    ...                                                          # the target verifies, `acceptance` says what stays
    grafter.learn(round, accepted, seconds); grafter.learn_top_k(top_k)

Our own engine runs it through `policies/graft.py`; others bring their own drafts and their own verify.
"""

from __future__ import annotations

import itertools
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.buckets import BUCKET_PROBABILITIES
from graft.spec_decode.budget import Budget, Plan
from graft.spec_decode.calibration import Calibration, PathCalibration
from graft.spec_decode.cost_model import StepCost, UnitCost
from graft.spec_decode.policy_settings import USUAL_PASS_COST, PolicySettings
from graft.spec_decode.proposers import DatastoreLookup, NgramTables, Retriever, SuffixLookup, TargetTopK
from graft.spec_decode.proposers.base import History, named, part_of, salt_of
from graft.tree.candidates import Candidates, Level, Ranking
from graft.tree.tree import DRAFTED, DraftTree

KEPT_OF_A_LEVEL = 24  # drafted nodes of a depth that become candidates; further ones are never among the best
_SHOWN = 8  # pruned candidates shown at least, where there are as many, to those who watch a round
_NUMBERS = itertools.count(1 << 40)  # of texts of other engines; those of our own count from 0


@dataclass(eq=False)
class Text:
    """A text of another engine, as retrievers see it. `ids` grow; the last is the root of the next round."""

    ids: list[int]
    num_prompt_tokens: int
    owner: int | None = None
    group: int | None = None
    number: int = field(default_factory=lambda: next(_NUMBERS))


@dataclass(eq=False)
class Round:
    """A round's candidates, how they were drafted, and what was chosen of them."""

    candidates: Candidates
    histories: Sequence[History]
    caps: Sequence[int]  # by row: the most nodes that it may get
    max_depth: int
    most: int  # nodes that it may verify, all rows together
    num_others: int  # tokens of the step that are no rows'
    passes: list[int]  # by row
    # By pass: P(one of the beams that it expanded is accepted), summed over the rows it was for.
    reaches: list[float] = field(default_factory=list)
    num_ahead: int = 0  # passes that were made ahead and used
    ahead_seconds: float = 0.0  # until these were there
    further_seconds: float = 0.0  # of all others
    plan: Plan | None = None
    tree: DraftTree | None = None
    paths: Tensor | None = None  # [B, W] path probabilities of its nodes

    @property
    def num_further(self) -> int:
        """Passes that were not made ahead."""
        return max(max(self.passes) - self.num_ahead, 0)


class _Outcome(NamedTuple):
    """A finished round, as the budget learns from it."""

    tree: DraftTree
    accepted: Accepted
    round: Round | None  # None if plain
    num_others: int  # tokens of its step that were no rows'
    seconds: float  # of the step
    took: float  # from the end of the round before to that of this one, 0 if there was none
    is_time_usual: bool  # whether these times may be learned from


class Grafter:
    """Ranks what a drafter and all retrievers propose, and chooses the nodes worth their cost.

    Four methods are its decisions, and a subclass may decide otherwise: `make_retrievers`, `goes_on` (another draft
    pass?), `best_of` (which candidates?) and `calibrate`.
    """

    def __init__(self, vocab_size: int, num_passes: int, settings: PolicySettings, step: StepCost) -> None:
        """num_passes: the most that the drafter makes in a round; 0: there is none. step: what steps cost, where the
        number of nodes is chosen."""
        self.settings = settings
        self.retrievers: Sequence[Retriever] = self.make_retrievers(vocab_size, settings)
        # Copies of earlier text cost nothing and may suffice: they are looked up before anything is drafted. The tables
        # come last: they look up successors of whatever the others have proposed.
        self._tables: list[Retriever] = [
            retriever for retriever in self.retrievers if isinstance(retriever, NgramTables)
        ]
        self._copies = [retriever for retriever in self.retrievers if retriever not in self._tables]
        if settings.budget is not None:  # a step is the unit of time
            self.budget = Budget(UnitCost(), num_passes, settings.pass_cost, settings.budget)
        else:
            self.budget = Budget(step, num_passes, USUAL_PASS_COST)
        # By source number, the drafter first.
        names, priors = ["root"], []
        if num_passes:
            names.append("drafted")
            priors.append(BUCKET_PROBABILITIES)
        for retriever in self.retrievers:
            names.extend(retriever.names)
            priors.extend(retriever.prior)
        self.sources = tuple(names)
        self._calibration, self._path_calibration = Calibration(priors), PathCalibration()
        self._unlearned: _Outcome | None = None  # the last round's, of which neither calibration nor budget know yet

    # Decisions

    def make_retrievers(self, vocab_size: int, settings: PolicySettings) -> list[Retriever]:
        """The sources of candidates beside the drafter."""
        datastore = [DatastoreLookup(settings.datastore)] if settings.datastore is not None else []
        return [
            SuffixLookup(isolated=settings.isolated),
            *datastore,
            NgramTables(vocab_size, isolated=settings.isolated),
        ]

    def calibrate(self, candidates: Candidates, accepted: Accepted) -> None:
        """Updates the acceptance probabilities with a round's outcome."""
        self._calibration.observe(candidates, accepted.tokens)

    def best_of(self, candidates: Candidates, total: int, caps: Sequence[int]) -> Ranking:
        """The likeliest candidates of all rows together, of each row at most `caps[row]`."""
        candidates.merge(DRAFTED, self._calibration.chances)
        return candidates.ranked(total, caps, self._truths)

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

    # The round

    def begin(
        self,
        roots: Tensor,
        histories: Sequence[History],
        caps: Sequence[int],
        max_depth: int,
        num_others: int = 0,
        is_quick: bool = False,
    ) -> Round | None:
        """A round below `roots` [B], the last tokens of `histories`, with copies of earlier text; None where it had
        better be plain.

        caps: by row, the most nodes that it may get. num_others: tokens of the step that are no rows'. is_quick: what
        no row can get is not looked for either where the number of nodes is given.
        """
        num_rows, most = len(histories), self._most_nodes(caps, max_depth, num_others)
        if most == 0:
            return None
        candidates = Candidates(
            roots, [history.ids for history in histories], [self.salt_of(history) for history in histories]
        )
        if self.adapts or is_quick:  # what no row can get need not be looked for
            candidates.most_nodes = max(2 * most // num_rows, 1)
        round = Round(candidates, histories, caps, max_depth, most, num_others, [0] * num_rows)
        self._retrieve(round, self._copies)
        return round

    def may_begin(self, caps: Sequence[int], max_depth: int, num_others: int = 0) -> bool:
        """Whether `begin` gives a round."""
        return self._most_nodes(caps, max_depth, num_others) > 0

    def wants_passes(self, num_rows: int) -> bool:
        """Whether the next round of so many rows is to be drafted: asked where its passes are made ahead."""
        return self.budget.may_look(num_rows) and any(self.goes_on(0, [1.0] * num_rows, [True] * num_rows))

    def draft(
        self,
        round: Round,
        passes: Iterator[Sequence[Level]],
        num_beams: int,
        num_ahead: int = 0,
        is_decided: bool = False,
        max_passes: int = sys.maxsize,
        rows: Sequence[bool] | None = None,
    ) -> None:
        """Adds drafted levels to the candidates: those of passes made ahead, and of further ones for as long as another
        pass is worth its time.

        passes: each `next` makes a pass. num_beams: nodes of a level that the next pass expands. num_ahead: passes that
        are being made already; the step waits for them, whether or not they are used. is_decided: it was asked before
        they were begun whether they pay. max_passes: how many there are, where not all that the drafter can make. rows:
        which are drafted for, where not all.
        """
        num_rows, candidates = len(round.passes), round.candidates
        reach = [1.0] * num_rows
        depth = 0
        caps = round.caps if rows is None else [cap if own else 0 for cap, own in zip(round.caps, rows, strict=True)]
        first = candidates.width - 1  # a level's parents are numbers in the drafted tree: retrieved nodes lie between
        start, ahead_until = time.perf_counter(), None
        for number in range(min(max_passes, self.budget.max_passes)):
            if number == num_ahead:
                ahead_until = time.perf_counter()
            going = [count == number and cap > 0 for count, cap in zip(round.passes, caps, strict=True)]
            if number >= num_ahead or (number == 0 and not is_decided):
                going = self.goes_on(number, reach, going)
            if depth >= round.max_depth or not any(going):
                break
            for level in next(passes)[: round.max_depth - depth]:
                depth += 1
                reached = candidates.add_level(
                    level, self._calibration.chances, DRAFTED, number + 1, first, going, num_beams
                )
            round.reaches.append(sum(compress(reach, going)))
            for row in compress(range(num_rows), going):
                round.passes[row] += 1
                reach[row] = reached[row]
        end = time.perf_counter()
        ahead_until = ahead_until or end
        round.num_ahead = min(num_ahead, max(round.passes))
        round.ahead_seconds, round.further_seconds = ahead_until - start, end - ahead_until
        if not any(round.passes):
            self.budget.doubt_passes(num_rows)

    def graft(self, round: Round) -> DraftTree:
        """Adds what is retrieved below drafted nodes, and chooses the tree."""
        self._retrieve(round, self._copies + self._tables if any(round.passes) else self._tables)
        ranking = self.best_of(round.candidates, round.most, round.caps)
        round.plan = self.budget.best(self.budget.plans(ranking.gains, len(round.passes), round.num_others))
        round.tree, round.paths = ranking.tree(round.max_depth, round.plan.num_nodes)
        return round.tree

    def considered(self, round: Round) -> DraftTree:
        """The tree and, behind its nodes, some candidates that are not in it, for whoever watches."""
        assert round.tree is not None
        more = [sum(counts[1:]) + _SHOWN for counts in round.tree.counts_by_source]
        return round.candidates.ranked(sum(more), more).tree(round.max_depth)[0]

    # Learning

    def learn(
        self,
        round: Round | None,
        tree: DraftTree,
        accepted: Accepted,
        seconds: float,
        took: float = 0.0,
        is_time_usual: bool = True,
        num_others: int = 0,
    ) -> None:
        """Takes in a finished round, whose step took `seconds`; most of it when `catch_up` is called, or the next one.

        round: None if it was plain. tree: what was verified. took: from the end of the round before to that of this
        one, 0 if there was none. is_time_usual: whether times may be learned from.
        """
        self.catch_up()
        is_usual = self.adapts and is_time_usual
        self._unlearned = _Outcome(tree, accepted, round, num_others, seconds, took, is_usual)

    def learn_top_k(self, top_k: TargetTopK) -> None:
        """Learns the target's top-k successors of verified tokens."""
        for retriever in self.retrievers:
            retriever.learn(top_k)

    def finish(self, history: History) -> None:
        """Learns from a finished text."""
        for retriever in self.retrievers:
            retriever.finish(history)

    def catch_up(self) -> None:
        """Does postponed learning."""
        outcome, self._unlearned = self._unlearned, None  # first, so that what fails is not tried again in every round
        if outcome is None:
            return
        if outcome.round is not None:
            self.calibrate(outcome.round.candidates, outcome.accepted)
            self._judge_passes(outcome.round)
        self._observe(outcome)

    def _judge_passes(self, round: Round) -> None:
        """Learns what the round's candidates would have been worth with fewer passes."""
        if round.reaches:
            num_rows = len(round.passes)
            prices = self.budget.prices(num_rows, round.num_others)
            values = round.candidates.values_by_need(len(round.reaches), *prices, round.caps, self._truths)
            self.budget.passes_of(num_rows).observe(round.reaches, values)

    def _observe(self, outcome: _Outcome) -> None:
        """Takes a round into the budget."""
        num_rows, round, accepted = len(outcome.accepted), outcome.round, outcome.accepted
        # Nobody asks for it where the number of nodes is given, and a grammar may have cut the tree.
        if self.adapts and round is not None and round.tree is outcome.tree and round.paths is not None:
            self._path_calibration.observe(round.paths, accepted.nodes)
        if outcome.is_time_usual:
            self._learn_costs(outcome)
        num_tokens = sum(map(len, accepted.tokens))
        if round is None:
            self.budget.observe(num_rows, num_tokens, None, 0, outcome.num_others)
        else:
            further, has_ahead = round.num_further, round.num_ahead > 0
            self.budget.observe(num_rows, num_tokens, round.plan, further, outcome.num_others, has_ahead)

    def _learn_costs(self, outcome: _Outcome) -> None:
        budget, num_rows, round, seconds = self.budget, len(outcome.accepted), outcome.round, outcome.seconds
        base = num_rows + outcome.num_others
        budget.step.observe(base + sum(outcome.tree.num_nodes), seconds, least=base)
        drafting = round.ahead_seconds + round.further_seconds if round is not None else 0.0
        if outcome.took and not outcome.num_others:  # all that is neither the step nor drafting
            host = budget.host if round is not None else budget.plain_host
            host.observe(num_rows, max(outcome.took - seconds - drafting, 0.0), most=seconds)
        if round is None:
            return
        if round.num_ahead:
            budget.ahead.observe(num_rows, round.ahead_seconds, most=seconds)
            budget.num_ahead = round.num_ahead
        # Where passes are made ahead, a first one that was not includes what else was to be done before it.
        if round.num_further and (round.num_ahead or not budget.ahead.is_known):
            budget.drafting.observe(num_rows, round.further_seconds / round.num_further, most=seconds)

    # What was learned

    def state(self) -> dict[str, Tensor]:
        """A copy of everything learned, by name."""
        self.catch_up()
        counts = self._calibration.state().values()
        by_source = {name: torch.stack([c[:, number] for c in counts]) for number, name in enumerate(self.sources)}
        retrieved = {key: value for retriever in self.retrievers for key, value in retriever.state().items()}
        return (
            retrieved
            | named("calibration", by_source)
            | named("prospect", self.budget.passes.state())
            | named("paths", self._path_calibration.state())
        )

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Replaces what was learned by what `state` once gave; what is missing there starts anew."""
        for retriever in self.retrievers:
            retriever.restore(state)
        self._unlearned = None
        self._restore_calibration(part_of(state, "calibration"))
        self._path_calibration.restore(part_of(state, "paths"))
        self.budget.passes.restore(part_of(state, "prospect"))
        self.budget.restart(is_calibrated=bool(state))

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
        if self.settings.budget is None and self.settings.pass_cost is None:  # else the user has given the costs
            self.budget.restore_costs(costs)

    # Small parts

    def salt_of(self, history: History) -> int:
        return salt_of(history, self.settings.isolated)

    def _most_nodes(self, caps: Sequence[int], max_depth: int, num_others: int) -> int:
        """Nodes that a round may verify, all rows together; 0 where it had better be plain."""
        num_rows = len(caps)
        most = min(self.budget.max_nodes(num_rows, num_others), sum(caps))
        return most if most > 0 and max_depth > 0 and self.budget.may_look(num_rows) else 0

    def _retrieve(self, round: Round, retrievers: Sequence[Retriever]) -> None:
        for retriever in retrievers:
            first = self.sources.index(retriever.names[0])
            retriever.propose(round.candidates, round.histories, first, self._calibration.chances, round.max_depth)

    @property
    def adapts(self) -> bool:
        """Whether it chooses the budget, and so learns costs from rounds' times."""
        return self.settings.budget is None

    @property
    def _truths(self) -> array[float] | None:
        """What of path probabilities comes true; where the number of nodes is given, nobody asks."""
        return self._path_calibration.truths if self.adapts else None

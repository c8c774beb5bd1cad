"""Grafter: every decision of a round, independent of any engine or model code.

Its inputs are texts, drafted levels and the target's likeliest tokens; its output is a tree to verify. A round:

    round = grafter.begin(roots, histories, caps, max_depth)     # copies of earlier text
    grafter.draft(round, passes, num_beams)                      # prune: draft passes while they pay
    tree = grafter.graft(round)                                  # graft, rank, and choose how many nodes to verify
    ...                                                          # the target verifies, `acceptance` walks the tree
    grafter.learn(round, tree, accepted, seconds)

Our own engine runs it through `policies/graft.py`. SGLang's plugin uses its sources and calibration.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from graft.model.noise import NOT_SAMPLED, ComingDraws
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.buckets import BUCKET_PROBABILITIES
from graft.spec_decode.budget import Budget, TreeSize
from graft.spec_decode.calibration import Calibration, PathCalibration, by_noise
from graft.spec_decode.cost_model import StepCost, UnitCost
from graft.spec_decode.policy_settings import USUAL_PASS_COST, PolicySettings
from graft.spec_decode.proposers import NgramTables, Retriever, SuffixLookup
from graft.spec_decode.proposers.base import History, named, part_of, salt_of
from graft.tree.candidates import Candidates, Level, Ranking
from graft.tree.tree import DRAFTED, DraftTree

_SHOWN = 8  # the most pruned candidates that the record of a round shows


@dataclass(eq=False)
class Round:
    """A round: its candidates, how they were drafted, and the tree chosen from them."""

    candidates: Candidates
    histories: Sequence[History]
    caps: Sequence[int]  # by row: the most nodes
    max_depth: int
    max_nodes: int  # all rows together
    num_prefill_tokens: int  # prompt tokens in the same step
    passes: list[int]  # by row
    # By pass: P(one of the expanded beams is accepted), summed over the rows that made the pass.
    reaches: list[float] = field(default_factory=list)
    draft_seconds: float = 0.0  # of all passes
    size: TreeSize | None = None
    tree: DraftTree | None = None
    paths: Tensor | None = None  # [B, W] path probabilities of the tree's nodes
    kinds: list[int] = field(default_factory=list)  # of rows, see `ComingDraws`


class Grafter:
    """Ranks the proposals of a drafter and all retrievers, and chooses the nodes that pay.

    Subclasses may override its three decisions: `make_retrievers`, `best_of` (which candidates?) and `calibrate`.
    """

    runs_on_device = True  # whether device rounds make the same decisions as this class

    def __init__(self, vocab_size: int, num_passes: int, settings: PolicySettings, step: StepCost) -> None:
        """num_passes: the most draft passes of a round; 0 without a drafter.

        step: step times, used unless `settings` fix the number of nodes.
        """
        self.settings = settings
        self.retrievers: Sequence[Retriever] = self.make_retrievers(vocab_size, settings)
        # Copies of earlier text are cheap and may suffice, so they come before drafting. Tables come last: they look up
        # successors of all other proposals.
        self._tables: list[Retriever] = [each for each in self.retrievers if isinstance(each, NgramTables)]
        self._copies = [each for each in self.retrievers if each not in self._tables]
        if settings.budget is not None:  # the step is the unit of time
            self.budget = Budget(UnitCost(), num_passes, settings.pass_cost, settings.budget, settings.passes)
        else:
            self.budget = Budget(step, num_passes, USUAL_PASS_COST, fixed_passes=settings.passes)
        # By source number, the drafter first.
        names, priors, sampled_priors = ["root"], [], []
        if num_passes:
            names.append("drafted")
            priors.append(BUCKET_PROBABILITIES)
            sampled_priors.append(BUCKET_PROBABILITIES)
        for retriever in self.retrievers:
            names.extend(retriever.names)
            priors.extend(retriever.prior)
            sampled = retriever.sampled_prior
            sampled_priors.extend(map(by_noise, sampled) if retriever.splits_by_noise else sampled)
        self.sources = tuple(names)
        self.calibration, self.path_calibration = Calibration(priors, sampled_priors), PathCalibration()

    # Decisions

    def make_retrievers(self, vocab_size: int, settings: PolicySettings) -> list[Retriever]:
        """All sources of candidates except the drafter."""
        return [SuffixLookup(isolated=settings.isolated), NgramTables(vocab_size, isolated=settings.isolated)]

    def calibrate(self, candidates: Candidates, accepted: Accepted) -> None:
        """Update the acceptance probabilities with a round's outcome."""
        self.calibration.observe(candidates, accepted.tokens)

    def best_of(self, candidates: Candidates, total: int, caps: Sequence[int]) -> Ranking:
        """The likeliest candidates of all rows together, at most `caps[row]` of each row."""
        candidates.merge(DRAFTED, self.calibration.acceptance_probs)
        return candidates.ranked(total, caps, self._path_ratios)

    def goes_on(self, num_done: int, reach: list[float], going: list[bool], kinds: list[int]) -> list[bool]:
        """By row: whether the next draft pass is expected to pay.

        num_done: passes so far. reach: by row, the probability that one of its beams is accepted. kinds: of rows.
        """
        num_rows = len(going)
        if self.adapts:  # rows share the budget, and all rows wait for a pass
            pays = sum(compress(reach, going)) > self.budget.least_reach(num_rows, num_done, kinds)
            return going if pays else [False] * num_rows
        # With a fixed budget, the step costs the same whatever is drafted, so each row decides as if all had its reach.
        return [
            is_going and num_rows * own > self.budget.least_reach(num_rows, num_done, [kind])
            for own, is_going, kind in zip(reach, going, kinds, strict=True)
        ]

    # The round

    def begin(
        self,
        roots: Tensor,
        histories: Sequence[History],
        caps: Sequence[int],
        max_depth: int,
        num_prefill_tokens: int = 0,
        draws: ComingDraws | None = None,
    ) -> Round | None:
        """Begin a round below `roots` [B], the last tokens of `histories`, with copies of earlier text.

        Returns None if the round should be plain. caps: by row, the most nodes. num_prefill_tokens: prompt tokens in
        the same step. draws: what is known of the rows' coming draws; the drafter must use the same.
        """
        num_rows, max_nodes = len(histories), self._max_nodes(caps, max_depth, num_prefill_tokens)
        if max_nodes == 0:
            return None
        salts = [self.salt_of(history) for history in histories]
        candidates = Candidates(roots, [history.ids for history in histories], salts, draws)
        if self.adapts:
            candidates.most_nodes = max(2 * max_nodes // num_rows, 1)
        round = Round(candidates, histories, caps, max_depth, max_nodes, num_prefill_tokens, [0] * num_rows)
        round.kinds = draws.kinds if draws is not None else [NOT_SAMPLED] * num_rows
        self._retrieve(round, self._copies)
        return round

    def may_begin(self, caps: Sequence[int], max_depth: int, num_prefill_tokens: int = 0) -> bool:
        """Whether `begin` would return a round."""
        return self._max_nodes(caps, max_depth, num_prefill_tokens) > 0

    def draft(
        self,
        round: Round,
        passes: Iterator[Sequence[Level]],
        num_beams: int,
    ) -> None:
        """Add drafted levels to the candidates, while passes pay.

        passes: each `next` makes a pass. num_beams: nodes of a level that the next pass expands.
        """
        num_rows, candidates = len(round.passes), round.candidates
        reach = [1.0] * num_rows
        depth = 0
        first = candidates.width - 1  # number of retrieved nodes, which come between the root and drafted nodes
        start = time.perf_counter()
        for number in range(self.budget.max_passes):
            going = [count == number and cap > 0 for count, cap in zip(round.passes, round.caps, strict=True)]
            going = self.goes_on(number, reach, going, round.kinds)
            if depth >= round.max_depth or not any(going):
                break
            for level in next(passes)[: round.max_depth - depth]:
                depth += 1
                reached = candidates.add_level(
                    level, self.calibration.acceptance_probs, DRAFTED, number + 1, first, going, num_beams
                )
            round.reaches.append(sum(compress(reach, going)))
            for row in compress(range(num_rows), going):
                round.passes[row] += 1
                reach[row] = reached[row]
        round.draft_seconds = time.perf_counter() - start

    def graft(self, round: Round) -> DraftTree:
        """Add retrieved candidates below drafted nodes, and choose the tree."""
        self._retrieve(round, self._copies + self._tables if any(round.passes) else self._tables)
        ranking = self.best_of(round.candidates, round.max_nodes, round.caps)
        sizes = self.budget.tree_sizes(ranking.gains, len(round.passes), round.num_prefill_tokens)
        round.size = self.budget.best(sizes)
        round.tree, round.paths = ranking.tree(round.max_depth, round.size.num_nodes)
        return round.tree

    def considered(self, round: Round) -> DraftTree:
        """The tree and, after its nodes, some pruned candidates, for the record of a round."""
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
        round_seconds: float = 0.0,
        is_time_usual: bool = True,
        num_prefill_tokens: int = 0,
    ) -> None:
        """Learn from a finished round, whose step took `seconds`.

        round: None if it was plain. tree: the verified tree. round_seconds: since the end of the previous round, 0 if
        there was none. is_time_usual: whether the budget may learn these times.
        """
        num_rows = len(accepted)
        if round is not None:
            self.calibrate(round.candidates, accepted)
            self._learn_pass_gains(round)
            # Only adaptive budgets use it, and only if no grammar has pruned the tree.
            if self.adapts and round.tree is tree and round.paths is not None:
                self.path_calibration.observe(round.paths, accepted.nodes, round.kinds)
        if self.adapts and is_time_usual:
            self._learn_costs(round, tree, seconds, round_seconds, num_prefill_tokens)
        size, num_passes = (round.size, max(round.passes)) if round is not None else (None, 0)
        self.budget.observe(num_rows, sum(map(len, accepted.tokens)), size, num_passes, num_prefill_tokens)

    def _learn_pass_gains(self, round: Round) -> None:
        """Learn the gain of each pass, by comparing the values of the round's candidates with fewer passes."""
        num_rows, num_passes = len(round.passes), len(round.reaches)
        values = [0.0]
        if num_passes:
            costs = self.budget.node_costs(num_rows, round.num_prefill_tokens)
            values = round.candidates.values_by_need(num_passes, *costs, round.caps, self._path_ratios)
        self.budget.passes.of(num_rows, round.kinds).observe(round.reaches, values)

    def _learn_costs(
        self, round: Round | None, tree: DraftTree, seconds: float, round_seconds: float, num_prefill_tokens: int
    ) -> None:
        budget, num_rows = self.budget, len(tree.tokens)
        base = num_rows + num_prefill_tokens
        budget.step.observe(base + sum(tree.num_nodes), seconds, least=base)
        drafting = round.draft_seconds if round is not None else 0.0
        if round_seconds and not num_prefill_tokens:  # the host's time: neither the step nor drafting
            host = budget.host if round is not None else budget.plain_host
            host.observe(num_rows, max(round_seconds - seconds - drafting, 0.0), most=seconds)
        if round is not None and any(round.passes):
            budget.drafting.observe(num_rows, drafting / max(round.passes), most=seconds)

    # State

    def state(self) -> dict[str, Tensor]:
        """A copy of everything learned, by name."""
        counts = self.calibration.state().values()
        by_source = {name: torch.stack([c[:, number] for c in counts]) for number, name in enumerate(self.sources)}
        retrieved = {key: value for retriever in self.retrievers for key, value in retriever.state().items()}
        return (
            retrieved
            | named("calibration", by_source)
            | named("prospect", self.budget.passes.state())
            | named("paths", self.path_calibration.state())
        )

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore everything learned from `state`; missing parts start anew."""
        for retriever in self.retrievers:
            retriever.restore(state)
        self._restore_calibration(part_of(state, "calibration"))
        self.path_calibration.restore(part_of(state, "paths"))
        self.budget.passes.restore(part_of(state, "prospect"))
        self.budget.restart(is_calibrated=bool(state))

    def _restore_calibration(self, by_source: Mapping[str, Tensor]) -> None:
        """Restore counts source by source. The state may have other sources and buckets, or only greedy rows."""
        self.calibration.restore({})
        new = self.calibration.state()
        for number, name in enumerate(self.sources):
            if name in by_source:
                for own, known in zip(new.values(), by_source[name], strict=True):
                    num_groups, width = (min(sizes) for sizes in zip(own[:, number].shape, known.shape, strict=True))
                    own[:num_groups, number, :width] = known[:num_groups, :width]
        self.calibration.restore(new)

    def costs(self) -> dict[str, Tensor]:
        return self.budget.costs()

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        if self.settings.budget is None and self.settings.pass_cost is None:  # otherwise the user has given the costs
            self.budget.restore_costs(costs)

    # Small parts

    def salt_of(self, history: History) -> int:
        return salt_of(history, self.settings.isolated)

    def _max_nodes(self, caps: Sequence[int], max_depth: int, num_prefill_tokens: int) -> int:
        """The most nodes that a round may verify, all rows together; 0 if it should be plain."""
        num_rows = len(caps)
        most = min(self.budget.max_nodes(num_rows, num_prefill_tokens), sum(caps))
        return most if most > 0 and max_depth > 0 and self.budget.may_propose(num_rows) else 0

    def _retrieve(self, round: Round, retrievers: Sequence[Retriever]) -> None:
        probs = self.calibration.acceptance_probs
        for retriever in retrievers:
            first = self.sources.index(retriever.names[0])
            retriever.propose(round.candidates, round.histories, first, probs, round.max_depth)

    @property
    def adapts(self) -> bool:
        """Whether the number of nodes is chosen in every round, from learned costs."""
        return self.settings.budget is None

    @property
    def _path_ratios(self) -> array[float] | None:
        """Calibration of path probabilities, which a fixed budget does not use."""
        return self.path_calibration.ratios if self.adapts else None

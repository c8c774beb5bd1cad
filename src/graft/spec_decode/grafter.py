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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.model.noise import NOT_SAMPLED, ComingDraws
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.buckets import BUCKET_PROBABILITIES
from graft.spec_decode.calibration import Calibration, PathCalibration, by_noise
from graft.spec_decode.planner import Outcome, Planner
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers import NgramTables, Retriever, SuffixLookup
from graft.spec_decode.proposers.base import History, named, part_of, salt_of
from graft.spec_decode.step_times import StepTimes
from graft.tree.candidates import Candidates, Level, Ranking
from graft.tree.tree import DRAFTED, DraftTree

_SHOWN = 8  # the most pruned candidates that the record of a round shows


class Likeliest(NamedTuple):
    """Path probabilities of a round's candidates, [rows, n], best first, and the draft passes that each needed."""

    paths: np.ndarray
    needs: np.ndarray


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
    retrieved: float = 0.0  # expected tokens of a row from copies alone
    # By pass: P(one of the expanded beams is accepted), summed over the rows that made the pass.
    reaches: list[float] = field(default_factory=list)
    tree: DraftTree | None = None
    likeliest: Likeliest | None = None  # candidates of each row
    kinds: list[int] = field(default_factory=list)  # of rows, see `ComingDraws`


class Grafter:
    """Ranks the proposals of a drafter and all retrievers, and chooses the nodes that pay.

    Subclasses may override its three decisions: `make_retrievers`, `best_of` (which candidates?) and `calibrate`.
    """

    runs_on_device = True  # whether device rounds make the same decisions as this class

    def __init__(
        self,
        vocab_size: int,
        num_passes: int,
        settings: PolicySettings,
        steps: StepTimes,
        sees_candidates: bool = True,
    ) -> None:
        """num_passes: the most draft passes of a round; 0 without a drafter.

        steps: step times, used unless `settings` fix the number of nodes. sees_candidates: see `Planner`.
        """
        self.settings = settings
        self.retrievers: Sequence[Retriever] = self.make_retrievers(vocab_size, settings)
        # Copies of earlier text are cheap and may suffice, so they come before drafting. Tables come last: they look up
        # successors of all other proposals.
        self._tables: list[Retriever] = [each for each in self.retrievers if isinstance(each, NgramTables)]
        self._copies = [each for each in self.retrievers if each not in self._tables]
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
        self.planner = Planner(
            steps,
            num_passes,
            self.calibration,
            self.path_calibration,
            sees_candidates,
            fixed=settings.budget,
            fixed_passes=settings.passes,
            pass_cost=settings.pass_cost,
        )

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
        return candidates.ranked(total, caps)

    def goes_on(self, round: Round, num_done: int, reach: list[float], going: list[bool]) -> list[bool]:
        """By row: whether the next draft pass is expected to pay.

        num_done: passes so far. reach: by row, the probability that one of its beams is accepted.
        """
        num_rows = len(going)
        if self.adapts:  # rows share the budget, and all rows wait for a pass
            least = self.planner.thresholds(round.kinds, retrieved=round.retrieved)[num_done]
            return going if sum(compress(reach, going)) > least else [False] * num_rows
        # With a fixed budget, the step costs the same whatever is drafted, so each row decides as if all were like it.
        return [
            is_going and num_rows * own > self.planner.thresholds([kind] * num_rows)[num_done]
            for own, is_going, kind in zip(reach, going, round.kinds, strict=True)
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
        num_rows, base = len(histories), len(histories) + num_prefill_tokens
        kinds = draws.kinds if draws is not None else [NOT_SAMPLED] * num_rows
        if self.settings.budget is not None:
            sizes = [num_rows * (1 + self.settings.budget)]
        else:
            sizes = [size - num_prefill_tokens for size in self.planner.steps.sizes if size > base]
        if not sum(caps) or max_depth <= 0:
            return None
        max_nodes = min(self.planner.plan(kinds, num_rows, sizes, num_prefill_tokens).tokens - num_rows, sum(caps))
        if max_nodes <= 0:
            return None
        salts = [self.salt_of(history) for history in histories]
        candidates = Candidates(roots, [history.ids for history in histories], salts, draws)
        if self.adapts:
            candidates.most_nodes = max(2 * max_nodes // num_rows, 1)
        round = Round(candidates, histories, caps, max_depth, max_nodes, num_prefill_tokens, [0] * num_rows)
        round.kinds = kinds
        self._retrieve(round, self._copies)
        round.retrieved = candidates.expected_chain() / num_rows
        return round

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
        for number in range(self.planner.num_passes):
            going = [count == number and cap > 0 for count, cap in zip(round.passes, round.caps, strict=True)]
            going = self.goes_on(round, number, reach, going)
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

    def graft(self, round: Round) -> DraftTree:
        """Add retrieved candidates below drafted nodes, and choose the tree."""
        self._retrieve(round, self._copies + self._tables if any(round.passes) else self._tables)
        ranking = self.best_of(round.candidates, round.max_nodes, round.caps)
        round.likeliest = Likeliest(*ranking.paths_and_needs())
        num_nodes = self.planner.choose(round.likeliest.paths, round.kinds, round.num_prefill_tokens)
        round.tree, _ = ranking.tree(round.max_depth, num_nodes)
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
        is_known = is_time_usual and round_seconds > 0 and not num_prefill_tokens
        host_seconds = max(round_seconds - seconds, 0.0) if is_known else 0.0
        if round is not None:
            self.calibrate(round.candidates, accepted)
        # If a grammar has pruned the tree, what was accepted says little about the candidates.
        likeliest = round.likeliest if round is not None and round.tree is tree else None
        self.planner.learn(
            Outcome(
                num_rows=len(accepted),
                is_plain=round is None,
                tokens=len(accepted) + sum(tree.num_nodes),
                num_prefill_tokens=num_prefill_tokens,
                kinds=round.kinds if round is not None else [NOT_SAMPLED] * len(accepted),
                paths=likeliest.paths if likeliest is not None else None,
                num_nodes=np.array(tree.num_nodes),
                nodes=accepted.nodes,
                needs=likeliest.needs if likeliest is not None else np.zeros((len(accepted), 0), np.int64),
                reaches=round.reaches if round is not None else (),
                num_passes=len(round.reaches) if round is not None else 0,
                tried=None,
                fitted=None,
                propose_seconds=host_seconds if round is not None else 0.0,
                step_seconds=seconds if is_time_usual else 0.0,
                rest_seconds=host_seconds if round is None and is_known else None,
                retrieved=round.retrieved if round is not None else None,
            )
        )

    # State

    def state(self) -> dict[str, Tensor]:
        """A copy of everything learned, by name."""
        counts = self.calibration.state().values()
        by_source = {name: torch.stack([c[:, number] for c in counts]) for number, name in enumerate(self.sources)}
        retrieved = {key: value for retriever in self.retrievers for key, value in retriever.state().items()}
        return (
            retrieved
            | named("calibration", by_source)
            | named("planner", self.planner.state())
            | named("paths", self.path_calibration.state())
        )

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore everything learned from `state`; missing parts start anew."""
        for retriever in self.retrievers:
            retriever.restore(state)
        self._restore_calibration(part_of(state, "calibration"))
        self.path_calibration.restore(part_of(state, "paths"))
        self.planner.restore(part_of(state, "planner"))

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
        return self.planner.times() if self.adapts else {}

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        if self.settings.budget is None and self.settings.pass_cost is None:  # otherwise the user has given the costs
            self.planner.restore_times(costs)

    # Small parts

    def salt_of(self, history: History) -> int:
        return salt_of(history, self.settings.isolated)

    def _retrieve(self, round: Round, retrievers: Sequence[Retriever]) -> None:
        probs = self.calibration.acceptance_probs
        for retriever in retrievers:
            first = self.sources.index(retriever.names[0])
            retriever.propose(round.candidates, round.histories, first, probs, round.max_depth)

    @property
    def adapts(self) -> bool:
        """Whether the number of nodes is chosen in every round, from learned costs."""
        return self.settings.budget is None

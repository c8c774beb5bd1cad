"""Rounds of the baselines, whose trees the host makes one by one; `engine/device_rounds.py` runs those of `graft`.

A baseline proposes a tree before the target verifies it (`HostPolicy.grow`), and learns from the round afterwards.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.engine.choosers import Choosers
from graft.engine.device_rows import ReadChunk
from graft.engine.marks import new_mark, seconds_between
from graft.model import Chunk, TargetRunner, VerifyOutput
from graft.model.grammar import pruned
from graft.model.noise import ComingDraws
from graft.model.sampler import Chooser, Sampler
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.request.sequence import TreeRow
from graft.request.stats import Clock
from graft.spec_decode.acceptance import Accepted, walk
from graft.spec_decode.grafter import Grafter, Round
from graft.spec_decode.planner import Planner
from graft.spec_decode.policies.base import Policy
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.policy_settings import MAX_BUDGET, PolicySettings
from graft.spec_decode.proposers.base import Learner, TargetTopK
from graft.spec_decode.proposers.drafter import KEPT_OF_A_LEVEL, Drafter, num_setups_of
from graft.spec_decode.step_times import StepTimes, usual_shape
from graft.tree.candidates import Candidates
from graft.tree.tree import DraftTree


@dataclass(frozen=True)
class DraftResult:
    """A round's trees to verify, and the number of draft passes of each row."""

    tree: DraftTree
    passes: list[int]
    considered: DraftTree | None = None  # the same nodes, then pruned candidates, for the record of a round
    draws: ComingDraws | None = None  # what the trees were made with

    @classmethod
    def without_drafts(cls, tree: DraftTree) -> DraftResult:
        return cls(tree, [0] * tree.tokens.shape[0])


@dataclass
class HostBatch:
    """The rows of a round, as `grow` sees them."""

    sequences: Sequence[TokenSequence]
    draft: Any
    chooser: Chooser
    num_prefill_tokens: int = 0  # prompt tokens of other batches in the same step

    def roots(self) -> Tensor:
        """[B] the last known token of each sequence."""
        return torch.tensor([sequence.ids[-1] for sequence in self.sequences])

    @property
    def max_depth(self) -> int:
        """The longest useful path of a tree. The last token of a round is the target's own."""
        return max(sequence.num_remaining for sequence in self.sequences) - 1


class HostRounds:
    """Runs the rounds of a `HostPolicy`, in place of `DeviceRounds`."""

    num_unknown = 0
    max_rows = 1 << 20

    def __init__(
        self,
        target: TargetRunner,
        policy: HostPolicy,
        new_sampler: Callable[[Sequence[TokenSequence]], Sampler],
    ) -> None:
        self._target, self._policy = target, policy
        self._choosers = Choosers(new_sampler)

    def run(
        self, batch: Batch, clock: Clock, chunks: Sequence[Chunk], meanwhile: Callable[[], None]
    ) -> list[VerifyOutput]:
        target, policy, sequences = self._target, self._policy, batch.sequences
        num_prefill = sum(len(chunk.tokens) for chunk in chunks)
        rows = HostBatch(sequences, batch.draft, self._choosers.of(batch), num_prefill)
        speculates = any(sequence.speculates for sequence in sequences)
        result = policy.grow(rows, rows.roots(), clock) if speculates else None
        result = result or DraftResult.without_drafts(DraftTree.roots(rows.roots()))
        tree = self._allowed(rows, result.tree)
        begin, end = (new_mark(target.device) for _ in range(2))
        with clock("verify"):
            begin.record()
            verified, read = target.step(batch.cache, tree, chunks)
            end.record()
            assert verified is not None
            batch.settle()
            meanwhile()
            target.synchronize()  # wait here, so that the time counts as the verify's and not as the walk's
        with clock("accept"):
            accepted = walk(tree, verified, rows.chooser)
            target.commit(batch.cache, accepted.nodes)
        with clock("learn"):
            if speculates:
                policy.learn(rows, tree, verified, accepted, seconds_between(begin, end))
        self._extend(sequences, tree, verified, accepted, result)
        return read

    def _allowed(self, rows: HostBatch, tree: DraftTree) -> DraftTree:
        """The tree without nodes that grammars forbid, and no larger than fits a step."""
        sequences, most = rows.sequences, self._target.max_tokens
        tree = pruned(tree, [each.constraint for each in sequences], [each.speculates for each in sequences])
        return tree if most is None else tree.first(max((most - rows.num_prefill_tokens) // len(sequences), 1))

    def _extend(
        self,
        sequences: Sequence[TokenSequence],
        tree: DraftTree,
        verified: VerifyOutput,
        accepted: Accepted,
        result: DraftResult,
    ) -> None:
        sources, common = self._policy.sources, self._policy.common_sources
        outcome = zip(sequences, accepted.tokens, accepted.nodes, result.passes, strict=True)
        for row, (sequence, tokens, nodes, passes) in enumerate(outcome):
            try:
                is_whole = sequence.speculates and sequence.constraint is None
                knew_noise = result.draws is not None and result.draws.kinds[row] > 0
                seen = TreeRow(
                    tree, verified, row, sources, result.considered if is_whole else None, common, knew_noise
                )
                sequence.stats.draft_passes += passes
                sequence.extend(tokens, nodes, seen)
            except Exception as error:  # ends only that sequence
                sequence.failure = error

    def learn_prompts(self, chunks: Sequence[ReadChunk]) -> None:
        for chunk in chunks:
            self._policy.read(chunk)

    def finish_text(self, sequence: TokenSequence) -> None:
        for retriever in self._policy.retrievers:
            retriever.finish(sequence)

    def warm_up(self, max_rows: int, choices: object = (), longest: int = 0) -> None:
        """Nothing is captured."""

    def memory(self) -> dict[str, int]:
        return {}


class HostPolicy(Policy):
    """Base of the policies whose trees the host makes."""

    rounds_class = HostRounds
    kept_of_a_level: int | None = None
    retrievers: Sequence[Learner] = ()

    @property
    def common_sources(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(name for retriever in self.retrievers for name in retriever.common)

    @abstractmethod
    def grow(self, batch: HostBatch, roots: Tensor, clock: Clock) -> DraftResult:
        """Trees to verify below `roots` [B], no deeper than the batch's `max_depth`."""

    def read(self, chunk: ReadChunk) -> None:
        """Learn from a prefilled chunk of a row's prompt."""
        if self.retrievers:
            self.learn_top_k(TargetTopK.of_chunk(chunk.verified, chunk.preceding, chunk.salt))
        if self.drafter is not None:
            self.drafter.read(chunk.draft, chunk.row, chunk.verified, chunk.following)

    def learn(
        self, batch: HostBatch, tree: DraftTree, verified: VerifyOutput, accepted: Accepted, seconds: float
    ) -> None:
        """Learn from a finished round, whose verify step took `seconds`; 0: unknown."""
        if self.drafter is not None:  # first, so that the device works while the host learns
            self.drafter.learn(batch.draft, verified, accepted.nodes, accepted.tokens)
        if self.retrievers:
            histories = [sequence.ids for sequence in batch.sequences]
            self.learn_top_k(TargetTopK.of_trees(verified, tree, histories, self._salts(batch)))
        self.learn_accepted(tree, accepted, seconds)

    def learn_top_k(self, top_k: TargetTopK) -> None:
        """Learn the target's top-k successors of verified tokens."""
        for retriever in self.retrievers:
            retriever.learn(top_k)

    def learn_accepted(self, tree: DraftTree, accepted: Accepted, seconds: float) -> None:
        """Learn which of the round's candidates were accepted."""

    def state(self) -> dict[str, Tensor]:
        return {key: value for retriever in self.retrievers for key, value in retriever.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for retriever in self.retrievers:
            retriever.restore(state)

    def coming_draws(self, batch: HostBatch) -> ComingDraws | None:
        """What the round's tree may use of the rows' coming draws; None: nothing."""
        draws = batch.chooser.coming_draws() if self.knows_draws else None
        is_known = draws is not None and (self.drafter is None or self.drafter.knows(draws))
        return draws if is_known else None

    def new_candidates(self, batch: HostBatch, roots: Tensor) -> Candidates:
        """Candidates with only the batch's roots."""
        ids = [sequence.ids for sequence in batch.sequences]
        return Candidates(roots, ids, self._salts(batch), self.coming_draws(batch))

    def _salts(self, batch: HostBatch) -> list[int]:
        return [self.salt_of(sequence) for sequence in batch.sequences]


class HostGraft(HostPolicy):
    """`graft` by `Grafter`, for the ablations that `DeviceRound` does not have."""

    kept_of_a_level = KEPT_OF_A_LEVEL
    knows_draws = True
    grafter_class: type[Grafter] = Grafter

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        self.drafter, self._target = drafter, target
        self.isolated = settings.isolated
        steps = StepTimes(target.step_sizes, usual_shape(target.device.type))
        num_passes = drafter.max_passes if drafter is not None else 0
        self.settings = settings
        self.grafter = self.grafter_class(target.vocab_size, num_passes, settings, steps)
        self.retrievers, self.sources = self.grafter.retrievers, self.grafter.sources
        self.planner: Planner = self.grafter.planner
        self._round: Round | None = None  # the current one; None if plain
        self._num_prefill_tokens = 0  # in the current step
        self._setups_before = 0
        self._ended = 0.0  # when the last round ended

    prepare, measure = Graft.prepare, Graft.measure

    def grow(self, batch: HostBatch, roots: Tensor, clock: Clock) -> DraftResult:
        self._num_prefill_tokens = batch.num_prefill_tokens
        self._setups_before = num_setups_of(self._target, self.drafter)
        most = MAX_BUDGET if self.planner.fixed is None else self.planner.fixed
        caps = [most if sequence.speculates else 0 for sequence in batch.sequences]
        limits = (batch.max_depth, batch.num_prefill_tokens)
        draws = self.coming_draws(batch)
        with clock("graft"):
            round = self._round = self.grafter.begin(roots, batch.sequences, caps, *limits, draws=draws)
        if round is None:
            return DraftResult.without_drafts(DraftTree.roots(roots))
        if self.drafter is not None:
            passes = self.drafter.passes(batch.draft, roots, keep=self.kept_of_a_level, draws=draws)
            with clock("draft"):
                self.grafter.draft(round, passes, self.drafter.num_beams)
        with clock("graft"):
            tree = self.grafter.graft(round)
        is_watched = any(sequence.is_recorded for sequence in batch.sequences)
        return DraftResult(tree, round.passes, self.grafter.considered(round) if is_watched else tree, draws)

    def learn_accepted(self, tree: DraftTree, accepted: Accepted, seconds: float) -> None:
        ended, self._ended = self._ended, time.perf_counter()
        round_seconds = self._ended - ended if ended else 0.0
        # The time of a round with one-time work, such as a graph capture, says nothing about other rounds.
        is_usual = seconds > 0 and num_setups_of(self._target, self.drafter) == self._setups_before
        self.grafter.learn(self._round, tree, accepted, seconds, round_seconds, is_usual, self._num_prefill_tokens)

    def state(self) -> dict[str, Tensor]:
        return self.grafter.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.grafter.restore(state)

    def costs(self) -> dict[str, Tensor]:
        return self.grafter.costs()

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        self.grafter.restore_costs(costs)

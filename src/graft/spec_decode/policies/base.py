"""The policy contract: propose a round's tree before the target verifies it, and learn from the round afterwards.

The base class keeps the drafter and the retrievers up to date, in the same way for all policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from graft.model import KVCache, TargetRunner, VerifyOutput
from graft.model.noise import ComingDraws
from graft.request.batch import Batch
from graft.request.stats import Clock
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.planner import Planner
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers.base import History, Learner, TargetTopK, salt_of
from graft.spec_decode.proposers.drafter import Drafter, DraftState
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


class Policy(ABC):
    """Decides which candidates a round verifies, but never what is accepted."""

    drafts = False  # whether it needs a drafter
    sources: tuple[str, ...] = ("root",)  # names, by source number
    drafter: Drafter | None = None
    retrievers: Sequence[Learner] = ()
    isolated = False
    knows_draws = False  # whether its trees use the noise of coming draws
    num_texts = 0  # finished texts that it has learned from
    kept_of_a_level: int | None = None  # drafted nodes of a depth that it uses, the likeliest; None: all
    runs_on_device = False  # whether its rounds can be device rounds
    planner: Planner | None = None  # of rounds with trees; None: device rounds are plain

    @property
    def common_sources(self) -> frozenset[str]:
        """Sources that may propose other users' text: round records show only their accepted nodes."""
        return frozenset(name for retriever in self.retrievers for name in retriever.common)

    @abstractmethod
    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None: ...

    def prepare(self) -> None:  # noqa: B027 - optional
        """Called before every run. Measures, once, costs that the policy needs from the start."""

    def measure(self) -> None:  # noqa: B027 - optional
        """Measure, once, costs that would otherwise be learned from rounds. A server does so at start-up."""

    @abstractmethod
    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftResult:
        """Trees to verify below `roots` [B], no deeper than the batch's `max_depth`."""

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]]) -> DraftState | None:
        """The drafter's state for the rows and texts of a new batch; None without a drafter."""
        return self.drafter.open(cache, texts) if self.drafter is not None else None

    def read(self, batch: Batch, row: int, verified: VerifyOutput, following: list[int]) -> None:
        """Learn from a prefilled chunk of a row's prompt. following: the tokens after each of its tokens."""
        if self.retrievers:
            start = batch.cache.lengths[row] - verified.tokens.shape[1]
            sequence = batch.sequences[row]
            preceding = sequence.ids[max(start - 2, 0) : start]
            self.learn_top_k(TargetTopK.of_chunk(verified, preceding, self.salt_of(sequence)))
        if self.drafter is not None:
            self.drafter.read(batch.draft, row, verified, following)

    def learn(self, batch: Batch, tree: DraftTree, verified: VerifyOutput, accepted: Accepted, seconds: float) -> None:
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

    def learn_accepted(self, tree: DraftTree, accepted: Accepted, seconds: float) -> None:  # noqa: B027 - optional
        """Learn which of the round's candidates were accepted."""

    def finish(self, history: History) -> None:
        """Learn from a finished text."""
        self.num_texts += 1
        for retriever in self.retrievers:
            retriever.finish(history)

    def state(self) -> dict[str, Tensor]:
        """A copy of everything learned, by name; empty for a policy that learns nothing."""
        return {key: value for retriever in self.retrievers for key, value in retriever.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore everything learned from `state`, made on any device; missing parts start anew."""
        for retriever in self.retrievers:
            retriever.restore(state)

    def costs(self) -> dict[str, Tensor]:
        """Measured costs, by name; empty for a policy that needs none."""
        return {}

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:  # noqa: B027 - optional
        """Restore costs from `costs`, made on this machine, so that they need not be measured again."""

    def coming_draws(self, batch: Batch) -> ComingDraws | None:
        """What the round's tree may use of the rows' coming draws; None: nothing."""
        draws = batch.chooser.coming_draws() if self.knows_draws and batch.chooser is not None else None
        is_known = draws is not None and (self.drafter is None or self.drafter.knows(draws))
        return draws if is_known else None

    def new_candidates(self, batch: Batch, roots: Tensor) -> Candidates:
        """Candidates with only the batch's roots."""
        ids = [sequence.ids for sequence in batch.sequences]
        return Candidates(roots, ids, self._salts(batch), self.coming_draws(batch))

    def _salts(self, batch: Batch) -> list[int]:
        """By row, the salt of its table entries."""
        return [self.salt_of(sequence) for sequence in batch.sequences]

    def salt_of(self, history: History) -> int:
        return salt_of(history, self.isolated)

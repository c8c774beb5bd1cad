"""The policy contract: grow the round's tree before the target sees it, learn from the round after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from graft.accept import Accepted
from graft.batch import Batch
from graft.draft.base import Drafter, DraftState
from graft.stats import Clock
from graft.target import TargetRunner, Verified
from graft.tree import DraftTree

MAX_BUDGET = 127  # nodes a round may verify beside the root


@dataclass(frozen=True)
class Grown:
    """What a policy made of a round: the trees to verify, and how many draft passes each row took."""

    tree: DraftTree
    passes: list[int]

    @classmethod
    def without_drafts(cls, tree: DraftTree) -> Grown:
        return cls(tree, [0] * tree.tokens.shape[0])


class Policy(ABC):
    """Decides what a round verifies. It never decides what is accepted."""

    sources: tuple[str, ...] = ("root",)  # names by source number

    @abstractmethod
    def __init__(self, target: TargetRunner, drafter: Drafter | None, budget: int | None) -> None: ...

    def prepare(self) -> None:  # noqa: B027 - optional, as are read and learn
        """Measures what it needs to know of the machine. Called before every run; does its work once."""

    @abstractmethod
    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> Grown:
        """The trees to verify under `roots` [B], no deeper than the batch's `max_depth`."""

    def open(self, num_rows: int, num_slots: int) -> DraftState | None:
        """What a drafter keeps for a new batch, if there is one."""
        return None

    def read(self, batch: Batch, row: int, verified: Verified, following: list[int]) -> None:  # noqa: B027
        """Learns from a judged chunk of a row's prompt; `following` are the tokens that come after each of it."""

    def learn(  # noqa: B027
        self, batch: Batch, tree: DraftTree, verified: Verified, accepted: Accepted, seconds: float
    ) -> None:
        """Learns from a finished round, whose verify took `seconds`."""

    def state(self) -> dict[str, Tensor]:
        """A copy of all that was learned, by name; empty for a policy that learns nothing."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Takes on what `state` once gave, on any device; what is missing there starts as new."""

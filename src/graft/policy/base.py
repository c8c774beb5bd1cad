"""The policy contract: grow the round's tree before the target sees it, learn from the round after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from graft.accept import Accepted
from graft.retrieve.base import History
from graft.stats import Clock
from graft.target import TargetRunner, Verified
from graft.tree import DraftTree

MAX_BUDGET = 127  # nodes a round may verify beside the root


class Policy(ABC):
    """Decides what a round verifies. It never decides what is accepted."""

    sources: tuple[str, ...] = ("root",)  # names by source number

    @abstractmethod
    def __init__(self, target: TargetRunner, budget: int | None) -> None: ...

    def prepare(self) -> None:  # noqa: B027 - optional, as are read and learn
        """Measures what it needs to know of the machine. Called before every run; does its work once."""

    @abstractmethod
    def grow(self, histories: Sequence[History], roots: Tensor, max_depth: int, clock: Clock) -> DraftTree:
        """The trees to verify under `roots` [B], no deeper than `max_depth`."""

    def read(self, verified: Verified) -> None:  # noqa: B027
        """Learns from a judged chunk of prompt."""

    def learn(self, tree: DraftTree, verified: Verified, accepted: Accepted, seconds: float) -> None:  # noqa: B027
        """Learns from a finished round, whose verify took `seconds`."""

"""The retriever contract: propose a tree, then learn from what the target said. A new retriever is a new file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from graft.target import Verified
from graft.tree import DraftTree


class History(Protocol):
    """A sequence as retrievers see it: its tokens so far, the root last. Hashable, and gone when it is done."""

    ids: list[int]

    def __hash__(self) -> int: ...


class Retriever(Protocol):
    """A source of nodes."""

    name: str
    prior: Tensor  # [buckets] P(accepted | parent accepted) of each evidence bucket before any is observed

    def propose(self, histories: Sequence[History], roots: Tensor, max_depth: int) -> DraftTree:
        """Trees under `roots` [B], at most `max_depth` deep, with `evidence` set; the policy adds probabilities."""
        ...

    def learn(self, verified: Verified) -> None:
        """Takes in the target's judgement of a prompt chunk or of a verified tree, accepted or not."""
        ...

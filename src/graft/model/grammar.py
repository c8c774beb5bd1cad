"""Grammar constraints: which tokens may come next.

The masks of all nodes of a tree are computed before its walk, so constrained answers also equal those of plain
decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

NOTHING_LEFT = "the request's other settings forbid every token that it allows here"


class Constraint(Protocol):
    """A grammar's state after the tokens taken so far. Methods never raise: a failed constraint has an `error`."""

    error: str | None

    def mask(self, scores: Tensor) -> Tensor:
        """Set the scores [V] of forbidden tokens to minus infinity."""
        ...

    def take(self, token: int) -> None:
        """Advance by one token of the answer."""
        ...

    @staticmethod
    def masks(trees: Sequence[GrammarTree], out: np.ndarray) -> list[TreeMasks]:
        """Write which tokens are allowed after the nodes of all these trees, as bits of out [N, words] int32.

        No grammar's state changes.
        """
        ...

    def fail(self, reason: str) -> None:
        """Set the error."""
        ...


class GrammarTree(NamedTuple):
    """A tree of a row with a grammar. Node 0 is the root, which is taken already; a node comes after its parent."""

    constraint: Any
    tokens: Sequence[int]
    parents: Sequence[int]


class TreeMasks(NamedTuple):
    """The masks of a tree. After a node that is forbidden all tokens are allowed, since no walk gets there."""

    numbers: list[int]  # the mask of each node; -1: all tokens are allowed
    failures: dict[int, str]  # by node, why the grammar fails there


def depth_first(parents: Sequence[int]) -> Iterator[int]:
    """The nodes of a tree, each followed by all nodes below it."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(len(parents) - 1, 0, -1):
        children[parents[node]].append(node)
    waiting = [0]
    while waiting:
        waiting += children[node := waiting.pop()]
        yield node


def advance(constraint: Constraint, tokens: Sequence[int], nodes: Sequence[int], failures: Mapping[int, str]) -> None:
    """Take a round's tokens, each chosen after one of these nodes. failures: those of `masks`."""
    for token, node in zip(tokens, nodes, strict=True):
        if node in failures:
            constraint.fail(failures[node])
        constraint.take(token)

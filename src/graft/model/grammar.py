"""Grammar constraints: which tokens may come next, and how trees lose the nodes that a grammar forbids.

The acceptance walk asks the constraint at every node, so constrained answers also equal those of plain decoding. In a
device round the masks of all nodes are computed before the walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from graft.tree.tree import PADDING, ROOT, DraftTree

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

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, in sequence, the grammar allows next. The state does not change."""
        ...

    def masks(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> dict[int, str]:
        """Write which tokens are allowed after each node of a tree, as bits of out [N, words] int32.

        Node 0 is the root, which is taken already; a node comes after its parent. After a node that is forbidden all
        tokens are allowed, since no walk gets there. Returns the reason by node where the grammar fails. The state does
        not change.
        """
        ...

    def fail(self, reason: str) -> None:
        """Set the error."""
        ...


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


def pruned(tree: DraftTree, constraints: Sequence[Constraint | None], speculating: Sequence[bool]) -> DraftTree:
    """Remove all nodes of rows that do not speculate, and the nodes that rows' constraints forbid.

    Trailing padding is trimmed.
    """
    if tree.width == 1 or (all(speculating) and not any(constraints)):
        return tree
    keep = tree.valid.clone()
    for row, (constraint, speculates) in enumerate(zip(constraints, speculating, strict=True)):
        if not speculates:
            keep[row, 1:] = False
        elif constraint is not None:
            keep[row] = _allowed(tree, row, constraint)
    order = (~keep).int().argsort(dim=1, stable=True)  # stable, so that parents stay before their children
    place = order.argsort(dim=1)
    parents = place.gather(1, tree.parents.gather(1, order))
    kept = keep.gather(1, order)
    columns = (tree.tokens, tree.probabilities, tree.score_bucket)
    tokens, probabilities, score_bucket = (column.gather(1, order) for column in columns)
    sources = tree.sources.gather(1, order).masked_fill(~kept, PADDING)
    return DraftTree(
        tree.max_depth, tokens, parents.masked_fill(~kept, ROOT), probabilities, sources, score_bucket
    ).trimmed()


def _allowed(tree: DraftTree, row: int, constraint: Constraint) -> Tensor:
    """[N] which of a row's nodes, the root included, its constraint allows."""
    tokens, parents, valid = (values[row].tolist() for values in (tree.tokens, tree.parents, tree.valid))
    allowed = [True] + [False] * (tree.width - 1)
    seen = set[int]()
    for leaf in range(tree.width - 1, 0, -1):  # nodes come after their parents, so a path's last node comes first here
        if leaf in seen or not valid[leaf]:
            continue
        path = [leaf]
        while parents[path[0]]:
            path.insert(0, parents[path[0]])
        seen.update(path)
        for node in path[: constraint.num_allowed([tokens[node] for node in path])]:
            allowed[node] = True
    return torch.tensor(allowed, device=tree.tokens.device)

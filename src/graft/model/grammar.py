"""Grammar constraints: which tokens an answer may go on with, and trees without the nodes that are forbidden.

A constraint is asked at every node of the acceptance walk, so a constrained answer too is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from graft.tree.tree import PADDING, ROOT, DraftTree


class Constraint(Protocol):
    """A grammar's state after the tokens taken so far. It never raises: where it cannot go on, it has an `error`."""

    error: str | None

    def mask(self, scores: Tensor) -> Tensor:
        """Scores [V] with those of forbidden tokens at minus infinity."""
        ...

    def take(self, token: int) -> None:
        """Moves on by a token of the answer."""
        ...

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, one after the other, the grammar allows next. Nothing is taken."""
        ...


def pruned(tree: DraftTree, constraints: Sequence[Constraint | None], speculating: Sequence[bool]) -> DraftTree:
    """The tree without nodes in rows that do not speculate, and without those that rows' constraints forbid.

    It is narrower where that leaves only padding.
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
    """[N] which of a row's nodes its constraint allows, the root among them."""
    tokens, parents, valid = (values[row].tolist() for values in (tree.tokens, tree.parents, tree.valid))
    allowed = [True] + [False] * (tree.width - 1)
    seen = set[int]()
    for leaf in range(tree.width - 1, 0, -1):  # a node stands after its parent, so a path's deepest node comes first
        if leaf in seen or not valid[leaf]:
            continue
        path = [leaf]
        while parents[path[0]]:
            path.insert(0, parents[path[0]])
        seen.update(path)
        for node in path[: constraint.num_allowed([tokens[node] for node in path])]:
            allowed[node] = True
    return torch.tensor(allowed, device=tree.tokens.device)

"""Acceptance: the walk down a verified tree, the same rule for greedy and sampled decoding.

At each node the next token is chosen from the target's own distribution there. If the tree has it as a child, the walk
continues there; otherwise that token is the round's last. The tree never changes what is chosen, so the text is that of
plain decoding (a tree of one node).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from graft.tree.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from graft.model.sampler import Chooser
    from graft.model.verified import VerifyOutput


@dataclass(frozen=True)
class Accepted:
    """The accepted path of every row, and its new tokens."""

    nodes: list[list[int]]  # accepted tree nodes on the path, without the root
    tokens: list[list[int]]  # the new tokens: those of the accepted nodes, then the target's own

    def __len__(self) -> int:
        return len(self.tokens)


def walk_step(
    columns: np.ndarray,  # [2 or more, T] tokens and parents (places in the row) of a flat step
    starts: Sequence[int],
    sizes: Sequence[int],
    logits: Tensor,  # [T, V] after each token of the step
    chooser: Chooser,
    is_open: Sequence[bool],
    most: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """The accepted path of every row that is open: its at most `most` new tokens, and the places of its nodes."""
    children = [
        {(parent, token): place for place, (token, parent) in reversed([*enumerate(below, start=1)])}
        for below in (
            zip(*columns[:2, start + 1 : start + size].tolist(), strict=True)
            for start, size in zip(starts, sizes, strict=True)
        )
    ]
    tokens: list[list[int]] = [[] for _ in starts]
    nodes: list[list[int]] = [[] for _ in starts]
    walking, at = list(is_open), list(starts)
    while any(walking):
        chosen = chooser.choose(logits[at], walking).tolist()
        for row in (row for row, walks in enumerate(walking) if walks):
            tokens[row].append(chosen[row])
            child = children[row].get((at[row] - starts[row], chosen[row]))
            if child is None or len(tokens[row]) == most:
                walking[row] = False
            else:
                nodes[row].append(child)
                at[row] = starts[row] + child
    return tokens, nodes


def walk(tree: DraftTree, verified: VerifyOutput, chooser: Chooser) -> Accepted:
    """The accepted path of every row: from the root down to the first chosen token that the tree does not hold."""
    logits, index = verified.logits, verified.index.tolist()
    num_rows, children = len(tree.tokens), _children(tree)
    accepted = Accepted([[] for _ in range(num_rows)], [[] for _ in range(num_rows)])
    node, walking = [0] * num_rows, [True] * num_rows
    while any(walking):
        places = [own[at] for own, at in zip(index, node, strict=True)]
        tokens = chooser.choose(logits[places], walking).tolist()
        for row in (row for row in range(num_rows) if walking[row]):
            accepted.tokens[row].append(tokens[row])
            child = children[row].get((node[row], tokens[row]))
            if child is None:
                walking[row] = False
            else:
                accepted.nodes[row].append(child)
                node[row] = child
    return accepted


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """By row: {(parent, token): node}; the first of equal children."""
    columns = (tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist())
    return [
        {(parents[node], tokens[node]): node for node in range(tree.width - 1, 0, -1) if sources[node] > ROOT}
        for tokens, parents, sources in zip(*columns, strict=True)
    ]

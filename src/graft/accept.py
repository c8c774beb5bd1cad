"""Acceptance: the walk down a verified tree, the same rule for greedy and sampled decoding.

At each node the token is chosen from the target's own distribution there; if the tree has it as a child the
walk goes on, otherwise that token is the round's last. Which tokens the tree holds never changes what is
chosen, so the text is that of plain decoding (a tree of one node).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from graft.tree import ROOT, DraftTree


class Chooser(Protocol):
    """Chooses each row's next token and remembers it as part of that row's history."""

    def choose(self, logits: Tensor, walking: Tensor) -> Tensor:
        """Next tokens [B] from logits [B, V]; only rows that are `walking` [B] move on by one token."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these rows alone, in this order."""
        ...

    def join(self, other: Any) -> None:
        """Takes in the rows of another chooser of its kind, behind its own."""
        ...


@dataclass(frozen=True)
class Accepted:
    """What a round decided, one list per row."""

    nodes: list[list[int]]  # accepted tree nodes on the path, without the root
    tokens: list[list[int]]  # the new tokens: those of the accepted nodes, then the target's own

    def __len__(self) -> int:
        return len(self.tokens)


def walk(tree: DraftTree, logits: Tensor, chooser: Chooser) -> Accepted:
    """Walks every row's tree from the root to the first token that the tree does not hold. logits [B, N, V]."""
    rows = torch.arange(tree.tokens.shape[0], device=logits.device)
    node = torch.zeros_like(rows)
    walking = torch.ones_like(rows, dtype=torch.bool)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []  # (walking, token, node) at each depth
    while bool(walking.any()):
        token = chooser.choose(logits[rows, node], walking)
        steps.append((walking, token, node))
        is_child = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & (tree.sources > ROOT)
        walking = walking & is_child.any(dim=1)
        node = torch.where(walking, is_child.int().argmax(dim=1), node)

    was_walking, tokens, nodes = (torch.stack(column).T.tolist() for column in zip(*steps, strict=True))
    return Accepted(
        nodes=[[n for w, n in zip(ws, ns, strict=True) if w and n] for ws, ns in zip(was_walking, nodes, strict=True)],
        tokens=[[t for w, t in zip(ws, ts, strict=True) if w] for ws, ts in zip(was_walking, tokens, strict=True)],
    )

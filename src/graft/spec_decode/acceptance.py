"""Acceptance: the walk down a verified tree, the same rule for greedy and sampled decoding.

At each node the token is chosen from the target's own distribution there; if the tree has it as a child the
walk goes on, otherwise that token is the round's last. Which tokens the tree holds never changes what is
chosen, so the text is that of plain decoding (a tree of one node).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from graft.model import VerifyOutput
from graft.spec_decode.native import native, plain
from graft.spec_decode.tree import ROOT, DraftTree


class Chooser(Protocol):
    """Chooses each row's next token and remembers it as part of that row's history."""

    def choose(self, logits: Tensor, walking: Sequence[bool]) -> Tensor:
        """Next tokens [B] from logits [B, V]; only rows that are `walking` move on by one token."""
        ...

    def choose_everywhere(self, tree: DraftTree, logits: Tensor, best: Tensor) -> tuple[Tensor, list[bool]] | None:
        """The token [B, N] after every node, were it reached, and for which rows that is so: in others it depends on
        how a node is reached. None if it does in all.

        best: the token of the highest logit of [B, N, V]. All on the logits' device, without waiting for it. Nothing
        moves on.
        """
        ...

    def move_on(self, counts: Sequence[int]) -> None:
        """Each row moves on by so many of the tokens that were chosen everywhere."""
        ...

    def keeping(self, rows: Sequence[int]) -> Self:
        """For these rows alone, in this order; see `TreeCache.keeping`."""
        ...

    def joining(self, other: Any) -> Self:
        """With the rows of another chooser of its kind behind its own, which itself stays as it was."""
        ...


@dataclass(frozen=True)
class Accepted:
    """What a round decided, one list per row."""

    nodes: list[list[int]]  # accepted tree nodes on the path, without the root
    tokens: list[list[int]]  # the new tokens: those of the accepted nodes, then the target's own

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Choices:
    """The token [B, N] that is chosen after each node, were it reached; of rows that have been walked, after each node
    that was."""

    there: Tensor  # on the device
    here: Tensor  # int64 on the host, once the step is judged
    walked: list[bool]  # rows that have moved on already


def choose_ahead(tree: DraftTree, verified: VerifyOutput, chooser: Chooser) -> Choices | None:
    """Chooses after all nodes of a captured step at once, in rows where that can be done, and waits for nothing.

    In the others each choice of their walk waits for the device. They are walked here, so that what follows can begin
    for all rows before the host knows of the rest.
    """
    step = verified.step
    if step is None:
        return None
    num_rows, width = tree.tokens.shape
    found = chooser.choose_everywhere(tree, verified.logits, step.best[:num_rows, :width])
    if found is None:
        return None
    there, is_known = found
    walked = [not known for known in is_known]
    if any(walked):
        there = _with_walked(there, _walk_rows(tree, verified.logits, chooser, walked), walked)
    here = step.chosen[: num_rows * width].view(num_rows, width)
    here.copy_(there.contiguous(), non_blocking=True)
    step.judged.record()
    return Choices(there, here, walked)


def _with_walked(there: Tensor, accepted: Accepted, walked: Sequence[bool]) -> Tensor:
    """The choices [B, N] with those of rows that have been walked in place."""
    rows = [row for row, was in enumerate(walked) if was]
    tokens = torch.zeros(len(rows), there.shape[1], dtype=there.dtype)
    for place, row in enumerate(rows):
        tokens[place, [0, *accepted.nodes[row]]] = torch.tensor(accepted.tokens[row], dtype=there.dtype)
    there = there.clone()
    there[rows] = tokens.to(there.device)
    return there


def walk(tree: DraftTree, verified: VerifyOutput, chooser: Chooser, choices: Choices | None = None) -> Accepted:
    """Walks every row's tree from the root to the first token that the tree does not hold."""
    if choices is None:
        return _walk_rows(tree, verified.logits, chooser, [True] * len(tree.tokens))
    accepted = paths(tree, choices.here)
    chooser.move_on([0 if was else len(tokens) for tokens, was in zip(accepted.tokens, choices.walked, strict=True)])
    return accepted


def _walk_rows(tree: DraftTree, logits: Tensor, chooser: Chooser, rows_to_walk: Sequence[bool]) -> Accepted:
    """The walk of some rows, choice by choice; others are left empty."""
    num_rows, children = len(tree.tokens), _children(tree)
    accepted = Accepted([[] for _ in range(num_rows)], [[] for _ in range(num_rows)])
    node, walking = [0] * num_rows, list(rows_to_walk)
    while any(walking):
        rows = torch.arange(num_rows, device=logits.device)
        tokens = chooser.choose(logits[rows, torch.tensor(node, device=logits.device)], walking).tolist()
        for row in (row for row in range(num_rows) if walking[row]):
            accepted.tokens[row].append(tokens[row])
            child = children[row].get((node[row], tokens[row]))
            if child is None:
                walking[row] = False
            else:
                accepted.nodes[row].append(child)
                node[row] = child
    return accepted


def paths(tree: DraftTree, chosen: Tensor) -> Accepted:
    """The walk when the token after every node is known, [B, N]."""
    library: Any = native()
    num_rows, width = tree.tokens.shape
    columns = [plain(column) for column in (tree.tokens, tree.parents, tree.sources, chosen)]
    found = array("q", bytes(8 * (2 * width + 1) * num_rows))  # nodes, tokens, and how many tokens by row
    start = found.buffer_info()[0]
    starts = (start + 8 * width * num_rows * part for part in range(3))
    library.graft_walk(num_rows, width, *(column.data_ptr() for column in columns), *starts)
    numbers = found.tolist()
    nodes, tokens = [], []
    for first, count in zip(range(0, num_rows * width, width), numbers[-num_rows:], strict=True):
        nodes.append(numbers[first : first + count - 1])
        first += num_rows * width
        tokens.append(numbers[first : first + count])
    return Accepted(nodes, tokens)


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """By row: the node of a token below a parent, of equal ones the first."""
    columns = (tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist())
    return [
        {(parents[node], tokens[node]): node for node in range(tree.width - 1, 0, -1) if sources[node] > ROOT}
        for tokens, parents, sources in zip(*columns, strict=True)
    ]

"""Acceptance: the walk down a verified tree, the same rule for greedy and sampled decoding.

At each node the next token is chosen from the target's own distribution there. If the tree has it as a child, the walk
continues there; otherwise that token is the round's last. The tree never changes what is chosen, so the text is that of
plain decoding (a tree of one node).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graft.tree.native import native, plain
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


@dataclass(frozen=True)
class Choices:
    """The token chosen after each node, in case the walk reaches it; in rows already walked, on their paths only."""

    there: Tensor  # [T] after each of the step's tokens, on the device
    flat: Tensor  # [T] int64 the same on the host, valid after the event `Step.ready`
    index: Tensor  # [B, N] each node's place among the step's tokens
    walked: list[bool]  # rows whose walk is over, so that their chooser has advanced

    @property
    def here(self) -> Tensor:
        """[B, N] int64 on the host."""
        return self.flat.index_select(0, self.index.flatten()).view_as(self.index)


def choose_ahead(tree: DraftTree, verified: VerifyOutput, chooser: Chooser) -> Choices | None:
    """Choose the token after every node of a captured step at once, on the device; None where no row can.

    Rows whose choices depend on earlier tokens of the path are walked here, choice by choice, and wait for the device.
    So the next round's drafting can begin for all rows before the host has walked the others.
    """
    step = verified.step
    if step is None:
        return None
    num_tokens = sum(verified.counts)  # trees come first
    found = chooser.choose_everywhere(verified.logits[:num_tokens], step)
    if found is None:
        return None
    there, is_known = found
    walked = [not known for known in is_known]
    if any(walked):
        there = _with_walked(there, _walk_rows(tree, verified, chooser, walked), walked, verified.index)
    flat = step.chosen[:num_tokens]
    flat.copy_(there, non_blocking=True)
    step.ready.record()
    return Choices(there, flat, verified.index, walked)


def _with_walked(there: Tensor, accepted: Accepted, walked: Sequence[bool], index: Tensor) -> Tensor:
    """The choices [T], with the tokens of walked rows at the nodes of their paths."""
    places, tokens = [], []
    for row in (row for row, was in enumerate(walked) if was):
        places += index[row, [0, *accepted.nodes[row]]].tolist()
        tokens += accepted.tokens[row]
    there = there.clone()
    there[torch.tensor(places, device=there.device)] = torch.tensor(tokens, dtype=there.dtype, device=there.device)
    return there


def walk(tree: DraftTree, verified: VerifyOutput, chooser: Chooser, choices: Choices | None = None) -> Accepted:
    """The accepted path of every row: from the root down to the first chosen token that the tree does not hold."""
    if choices is None:
        return _walk_rows(tree, verified, chooser, [True] * len(tree.tokens))
    if tree.width == 1:  # roots alone: each row gets the token after its root
        tokens = choices.flat.tolist()
        accepted = Accepted([[] for _ in tokens], [[token] for token in tokens])
    else:
        accepted = paths(tree, choices.here)
    chooser.advance([0 if was else len(tokens) for tokens, was in zip(accepted.tokens, choices.walked, strict=True)])
    return accepted


def _walk_rows(tree: DraftTree, verified: VerifyOutput, chooser: Chooser, rows_to_walk: Sequence[bool]) -> Accepted:
    """Walk some rows, choice by choice; the lists of the others stay empty."""
    logits, index = verified.logits, verified.index
    num_rows, children = len(tree.tokens), _children(tree)
    accepted = Accepted([[] for _ in range(num_rows)], [[] for _ in range(num_rows)])
    node, walking = [0] * num_rows, list(rows_to_walk)
    while any(walking):
        places = index[torch.arange(num_rows), torch.tensor(node)].to(logits.device)
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


def paths(tree: DraftTree, chosen: Tensor) -> Accepted:
    """Walk all rows when the token after every node is known: chosen [B, N] on the host."""
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
    """By row: {(parent, token): node}; the first of equal children."""
    columns = (tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist())
    return [
        {(parents[node], tokens[node]): node for node in range(tree.width - 1, 0, -1) if sources[node] > ROOT}
        for tokens, parents, sources in zip(*columns, strict=True)
    ]

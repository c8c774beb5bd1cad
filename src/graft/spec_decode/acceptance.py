"""Acceptance: the walk down a verified tree, the same rule for greedy and sampled decoding.

At each node the next token is chosen from the target's own distribution there. If the tree has it as a child, the walk
continues there; otherwise that token is the round's last. The tree never changes what is chosen, so the text is that of
plain decoding (a tree of one node).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from graft.model.sampler import Chooser


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

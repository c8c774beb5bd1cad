"""Proposals put together on the host, row by row: where in the pool to look up, and how to hang what is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from graft.pool import Pool
from graft.retrieve.base import Weigh


class Place(NamedTuple):
    """A node of the pool, and how it is reached."""

    node: int
    depth: int
    path: list[int]  # the tokens from the root down to it, without the root's


def likeliest_places(pool: Pool, count: int, max_depth: int) -> list[list[Place]]:
    """By row: the root, as long as nothing was drafted, whatever others retrieved; from then on up to `count` nodes
    below it, those likeliest to be reached that may still have children."""
    nodes = pool.nodes
    count = min(count, pool.width - 1)
    if count == 0 or not nodes.needs.any():
        return [[Place(0, 0, [])] for _ in range(len(nodes.tokens))]
    best = nodes.paths[:, 1:].topk(count, dim=1).indices + 1
    columns = (best, nodes.tokens, nodes.parents, nodes.depths, nodes.paths)
    found = []
    for chosen, tokens, parents, depths, paths in zip(*(column.tolist() for column in columns), strict=True):
        places = []
        for node in (node for node in chosen if paths[node] > 0 and depths[node] < max_depth):
            path, at = [], node
            while at:
                path.append(tokens[at])
                at = parents[at]
            places.append(Place(node, depths[node], path[::-1]))
        found.append(places)
    return found


class Row:
    """One row's new nodes. They are numbered on from the pool's, so that they can hang below it or below each other."""

    def __init__(self, pool: Pool) -> None:
        self._first = pool.width
        self._columns: tuple[list[int], ...] = ([], [], [], [], [])
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, parent: int, token: int, depth: int, source: int, evidence: int) -> int:
        """The node for `token` below `parent`; one that is there already keeps its evidence."""
        node = self._children.setdefault((parent, token), self._first + len(self))
        if node == self._first + len(self):
            for column, value in zip(self._columns, (token, parent, depth, source, evidence), strict=True):
                column.append(value)
        return node

    def columns(self, width: int) -> list[list[int]]:
        """Tokens, parents, depths, sources, evidence and which of them are nodes, filled up to `width`."""
        fill = [0] * (width - len(self))
        return [column + fill for column in (*self._columns, [1] * len(self))]


def add_rows(pool: Pool, rows: Sequence[Row], first: int, weigh: Weigh) -> None:
    """Adds all rows' nodes to the pool."""
    width = max(map(len, rows))
    if width == 0:
        return
    # One array and one transfer: from nested lists, torch takes ten times as long as numpy.
    columns = np.array([row.columns(width) for row in rows])  # [B, 6, n]
    tokens, parents, depths, sources, evidence, is_node = (
        torch.from_numpy(columns).to(pool.nodes.tokens.device).unbind(dim=1)
    )
    pool.add_chains(tokens, parents, depths, weigh(sources, evidence) * is_node, sources + first, evidence)

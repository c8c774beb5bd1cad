"""Subtrees: proposals made in Python, row by row, to be attached below candidate nodes."""

from __future__ import annotations

from graft.tree.candidates import Candidates, Columns, Place


class Subtree:
    """A small tree to attach below a node: its own nodes are numbered from 1, and 0 is that node."""

    def __init__(self) -> None:
        self.columns = Columns([], [], [], [], [])
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def add(self, parent: int, token: int, depth: int, source: int, score_bucket: int) -> int:
        """The number of the node for `token` below `parent`; one that exists already keeps its score bucket."""
        new = len(self._nodes) + 1
        node = self._nodes.setdefault((parent, token), new)
        if node == new:
            for column, value in zip(self.columns, (token, parent, depth, source, score_bucket), strict=True):
                column.append(value)
        return node


class Row:
    """One row's new nodes, numbered on from its candidates."""

    def __init__(self, candidates: Candidates, first: int) -> None:
        """first: the number of the proposer's source 0."""
        self._first_node, self._first_source = candidates.width, first
        self.columns = Columns([], [], [], [], [])

    def attach(self, place: Place, subtree: Columns) -> None:
        """Adds a subtree's nodes below a candidate node."""
        own, before = self.columns, self._first_node + len(self.columns.tokens) - 1
        own.tokens.extend(subtree.tokens)
        own.parents.extend([before + parent if parent else place.node for parent in subtree.parents])
        own.depths.extend([place.depth + depth for depth in subtree.depths])
        own.sources.extend([self._first_source + source for source in subtree.sources])
        own.score_bucket.extend(subtree.score_bucket)

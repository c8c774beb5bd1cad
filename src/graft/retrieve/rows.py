"""Proposals put together on the host: twigs, hung at places of the pool row by row."""

from __future__ import annotations

from graft.pool import Columns, Place, Pool


class Twig:
    """A small tree to hang at a place: its nodes are numbered from 1, and 0 is the place."""

    def __init__(self) -> None:
        self.columns = Columns([], [], [], [], [])
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def add(self, parent: int, token: int, depth: int, source: int, evidence: int) -> int:
        """The node for `token` below `parent`; one that is there already keeps its evidence."""
        new = len(self._nodes) + 1
        node = self._nodes.setdefault((parent, token), new)
        if node == new:
            for column, value in zip(self.columns, (token, parent, depth, source, evidence), strict=True):
                column.append(value)
        return node


class Row:
    """One row's new nodes, numbered on from the pool's."""

    def __init__(self, pool: Pool, first: int) -> None:
        """first: the number of the proposer's source 0."""
        self._first_node, self._first_source = pool.width, first
        self.columns = Columns([], [], [], [], [])

    def hang(self, place: Place, twig: Columns) -> None:
        """Adds a twig's nodes below a place."""
        own, before = self.columns, self._first_node + len(self.columns.tokens) - 1
        own.tokens.extend(twig.tokens)
        own.parents.extend([before + parent if parent else place.node for parent in twig.parents])
        own.depths.extend([place.depth + depth for depth in twig.depths])
        own.sources.extend([self._first_source + source for source in twig.sources])
        own.evidence.extend(twig.evidence)

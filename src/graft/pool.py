"""Pool: everything that was proposed for a round, in one currency, while the round's tree is put together.

A node carries what its path amounts to (probability, key, last tokens), worked out from its parent when it is
added: nothing is folded over the tree afterwards. Equal paths, whoever proposed them, have equal keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from graft.buckets import NUM_BUCKETS, probability_bucket
from graft.hashing import mix64
from graft.tree import PADDING, ROOT, DraftTree

if TYPE_CHECKING:
    from graft.draft.base import Level
    from graft.retrieve.table import SuccessorTables

NOBODY = -1  # no source
ALONE, OPPOSED, AGREED = range(3)  # how a node stands among the proposals (see `Pool.merge`)
NO_TOKEN = -1  # stands where a text has no earlier token
# A path's key is the sum of its tokens, each times an odd number of its depth: equal keys of different paths are as
# rare as equal random numbers.
DEPTH_FACTORS = mix64(torch.arange(4096)) | 1  # more depths than any tree has
_SURE = 0.999  # a node is always a little less likely than its parent, so it never ranks before it
_LEAST = 1e-30  # less likely paths count as 0: near the least float, rounding could make a node its parent's equal
_INHERITED = 5  # the first fields below are what a node's own follow from, one gather for all


class Nodes(NamedTuple):
    """B rows of N nodes, each field [B, N]. The first is the root; a node stands after its parent."""

    tokens: Tensor
    before: Tensor  # the token before the node's
    depths: Tensor
    keys: Tensor  # names the path from the root
    needs: Tensor  # draft passes without which the node would not be here
    parents: Tensor
    earlier: Tensor  # the token before `before`
    sources: Tensor
    evidence: Tensor
    paths: Tensor  # P(the target accepts the node); 0 is padding


class Place(NamedTuple):
    """A node of the pool, and how it is reached."""

    node: int
    depth: int
    path: list[int]  # the tokens from the root down to it, without the root's


class Columns(NamedTuple):
    """Nodes of one row, put together on the host, a list a field."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    sources: list[int]
    evidence: list[int]


class Pool:
    """Proposals for `roots` [B], with the two tokens before each; as tensor operations.

    `chances` are P(accepted | parent) as `Calibration` has them, by standing, source and evidence.
    """

    def __init__(self, roots: Tensor, before: Tensor, earlier: Tensor, salts: Tensor | None = None) -> None:
        """salts [B]: whose tables each row uses, if not everybody's (see `Judged`)."""
        zeros = torch.zeros_like(roots)
        fields = (roots, before, zeros, zeros, zeros, zeros, earlier, zeros + ROOT, zeros)
        self._fields = torch.stack(fields)[:, :, None]  # [fields, B, N], all but the paths
        self._paths = torch.ones_like(roots, dtype=torch.float32)[:, None]  # [B, N]
        self.salts = zeros if salts is None else salts
        self._standing = zeros[:, None]
        self._factors = DEPTH_FACTORS
        self._deepest = 0  # no node is deeper

    @property
    def nodes(self) -> Nodes:
        return Nodes._make((*self._fields.unbind(), self._paths))

    @property
    def standing(self) -> Tensor:
        """[B, N] how each node stands among the proposals, once they are merged."""
        return self._standing

    @property
    def width(self) -> int:
        return self._paths.shape[1]

    def add(
        self,
        tokens: Tensor,
        parents: Tensor,
        probabilities: Tensor,
        sources: Tensor,
        evidence: Tensor,
        needs: int | None = None,
    ) -> None:
        """Adds nodes [B, n] under nodes that are there; probability 0 adds padding. needs: their parents' if None."""
        above = self._fields[:_INHERITED].gather(2, parents.expand(_INHERITED, -1, -1))
        before, earlier, depths, keys, inherited = above.unbind()
        depths = depths + 1
        keys = keys + (tokens + 1) * self._factors[depths]
        own_needs = inherited if needs is None else torch.full_like(parents, needs)
        self._append(
            (tokens, before, depths, keys, own_needs, parents, earlier, sources, evidence),
            self._paths.gather(1, parents) * probabilities.clamp(max=_SURE),
        )
        self._deepest += 1

    def add_level(
        self,
        level: Level,
        chances: Tensor,
        source: int,
        needs: int,
        first: int,
        going: Sequence[bool],
        num_beams: int,
    ) -> list[float]:
        """Adds a drafted level, weighed by its probabilities' buckets; it is padding in rows that are not `going`.

        first: places in the pool between the root and the first drafted level. Returns how likely the target is to
        come as far as one of the first `num_beams`, by row.
        """
        evidence = probability_bucket(level.probabilities)
        wanted = torch.tensor(going)[:, None]
        parents = torch.where(level.parents > 0, level.parents + first, 0)
        sources = torch.full_like(evidence, source)
        self.add(level.tokens, parents, chances[ALONE, source][evidence] * wanted, sources, evidence, needs)
        beams = self._paths[:, -level.tokens.shape[1] :][:, :num_beams]
        return beams.sum(dim=1).clamp(max=1.0).tolist()

    def add_rows(self, rows: Sequence[Columns], chances: Tensor) -> None:
        """Adds nodes put together on the host, for each row its own."""
        width = max(len(row.tokens) for row in rows)
        if width == 0:
            return
        # One array and one transfer: from nested lists, torch takes ten times as long as numpy.
        padding = (0, 0, 1, 0, 0, 0)  # a token below the root, of no source
        filled = [
            [
                column + [fill] * (width - len(column))
                for column, fill in zip((*row, [1] * len(row.tokens)), padding, strict=True)
            ]
            for row in rows
        ]
        tokens, parents, depths, sources, evidence, is_node = torch.from_numpy(np.array(filled)).unbind(dim=1)
        deepest = max(max(row.depths, default=0) for row in rows)
        probabilities = chances[ALONE][sources, evidence] * is_node
        self.add_chains(tokens, parents, depths, deepest, probabilities, sources, evidence)

    def add_chains(
        self,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        deepest: int,
        probabilities: Tensor,
        sources: Tensor,
        evidence: Tensor,
    ) -> None:
        """Adds nodes [B, n] that may hang below each other: parents count on from the nodes that are there."""
        old, width = self.nodes, self.width
        jump = torch.cat([torch.arange(width).expand(len(tokens), -1), parents], dim=1)
        paths = torch.cat([torch.ones_like(old.paths), probabilities.clamp(max=_SURE)], dim=1)
        keys = torch.cat([torch.zeros_like(old.keys), (tokens + 1) * self._factors[depths]], dim=1)
        for _ in range(deepest.bit_length()):  # doublings: no chain is longer than it is deep
            paths, keys = paths * paths.gather(1, jump), keys + keys.gather(1, jump)
            jump = jump.gather(1, jump)
        anchors = jump[:, width:]  # the old node that each hangs under
        before = torch.cat([old.tokens, tokens], dim=1).gather(1, parents)
        earlier = torch.cat([old.before, before], dim=1).gather(1, parents)
        keys = keys[:, width:] + old.keys.gather(1, anchors)
        needs = old.needs.gather(1, anchors)
        self._append(
            (tokens, before, depths, keys, needs, parents, earlier, sources, evidence),
            paths[:, width:] * old.paths.gather(1, anchors),
        )
        self._deepest = max(self._deepest, deepest)

    def follow(
        self, tables: SuccessorTables, chances: Tensor, first: int, waves: int, beam: int, max_depth: int
    ) -> None:
        """Adds what the tables know to follow: wave by wave, of the `beam` likeliest nodes not yet looked up.

        Nodes have the number of their table, counted from `first`, as their source.
        """
        done = torch.zeros_like(self._paths, dtype=torch.bool)  # [B, N] looked up already
        for _ in range(min(waves, max_depth)):
            nodes = self.nodes
            open_paths = nodes.paths.masked_fill(done | (nodes.depths >= max_depth), 0.0)
            reached, best = _highest(open_paths, beam)  # [B, F]
            grams = (nodes.tokens.gather(1, best), nodes.before.gather(1, best), nodes.earlier.gather(1, best))
            tokens, numbers, evidence = tables.successors(*grams, self.salts[:, None])  # [B, F, k]
            known = (tokens != NO_TOKEN) & (reached > 0)[:, :, None]  # fewer than the beam may be open
            tokens, sources = tokens.masked_fill(~known, 0), numbers + first
            evidence = evidence.masked_fill(~known, NUM_BUCKETS - 1)
            self.add(
                tokens.flatten(1),
                best[:, :, None].expand_as(tokens).flatten(1),
                (chances[ALONE][sources, evidence] * known).flatten(1),
                sources.flatten(1),
                evidence.flatten(1),
            )
            done = nn.functional.pad(done.scatter(1, best, True), (0, self.width - done.shape[1]))

    def _append(self, fields: tuple[Tensor, ...], paths: Tensor) -> None:
        self._fields = torch.cat([self._fields, torch.stack(fields)], dim=2)
        self._paths = torch.cat([self._paths, paths.masked_fill(paths < _LEAST, 0.0)], dim=1)

    def keep_best(self, counts: Sequence[int]) -> None:
        """Of each row only the root and its `counts[row]` likeliest nodes stay, equal paths counted apart."""
        paths = self.nodes.paths
        rank = paths.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # the root has rank 0
        limit = torch.tensor(counts)[:, None]
        paths.masked_fill_(rank > limit, 0.0)

    def merge(self, drafted: int = NOBODY, chances: Tensor | None = None) -> None:
        """Makes equal paths one node, the likeliest standing for all; the others become padding.

        With `chances`, nodes are weighed again by how they stand: proposed by several, by one where the source
        `drafted` had its say and proposed something else, or by one alone. What retrieval proposes against the drafter
        seldom comes true, whatever its record elsewhere.
        """
        old = self.nodes
        index = torch.arange(self.width).expand_as(old.parents)
        order, starts = self._by_path_key()
        run = (starts * index).cummax(dim=1).values
        kept_of = torch.empty_like(order).scatter_(1, order, order.gather(1, run))  # [B, N] node -> its stand-in
        is_real = old.paths > 0  # copies with no chance are none
        is_node = (kept_of == index) & is_real
        parents = kept_of.gather(1, old.parents)
        needs = _least(torch.where(is_real, old.needs, old.needs.gather(1, kept_of)), kept_of)
        paths = old.paths.masked_fill(~is_node, 0.0)
        standing = torch.zeros_like(parents)
        if chances is not None:
            sources = torch.where(is_real, old.sources, old.sources.gather(1, kept_of))
            agreed = _least(sources, kept_of) != -_least(-sources, kept_of)
            by_drafter = ((old.sources == drafted) & is_real).long()
            spoke = -_least(-by_drafter, parents)  # [B, N] whether the drafter proposed something below a node
            opposed = (spoke.gather(1, parents) > 0) & (old.sources != drafted)
            standing = torch.where(agreed, AGREED, opposed * OPPOSED)
            paths = chances[standing, old.sources, old.evidence].clamp(max=_SURE) * is_node
            paths[:, 0] = 1.0
            jump = parents
            for _ in range(self._deepest.bit_length()):
                paths, jump = paths * paths.gather(1, jump), jump.gather(1, jump)
            paths = paths.masked_fill(paths < _LEAST, 0.0)
        fields = old._replace(parents=parents, needs=needs)
        self._fields, self._paths, self._standing = torch.stack(fields[:-1]), paths, standing

    def best(self, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
        """The root and the `budget` likeliest nodes of a merged pool, likeliest first; and their path probabilities.

        A path's probability falls along it, so the best are closed under ancestors. No node is deeper than
        `max_depth`.
        """
        pool = self.nodes
        paths, chosen = _highest(pool.paths, budget + 1)  # the root has 1, all others less
        places = torch.arange(chosen.shape[1]).expand_as(chosen)
        place = torch.zeros_like(pool.parents).scatter_(1, chosen, places)
        parents = place.gather(1, pool.parents.gather(1, chosen))
        padding = paths <= 0
        tree = DraftTree(
            max_depth=max_depth,
            tokens=pool.tokens.gather(1, chosen),
            parents=parents.masked_fill(padding, 0),
            probabilities=paths / paths.gather(1, parents).clamp(min=_LEAST),
            sources=pool.sources.gather(1, chosen).masked_fill(padding, PADDING),
            evidence=pool.evidence.gather(1, chosen),
        )
        return tree, paths

    def best_gains(self, count: int) -> list[float]:
        """Expected accepted tokens of the 1, 2, 3 ... `count` likeliest nodes of each row, in all rows together."""
        paths = self.nodes.paths[:, 1:].topk(min(count, self.width - 1), dim=1).values
        return paths.double().sum(dim=0).cumsum(dim=0).tolist()

    def places(self, count: int, max_depth: int) -> list[list[Place]]:
        """Where to look up what is likely to come, by row.

        That is the root, as long as nothing was drafted, whatever others retrieved; from then on up to `count` nodes
        below it, those likeliest to be reached that may still have children.
        """
        nodes = self.nodes
        if self.width == 1 or not nodes.needs.any():
            return [[Place(0, 0, [])] for _ in range(len(nodes.tokens))]
        best = _highest(nodes.paths[:, 1:], count)[1] + 1
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

    def values_by_need(self, max_passes: int, budget: int) -> list[list[float]]:
        """By row: expected tokens of a merged pool's `budget` best, had there been 0, 1, 2 ... `max_passes` passes."""
        budget = min(budget, self.width - 1)
        needs = self.nodes.needs
        values = [
            self._paths.masked_fill(needs > passes, 0.0).topk(budget + 1, dim=1).values.sum(dim=1)
            - 1  # the root is sure
            for passes in range(max_passes + 1)
        ]
        return torch.stack(values, dim=1).tolist()

    def _by_path_key(self) -> tuple[Tensor, Tensor]:
        """An order [B, N] with equal paths side by side, the likeliest first, and where such a run starts."""
        by_path = self.nodes.paths.argsort(dim=1, descending=True, stable=True)
        keys, by_key = self.nodes.keys.gather(1, by_path).sort(dim=1, stable=True)
        starts = torch.ones_like(keys, dtype=torch.bool)
        starts[:, 1:] = keys[:, 1:] != keys[:, :-1]
        return by_path.gather(1, by_key), starts

    def judged(self, emitted: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Which proposals were put to the test by the tokens that came, and which of them fitted: both [B, N] bool.

        A proposal is tested when its parent's path came true, whether or not it was verified.
        """
        pool = self.nodes
        longest = max(map(len, emitted))
        truth = torch.tensor([[*t, *[NO_TOKEN] * (longest - len(t))] for t in emitted])
        depths = torch.arange(1, longest + 1).expand_as(truth)
        steps = (truth + 1) * self._factors[depths]
        true_keys = nn.functional.pad(steps.cumsum(dim=1), (1, 0))  # [B, longest + 1]
        is_true = pool.keys[:, :, None] == true_keys[:, None, :]  # [B, N, longest + 1]
        fitted = is_true[:, :, 1:].any(dim=2)
        ended = torch.tensor([len(t) for t in emitted])[:, None]
        goes_on = torch.arange(longest + 1) < ended  # [B, longest + 1]
        followed = (is_true & goes_on[:, None]).any(dim=2)  # came true, and was not the last to come
        return followed.gather(1, pool.parents) & (pool.sources > ROOT) & (pool.paths > 0), fitted

    def count(self, emitted: Sequence[Sequence[int]], tried: Tensor, fitted: Tensor, memory: float) -> None:
        """Adds to the counts [standings, sources, buckets] what was put to the test, and what of it fitted.

        Beyond a `memory` of tests old ones fade.
        """
        judged, fits = self.judged(emitted)
        cell = (self.standing[judged], self.nodes.sources[judged], self.nodes.evidence[judged])
        tried.index_put_(cell, torch.ones_like(cell[0], dtype=torch.float32), accumulate=True)
        fitted.index_put_(cell, fits[judged].float(), accumulate=True)
        fade = (memory / tried).clamp(max=1.0)
        tried *= fade
        fitted *= fade


def _highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest of each row [B, N], best first, and where they stand; of equals the first."""
    ordered, places = values.sort(dim=1, descending=True, stable=True)
    return ordered[:, :count], places[:, :count]


def _least(values: Tensor, places: Tensor) -> Tensor:
    """[B, N] at each place the least of the `values` [B, N] that `places` [B, N] sends there; 0 where there is none."""
    return torch.zeros_like(values).scatter_reduce_(1, places, values, "amin", include_self=False)


def before_roots(histories: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The token before each text's last, and the one before that, both [B]."""
    before, earlier = torch.tensor(last_before_roots(histories)).unbind()
    return before, earlier


def last_before_roots(histories: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """`before_roots` as lists."""
    before, earlier = ([ids[-n] if len(ids) >= n else NO_TOKEN for ids in histories] for n in (2, 3))
    return before, earlier

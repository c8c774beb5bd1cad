"""Candidates: everything that was proposed for a round, in one currency, while the round's tree is put together.

A node carries what its path amounts to (probability, key, last tokens), worked out from its parent when it is
added: nothing is folded over the tree afterwards. Equal paths, whoever proposed them, have equal keys. The pool is in
the host's memory, wherever the models are, and `native.c` does all the work; here is what it does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from ctypes import Array, byref
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.hashing import mix64
from graft.spec_decode.native import ChancesStruct, PoolStruct, ScaleStruct, TableStruct, TemplateStruct, native, plain
from graft.spec_decode.tree import DraftTree

NOBODY = -1  # no source
ALONE, OPPOSED, AGREED = range(3)  # how a node stands among the proposals (see `Candidates.merge`)
NO_TOKEN = -1  # stands where a text has no earlier token
# A path's key is the sum of its tokens, each times an odd number of its depth: equal keys of different paths are as
# rare as equal random numbers.
DEPTH_FACTORS = mix64(torch.arange(4096)) | 1  # more depths than any tree has
_CAPACITY = 1024  # nodes a row has room for at first
_INHERITED = -1  # needs what its parent needs


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
    score_bucket: Tensor
    paths: Tensor  # P(the target accepts the node); 0 is padding


@dataclass(frozen=True)
class Level:
    """The nodes that one draft pass adds, all at one depth. Parents are places in the tree grown so far."""

    tokens: Tensor  # [B, n] target ids
    parents: Tensor  # [B, n]
    probabilities: Tensor  # [B, n] the drafter's q(token | parent)
    path_probabilities: Tensor  # [B, n] their product along the path

    def to_host(self) -> Level:
        return Level(*(getattr(self, field.name).cpu() for field in fields(self)))

    def at(self, index: Tensor) -> Level:
        """Its nodes at `index` [B, m]."""
        return Level(*(getattr(self, field.name).gather(1, index) for field in fields(self)))


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
    score_bucket: list[int]


class _Room:
    """Memory for a pool, and how the kernels find it."""

    def __init__(self, fields: Tensor, paths: Tensor) -> None:
        self.fields, self.paths = fields, paths
        addresses = (fields.data_ptr(), paths.data_ptr(), None, DEPTH_FACTORS.data_ptr())
        self.struct = PoolStruct(*paths.shape, 0, 0, *addresses, DEPTH_FACTORS.numel())
        self.ref = byref(self.struct)


_SPARE: deque[_Room] = deque(maxlen=4)  # of pools that are gone: new memory is slow to be written to


class Candidates:
    """Proposals for `roots` [B].

    `chances` are P(accepted | parent) as `Calibration` has them, by agreement, source and score bucket.
    """

    _is_alone = False  # whether nobody may look at the memory when the pool is gone

    def __init__(self, roots: Tensor, histories: Sequence[Sequence[int]], salts: Sequence[int] = ()) -> None:
        """roots [B]: the last tokens of the texts. salts [B]: whose tables each row uses, if not everybody's."""
        library: Any = native()
        self._native = library
        self.num_rows = len(roots)
        self._salts = array("q", salts) if salts else _no_salts(self.num_rows)
        self._chances: tuple[Tensor | None, Any] | None = None
        self._spare = _SPARE
        self._move_into(_room_for(self.num_rows))
        self._is_alone = True
        roots, columns = plain(roots), [array("q", column) for column in before_roots(histories)]
        self._native.graft_begin(self._ref, roots.data_ptr(), *map(address_of, columns))

    def __del__(self) -> None:
        if self._is_alone:
            self._spare.append(self._room)

    def _move_into(self, room: _Room) -> None:
        room.struct.salts = address_of(self._salts)
        self._room, self._fields, self._paths = room, room.fields, room.paths
        self._struct, self._ref = room.struct, room.ref

    def _copy_into(self, fields: Tensor, paths: Tensor) -> None:
        """Goes on in other memory, into which everything was copied."""
        old = self._struct
        self._move_into(_Room(fields, paths))
        self._struct.width, self._struct.deepest = old.width, old.deepest

    def _make_room(self, count: int) -> None:
        """For so many more nodes in each row."""
        width, capacity = self.width, self._struct.capacity
        if width + count > capacity:
            more = max(capacity, width + count - capacity)
            self._copy_into(*(torch.nn.functional.pad(column, (0, more)) for column in (self._fields, self._paths)))

    def _weigh_by(self, chances: Tensor | None) -> Any:
        """Where the kernels find the chances, which are mostly the same in a round."""
        if self._chances is None or chances is not self._chances[0]:
            self._chances = (chances, byref(ChancesStruct.of(chances)))
        return self._chances[1]

    def __copy__(self) -> Candidates:
        other = object.__new__(Candidates)
        other.__dict__.update(self.__dict__)
        other._copy_into(self._fields.clone(), self._paths.clone())
        return other

    @property
    def nodes(self) -> Nodes:
        self._is_alone = False
        return Nodes._make((*self._fields[:-1, :, : self.width].unbind(), self._paths[:, : self.width]))

    @property
    def agreement(self) -> Tensor:
        """[B, N] how each node stands among the proposals, once they are merged."""
        self._is_alone = False
        return self._fields[-1, :, : self.width]

    @property
    def width(self) -> int:
        return self._struct.width

    def add(
        self,
        tokens: Tensor,
        parents: Tensor,
        probabilities: Tensor,
        sources: Tensor,
        score_bucket: Tensor,
        needs: int | None = None,
    ) -> None:
        """Adds nodes [B, n], which may hang below each other; probability 0 adds padding. needs: their parents' if
        None."""
        self._make_room(tokens.shape[1])
        tokens, parents, sources, score_bucket = (plain(column) for column in (tokens, parents, sources, score_bucket))
        probabilities = plain(probabilities, torch.float32)
        self._native.graft_add(
            self._ref,
            tokens.shape[1],
            tokens.data_ptr(),
            parents.data_ptr(),
            probabilities.data_ptr(),
            sources.data_ptr(),
            score_bucket.data_ptr(),
            _INHERITED if needs is None else needs,
        )

    def add_level(
        self,
        level: Level,
        chances: Tensor | None,
        source: int,
        needs: int,
        first: int,
        going: Sequence[bool],
        num_beams: int,
    ) -> list[float]:
        """Adds a drafted level, weighed by its probabilities' buckets, or without `chances` by these themselves; it is
        padding in rows that are not `going`.

        first: places in the pool between the root and the first drafted level. Returns how likely the target is to
        come as far as one of the first `num_beams`, by row.
        """
        count = level.tokens.shape[1]
        self._make_room(count)
        tokens, parents = plain(level.tokens), plain(level.parents)
        probabilities = plain(level.probabilities, torch.float32)
        reached = (ctypes.c_double * len(going))()
        self._native.graft_add_level(
            self._ref,
            count,
            tokens.data_ptr(),
            parents.data_ptr(),
            probabilities.data_ptr(),
            self._weigh_by(chances),
            source,
            needs,
            first,
            bytes(going),
            num_beams,
            reached,
        )
        return reached[:]

    def add_rows(self, rows: Sequence[Columns], chances: Tensor) -> None:
        """Adds nodes put together in Python, for each row its own."""
        counts = [len(row.tokens) for row in rows]
        width = max(counts)
        if width == 0:
            return
        self._make_room(width)
        columns, lengths = array("q"), array("q", counts)
        for column in (0, 1, 3, 4):  # depths follow from the parents
            for row, count in zip(rows, counts, strict=True):
                columns.extend(row[column])
                columns.extend([0] * (width - count))
        self._native.graft_add_rows(self._ref, width, address_of(columns), address_of(lengths), self._weigh_by(chances))

    def attach_copies(
        self,
        own: Sequence[int],
        past: Sequence[int],
        scale: ScaleStruct,
        first: int,
        chances: Tensor,
        num_places: int,
        max_depth: int,
        length: int,
        num_nodes: int,
    ) -> None:
        """Adds what `SuffixLookup` proposes. own, past: addresses of every row's own index and of that of others."""
        addresses, others, count, width = array("q", own), array("q", past), ctypes.c_int64(), self.width
        while True:
            self._native.graft_attach_copies(
                self._ref,
                address_of(addresses),
                address_of(others),
                first,
                self._weigh_by(chances),
                num_places,
                max_depth,
                length,
                num_nodes,
                byref(scale),
                byref(count),
            )
            if self.width == width + count.value:
                break
            self._make_room(count.value)  # there was none, so that nothing was added

    def follow(
        self, tables: Array[TableStruct], chances: Tensor, first: int, waves: int, beam: int, max_depth: int
    ) -> None:
        """Adds what the tables know to follow: wave by wave, of the `beam` likeliest nodes not yet looked up.

        Nodes have the number of their table, counted from `first`, as their source.
        """
        waves = min(waves, max_depth)
        self._make_room(waves * beam * tables[0].num_successors)
        self._native.graft_follow(
            self._ref, tables, len(tables), self._weigh_by(chances), first, waves, beam, max_depth
        )

    def fill(
        self,
        tables: Array[TableStruct],
        templates: Sequence[TemplateStruct],
        chance: float,
        source: int,
        max_depth: int,
    ) -> None:
        """Adds each row's template below the root; what the only table does not know stays empty."""
        self._make_room(max(template.count for template in templates))
        addresses = array("q", map(ctypes.addressof, templates))
        self._native.graft_fill(self._ref, tables, address_of(addresses), chance, source, max_depth)

    def extend_leaves(
        self, tables: Array[TableStruct], count: int, num_children: int, chance: float, source: int, max_depth: int
    ) -> None:
        """The `count` likeliest leaves go on by their first successors in the only table."""
        self._make_room(count * num_children)
        self._native.graft_extend_leaves(self._ref, tables, count, num_children, chance, source, max_depth)

    def keep_best(self, counts: Sequence[int]) -> None:
        """Of each row only the root and its `counts[row]` likeliest nodes stay, equal paths counted apart."""
        numbers = array("q", counts)
        self._native.graft_keep_best(self._ref, address_of(numbers))

    def merge(self, drafted: int = NOBODY, chances: Tensor | None = None) -> None:
        """Makes equal paths one node, the likeliest agreement for all; the others become padding.

        With `chances`, nodes are weighed again by how they stand: proposed by several, by one where the source
        `drafted` had its say and proposed something else, or by one alone. What retrieval proposes against the drafter
        seldom comes true, whatever its record elsewhere.
        """
        self._native.graft_merge(self._ref, drafted, self._weigh_by(chances))

    def best(self, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
        """The root and the `budget` likeliest nodes of a merged pool, likeliest first; and their path probabilities.

        A path's probability falls along it, so the best are closed under ancestors. No node is deeper than
        `max_depth`.
        """
        count = min(budget + 1, self.width)
        numbers = torch.empty(4, self.num_rows, count, dtype=torch.int64)
        shares = torch.empty(2, self.num_rows, count)
        self._native.graft_best(self._ref, count, numbers.data_ptr(), shares.data_ptr())
        tokens, parents, sources, score_bucket = numbers.unbind()
        probabilities, paths = shares.unbind()
        return DraftTree(max_depth, tokens, parents, probabilities, sources, score_bucket), paths

    def best_gains(self, count: int) -> list[float]:
        """Expected accepted tokens of the 1, 2, 3 ... `count` likeliest nodes of each row, in all rows together."""
        count = min(count, self.width - 1)
        gains = (ctypes.c_double * count)()
        self._native.graft_best_gains(self._ref, count, gains)
        return gains[:]

    def values_by_need(self, max_passes: int, budget: int) -> list[list[float]]:
        """By row: expected tokens of a merged pool's `budget` best, had there been 0, 1, 2 ... `max_passes` passes."""
        num_rows, count = self.num_rows, max_passes + 1
        values = (ctypes.c_double * (num_rows * count))()
        self._native.graft_values_by_need(self._ref, max_passes, budget, values)
        return [values[row * count : (row + 1) * count] for row in range(num_rows)]

    def places(self, count: int, max_depth: int) -> list[list[Place]]:
        """Where to look up what is likely to come, by row.

        That is the root, as long as nothing was drafted, whatever others retrieved; from then on up to `count` nodes
        below it, those likeliest to be reached that may still have children.
        """
        num_rows = self.num_rows
        room = 1 + max(count, 1) * (2 + min(max_depth, self._struct.deepest))
        found = (ctypes.c_int64 * (num_rows * room))()
        self._native.graft_places(self._ref, count, max_depth, found)
        places: list[list[Place]] = []
        at = 0
        for _ in range(num_rows):
            places.append([])
            num_places = found[at]
            at += 1
            for _ in range(num_places):
                node, depth = found[at : at + 2]
                places[-1].append(Place(node, depth, found[at + 2 : at + 2 + depth]))
                at += 2 + depth
        return places

    def count(self, emitted: Sequence[Sequence[int]], tried: Tensor, fitted: Tensor, memory: float) -> None:
        """Adds to the counts [standings, sources, buckets] what was put to the test, and what of it fitted.

        A proposal is tested when its parent's path came true, whether or not it was verified. Beyond a `memory` of
        tests old ones fade.
        """
        came = array("q", [token for tokens in emitted for token in tokens])
        lengths = array("q", map(len, emitted))
        self._native.graft_count(
            self._ref, address_of(came), address_of(lengths), tried.data_ptr(), fitted.data_ptr(), *tried.shape, memory
        )


def _room_for(num_rows: int) -> _Room:
    for _ in range(len(_SPARE)):
        try:
            room = _SPARE.popleft()
        except IndexError:  # another thread was quicker
            break
        if len(room.paths) == num_rows:
            return room
        _SPARE.append(room)
    fields = torch.empty(len(Nodes._fields), num_rows, _CAPACITY, dtype=torch.int64)
    return _Room(fields, torch.empty(num_rows, _CAPACITY))


@lru_cache(maxsize=64)
def _no_salts(num_rows: int) -> array[int]:
    """Not to be written to."""
    return array("q", [0] * num_rows)


def address_of(numbers: array[int]) -> int:
    """Of an array that must live as long as it is used."""
    return numbers.buffer_info()[0]


def before_roots(histories: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The token before each text's last, and the one before that."""
    before, earlier = ([ids[-n] if len(ids) >= n else NO_TOKEN for ids in histories] for n in (2, 3))
    return before, earlier

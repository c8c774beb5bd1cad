"""HostPool: the pool in a CPU's memory, put together by the kernels of `kernels.c`."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from ctypes import byref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graft.buckets import NUM_BUCKETS
from graft.kernels import ChancesStruct, PoolStruct, ScaleStruct, available, kernels, plain
from graft.pool import DEPTH_FACTORS, NOBODY, Columns, Nodes, Place, Pool, before_roots, last_before_roots
from graft.tree import DraftTree

if TYPE_CHECKING:
    from graft.draft.base import Level
    from graft.retrieve.table import SuccessorTables

_NUM_FIELDS = len(Nodes._fields)  # of whole numbers: the standing takes the place of the paths
_CAPACITY = 1024  # nodes a row has room for at first
_INHERITED = -1  # needs what its parent needs


def make_pool(roots: Tensor, histories: Sequence[Sequence[int]], salts: Tensor | None = None) -> Pool:
    """A pool with nothing but its roots [B], the texts' last tokens."""
    if available():
        return HostPool.of_texts(roots, histories, salts)
    return Pool(roots, *before_roots(histories), salts)


class _Room:
    """Memory for a pool, and how the kernels find it."""

    def __init__(self, fields: Tensor, paths: Tensor) -> None:
        self.fields, self.paths = fields, paths
        addresses = (fields.data_ptr(), paths.data_ptr(), None, DEPTH_FACTORS.data_ptr())
        self.struct = PoolStruct(*paths.shape, 0, 0, *addresses, DEPTH_FACTORS.numel())
        self.ref = byref(self.struct)


_SPARE: deque[_Room] = deque(maxlen=4)  # of pools that are gone: new memory is slow to be written to


class HostPool(Pool):
    """Does what `Pool` does, in place."""

    _is_alone = False  # whether nobody may look at the memory when the pool is gone

    def __init__(self, roots: Tensor, before: Tensor, earlier: Tensor, salts: Tensor | None = None) -> None:
        columns = [plain(column) for column in (roots, before, earlier)]
        self._begin([column.data_ptr() for column in columns], len(roots), salts)

    @classmethod
    def of_texts(cls, roots: Tensor, histories: Sequence[Sequence[int]], salts: Tensor | None = None) -> HostPool:
        """The same, given the texts that end with the roots."""
        pool = object.__new__(cls)
        roots, columns = plain(roots), [array("q", column) for column in last_before_roots(histories)]
        pool._begin([roots.data_ptr(), *map(_address, columns)], len(roots), salts)
        return pool

    def _begin(self, columns: Sequence[int], num_rows: int, salts: Tensor | None) -> None:
        """columns: addresses of the roots and of the two tokens before each."""
        library: Any = kernels()
        self._kernels = library
        self._factors = DEPTH_FACTORS
        self.salts = _no_salts(num_rows) if salts is None else plain(salts)
        self._chances: tuple[Tensor | None, Any] | None = None
        self._spare = _SPARE
        self._move_into(_room_for(num_rows))
        self._is_alone = True
        self._kernels.graft_begin(self._ref, *columns)

    def __del__(self) -> None:
        if self._is_alone:
            self._spare.append(self._room)

    def _move_into(self, room: _Room) -> None:
        room.struct.salts = self.salts.data_ptr()
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

    def __copy__(self) -> HostPool:
        other = object.__new__(HostPool)
        other.__dict__.update(self.__dict__)
        other._copy_into(self._fields.clone(), self._paths.clone())
        return other

    @property
    def nodes(self) -> Nodes:
        self._is_alone = False
        return Nodes._make((*self._fields[:-1, :, : self.width].unbind(), self._paths[:, : self.width]))

    @property
    def standing(self) -> Tensor:
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
        evidence: Tensor,
        needs: int | None = None,
    ) -> None:
        self._make_room(tokens.shape[1])
        tokens, parents, sources, evidence = (plain(column) for column in (tokens, parents, sources, evidence))
        probabilities = plain(probabilities, torch.float32)
        self._kernels.graft_add(
            self._ref,
            tokens.shape[1],
            tokens.data_ptr(),
            parents.data_ptr(),
            probabilities.data_ptr(),
            sources.data_ptr(),
            evidence.data_ptr(),
            _INHERITED if needs is None else needs,
        )

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
        self.add(tokens, parents, probabilities, sources, evidence)

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
        count = level.tokens.shape[1]
        self._make_room(count)
        tokens, parents = plain(level.tokens), plain(level.parents)
        probabilities = plain(level.probabilities, torch.float32)
        reached = (ctypes.c_double * len(going))()
        self._kernels.graft_add_level(
            self._ref,
            count,
            tokens.data_ptr(),
            parents.data_ptr(),
            probabilities.data_ptr(),
            self._weigh_by(chances),
            NUM_BUCKETS,
            source,
            needs,
            first,
            bytes(going),
            num_beams,
            reached,
        )
        return reached[:]

    def add_rows(self, rows: Sequence[Columns], chances: Tensor) -> None:
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
        self._kernels.graft_add_rows(self._ref, width, _address(columns), _address(lengths), self._weigh_by(chances))

    def hang_copies(
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
        """Adds what `SuffixLookup` proposes. own, past: addresses of every row's index and of that of
        finished texts that it may see."""
        addresses, finished = array("q", own), array("q", past)
        count, width = ctypes.c_int64(), self.width
        while True:
            self._kernels.graft_hang_copies(
                self._ref,
                _address(addresses),
                _address(finished),
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
        self, tables: SuccessorTables, chances: Tensor, first: int, waves: int, beam: int, max_depth: int
    ) -> None:
        waves = min(waves, max_depth)
        self._make_room(waves * beam * tables.num_successors)
        structs = tables.structs
        self._kernels.graft_follow(
            self._ref, structs, len(structs), self._weigh_by(chances), first, waves, beam, max_depth
        )

    def merge(self, drafted: int = NOBODY, chances: Tensor | None = None) -> None:
        self._kernels.graft_merge(self._ref, drafted, self._weigh_by(chances))

    def best(self, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
        count = min(budget + 1, self.width)
        num_rows = self._struct.num_rows
        numbers = torch.empty(4, num_rows, count, dtype=torch.int64)
        shares = torch.empty(2, num_rows, count)
        self._kernels.graft_best(self._ref, count, numbers.data_ptr(), shares.data_ptr())
        tokens, parents, sources, evidence = numbers.unbind()
        probabilities, paths = shares.unbind()
        return DraftTree(max_depth, tokens, parents, probabilities, sources, evidence), paths

    def best_gains(self, count: int) -> list[float]:
        count = min(count, self.width - 1)
        gains = (ctypes.c_double * count)()
        self._kernels.graft_best_gains(self._ref, count, gains)
        return gains[:]

    def values_by_need(self, max_passes: int, budget: int) -> list[list[float]]:
        num_rows, count = self._struct.num_rows, max_passes + 1
        values = (ctypes.c_double * (num_rows * count))()
        self._kernels.graft_values_by_need(self._ref, max_passes, budget, values)
        return [values[row * count : (row + 1) * count] for row in range(num_rows)]

    def places(self, count: int, max_depth: int) -> list[list[Place]]:
        num_rows = self._struct.num_rows
        room = 1 + max(count, 1) * (2 + min(max_depth, self._struct.deepest))
        found = (ctypes.c_int64 * (num_rows * room))()
        self._kernels.graft_places(self._ref, count, max_depth, found)
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
        came = array("q", [token for tokens in emitted for token in tokens])
        lengths = array("q", map(len, emitted))
        self._kernels.graft_count(
            self._ref, _address(came), _address(lengths), tried.data_ptr(), fitted.data_ptr(), *tried.shape, memory
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
    fields = torch.empty(_NUM_FIELDS, num_rows, _CAPACITY, dtype=torch.int64)
    return _Room(fields, torch.empty(num_rows, _CAPACITY))


@lru_cache(maxsize=64)
def _no_salts(num_rows: int) -> Tensor:
    """Not to be written to."""
    return torch.zeros(num_rows, dtype=torch.int64)


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]

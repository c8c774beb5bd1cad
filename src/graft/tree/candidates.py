"""Candidates: all tokens proposed for a round, with their acceptance probabilities. The tree is chosen from them.

When a node is added, its path probability, path key and last tokens are computed from its parent's, so no pass over the
tree is needed afterwards. Equal paths have equal keys, whichever source proposed them. Candidates are in host memory
even if the models are on a GPU. C code does the work; the docstrings here say what it does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from ctypes import Array, byref
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.hashing import mix64
from graft.model.noise import ComingDraws, RowDraws
from graft.tree.native import AcceptanceProbsStruct, DrawsStruct, PoolStruct, ScaleStruct, TableStruct, native, plain
from graft.tree.tree import DraftTree

NOBODY = -1  # no source
ALONE, OPPOSED, AGREED = range(3)  # agreement of a node's proposers; see `Candidates.merge`
NO_TOKEN = -1  # in place of a token before the beginning of a text
# A path's key is a hash: the sum of its tokens, each times an odd random factor of its depth.
DEPTH_FACTORS = mix64(torch.arange(4096)) | 1  # no tree is deeper
_CAPACITY = 2048  # initial room for nodes of a row
_NUM_BUCKETS = 16  # of probabilities, two per halving; as in the C code
_INHERITED = -1  # the node needs as many draft passes as its parent


class Nodes(NamedTuple):
    """B rows of N nodes, each field [B, N]. The first node is the root; every node comes after its parent."""

    tokens: Tensor
    before: Tensor  # the token before the node's
    depths: Tensor
    keys: Tensor  # hash of the path from the root
    needs: Tensor  # draft passes that the proposal depends on
    parents: Tensor
    earlier: Tensor  # the token before `before`
    sources: Tensor
    score_bucket: Tensor
    paths: Tensor  # P(the target accepts the whole path down to the node); 0 is padding


@dataclass(frozen=True)
class Level:
    """Drafted nodes of one depth. Parents are node numbers in the drafted tree; the root is 0."""

    tokens: Tensor  # [B, n] target ids
    parents: Tensor  # [B, n]
    probabilities: Tensor  # [B, n] the drafter's q(token | parent); 0 is padding
    path_probabilities: Tensor  # [B, n] their product along the path

    def to_host(self) -> Level:
        return Level(*(getattr(self, field.name).cpu() for field in fields(self)))

    def at(self, index: Tensor) -> Level:
        """The nodes at `index` [B, m] of the level."""
        return Level(*(getattr(self, field.name).gather(1, index) for field in fields(self)))


class Beside(NamedTuple):
    """By row, the other answers to the same prompt that are being decoded."""

    indices: array[int]  # addresses of their suffix indices, row after row
    ends: array[int]  # [B] where each row's addresses end
    num_prompt: array[int]  # [B] tokens of the prompt


class _DrawColumns:
    """`ComingDraws` in memory that C can read."""

    def __init__(self, draws: ComingDraws) -> None:
        rows = [row or RowDraws(0, 0, 0.0) for row in draws.rows]
        banned, banned_ends = _joined(row.banned for row in rows)
        endings, ending_ends = _joined(row.endings for row in rows)
        self._times = [[plain(each, torch.float32) for each in row.times or ()] for row in rows]
        num_depths = max(map(len, self._times))
        addresses = array("q")
        for own in self._times:
            addresses.extend(each.data_ptr() for each in own)
            addresses.extend([0] * (num_depths - len(own)))
        columns: list[array[int] | array[float]] = [
            array("q", [row.kind for row in rows]),
            array("q", [row.seed for row in rows]),
            array("q", [row.position for row in rows]),
            array("d", [row.share_power(bucket / 2) for row in rows for bucket in range(_NUM_BUCKETS)]),
            *(banned, banned_ends, endings, ending_ends),
            array("q", [row.num_unending for row in rows]),
            addresses,
            array("q", [row.times is None for row in rows]),
        ]
        self._columns = columns  # kept alive, because C reads their memory
        self._struct = DrawsStruct(*map(address_of, columns), num_depths)
        self.address = ctypes.addressof(self._struct)


def _joined(lists: Iterable[Sequence[int]]) -> tuple[array[int], array[int]]:
    """Several lists one after the other, and where each ends."""
    numbers, ends = array("q"), array("q")
    for each in lists:
        numbers.extend(each)
        ends.append(len(numbers))
    return numbers, ends


class _Room:
    """Memory for candidates, and the C struct that points to it."""

    def __init__(self, fields: Tensor, paths: Tensor) -> None:
        self.fields, self.paths = self.memory = fields, paths
        addresses = (fields.data_ptr(), paths.data_ptr(), None, DEPTH_FACTORS.data_ptr())
        self.struct = PoolStruct(*paths.shape, 0, 0, *addresses, DEPTH_FACTORS.numel(), None)
        self.ref = byref(self.struct)


_SPARE: deque[_Room] = deque(maxlen=4)  # memory of earlier rounds, because first writes to new memory are slow


class Candidates:
    """The candidate nodes below B roots, one row for each.

    Many methods take `Calibration.acceptance_probs`: P(accepted | parent accepted) by kind of row and agreement, source
    and bucket.
    """

    most_nodes = 1 << 10  # retrieval stops when a row has this many nodes
    _is_alone = False  # whether there is no other view of the memory, so that it can be reused

    def __init__(
        self,
        roots: Tensor,
        histories: Sequence[Sequence[int]],
        salts: Sequence[int] = (),
        draws: ComingDraws | None = None,
    ) -> None:
        """roots [B]: the last tokens of the histories. salts [B]: of each row's table entries; empty: all rows share 0.

        draws: what is known of the coming draws. Tokens that cannot be drawn become padding.
        """
        library: Any = native()
        self._native = library
        self.num_rows = len(roots)
        self._salts = array("q", salts) if salts else _no_salts(self.num_rows)
        self._draws = _DrawColumns(draws) if draws is not None else None
        self._probs: tuple[Tensor | None, Any] | None = None
        self._spare = _SPARE
        self._move_into(_room_for(self.num_rows))
        self._is_alone = True
        roots, columns = plain(roots), [array("q", column) for column in before_roots(histories)]
        self._native.graft_begin(self.ref, roots.data_ptr(), *map(address_of, columns))

    def __del__(self) -> None:
        if self._is_alone:
            self._spare.append(self._room)

    def _move_into(self, room: _Room) -> None:
        room.struct.salts = address_of(self._salts)
        room.struct.draws = self._draws.address if self._draws is not None else None
        self._room, self._fields, self._paths = room, room.fields, room.paths
        self._struct = room.struct
        self.ref = room.ref  # the pointer for C; `reserve` may replace it

    def _copy_into(self, fields: Tensor, paths: Tensor) -> None:
        """Switch to other memory, to which the caller has copied everything."""
        old = self._struct
        self._move_into(_Room(fields, paths))
        self._struct.width, self._struct.deepest = old.width, old.deepest

    def reserve(self, count: int) -> None:
        """Make room for `count` more nodes in each row."""
        width, capacity = self.width, self._struct.capacity
        if width + count > capacity:
            more = max(capacity, width + count - capacity)
            self._copy_into(*(torch.nn.functional.pad(column, (0, more)) for column in (self._fields, self._paths)))

    def _weigh_by(self, acceptance_probs: Tensor | None) -> Any:
        """A C reference to the probabilities. It is cached, since most calls of a round pass the same tensor."""
        if self._probs is None or acceptance_probs is not self._probs[0]:
            self._probs = (acceptance_probs, byref(AcceptanceProbsStruct.of(acceptance_probs)))
        return self._probs[1]

    def __copy__(self) -> Candidates:
        other = object.__new__(Candidates)
        other.__dict__.update(self.__dict__, _is_alone=False)  # until it has memory of its own
        other._copy_into(self._fields.clone(), self._paths.clone())
        return other

    @property
    def nodes(self) -> Nodes:
        self._is_alone = False
        return Nodes._make((*self._fields[:-1, :, : self.width].unbind(), self._paths[:, : self.width]))

    @property
    def agreement(self) -> Tensor:
        """[B, N] ALONE, OPPOSED or AGREED for each node, once candidates are merged."""
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
        """Add nodes [B, n]. Parents may be earlier nodes among them. Nodes of probability 0 are padding.

        needs: draft passes that they depend on; None: as many as their parents.
        """
        count, probabilities = tokens.shape[1], plain(probabilities, torch.float32)
        self.reserve(count)
        columns = [plain(tokens), plain(parents), probabilities, plain(sources), plain(score_bucket)]
        pointers = [column.data_ptr() for column in columns]
        self._native.graft_add(self.ref, count, *pointers, _INHERITED if needs is None else needs)

    def add_level(
        self,
        level: Level,
        acceptance_probs: Tensor | None,
        source: int,
        needs: int,
        first: int,
        going: Sequence[bool],
        num_beams: int,
    ) -> list[float]:
        """Add a drafted level. Rows that are not `going`, and nodes whose q is 0, become padding.

        acceptance_probs: turn the drafter's q into acceptance probabilities; None: q is used as it is. first:
        candidates between the root and the first drafted level. Returns, by row, the reach of the level's first
        `num_beams` nodes: the probability that the target accepts a path down to one of them.
        """
        count = level.tokens.shape[1]
        self.reserve(count)
        columns = [plain(level.tokens), plain(level.parents), plain(level.probabilities, torch.float32)]
        pointers = [column.data_ptr() for column in columns]
        probs, reached = self._weigh_by(acceptance_probs), (ctypes.c_double * len(going))()
        numbers = (source, needs, first, bytes(going), num_beams)
        self._native.graft_add_level(self.ref, count, *pointers, probs, *numbers, reached)
        return reached[:]

    def attach_copies(
        self,
        own: array[int],
        past: array[int],
        beside: Beside,
        scale: ScaleStruct,
        first: int,
        acceptance_probs: Tensor,
        num_places: int,
        max_depth: int,
        length: int,
        num_nodes: int,
    ) -> None:
        """Add the proposals of `SuffixLookup`.

        own, past: by row, the addresses of the indices of its own text and of finished texts.
        """
        count, width = ctypes.c_int64(), self.width
        indices = [address_of(part) for part in (own, past, *beside)]
        limits = (num_places, max_depth, length, num_nodes)
        while True:
            probs = self._weigh_by(acceptance_probs)
            self._native.graft_attach_copies(self.ref, *indices, first, probs, *limits, byref(scale), byref(count))
            if self.width == width + count.value:
                break
            self.reserve(count.value)  # nothing was added, because there was not enough room

    def follow(
        self, tables: Array[TableStruct], acceptance_probs: Tensor, first: int, waves: int, beam: int, max_depth: int
    ) -> None:
        """In each wave, add the tables' successors of the `beam` likeliest nodes that were not looked up yet.

        A node's source is `first` plus the number of its table.
        """
        waves = min(waves, max_depth)
        self.reserve(waves * beam * tables[0].num_successors)
        self._native.graft_follow(
            self.ref, tables, len(tables), self._weigh_by(acceptance_probs), first, waves, beam, max_depth
        )

    def merge(self, drafted: int = NOBODY, acceptance_probs: Tensor | None = None) -> None:
        """Merge equal paths into one node: the likeliest copy stays, the others become padding.

        With `acceptance_probs`, probabilities are recomputed by agreement: AGREED if several sources propose the token,
        OPPOSED if one does and the source `drafted` proposes other tokens there, ALONE otherwise. Retrieved tokens that
        oppose the drafter are seldom accepted, even from a source that is good elsewhere.
        """
        self._native.graft_merge(self.ref, drafted, self._weigh_by(acceptance_probs))

    def ranked(self, total: int, caps: Sequence[int], path_ratios: array[float] | None = None) -> Ranking:
        """The `total` likeliest nodes of all rows together, at most `caps[row]` of each row; roots do not count.

        path_ratios: see `PathCalibration`; None: path probabilities are used as they are. Equal paths count separately
        unless candidates are merged.
        """
        return Ranking(self, total, caps, path_ratios)

    def best(self, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
        """The tree of the root and the `budget` likeliest nodes of each row, and their path probabilities.

        Candidates must be merged. max_depth: no candidate is deeper.
        """
        return self.ranked(budget * self.num_rows, [budget] * self.num_rows).tree(max_depth)

    def values_by_need(
        self,
        max_passes: int,
        counts: Sequence[int],
        costs: Sequence[float],
        caps: Sequence[int],
        path_ratios: array[float] | None = None,
    ) -> list[float]:
        """The value of the best nodes (see `ranked`) that need at most 0, 1, ... `max_passes` draft passes.

        The value is the expected accepted tokens minus the cost of verifying them, and at least 0. It is the maximum
        over the ascending node counts `counts`, whose `costs` are in tokens. Candidates must be merged.
        """
        values, limits = (ctypes.c_double * (max_passes + 1))(), array("q", caps)
        numbers, prices = array("q", counts), array("d", costs)
        options = (len(counts), address_of(numbers), address_of(prices), max(caps), address_of(limits))
        ratios = path_ratios and address_of(path_ratios)
        self._native.graft_values_by_need(self.ref, max_passes, *options, ratios, values)
        return values[:]

    def count(self, emitted: Sequence[Sequence[int]], tried: Tensor, fitted: Tensor, memory: float) -> None:
        """Add the numbers of proposals that were tried, and that fit, to counts [kinds * agreements, sources, buckets].

        A proposal is tried if its parent's path was emitted with a token after it. It fits if it is this token, whether
        it was verified or not. Counts above `memory` are scaled down to it, so that old ones fade.
        """
        came = array("q", [token for tokens in emitted for token in tokens])
        lengths = array("q", map(len, emitted))
        self._native.graft_count(
            self.ref, address_of(came), address_of(lengths), tried.data_ptr(), fitted.data_ptr(), *tried.shape, memory
        )


class Ranking:
    """The likeliest nodes of all rows in one order, likeliest first; ties go to the first row.

    Path probabilities fall along a path, so the first n nodes always form trees. The candidates must not change while
    the ranking is used.
    """

    def __init__(
        self, candidates: Candidates, total: int, caps: Sequence[int], path_ratios: array[float] | None = None
    ) -> None:
        most = min(max(caps), total, candidates.width - 1)  # nodes that a row may get
        total = min(total, most * candidates.num_rows)
        self._candidates, self._stride = candidates, most
        self._nodes, self._rows = _numbers(most * candidates.num_rows), _numbers(total)
        limits, found = array("q", (min(cap, most) for cap in caps)), ctypes.c_int64()
        gains = (ctypes.c_double * total)()
        ratios = path_ratios and address_of(path_ratios)
        addresses = (address_of(limits), ratios, *map(address_of, (self._nodes, self._rows)))
        candidates._native.graft_rank(candidates.ref, total, most, *addresses, gains, byref(found))
        self.gains: list[float] = gains[: found.value]  # expected accepted tokens of the first 1, 2, 3 ... nodes

    def __len__(self) -> int:
        return len(self.gains)

    def tree(self, max_depth: int, count: int | None = None) -> tuple[DraftTree, Tensor]:
        """The tree [B, W] of the roots and the first `count` nodes (None: all), and path probabilities [B, W].

        Each row has its likeliest nodes first, then PADDING. max_depth: no candidate is deeper.
        """
        num_rows, count = self._candidates.num_rows, len(self) if count is None else min(count, len(self))
        room = 1 + min(self._stride, count)
        numbers = torch.empty(4 * num_rows * room, dtype=torch.int64)
        shares, width = torch.empty(2 * num_rows * room), ctypes.c_int64()
        memory = (numbers.data_ptr(), shares.data_ptr(), byref(width))
        ranked = (self._stride, address_of(self._nodes), address_of(self._rows))
        self._candidates._native.graft_tree(self._candidates.ref, count, *ranked, room, *memory)
        size = num_rows * width.value
        tokens, parents, sources, score_bucket = numbers[: 4 * size].view(4, num_rows, -1).unbind()
        probabilities, paths = shares[: 2 * size].view(2, num_rows, -1).unbind()
        return DraftTree(max_depth, tokens, parents, probabilities, sources, score_bucket), paths


def _numbers(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def _room_for(num_rows: int) -> _Room:
    """Spare or new memory for `num_rows` rows. New memory has room for a power of two, since rows come and go."""
    num_fields, size = len(Nodes._fields), num_rows * _CAPACITY
    for _ in range(len(_SPARE)):
        try:
            room = _SPARE.popleft()
        except IndexError:  # another thread was quicker
            break
        if room.paths.shape == (num_rows, _CAPACITY):
            return room
        if room.paths.untyped_storage().nbytes() >= 4 * size:
            fields, paths = (torch.empty(0, dtype=part.dtype).set_(part.untyped_storage()) for part in room.memory)
            return _Room(fields[: num_fields * size].view(num_fields, num_rows, -1), paths[:size].view(num_rows, -1))
        _SPARE.append(room)
    most = _CAPACITY << (num_rows - 1).bit_length()
    fields, paths = torch.empty(num_fields * most, dtype=torch.int64), torch.empty(most)
    return _Room(fields[: num_fields * size].view(num_fields, num_rows, -1), paths[:size].view(num_rows, -1))


@lru_cache(maxsize=64)
def _no_salts(num_rows: int) -> array[int]:
    """A zero for each row. The array is shared, so it must not be written to."""
    return array("q", [0] * num_rows)


def address_of(numbers: array[int] | array[float]) -> int:
    """The address of an array's memory; the array must outlive its use."""
    return numbers.buffer_info()[0]


def before_roots(histories: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """By text, the token before the last one, and the token before that one."""
    before, earlier = ([ids[-n] if len(ids) >= n else NO_TOKEN for ids in histories] for n in (2, 3))
    return before, earlier

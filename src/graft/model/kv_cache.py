"""The KV cache: preallocated, one row a sequence, committed and rolled back in place.

A forward writes its tokens' keys and values behind each row's committed length; `commit` says which of them stay, and
the next forward writes over the others. Rows join and leave by way of a new cache over the same memory: until it
replaces the old one, the old one's rows are unchanged.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graft.errors import GraftError

_SLOT_STEP = 256  # slots by which a cache that others join grows


@dataclass(frozen=True)
class WritePosition:
    """Where a forward writes its tokens' keys and values: behind the committed ones of each row."""

    lengths: Tensor  # [B] committed tokens of the rows
    exact_end: bool  # whether the slots read end with the last token of the longest row


class NoRoomError(torch.OutOfMemoryError):
    """KV caches have reached their limit, whether or not there is memory."""


class Claim:
    """Slots taken of a limit; they are given back when this object is gone."""


class Keeper(Protocol):
    """An owner of unused slots, which it gives up when others need them."""

    @property
    def num_free_slots(self) -> int: ...

    def drop_free(self) -> None: ...


class CacheLimit:
    """A limit on the slots (keys and values of one token) that KV caches have allocated together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_taken = 0
        self._lock = threading.RLock()  # claims may end in any thread, and while another is made
        self._keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()

    def add_keeper(self, keeper: Keeper) -> None:
        self._keepers.add(keeper)

    def claim(self, num_slots: int) -> Claim:
        """Takes so many slots; a NoRoomError, and no change, if there are fewer."""
        if self.num_taken + num_slots > self.most:
            for keeper in list(self._keepers):
                keeper.drop_free()
        with self._lock:
            if self.num_taken + num_slots > self.most:
                raise NoRoomError(f"{self.num_taken} of {self.most} slots are taken, and {num_slots} more are needed")
            self.num_taken += num_slots
            claim = Claim()
            weakref.finalize(claim, self._end, num_slots)
        return claim

    def has(self, num_slots: int) -> bool:
        """Whether so many slots are unused."""
        return self._num_used + num_slots <= self.most

    def has_plenty(self, num_slots: int) -> bool:
        """Whether so many could be taken in advance, with room left for other caches to grow."""
        return self._num_used + num_slots <= self.most // 2

    @property
    def _num_used(self) -> int:
        return self.num_taken - sum(keeper.num_free_slots for keeper in list(self._keepers))

    def _end(self, num_slots: int) -> None:
        with self._lock:
            self.num_taken -= num_slots


class TreeCache(Cache):
    """A batch's KV cache: keys and values of all layers, one tensor each, [layers, rows, slots, heads, head_dim]."""

    def __init__(self, num_layers: int, num_rows: int, num_slots: int, limit: CacheLimit | None = None) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * num_rows  # committed tokens of each row
        self.num_slots = num_slots
        self._num_layers = num_layers
        self._limit = limit
        self._room = (num_rows, num_slots)  # rows and slots allocated, or to be
        self._claim = limit.claim(num_rows * num_slots) if limit is not None else None
        self._keys: Tensor | None = None  # made at the first write, when heads, dtype and device are known
        self._values: Tensor | None = None
        self._rows = slice(0, num_rows)  # the rows of the current forward
        self._slots: Tensor | None = None  # [B, W] slots that it writes
        self._end = 0  # slots that it reads

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_needed(self) -> int:
        """Slots of a row that were asked for, of possibly more."""
        return self.num_slots

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """All keys and all values, once allocated."""
        assert self._keys is not None and self._values is not None
        return self._keys, self._values

    def aim(self, rows: slice, width: int, device: torch.device, offset: int = 0) -> WritePosition:
        """Sets where the next forward, of `width` tokens in each of the rows, writes.

        offset: uncommitted tokens of earlier forwards that stay; it writes behind them.
        """
        lengths = self.lengths[rows]
        starts = torch.tensor(lengths, device=device)
        self._rows, self._end = rows, max(lengths) + offset + width
        if self._end > self.num_slots:
            raise GraftError(f"the cache holds {self.num_slots} tokens and {self._end} are needed")
        self._slots = starts[:, None] + offset + torch.arange(width, device=device)
        return WritePosition(starts, exact_end=True)

    def aim_on_device(self, starts: Tensor, width: int = 1) -> WritePosition:
        """As `aim`, for all rows, with their lengths `starts` [B] on the device.

        Shapes do not depend on the lengths (every slot is read, under a mask), so such forwards can be captured and
        replayed; whoever replays them sets `lengths` afterwards.
        """
        self._rows, self._end = slice(0, self.num_rows), self.num_slots
        self._slots = starts[:, None] + torch.arange(width, device=starts.device)
        return WritePosition(starts, exact_end=False)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one layer's new keys and values [B, heads, W, head_dim]; returns all up to the last used slot."""
        if self._keys is None or self._values is None:
            self._keys, self._values = self._allocate(key_states), self._allocate(value_states)
        return self._write(self._keys, layer_idx, key_states), self._write(self._values, layer_idx, value_states)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Commits, in each row of the last forward, its token 0 and the tokens of its path, moved together.

        A path lists nodes of the forward's tree, in order, without the root; one gather moves all layers.
        """
        first = self._rows.start
        longest = max(map(len, paths))
        if any(list(path) != list(range(1, len(path) + 1)) for path in paths):
            # Slots behind a path move onto themselves: so rows of different path lengths share one gather.
            moves = [[*path, *range(len(path) + 1, longest + 1)] for path in paths]
            for stored in (self._keys, self._values):
                assert stored is not None
                rows = torch.arange(first, first + len(paths), device=stored.device)[:, None]
                starts = torch.tensor(self.lengths[self._rows], device=stored.device)[:, None]
                source = starts + torch.tensor(moves, device=stored.device)
                target = starts + torch.arange(1, longest + 1, device=stored.device)
                stored[:, rows, target] = stored[:, rows, source]
        self.advance([1 + len(path) for path in paths])

    def advance(self, counts: Sequence[int]) -> None:
        """Commits the first `counts[i]` tokens that the last forward wrote in its i-th row."""
        for row, count in enumerate(counts, start=self._rows.start):
            self.lengths[row] += count

    def copy_row(self, source: int, target: int) -> None:
        """Makes row `target` a copy of row `source`."""
        self._copy_tokens(source, target)
        self.lengths[target] = self.lengths[source]

    def keeping(self, rows: Sequence[int]) -> Self:
        """A cache of these rows alone, in this order, in the same memory.

        A row either keeps its place or moves from behind the kept ones into the place of one that leaves, so that no
        row that stays is written over.
        """
        assert all(row == place or row >= len(rows) for place, row in enumerate(rows))
        for place, row in enumerate(rows):
            if row != place:
                self._copy_tokens(row, place)
        return self._with_lengths([self.lengths[row] for row in rows])

    def reserving(self, num_rows: int) -> Self:
        """The cache with room for so many rows, where a later move would make captured graphs useless."""
        return self

    def joining(self, other: TreeCache) -> Self:
        """A cache of its own rows and, behind them, those of another."""
        there = self._with_room(self.num_rows + other.num_rows, max(self.num_needed, other.num_needed))
        if there._keys is None and other._keys is not None:
            there._keys, there._values = (_larger(other._keys, there._room) for _ in range(2))
        for own, new in ((there._keys, other._keys), (there._values, other._values)):
            if own is not None and new is not None:
                for row, length in enumerate(other.lengths, start=self.num_rows):
                    own[:, row, :length] = new[:, row - self.num_rows, :length]
        return there._with_lengths(self.lengths + other.lengths)

    def _with_lengths(self, lengths: list[int]) -> Self:
        there = copy.copy(self)
        there.lengths = lengths
        return there

    def _with_room(self, num_rows: int, num_slots: int) -> Self:
        """The same rows with room for so many rows and slots, copied to larger memory if need be."""
        there = self._with_lengths(self.lengths)
        there.num_slots = num_slots
        if num_rows <= self._room[0] and num_slots <= self._room[1]:
            return there
        there._room = self._size_for(num_rows, num_slots)
        there._claim = self._limit.claim(there._room[0] * there._room[1]) if self._limit is not None else None
        if self._keys is not None and self._values is not None:
            there._keys, there._values = (_larger(stored, there._room) for stored in (self._keys, self._values))
            longest = max(self.lengths, default=0)
            for stored, before in ((there._keys, self._keys), (there._values, self._values)):
                stored[:, : self.num_rows, :longest] = before[:, : self.num_rows, :longest]
        return there

    def _size_for(self, num_rows: int, num_slots: int) -> tuple[int, int]:
        """Rows and slots to allocate: rounded up while there is plenty, so that not every join copies everything."""
        rows = max(self._room[0], 1 << (num_rows - 1).bit_length())
        slots = max(self._room[1], -(-num_slots // _SLOT_STEP) * _SLOT_STEP)
        plenty = self._limit is None or self._limit.has_plenty(rows * slots)
        return (rows, slots) if plenty else (num_rows, num_slots)

    def _copy_tokens(self, source: int, target: int) -> None:
        length = self.lengths[source]
        for stored in (self._keys, self._values):
            if stored is not None:
                stored[:, target, :length] = stored[:, source, :length]

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of a row's committed keys and values from `start` to `end`, [2, layers, tokens, heads, head_dim]."""
        assert self._keys is not None and self._values is not None and end <= self.lengths[row]
        return torch.stack([self._keys[:, row, start:end], self._values[:, row, start:end]])

    def append(self, row: int, pieces: Sequence[Tensor]) -> None:
        """Commits keys and values that `read` once gave to a row, piece after piece."""
        if self._keys is None or self._values is None:
            _, layers, _, heads, head_dim = pieces[0].shape
            like = pieces[0].new_empty(layers, 0, 0, heads, head_dim)
            self._keys, self._values = (_larger(like, self._room) for _ in range(2))
        for piece in pieces:
            start, end = self.lengths[row], self.lengths[row] + piece.shape[2]
            self._keys[:, row, start:end], self._values[:, row, start:end] = piece
            self.lengths[row] = end

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots that the current forward reads; transformers would derive positions from it, but ours are given."""
        return self._end

    def _allocate(self, states: Tensor) -> Tensor:
        _, heads, _, head_dim = states.shape
        # Zeros, not empty memory: a masked slot may be read, and NaN times zero is NaN.
        return states.new_zeros(self._num_layers, *self._room, heads, head_dim)

    def _write(self, stored: Tensor, layer: int, states: Tensor) -> Tensor:
        if stored.shape[3:] != (states.shape[1], states.shape[3]):
            raise GraftError(
                f"layer {layer} has {states.shape[1]} key/value heads of {states.shape[3]}, other layers "
                f"{stored.shape[3]} of {stored.shape[4]}: models whose layers differ in shape are not supported"
            )
        rows = stored[layer, self._rows]  # [B, slots, heads, head_dim], a view
        index = self._slots[:, :, None, None].expand(-1, -1, *rows.shape[2:])  # type: ignore[index]
        rows.scatter_(1, index, states.transpose(1, 2))
        return rows[:, : self._end].transpose(1, 2)


def kept_rows(stored: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows `rows` of [B, ...], moved in place; see `TreeCache.keeping`."""
    for place, row in enumerate(rows):
        if row != place:
            stored[place] = stored[row]
    return stored[: len(rows)]


def _larger(like: Tensor, room: tuple[int, int]) -> Tensor:
    """Zeros like a cache's keys, with `room` rows and slots."""
    layers, _, _, heads, head_dim = like.shape
    return like.new_zeros(layers, *room, heads, head_dim)

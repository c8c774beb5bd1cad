"""The key/value cache: preallocated, one row a sequence, committed and rolled back in place.

A forward writes its tokens behind each row's committed length; nothing is committed until `commit` says which
of them stay. What is not committed is simply overwritten by the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graft.errors import GraftError

_SLOT_STEP = 256  # slots by which a cache that others join grows


@dataclass(frozen=True)
class Aim:
    """Where a forward's tokens go."""

    lengths: Tensor  # [B] committed tokens of its rows, which they come behind
    exact_end: bool  # whether no slot is read behind the last token of the longest row


class TreeCache(Cache):
    """Keys and values of all layers in one tensor each, [layers, rows, slots, heads, head_dim]."""

    def __init__(self, num_layers: int, num_rows: int, num_slots: int) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * num_rows  # committed tokens of each row
        self.num_slots = num_slots
        self._num_layers = num_layers
        self._keys: Tensor | None = None  # made at the first write, when heads, dtype and device are known
        self._values: Tensor | None = None
        self._rows = slice(0, num_rows)  # the rows that the current forward runs
        self._slots: Tensor | None = None  # [B, W] where it writes
        self._end = 0  # slots it reads

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """All keys and all values, once there are any."""
        assert self._keys is not None and self._values is not None
        return self._keys, self._values

    def aim(self, rows: slice, width: int, device: torch.device, offset: int = 0) -> Aim:
        """Readies the rows for a forward of `width` tokens.

        offset: uncommitted tokens of earlier forwards that stay, and that the new ones come behind.
        """
        lengths = self.lengths[rows]
        starts = torch.tensor(lengths, device=device)
        self._rows, self._end = rows, max(lengths) + offset + width
        if self._end > self.num_slots:
            raise GraftError(f"the cache holds {self.num_slots} tokens and {self._end} are needed")
        self._slots = starts[:, None] + offset + torch.arange(width, device=device)
        return Aim(starts, exact_end=True)

    def aim_on_device(self, starts: Tensor, width: int = 1) -> Aim:
        """Readies all rows for a forward of `width` tokens each from `starts` [B] on, known to the device alone.

        Shapes no longer follow the contents (every slot is read, under a mask), so such forwards can be captured
        and replayed; whoever replays them sets `lengths` afterwards.
        """
        self._rows, self._end = slice(0, self.num_rows), self.num_slots
        self._slots = starts[:, None] + torch.arange(width, device=starts.device)
        return Aim(starts, exact_end=False)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one layer's new keys and values [B, heads, W, head_dim]; returns all up to the last used slot."""
        if self._keys is None or self._values is None:
            self._keys, self._values = self._allocate(key_states), self._allocate(value_states)
        return self._write(self._keys, layer_idx, key_states), self._write(self._values, layer_idx, value_states)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps, in each row of the last forward, the token 0 and then those of its path, and moves them together.

        A path lists places in the forward, in order; one gather moves all layers.
        """
        first = self._rows.start
        longest = max(map(len, paths))
        if any(list(path) != list(range(1, len(path) + 1)) for path in paths):
            # A place that is not kept moves onto itself: rows of different path lengths share one gather.
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
        """Keeps the first `counts` tokens that the last forward wrote in each of its rows."""
        for row, count in enumerate(counts, start=self._rows.start):
            self.lengths[row] += count

    def copy_row(self, source: int, target: int) -> None:
        """Makes one row's committed tokens those of another."""
        length = self.lengths[source]
        for stored in (self._keys, self._values):
            if stored is not None:
                stored[:, target, :length] = stored[:, source, :length]
        self.lengths[target] = length

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these rows alone, in this order."""
        lengths = [self.lengths[row] for row in rows]
        if all(row >= place for place, row in enumerate(rows)):
            # No row moves onto one that is yet to move: their committed tokens move and the memory stays.
            for place, row in enumerate(rows):
                if row != place:
                    self.copy_row(row, place)
        elif self._keys is not None and self._values is not None:
            index = torch.tensor(rows, dtype=torch.int64, device=self._keys.device)
            self._keys, self._values = self._keys[:, index], self._values[:, index]
        self.lengths = lengths

    def reserve(self, num_rows: int) -> None:
        """Makes room for so many rows, if rows that join later would else have it move what is captured."""

    def join(self, other: TreeCache) -> None:
        """Takes in another cache's rows behind its own; grows in steps, so that not every join moves everything."""
        first, lengths = self.num_rows, self.lengths + other.lengths
        size = (len(lengths), max(self.num_slots, other.num_slots))
        if (like := other._keys if self._keys is None else self._keys) is not None:
            # There may be no memory for it: until there is, nothing else changes.
            self._keys, self._values = (_with_room(stored, like, *size) for stored in (self._keys, self._values))
        self.lengths, (_, self.num_slots) = lengths, size
        for own, new in ((self._keys, other._keys), (self._values, other._values)):
            if own is not None and new is not None:
                for row, length in enumerate(other.lengths):
                    own[:, first + row, :length] = new[:, row, :length]

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of a row's committed keys and values at these places, [2, layers, tokens, heads, head_dim]."""
        assert self._keys is not None and self._values is not None and end <= self.lengths[row]
        return torch.stack([self._keys[:, row, start:end], self._values[:, row, start:end]])

    def append(self, row: int, pieces: Sequence[Tensor]) -> None:
        """Commits to a row what `read` once gave, piece behind piece."""
        if self._keys is None or self._values is None:
            _, layers, _, heads, head_dim = pieces[0].shape
            like = pieces[0].new_empty(layers, 0, 0, heads, head_dim)
            self._keys, self._values = (_with_room(None, like, self.num_rows, self.num_slots) for _ in range(2))
        for piece in pieces:
            start, end = self.lengths[row], self.lengths[row] + piece.shape[2]
            self._keys[:, row, start:end], self._values[:, row, start:end] = piece
            self.lengths[row] = end

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """transformers asks this to make up positions; ours are always given."""
        return self._end

    def _allocate(self, states: Tensor) -> Tensor:
        _, heads, _, head_dim = states.shape
        # Zeros, not empty memory: a masked slot may be read, and NaN times zero is NaN.
        return states.new_zeros(self._num_layers, self.num_rows, self.num_slots, heads, head_dim)

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


def _with_room(stored: Tensor | None, like: Tensor, num_rows: int, num_slots: int) -> Tensor:
    """`stored`, or a larger copy of it where it has fewer rows or slots than that."""
    old_rows, old_slots = stored.shape[1:3] if stored is not None else (0, 0)
    if stored is not None and old_rows >= num_rows and old_slots >= num_slots:
        return stored
    layers, _, _, heads, head_dim = like.shape
    larger = like.new_zeros(
        layers,
        max(old_rows, 1 << (num_rows - 1).bit_length()),
        max(old_slots, -(-num_slots // _SLOT_STEP) * _SLOT_STEP),
        heads,
        head_dim,
    )
    if stored is not None:
        larger[:, :old_rows, :old_slots] = stored
    return larger

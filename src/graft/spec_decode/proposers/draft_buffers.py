"""Static tensors of heads in Triton: the inputs of graphs. `head_drafter` uses them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.model import PagePool
from graft.model.captures import ROWS, Event, padded, pinned_zeros, round_up
from graft.model.kv_cache import KVStore
from graft.model.llama import Rotary
from graft.tree.device.buffers import DraftDraws

# Numbers of entries that graphs are captured for.
ENTRIES = (4, 16, 64, 128, 256, 512, 1024, 2048)
_TRANSFERS = 8  # host buffers, used in turns; with too few, the host would wait for the device

Numeric = np.ndarray | Sequence[int]


class ByRow(NamedTuple):
    """Inputs of a graph by row, [R + 1] int32. Padding is zero, since row 0 of the block tables is reserved."""

    table_rows: Any = ()  # rows of the block tables
    starts: Any = ()  # number of the row's earlier entries
    begins: Any = ()  # the row's first entry among those to run
    counts: Any = ()  # entries to run
    lengths: Any = ()  # entries when a pass is run


class ByEntry(NamedTuple):
    """Inputs of a graph by entry, [E] int32."""

    rows: Any = ()
    places: Any = ()  # among the row's entries to run
    tokens: Any = ()  # the token after each
    sources: Any = ()  # where its features are in the target's hidden states


class Numbers:
    """Static int32 inputs of CUDA graphs, sent to the device in one transfer."""

    def __init__(self, max_rows: int, max_entries: int, device: torch.device) -> None:
        self._num_by_row = round_up(max_rows + 1)
        size = len(ByRow._fields) * self._num_by_row + len(ByEntry._fields) * round_up(max_entries)
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        # Several buffers, so that the host need not wait for the previous transfer.
        self._here = [(pinned_zeros((size,), torch.int32, device), Event(device)) for _ in range(_TRANSFERS)]
        self._turns = itertools.cycle(self._here)

    def by_row(self, rows: int | None = None) -> ByRow:
        """Inputs on the device of the first rows (all if None) and of one row of padding."""
        end = self._num_by_row if rows is None else rows + 1
        return ByRow(*(part[:end] for part in self._rows_of(self._there)))

    def by_entry(self, size: int) -> ByEntry:
        """Inputs on the device of `size` entries, where `load` puts them."""
        return ByEntry(*(part[:size] for part in self._entries_of(self._there, size)))

    def load(self, by_row: ByRow, by_entry: ByEntry, size: int) -> None:
        """Send rows and entries. Entries are padded to `size`; padding belongs to the first padding row."""
        here, loaded = next(self._turns)
        loaded.wait()
        array = here.numpy()
        end = len(ByRow._fields) * self._num_by_row + len(ByEntry._fields) * round_up(size)
        array[:end] = 0
        entries = self._entries_of(array, size)
        entries[0][len(by_entry.rows) :] = len(by_row.table_rows)
        for parts, given in ((self._rows_of(array), by_row), (entries, by_entry)):
            for part, numbers in zip(parts, given, strict=True):
                part[: len(numbers)] = numbers
        self._there[:end].copy_(here[:end], non_blocking=True)
        loaded.record()

    def _rows_of(self, numbers: Any) -> Any:
        return numbers[: len(ByRow._fields) * self._num_by_row].reshape(len(ByRow._fields), self._num_by_row)

    def _entries_of(self, numbers: Any, size: int) -> Any:
        start = len(ByRow._fields) * self._num_by_row
        return numbers[start : start + len(ByEntry._fields) * round_up(size)].reshape(
            len(ByEntry._fields), round_up(size)
        )


class DraftBuffers:
    """Static tensors of a drafter's graphs over one page pool. Subclasses add those of draft passes."""

    def __init__(self, pool: PagePool, store: KVStore, rotary: Rotary, number: int) -> None:
        """number: identifies the buffers in keys of graphs."""
        device = pool.device
        self.max_rows = padded(pool.num_table_rows, ROWS)
        self.max_entries = max(padded(self.max_rows, ENTRIES), ENTRIES[-1])  # that one graph runs
        self.number, self.num_resized = number, pool.num_resized
        self.tables = pool.tables
        self.keys, self.values = store.stored  # [layers, slots, kv_heads, head_dim]
        self.rotary = rotary
        self.round = Numbers(self.max_rows, self.max_entries, device)
        # Seeds and temperatures of the rows' coming draws, for passes that use them.
        self.seeds = torch.zeros(self.max_rows, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(self.max_rows, device=device)
        # All zeros, since there is no tree: entries of the text see all entries before them.
        self.paths = torch.zeros(self.max_entries, 1, dtype=torch.int32, device=device)
        self.readers: tuple[Any, ...] = ()  # the address and shape of the hidden states that graphs read

    @property
    def by_table_row(self) -> tuple[Tensor, ...]:
        """Tensors of state that is kept by row of the block tables."""
        return ()

    def draws(self, rows: int, to_target: Tensor) -> DraftDraws:
        """What is known of the first rows' coming draws. to_target: [V] to add to a draft id."""
        lengths = self.round.by_row(rows).lengths[:rows]
        return DraftDraws(self.seeds[:rows], self.temperatures[:rows], lengths, to_target)

    def take(self, other: DraftBuffers) -> None:
        """Copy the rows' state from other buffers."""
        for own, old in zip(self.by_table_row, other.by_table_row, strict=True):
            own[: len(old)] = old


def ragged(counts: Numeric) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For flat items, `counts` per row: the row of each item, its place in the row, and each row's first item."""
    counts = np.asarray(counts, dtype=np.int64)
    begins = counts.cumsum() - counts
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - begins[rows], begins

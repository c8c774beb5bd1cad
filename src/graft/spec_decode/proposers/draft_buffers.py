"""Static tensors of captured drafters: the numbers that graphs read, features that wait, the walk's tables.

`captured` says what is done with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.model import PagePool
from graft.model.captures import Event, pinned_zeros, round_up
from graft.model.kv_cache import KVStore
from graft.model.llama import Rotary

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # that graphs are captured for
ENTRIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (64, 128, 256, 512)  # entries of prompts
PENDING = 32  # entries of a row that wait for a draft; then they are run without one
_TRANSFERS = 8  # of numbers, that may be under way

Numeric = np.ndarray | Sequence[int]


class ByRow(NamedTuple):
    """Inputs of a graph, [R + 1] int32; what is behind the rows in use is zero, and so belongs to line 0."""

    lines: Any = ()
    roots: Any = ()  # the last token of each row's text
    starts: Any = ()  # entries of each row before those to be run
    begins: Any = ()  # which of the entries to be run is the row's first
    counts: Any = ()  # how many they are
    lengths: Any = ()  # entries with them


class ByEntry(NamedTuple):
    """Inputs of a graph, [E] int32."""

    rows: Any = ()
    places: Any = ()  # among the row's entries to be run
    tokens: Any = ()  # the token after each
    sources: Any = ()  # where its features are: among hidden states, in `features`, or by the walk's tables
    targets: Any = ()  # where in `features` they are to wait


class Numbers:
    """Static int32 inputs of CUDA graphs, taken from the host to the device in one transfer."""

    def __init__(self, max_rows: int, max_entries: int, device: torch.device) -> None:
        self._num_by_row = round_up(max_rows + 1)
        size = len(ByRow._fields) * self._num_by_row + len(ByEntry._fields) * round_up(max_entries)
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        # Several, so that the host need not wait for the transfer before.
        self._here = [(pinned_zeros((size,), torch.int32, device), Event(device)) for _ in range(_TRANSFERS)]
        self._turns = itertools.cycle(self._here)

    def by_row(self, rows: int | None = None) -> ByRow:
        """On the device, for so many rows, or for all there can be; and one more, which has nothing."""
        end = self._num_by_row if rows is None else rows + 1
        return ByRow(*(part[:end] for part in self._rows_of(self._there)))

    def by_entry(self, size: int) -> ByEntry:
        """On the device, where `load` puts so many entries."""
        return ByEntry(*(part[:size] for part in self._entries_of(self._there, size)))

    def load(self, by_row: ByRow, by_entry: ByEntry, size: int) -> None:
        """Sends rows and entries, which are padded to `size` with entries of the first row that is nobody's."""
        here, loaded = next(self._turns)
        loaded.wait()
        array = here.numpy()
        end = len(ByRow._fields) * self._num_by_row + len(ByEntry._fields) * round_up(size)
        array[:end] = 0
        entries = self._entries_of(array, size)
        entries[0][len(by_entry.rows) :] = len(by_row.lines)
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
    """Static tensors of a drafter's graphs over one pool of pages, but for those of its passes."""

    def __init__(
        self, weight: Tensor, pool: PagePool, store: KVStore, rotary: Rotary, number: int, max_ahead: int, passes: int
    ) -> None:
        """weight: that of `DraftHead.fc`. number: its own, in the keys of its graphs. passes: of a round at most."""
        device, num_table_rows = pool.device, pool.num_table_rows
        max_rows = padded(num_table_rows, ROWS)
        self.number, self.num_resized = number, pool.num_resized
        self.tables = pool.tables
        self.keys, self.values = store.stored  # [layers, slots, kv_heads, head_dim]
        self.rotary = rotary
        # By line of the block tables: features of entries that wait.
        self.features = weight.new_zeros(num_table_rows, PENDING, weight.shape[1])
        max_entries = padded(max_rows * PENDING, ENTRIES)
        self.max_rows, self.max_entries = max_rows, max_entries
        self.round = Numbers(max_rows, max_entries, device)
        self.chunk = Numbers(1, CHUNKS[-1], device)
        walk_shape = (max_rows + 1, max_ahead)
        self.walked = torch.zeros(walk_shape, dtype=torch.int32, device=device)  # the tokens of each row's round
        self.nodes = torch.zeros(walk_shape, dtype=torch.int32, device=device)  # of the step, that they come after
        # Nobody's: entries with the target's features see all that stands before them.
        self.paths = torch.zeros(max(max_entries, CHUNKS[-1]), 1, dtype=torch.int32, device=device)
        self.was_sent = [Event(device) for _ in range(passes)]
        # Whose rows `round` and the passes are; others draft anew.
        self.owner: Callable[[], object | None] = lambda: None
        self.readers: tuple[Any, ...] = ()  # the address and shape of the hidden states that graphs read

    @property
    def by_line(self) -> tuple[Tensor, ...]:
        """What is kept of rows, by line of the block tables."""
        return (self.features,)

    def take(self, other: DraftBuffers) -> None:
        """Goes on with what another has kept of the rows."""
        for own, old in zip(self.by_line, other.by_line, strict=True):
            own[: len(old)] = old


def padded(count: int, sizes: Sequence[int]) -> int:
    """The least of `sizes` that is no less; a multiple of the last if none is."""
    return next((size for size in sizes if size >= count), round_up(count, sizes[-1]))


def ragged(counts: Numeric) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of things that stand row by row: the row of each, its place in the row, and each row's first."""
    counts = np.asarray(counts, dtype=np.int64)
    begins = counts.cumsum() - counts
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - begins[rows], begins

"""Static tensors of heads in Triton: the inputs of graphs. `head_drafter` uses them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.model import PagePool
from graft.model.captures import ROWS, Event, padded, pinned_zeros, round_up
from graft.model.kv_cache import KVStore
from graft.model.llama import Rotary
from graft.tree.device.buffers import Entries

# Numbers of entries that graphs are captured for.
ENTRIES = (4, 16, 64, 128, 256, 512, 1024, 2048)
_TRANSFERS = 8  # host buffers, used in turns; with too few, the host would wait for the device

Numeric = np.ndarray | Sequence[int]


class EntryBuffer:
    """`Entries` at fixed addresses, sent to the device in one transfer."""

    def __init__(self, max_rows: int, max_entries: int, device: torch.device) -> None:
        self._num_by_row = round_up(max_rows + 1)
        size = 4 * (self._num_by_row + round_up(max_entries))
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        # Several buffers, so that the host need not wait for the previous transfer.
        self._here = [(pinned_zeros((size,), torch.int32, device), Event(device)) for _ in range(_TRANSFERS)]
        self._turns = itertools.cycle(self._here)

    def entries(self, size: int) -> Entries:
        """The `size` entries on the device."""
        flat, by_row = self._parts_of(self._there, size)
        return Entries(*(part[:size] for part in flat), *by_row)

    def load(self, size: int, flat: Sequence[Numeric] = (), by_row: Sequence[Numeric] = ()) -> None:
        """Send entries, in the order of the fields of `Entries`, and pad them to `size`.

        Padding belongs to the first padding row, whose block table row is 0.
        """
        here, loaded = next(self._turns)
        loaded.wait()
        array = here.numpy()
        end = 4 * (self._num_by_row + round_up(size))
        array[:end] = 0
        for parts, given in zip(self._parts_of(array, size), (flat, by_row), strict=True):
            for part, numbers in zip(parts, given, strict=False):
                part[: len(numbers)] = numbers
        if flat:
            self._parts_of(array, size)[0][0][len(flat[0]) :] = len(by_row[0])
        self._there[:end].copy_(here[:end], non_blocking=True)
        loaded.record()

    def _parts_of(self, numbers: Any, size: int) -> Any:
        """The parts by entry, and those by row."""
        end = 4 * self._num_by_row
        flat = numbers[end : end + 4 * round_up(size)].reshape(4, round_up(size))
        return flat, numbers[:end].reshape(4, self._num_by_row)


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
        self.new = EntryBuffer(self.max_rows, self.max_entries, device)
        # All zeros, since there is no tree: entries of the text see all entries before them.
        self.paths = torch.zeros(self.max_entries, 1, dtype=torch.int32, device=device)
        self.readers: tuple[Any, ...] = ()  # the address and shape of the hidden states that graphs read

    @property
    def by_table_row(self) -> tuple[Tensor, ...]:
        """Tensors of state that is kept by row of the block tables."""
        return ()

    def take(self, other: DraftBuffers) -> None:
        """Copy the rows' state from other buffers."""
        for own, old in zip(self.by_table_row, other.by_table_row, strict=True):
            own[: len(old)] = old

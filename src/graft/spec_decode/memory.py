"""Memory: what rounds have learned from texts, which is n-gram tables and finished texts, on the target's device.

`tree/device` reads it in every round and writes to the tables; `DeviceRounds` adds finished texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from graft.model.hashing import mix64
from graft.spec_decode.sources import TABLES
from graft.spec_decode.states import named, part_of
from graft.tree.device.buffers import NO_TOKEN, NUM_SUCCESSORS, Tables

PAST_TOKENS = 1 << 18  # tokens of finished texts to search for copies
ROWS = 1 << 18  # rows of a hashed table
ISOLATED_ROWS = 1 << 20  # the same where texts are isolated
# Hash factors of the last three tokens, latest first, and of the salt. The row is the high bits of the sum of products.
FACTORS = mix64(torch.arange(4)) | 1

Send = Callable[[Sequence[int], torch.dtype], Tensor]


class PastTexts:
    """Finished texts in a ring. Each is followed by NO_TOKEN, so that nothing is matched or copied across its end."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tokens = torch.full((size,), NO_TOKEN, dtype=torch.int32, device=device)
        self.owners = torch.zeros(size, dtype=torch.int64, device=device)  # a row copies only its own owner's
        self.end = torch.zeros(2, dtype=torch.int64, device=device)  # tokens ever written, and ever dropped
        self._written = 0

    def add(self, text: Sequence[int], owner: int, send: Send) -> None:
        """Write a finished text over the oldest ones. send: copies numbers to the device."""
        size = len(self.tokens)
        ids = [*text[-size // 2 :], NO_TOKEN]
        tokens, at = send(ids, torch.int32), self._written % size
        before_wrap = min(len(ids), size - at)
        for first, place, count in ((0, at, before_wrap), (before_wrap, 0, len(ids) - before_wrap)):
            if count > 0:
                self.tokens[place : place + count].copy_(tokens[first : first + count])
                self.owners[place : place + count].fill_(owner)
        self._written += len(ids)
        self.end.copy_(send([self._written, max(self._written - size, 0)], torch.int64))

    def texts(self) -> list[list[int]]:
        """All of them, without the oldest one if a part of it may have been overwritten."""
        size = len(self.tokens)
        first = max(self._written - size, 0)
        places = torch.arange(first, self._written, device=self.tokens.device) % size
        tokens = self.tokens[places].tolist()
        texts = [list(group) for is_text, group in itertools.groupby(tokens, lambda token: token >= 0) if is_text]
        return texts[1:] if first and tokens[0] >= 0 else texts

    def clear(self) -> None:
        self._written = 0
        self.end.zero_()


class Memory:
    """Tables and finished texts of one policy. Their memory is allocated at first use."""

    def __init__(
        self,
        vocab_size: int,
        isolated: bool,
        device: Callable[[], torch.device],
        keeps_past: bool = True,
        tables: Sequence[str] = TABLES,
    ) -> None:
        """isolated: texts learn only from themselves and from texts of the same owner.

        keeps_past: whether finished texts are kept. tables: those that learn, neighbours among `TABLES`; others stay
        empty.
        """
        self.isolated, self._vocab_size, self._device = isolated, vocab_size, device
        self.keeps_past, self._tables = keeps_past, tables

    @cached_property
    def past(self) -> PastTexts:
        return PastTexts(PAST_TOKENS if self.keeps_past else 1, self._device())

    @cached_property
    def tables(self) -> Tables | None:
        if not self._tables:
            return None
        rows = ISOLATED_ROWS if self.isolated else ROWS
        sizes = (rows, rows, rows if self.isolated else self._vocab_size)
        first = TABLES.index(self._tables[0])
        learned = (first, first + len(self._tables))
        return Tables.make(sizes, (True, True, self.isolated), FACTORS, self.isolated, self._device(), learned)

    def state(self) -> dict[str, Tensor]:
        """A copy of everything learned, on the host. Texts of isolated owners are left out."""
        held: dict[str, Tensor] = {}
        for name, _, is_hashed, entries, tags in self._by_table():
            rows = (entries[:, 0] >= 0).nonzero().squeeze(1)
            part = {"rows": rows.int().cpu(), "entries": entries[rows].cpu()}
            held |= named(name, part | ({"tags": tags[rows].cpu()} if is_hashed else {}))
        if self.keeps_past:
            texts = [] if self.isolated else self.past.texts()
            flat = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
            held |= named("past", {"tokens": flat, "lengths": torch.tensor([*map(len, texts)], dtype=torch.int64)})
        return held

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was learned by the output of `state`; what is missing there starts empty."""
        for name, bits, is_hashed, entries, tags in self._by_table():
            entries.fill_(-1)
            tags.zero_()
            if held := part_of(state, name):
                rows, new, new_tags = _rows_to_write(held, bits if is_hashed else 0, len(entries))
                at = torch.from_numpy(rows).to(entries.device)
                entries[at, : new.shape[1]] = torch.from_numpy(new).to(entries.device)
                tags[at] = torch.from_numpy(new_tags).to(tags.device)
        if self.keeps_past:
            self.past.clear()
            if past := part_of(state, "past"):
                for text in past["tokens"].split(past["lengths"].tolist()):
                    self.past.add(text.tolist(), 0, lambda ids, dtype: torch.tensor(ids, dtype=dtype))

    def _by_table(self) -> list[tuple[str, int, bool, Tensor, Tensor]]:
        """By table: its name, the bits of its row numbers, whether it is hashed, its entries and its tags."""
        if self.tables is None:
            return []
        ends = [*self.tables.starts.tolist(), len(self.tables.entries)]
        parts = zip(TABLES, self.tables.row_bits.tolist(), itertools.pairwise(ends), strict=True)
        return [
            (name, bits, bits > 0, self.tables.entries[first:end], self.tables.tags[first:end])
            for name, bits, (first, end) in parts
            if name in self._tables
        ]


def _rows_to_write(held: Mapping[str, Tensor], bits: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows, entries and tags of a saved table for one of another size. bits: of a hashed row; 0: no hash.

    Raises a ValueError if the saved parts do not belong together.
    """
    rows, entries = held["rows"].cpu().long().numpy(), held["entries"].cpu().int().numpy()
    # Rows of a table without hashes are tokens; the tag of one under salt 0 follows.
    tags = held["tags"].cpu().numpy() if "tags" in held else rows * int(FACTORS[0])
    if entries.ndim != 2 or not len(rows) == len(entries) == len(tags) or entries.shape[1] > NUM_SUCCESSORS:
        raise ValueError("the rows, tags and entries of a table do not fit together")
    if bits:
        rows = (tags.view(np.uint64) >> np.uint64(64 - bits)).astype(np.int64)
    if len(rows) and not (rows.min() >= 0 and rows.max() < size):
        raise ValueError("a table has rows for tokens that the model does not have")
    _, last = np.unique(rows[::-1], return_index=True)  # of equal rows, the last one stays
    kept = len(rows) - 1 - last
    return rows[kept], entries[kept], tags[kept]

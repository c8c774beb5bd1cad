"""Batch: the sequences that are decoded together, with the KV cache, sampler and draft state of their rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.model import Chunk, KVCache
from graft.model.sampler import Chooser
from graft.request.sequence import Sequence


@dataclass
class Batch:
    """Sequences and the state of their rows. Row i of every field belongs to sequence i."""

    sequences: list[Sequence]
    cache: KVCache  # of the target
    chooser: Chooser | None  # None in device rounds, which choose by themselves
    draft: Any = None  # the drafter's DraftState
    is_on_device: bool = False  # whether it is decoded in device rounds
    num_prefill_tokens: int = 0  # prompt tokens of other batches in the coming step
    _max_depth: int | None = None  # cached for the current round

    def roots(self) -> Tensor:
        """[B] the last known token of each sequence."""
        return torch.tensor([sequence.ids[-1] for sequence in self.sequences])

    @property
    def max_depth(self) -> int:
        """The longest useful path of a tree. The last token of a round is the target's own."""
        if self._max_depth is None:
            self._max_depth = max([sequence.num_remaining for sequence in self.sequences]) - 1
        return self._max_depth

    def begin_round(self, num_prefill_tokens: int) -> None:
        self.num_prefill_tokens, self._max_depth = num_prefill_tokens, None

    def settle(self) -> None:
        """Settle the sequences' earlier rounds while the device computes. A failure ends only that sequence."""
        for sequence in self.sequences:
            try:
                sequence.settle()
            except Exception as error:
                sequence.failure = error

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row's state to another row, because answers to the same prompt share its prefill."""
        self.cache.pool.copy(self.cache.rows[source], self.cache.rows[target])
        if self.draft is not None:
            self.draft.copy_row(source, target, self.cache.rows[target])

    def join(self, other: Batch) -> None:
        """Append the rows of another batch that the same engine opened."""
        chooser = self.chooser.concat(other.chooser) if self.chooser is not None else None
        draft = self.draft.concat(other.draft) if self.draft is not None else None
        cache = self.cache.with_rows(self.cache.rows + other.cache.rows)
        sequences = self.sequences + other.sequences
        self.cache, self.chooser, self.draft, self.sequences = cache, chooser, draft, sequences

    def keep(self, rows: Iterable[int]) -> None:
        """Keep only these rows, and release the pages of the others."""
        stay = set(rows)
        kept = sorted(stay)
        chooser = self.chooser.select(kept) if self.chooser is not None else None
        draft = self.draft.select(kept) if self.draft is not None else None
        cache = self.cache.with_rows([self.cache.rows[row] for row in kept])
        gone = [row for number, row in enumerate(self.cache.rows) if number not in stay]
        sequences = [self.sequences[row] for row in kept]
        self.cache, self.chooser, self.draft, self.sequences = cache, chooser, draft, sequences
        for row in gone:
            cache.pool.release(row)

    def next_chunk(self, row: int, max_tokens: int) -> Chunk:
        """The next tokens of the row's text to prefill. The text's last token is left for the first round's root."""
        start, ids = self.cache.rows[row].length, self.sequences[row].ids
        return Chunk(self.cache.rows[row], ids[start : min(start + max_tokens, len(ids) - 1)])

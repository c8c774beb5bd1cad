"""Batch: the sequences that are decoded together, and what is kept for each of their rows."""

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
    """Row i of everything belongs to sequence i."""

    sequences: list[Sequence]
    cache: KVCache  # of the target
    chooser: Chooser
    draft: Any = None  # what the policy's drafter keeps, a DraftState
    num_other_tokens: int = 0  # of the coming step, of prompts that are read meanwhile
    _max_depth: int | None = None  # of the round under way

    def roots(self) -> Tensor:
        """[B] the last known token of each sequence."""
        return torch.tensor([sequence.ids[-1] for sequence in self.sequences])

    @property
    def max_depth(self) -> int:
        """The round's last token is the target's own, so no path need be longer than what is left less one."""
        if self._max_depth is None:
            self._max_depth = max([sequence.num_remaining for sequence in self.sequences]) - 1
        return self._max_depth

    def begin_round(self, num_other_tokens: int) -> None:
        self.num_other_tokens, self._max_depth = num_other_tokens, None

    def copy_row(self, source: int, target: int) -> None:
        """Makes one row what another is: answers to the same prompt share its prefill."""
        self.cache.pool.copy(self.cache.rows[source], self.cache.rows[target])
        if self.draft is not None:
            self.draft.copy_row(source, target, self.cache.rows[target])

    def join(self, other: Batch) -> None:
        """Takes in the rows of another batch, behind its own; both were opened by the same engine."""
        chooser = self.chooser.joining(other.chooser)
        draft = self.draft.concat(other.draft) if self.draft is not None else None
        cache = self.cache.with_rows(self.cache.rows + other.cache.rows)
        sequences = self.sequences + other.sequences
        self.cache, self.chooser, self.draft, self.sequences = cache, chooser, draft, sequences

    def keep(self, rows: Iterable[int]) -> None:
        """Goes on with these rows alone; the others' pages are given back."""
        places = sorted(set(rows))
        chooser = self.chooser.keeping(places)
        draft = self.draft.select(places) if self.draft is not None else None
        cache = self.cache.with_rows([self.cache.rows[row] for row in places])
        stay = set(places)
        gone = [row for number, row in enumerate(self.cache.rows) if number not in stay]
        sequences = [self.sequences[row] for row in places]
        self.cache, self.chooser, self.draft, self.sequences = cache, chooser, draft, sequences
        for row in gone:
            cache.pool.release(row)

    def release(self) -> None:
        """Gives all pages back."""
        self.cache.release()

    def rest_of(self, row: int, most: int) -> Chunk:
        """At most so many tokens of the row's text that are next to be read; the last token is the first root."""
        start, ids = self.cache.rows[row].length, self.sequences[row].ids
        return Chunk(self.cache.rows[row], ids[start : min(start + most, len(ids) - 1)])

"""Batch: the sequences that are decoded together, and what is kept for each of their rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.model import TreeCache
from graft.sequence import Sequence
from graft.spec_decode.acceptance import Chooser


@dataclass
class Batch:
    """Row i of everything belongs to sequence i."""

    sequences: list[Sequence]
    cache: TreeCache  # of the target
    chooser: Chooser
    draft: Any = None  # what the policy's drafter keeps, a DraftState

    def roots(self) -> Tensor:
        """[B] the last known token of each sequence."""
        return torch.tensor([sequence.ids[-1] for sequence in self.sequences])

    @property
    def max_depth(self) -> int:
        """The round's last token is the target's own, so no path need be longer than what is left less one."""
        return max(sequence.num_remaining for sequence in self.sequences) - 1

    def copy_row(self, source: int, target: int) -> None:
        """Makes one row what another is: answers to the same prompt share its prefill."""
        self.cache.copy_row(source, target)
        if self.draft is not None:
            self.draft.copy_row(source, target)

    # Whoever joins or goes, does so in all parts or in none: each part gives a new one in place of itself, and when all
    # have done so they are exchanged, which cannot fail. What a part writes meanwhile is no row of the old one's.

    def reserve(self, num_rows: int) -> None:
        """Makes room for so many rows that may join."""
        cache = self.cache.reserving(num_rows)
        draft = self.draft.reserving(num_rows) if self.draft is not None else None
        self.cache, self.draft = cache, draft

    def join(self, other: Batch) -> None:
        """Takes in the rows of another batch, behind its own; both were opened by the same engine."""
        cache, chooser = self.cache.joining(other.cache), self.chooser.joining(other.chooser)
        draft = self.draft.joining(other.draft) if self.draft is not None else None
        sequences = self.sequences + other.sequences
        self.cache, self.chooser, self.draft, self.sequences = cache, chooser, draft, sequences

    def keep(self, rows: Iterable[int]) -> None:
        """Goes on with these rows alone; the last ones take the places of those that go."""
        places = _places(set(rows))
        cache, chooser = self.cache.keeping(places), self.chooser.keeping(places)
        draft = self.draft.keeping(places) if self.draft is not None else None
        sequences = [self.sequences[row] for row in places]
        self.cache, self.chooser, self.draft, self.sequences = cache, chooser, draft, sequences


def _places(rows: set[int]) -> list[int]:
    """Rows that stay, in an order in which few move, and those to places that nobody has any more."""
    last = iter(sorted(row for row in rows if row >= len(rows)))
    return [place if place in rows else next(last) for place in range(len(rows))]

"""Batch: the sequences that are decoded together, and what is kept for each of their rows."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.accept import Chooser
from graft.sequence import Sequence
from graft.target import TreeCache


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

    def reserve(self, num_rows: int) -> None:
        """Makes room for so many rows that may join."""
        self.cache.reserve(num_rows)
        if self.draft is not None:
            self.draft.reserve(num_rows)

    def join(self, other: Batch) -> None:
        """Takes in the rows of another batch, behind its own; both were opened by the same engine."""
        self.cache.join(other.cache)
        if self.draft is not None:
            self.draft.join(other.draft)
        self.chooser.join(other.chooser)
        self.sequences = self.sequences + other.sequences

    def keep(self, rows: SequenceOf[int]) -> None:
        """Goes on with these rows alone, in this order."""
        self.sequences = [self.sequences[row] for row in rows]
        self.cache.keep(rows)
        self.chooser.keep(rows)
        if self.draft is not None:
            self.draft.keep(rows)

"""FlatStep: the tokens of one forward, row after row: nodes of draft trees, then chunks of prompts.

Rows are not padded to a common width. For each token the step holds its row, its place among the row's tokens of the
step, and its parent's place. The rows' committed tokens are in pages (`kv_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.model.kv_cache import PAGE, Row
from graft.tree.device import c_kernels
from graft.tree.tree import DraftTree

LONG_TEXT = 16_384  # tokens; the scheduler makes smaller steps when a row's text is longer
COLUMNS = 6  # tokens, parents, places, depths, rows and strips, as in `Layout`


class Chunk(NamedTuple):
    """The part of a row's prompt that follows its committed tokens."""

    row: Row
    tokens: Sequence[int]


@dataclass(frozen=True)
class Part:
    """Draft trees [B, W], or one chunk [1, W], and where their tokens are in the step."""

    tokens: Tensor  # [B, W] on the host
    index: Tensor  # [B, W] int64 on the host: indices into the step's tokens; padding has its row's root
    counts: list[int]  # [B] tokens, padding not counted


class FlatStep:
    """A step on the host, in int32; `Layout` is its counterpart on the device."""

    def __init__(
        self,
        rows: Sequence[Row],
        tree: DraftTree | None,
        chunks: Sequence[Chunk] = (),
        columns: np.ndarray | None = None,
        by_row: np.ndarray | None = None,
    ) -> None:
        """rows: those of the tree. columns [6, room], by_row [4, room]: buffers to write into; None: new ones."""
        all_rows = [*rows, *(chunk.row for chunk in chunks)]
        num_in_trees = tree.tokens.numel() if tree is not None else 0
        room = num_in_trees + sum(len(chunk.tokens) for chunk in chunks)
        self.columns = np.empty((COLUMNS, room), dtype=np.int32) if columns is None else columns
        self.by_row = np.empty((4, len(all_rows)), dtype=np.int32) if by_row is None else by_row
        self.rows = all_rows
        self.tree: Part | None = None
        self.chunks: list[Part] = []
        self.num_tokens = 0
        if tree is not None:
            self._add_tree(tree)
        for number, chunk in enumerate(chunks, start=len(rows)):
            self._add_chunk(number, chunk.tokens)
        self.by_row[2, : len(all_rows)] = [row.length for row in all_rows]
        self.by_row[3, : len(all_rows)] = [row.block_table_row for row in all_rows]

    def _add_tree(self, tree: DraftTree) -> None:
        num_rows, width = tree.tokens.shape
        index = torch.empty(num_rows, width, dtype=torch.int64)
        columns = (tree.tokens, tree.parents, tree.sources, self.columns, self.by_row)
        self.num_tokens = c_kernels.flatten_trees(*columns, index)
        self.tree = Part(tree.tokens, index, self.by_row[1, :num_rows].tolist())

    def _add_chunk(self, number: int, given: Sequence[int]) -> None:
        start, count = self.num_tokens, len(given)
        end, places = start + count, np.arange(count, dtype=np.int32)
        self.columns[0, start:end] = given
        self.columns[1, start:end] = np.maximum(places - 1, 0)
        self.columns[2, start:end] = self.columns[3, start:end] = places
        self.columns[4, start:end] = number
        self.columns[5, start:end] = np.where(places + 1 < count, places + 1, -count)
        self.by_row[:2, number] = start, count
        self.chunks.append(Part(torch.tensor([list(given)]), torch.arange(start, end)[None], [count]))
        self.num_tokens = end

    def skip_already_run(self, num_already_run: int) -> np.ndarray:
        """Leave out the first nodes of each tree, and let `tree` point at the outputs of the others.

        Returns [T] bool: which tokens are run.
        """
        assert self.tree is not None and not self.chunks
        is_new = self.columns[2, : self.num_tokens] >= num_already_run
        index = torch.from_numpy(np.cumsum(is_new) - 1)[self.tree.index]
        self.tree = Part(self.tree.tokens, index, self.tree.counts)
        return is_new

    @property
    def tokens(self) -> np.ndarray:
        return self.columns[0, : self.num_tokens]

    @property
    def parents(self) -> np.ndarray:
        return self.columns[1, : self.num_tokens]

    def positions(self) -> np.ndarray:
        """[T] position of each token in its text."""
        return self._lengths_of_tokens() + self.columns[3, : self.num_tokens]

    def slots(self) -> np.ndarray:
        """[T] slot of each token's keys and values."""
        positions = self._lengths_of_tokens() + self.columns[2, : self.num_tokens]
        slots = np.empty(self.num_tokens, dtype=np.int64)
        for row, start, count in zip(self.rows, *self.by_row[:2, : len(self.rows)].tolist(), strict=True):
            own = positions[start : start + count]
            slots[start : start + count] = np.array(row.pages, dtype=np.int64)[own // PAGE] * PAGE + own % PAGE
        return slots

    def _lengths_of_tokens(self) -> np.ndarray:
        lengths: np.ndarray = self.by_row[2][self.columns[4, : self.num_tokens]]
        return lengths

"""Block drafter by CUDA graphs: one graph runs the block and makes the table from which the host builds the trees.

`captured` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.model import PagePool
from graft.model.attention import KernelStep
from graft.model.captures import ROWS, padded
from graft.model.kernels import gate
from graft.model.kernels import topk as topk_kernels
from graft.model.kv_cache import PAGE, KVStore
from graft.model.layout import Layout, bidirectional_columns
from graft.model.noise import ComingDraws
from graft.spec_decode.proposers.block import kernels as block_kernels
from graft.spec_decode.proposers.block.drafter import BlockDrafter, BlockTreeSettings, table_of
from graft.spec_decode.proposers.block.fused_head import FastBlock
from graft.spec_decode.proposers.block.head import BlockHead
from graft.spec_decode.proposers.block.tree import Ranking, Table
from graft.spec_decode.proposers.captured import CapturedDrafter
from graft.spec_decode.proposers.captured_state import CapturedState
from graft.spec_decode.proposers.draft_buffers import ByRow, DraftBuffers
from graft.spec_decode.proposers.eager import DraftRow
from graft.tree.candidates import Level


class Shape(NamedTuple):
    """Shape of a round's tables."""

    rows: int  # with padding
    is_chain: bool  # else tables for trees


class BlockBuffers(DraftBuffers):
    """Static tensors, with those of blocks and tables."""

    def __init__(self, fast: FastBlock, pool: PagePool, store: KVStore, number: int) -> None:
        super().__init__(pool, store, fast.rotary(pool.tables.shape[1] * PAGE), number, num_passes=1)
        self.width = fast.config.block_size
        rows = torch.arange(self.max_rows, dtype=torch.int32, device=pool.device)
        self._rows_of = rows.repeat_interleave(self.width)  # by slot
        self._starts = rows * self.width
        self._counts = torch.full_like(rows, self.width)
        self._places = torch.arange(self.width, dtype=torch.int32, device=pool.device).repeat(self.max_rows)
        self._two_ways = bidirectional_columns(self.width, self.max_rows, fast.tile, pool.device)
        self._fits_tile = self.width <= fast.tile
        self._tables: dict[Shape, Tensor] = {}

    def layout(self, rows: int, context: int) -> Layout:
        """Layout of causal slots after the entries of their rows."""
        count, by_row = rows * self.width, self.round.by_row(rows)
        return Layout(
            rows=self._rows_of[:count],
            places=self._places[:count],
            depths=self._places[:count],
            paths=self._two_ways[2][:count],  # not read
            starts=self._starts[:rows],
            counts=self._counts[:rows],
            lengths=by_row.lengths[:rows],
            table_rows=by_row.table_rows[:rows],
            tables=self.tables,
            max_context=context,
            only_chains=True,
        )

    def two_ways(self, layout: Layout) -> Layout:
        """The same slots, each of which sees all slots of its row."""
        places, depths, paths = (part[: len(layout.rows)] for part in self._two_ways)
        return replace(layout, places=places, depths=depths, paths=paths, only_chains=self._fits_tile)

    def table(self, shape: Shape, size: tuple[int, int]) -> Tensor:
        """The buffer for tables, [3, rows, *size] int32."""
        if shape not in self._tables:
            self._tables[shape] = torch.zeros(3, shape.rows, *size, dtype=torch.int32, device=self._places.device)
        return self._tables[shape]


class CapturedBlockDrafter(CapturedDrafter[DraftRow, BlockBuffers], BlockDrafter):
    """Drafts with a block head by CUDA graphs."""

    def __init__(self, head: BlockHead, settings: BlockTreeSettings | None = None) -> None:
        """head: one for which `fused_head.why_not` is None."""
        super().__init__(head, settings)
        self.fast = FastBlock(head)
        self._table_sizes: dict[bool, tuple[int, int]] = {}  # by `Shape.is_chain`

    def passes(
        self,
        state: Any,
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Sequence[Level]]:
        if not isinstance(state, CapturedState):
            yield from super().passes(state, roots, keep, draws)
            return
        shape = self._shape_of(len(state.rows), keep)
        with self._captures.lock, state.pool.lock:
            buffers = self._make_pass(state, roots, shape, 0)
            numbers = self._table_in(buffers, shape).to("cpu", copy=True)  # waits for the device
        table = Table(*(part[: len(state.rows)] for part in _as_table(numbers)))
        yield self._levels(table, shape.is_chain)

    def _table_in(self, buffers: BlockBuffers, shape: Shape) -> Tensor:
        """Where a pass leaves its table."""
        if shape.is_chain not in self._table_sizes:  # sizes are found by making a table of zeros
            config, weight = self.head.config, self.head.fc.weight
            hidden, roots = weight.new_zeros(1, config.num_drafts, config.hidden_size), self.head.d2t.new_zeros(1)
            with torch.no_grad():
                tokens = table_of(self.head, hidden, roots, self.settings, shape.is_chain).tokens
            self._table_sizes[shape.is_chain] = tokens.shape[1], tokens.shape[2]
        return buffers.table(shape, self._table_sizes[shape.is_chain])

    def _new_buffers(self, pool: PagePool, store: KVStore, number: int) -> BlockBuffers:
        return BlockBuffers(self.fast, pool, store, number)

    def _shape_of(self, num_rows: int, keep: int | None) -> Shape:
        return Shape(padded(num_rows, ROWS), keep == 1)

    # Graphs

    def _replay_pass(self, buffers: BlockBuffers, shape: Shape, number: int, context: int) -> None:
        there = self._table_in(buffers, shape)
        self._replay(buffers, ("block", shape, context), partial(self._run_block, buffers, shape, context, there))

    def _enter(self, buffers: BlockBuffers, features: Tensor, tokens: Tensor, by_row: ByRow, layout: Layout) -> None:
        self.fast.enter(features, layout, buffers.keys, buffers.values, buffers.rotary)

    @torch.no_grad()
    def _run_block(self, buffers: BlockBuffers, shape: Shape, context: int, there: Tensor) -> None:
        rows = shape.rows
        roots = buffers.round.by_row(rows).roots[:rows]
        layout = buffers.layout(rows, context)
        causal, two_ways = KernelStep(layout), KernelStep(buffers.two_ways(layout))
        seen = [causal if is_causal else two_ways for is_causal in self.head.config.causal]
        hidden = self.fast.run(roots, causal, seen, buffers.keys, buffers.values, buffers.rotary)
        table = _as_table(there)

        def children(logits: Tensor, candidates: Tensor, k: int) -> Table:
            block_kernels.children(logits, candidates, k, *table)
            return table

        ranking = Ranking(_highest, children)
        made = table_of(self.head, hidden, roots.long(), self.settings, shape.is_chain, ranking)
        for part, own in zip(table, made, strict=True):
            gate.copy(part, own)  # no copy if it was made in place


def _highest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`topk.highest`, with ids that PyTorch can use as indices even if a shut gate leaves them unwritten."""
    ids, best, total = topk_kernels.highest(logits, k)
    return ids.clamp(0, logits.shape[1] - 1) if gate.is_set() else ids, best, total


def _as_table(numbers: Tensor) -> Table:
    """View tables [3, rows, entries, tokens] int32, whose probabilities are float32 bits."""
    return Table(numbers[0], numbers[1].view(torch.float32), numbers[2])

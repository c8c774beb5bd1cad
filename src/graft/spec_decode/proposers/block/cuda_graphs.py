"""CUDA graphs of the block drafter: one graph runs the whole block and makes the table, from which the host builds the
trees. What comes before it, and drafting ahead, is in `captured`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graft.model import PagePool
from graft.model.attention import KernelStep, Layout, two_way_columns
from graft.model.captures import on_host
from graft.model.kernels import block as block_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kv_cache import PAGE, KVStore
from graft.spec_decode.candidates import Level
from graft.spec_decode.proposers.block.drafter import BlockDrafter, BlockTreeSettings, table_of
from graft.spec_decode.proposers.block.fused_head import FastBlock
from graft.spec_decode.proposers.block.head import BlockHead
from graft.spec_decode.proposers.block.tree import Ranking, Table, levels_of
from graft.spec_decode.proposers.captured import CapturedDrafter, CapturedState
from graft.spec_decode.proposers.draft_buffers import ROWS, ByRow, DraftBuffers, padded
from graft.spec_decode.proposers.eager import DraftRow


class BlockBuffers(DraftBuffers):
    """The static tensors, with those of blocks and tables."""

    def __init__(self, fast: FastBlock, max_ahead: int, *given: Any) -> None:
        """given: a pool, its store, and the buffers' number."""
        pool, store, number = given
        rotary = fast.rotary(pool.tables.shape[1] * PAGE)
        super().__init__(fast.head.fc.weight, pool, store, rotary, number, max_ahead, passes=1)
        self.width = fast.config.block_size
        rows = torch.arange(self.max_rows, dtype=torch.int32, device=pool.device)
        self._rows_of = rows.repeat_interleave(self.width)  # by slot
        self._starts = rows * self.width
        self._counts = torch.full_like(rows, self.width)
        self._places = torch.arange(self.width, dtype=torch.int32, device=pool.device).repeat(self.max_rows)
        self._two_ways = two_way_columns(self.width, self.max_rows, fast.tile, pool.device)
        self._fits_tile = self.width <= fast.tile
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}

    def layout(self, rows: int, context: int) -> Layout:
        """Slots of so many rows behind their entries, each of which sees those before it."""
        count, by_row = rows * self.width, self.round.by_row(rows)
        return Layout(
            rows=self._rows_of[:count],
            places=self._places[:count],
            depths=self._places[:count],
            paths=self._two_ways[2][:count],  # of which none is read
            starts=self._starts[:rows],
            counts=self._counts[:rows],
            lengths=by_row.lengths[:rows],
            lines=by_row.lines[:rows],
            tables=self.tables,
            max_context=context,
            only_chains=True,
        )

    def two_ways(self, layout: Layout) -> Layout:
        """The same slots, each of which sees all of its row's."""
        places, depths, paths = (part[: len(layout.rows)] for part in self._two_ways)
        return replace(layout, places=places, depths=depths, paths=paths, only_chains=self._fits_tile)

    def sent(self, rows: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Room for the tables of so many rows, [3, rows, *size] int32: on the device, and on the host."""
        if rows not in self._sent:
            shape, device = (3, rows, *size), self._places.device
            there = torch.zeros(shape, dtype=torch.int32, device=device)
            self._sent[rows] = there, on_host(shape, torch.int32, device)
        return self._sent[rows]


class CapturedBlockDrafter(CapturedDrafter[DraftRow, BlockBuffers], BlockDrafter):
    """Block drafter by CUDA graphs."""

    def __init__(self, head: BlockHead, settings: BlockTreeSettings | None = None) -> None:
        """head: one for which `fused_head.why_not` is None."""
        super().__init__(head, settings)
        self.fast = FastBlock(head)
        self.max_ahead = max(self.max_ahead, self.max_depth + 1)
        self._table_size: tuple[int, int] | None = None

    def passes(
        self, state: Any, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Sequence[Level]]:
        if not isinstance(state, CapturedState):
            yield from super().passes(state, roots, keep, stops)
            return
        with self._captures.lock, state.pool.lock:
            for row, root in zip(state.rows, roots.tolist(), strict=True):
                if row.root != root:  # a text without a prompt to read
                    row.root, state.num_prefetched = root, 0
            self._begin(state, keep, 1)
            state.num_taken = 1
            levels = levels_of(self._received(state), self.max_depth, self.settings.nodes)
        yield levels

    def _received(self, state: CapturedState) -> Table:
        """The tables of a state's rows, on the host; the next pass writes over them."""
        buffers = self._buffers[state.pool]
        _, here = buffers.sent(self._shape(state), self._size_of_table())
        buffers.was_sent[0].wait()
        return Table(*(part[: len(state.rows)] for part in _as_table(here)))

    def _size_of_table(self) -> tuple[int, int]:
        """Entries of a row's table, and tokens of an entry; found by making one, of nothing."""
        if self._table_size is None:
            config, weight = self.head.config, self.head.fc.weight
            hidden = weight.new_zeros(1, config.num_drafts, config.hidden_size)
            with torch.no_grad():
                table = table_of(self.head, hidden, self.head.d2t.new_zeros(1), self.settings)
            self._table_size = table.tokens.shape[1], table.tokens.shape[2]
        return self._table_size

    def _new_buffers(self, pool: PagePool, store: KVStore, number: int) -> BlockBuffers:
        return BlockBuffers(self.fast, self.max_ahead, pool, store, number)

    def _shape_of(self, num_rows: int, keep: int | None) -> int:
        """The number of rows with padding."""
        return padded(num_rows, ROWS)

    def _num_slots(self, shape: int) -> int:
        return self.num_slots

    def _num_ahead(self, state: CapturedState) -> int:
        return 1

    def _send(self, buffers: BlockBuffers, shape: int, number: int) -> None:
        there, here = buffers.sent(shape, self._size_of_table())
        here.copy_(there, non_blocking=True)

    # Graphs

    def _replay_pass(self, buffers: BlockBuffers, shape: int, number: int, context: int) -> None:
        there, _ = buffers.sent(shape, self._size_of_table())
        self._replay(buffers, ("block", shape, context), partial(self._run_block, buffers, shape, context, there))

    def _enter(self, buffers: BlockBuffers, features: Tensor, tokens: Tensor, by_row: ByRow, layout: Layout) -> None:
        self.fast.enter(features, layout, buffers.keys, buffers.values, buffers.rotary)

    @torch.no_grad()
    def _run_block(self, buffers: BlockBuffers, rows: int, context: int, there: Tensor) -> None:
        roots = buffers.round.by_row(rows).roots[:rows]
        layout = buffers.layout(rows, context)
        causal, two_ways = KernelStep(layout), KernelStep(buffers.two_ways(layout))
        seen = [causal if is_causal else two_ways for is_causal in self.head.config.causal]
        hidden = self.fast.run(roots, causal, seen, buffers.keys, buffers.values, buffers.rotary)
        table = _as_table(there)

        def children(logits: Tensor, candidates: Tensor, k: int) -> Table:
            block_kernels.children(logits, candidates, k, *table)
            return table

        made = table_of(self.head, hidden, roots.long(), self.settings, Ranking(topk_kernels.highest, children))
        for part, own in zip(table, made, strict=True):
            part.copy_(own)  # which is nothing to do where it is there already


def _as_table(numbers: Tensor) -> Table:
    """Tables [3, rows, entries, tokens] int32, in which probabilities are float32."""
    return Table(numbers[0], numbers[1].view(torch.float32), numbers[2])

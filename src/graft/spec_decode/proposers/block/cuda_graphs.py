"""Block drafter by CUDA graphs: one graph runs the block, makes its table and grows the trees, all on the device.

`captured` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.model import PagePool
from graft.model.attention import KernelStep
from graft.model.captures import ROWS, padded
from graft.model.kernels import topk as topk_kernels
from graft.model.kv_cache import PAGE, KVStore
from graft.model.layout import Layout, bidirectional_columns
from graft.model.noise import ComingDraws
from graft.spec_decode.proposers.block import kernels as block_kernels
from graft.spec_decode.proposers.block.drafter import BlockDrafter, BlockTreeSettings, table_of
from graft.spec_decode.proposers.block.fused_head import FastBlock
from graft.spec_decode.proposers.block.head import BlockHead
from graft.spec_decode.proposers.block.tree import Ranking
from graft.spec_decode.proposers.captured import CapturedDrafter
from graft.spec_decode.proposers.captured_state import CapturedState
from graft.spec_decode.proposers.draft_buffers import ByRow, DraftBuffers
from graft.spec_decode.proposers.drafter import PassesOnDevice
from graft.spec_decode.proposers.eager import DraftRow
from graft.tree.device import best_first
from graft.tree.device.buffers import DraftDraws, Level, Trees


class Shape(NamedTuple):
    """Shape of a round's trees."""

    rows: int  # with padding
    nodes: int  # of a row
    is_chain: bool
    knows_draws: bool


class BlockBuffers(DraftBuffers):
    """Static tensors, including those of blocks and trees."""

    def __init__(self, fast: FastBlock, num_nodes: int, pool: PagePool, store: KVStore, number: int) -> None:
        """num_nodes: the most nodes of a tree."""
        super().__init__(pool, store, fast.rotary(pool.tables.shape[1] * PAGE), number, num_passes=1)
        self.width = fast.config.block_size
        rows = torch.arange(self.max_rows, dtype=torch.int32, device=pool.device)
        self._rows_of = rows.repeat_interleave(self.width)  # by slot
        self._starts = rows * self.width
        self._counts = torch.full_like(rows, self.width)
        self._places = torch.arange(self.width, dtype=torch.int32, device=pool.device).repeat(self.max_rows)
        self._two_ways = bidirectional_columns(self.width, self.max_rows, fast.tile, pool.device)
        self._fits_tile = self.width <= fast.tile
        self._trees = torch.zeros(5 * self.max_rows * num_nodes, dtype=torch.int32, device=pool.device)

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
        """The same slots for bidirectional layers: each slot sees all slots of its row."""
        places, depths, paths = (part[: len(layout.rows)] for part in self._two_ways)
        return replace(layout, places=places, depths=depths, paths=paths, only_chains=self._fits_tile)

    def trees(self, shape: Shape) -> Trees:
        """The trees of a round, on the device."""
        return Trees(self._trees[: 5 * shape.rows * shape.nodes].view(5, shape.rows, shape.nodes))


class CapturedBlockDrafter(CapturedDrafter[DraftRow, BlockBuffers], BlockDrafter):
    """Drafts with a block head by CUDA graphs."""

    def __init__(self, head: BlockHead, settings: BlockTreeSettings | None = None) -> None:
        """head: one for which `fused_head.why_not` is None."""
        super().__init__(head, settings)
        self.fast = FastBlock(head)

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
        shape = self._shape_of(len(state.rows), keep, draws is not None)
        with self._captures.lock, state.pool.lock:
            buffers = self._make_pass(state, roots, shape, 0, draws)
            trees = Trees(buffers.trees(shape).numbers.to("cpu", copy=True))  # waits for the device
        yield trees.levels(len(state.rows))

    def _new_buffers(self, pool: PagePool, store: KVStore, number: int) -> BlockBuffers:
        return BlockBuffers(self.fast, max(map(self._num_drafted, (False, True))), pool, store, number)

    def _shape_of(self, num_rows: int, keep: int | None, knows_draws: bool = False) -> Shape:
        is_chain = keep == 1
        return Shape(padded(num_rows, ROWS), self._num_drafted(is_chain), is_chain, knows_draws)

    # Rounds on the device

    def run_passes(self, asked: PassesOnDevice, add_level: Callable[[int, Tensor, Tensor, Tensor], None]) -> None:
        num_rows = asked.num_rows
        buffers, shape = self._buffers[asked.pool], self._shape_of(num_rows, asked.keep, asked.draws is not None)
        by_row = buffers.round.by_row(num_rows)
        by_row.table_rows[:num_rows].copy_(asked.table_rows)
        by_row.lengths[:num_rows].copy_(asked.lengths)
        by_row.roots[:num_rows].copy_(asked.roots[:num_rows])
        if asked.draws is not None:
            self._load_draws(buffers, *(part[:num_rows] for part in asked.draws))
        self._run_block(buffers, shape, asked.context)
        trees = buffers.trees(shape)
        add_level(0, *(part.flatten() for part in (trees.tokens, trees.parents, trees.probabilities)))

    def _ranking(self, buffers: BlockBuffers, shape: Shape) -> Ranking:
        draws = factors = None
        if shape.knows_draws:
            by_row, num_slots = buffers.draws(shape.rows, self.head.d2t), self.max_depth
            factors = torch.where(by_row.temperatures > 0, 1 / by_row.temperatures, 1.0)
            seeds, temperatures, positions = (part.repeat_interleave(num_slots) for part in by_row[:3])
            places = torch.arange(num_slots, device=positions.device).repeat(shape.rows)
            draws = DraftDraws(seeds, temperatures, positions + places, by_row.to_target)

        def highest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
            ids, best, total = topk_kernels.highest(logits.flatten(0, 1), k, draws)
            shape = logits.shape[:2]
            return ids.unflatten(0, shape), best.unflatten(0, shape), total.unflatten(0, shape)

        return Ranking(highest, block_kernels.children, factors)

    # Graphs

    def _replay_pass(self, buffers: BlockBuffers, shape: Shape, number: int, context: int) -> None:
        self._replay(buffers, ("block", shape, context), partial(self._run_block, buffers, shape, context))

    def _enter(self, buffers: BlockBuffers, features: Tensor, tokens: Tensor, by_row: ByRow, layout: Layout) -> None:
        self.fast.enter(features, layout, buffers.keys, buffers.values, buffers.rotary)

    @torch.no_grad()
    def _run_block(self, buffers: BlockBuffers, shape: Shape, context: int) -> None:
        rows = shape.rows
        roots = buffers.round.by_row(rows).roots[:rows]
        layout = buffers.layout(rows, context)
        causal, two_ways = KernelStep(layout), KernelStep(buffers.two_ways(layout))
        seen = [causal if is_causal else two_ways for is_causal in self.head.config.causal]
        hidden = self.fast.run(roots, causal, seen, buffers.keys, buffers.values, buffers.rotary)
        table = table_of(self.head, hidden, roots.long(), self.settings, shape.is_chain, self._ranking(buffers, shape))
        best_first.grow(*table, self.max_depth, buffers.trees(shape))

"""CUDA graphs of the block drafter: one graph runs the whole block and makes the table, from which the host builds the
trees. What comes before it, and drafting ahead, is in `captured`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.model import PagePool
from graft.model.attention import KernelStep, Layout
from graft.model.captures import on_host
from graft.model.kv_cache import PAGE, KVStore
from graft.spec_decode.candidates import Level
from graft.spec_decode.proposers.block.drafter import BlockDrafter, BlockTreeSettings
from graft.spec_decode.proposers.block.fused_head import FastBlock
from graft.spec_decode.proposers.block.head import BlockHead
from graft.spec_decode.proposers.block.tree import Table, levels_of
from graft.spec_decode.proposers.captured import (
    ROWS,
    ByRow,
    CapturedDrafter,
    CapturedState,
    DraftBuffers,
    padded,
)
from graft.spec_decode.proposers.eager import DraftRow


class Shape(NamedTuple):
    """What the blocks of a round look like."""

    rows: int  # with padding
    most: int  # nodes of a level


class Part(NamedTuple):
    """One of a table's tensors as it is sent: the shape of a row's, and whether it is float32; else it is int32."""

    shape: tuple[int, ...]
    is_float: bool


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
        self._last = torch.zeros_like(self._places)
        self._no_paths = self._last[:, None]
        self._sent: dict[Shape, tuple[Tensor, Tensor]] = {}

    def layout(self, rows: int, context: int) -> Layout:
        """Slots of so many rows behind their entries, each of which sees those before it."""
        count, by_row = rows * self.width, self.round.by_row(rows)
        return Layout(
            rows=self._rows_of[:count],
            places=self._places[:count],
            depths=self._places[:count],
            paths=self._no_paths[:count],
            starts=self._starts[:rows],
            counts=self._counts[:rows],
            lengths=by_row.lengths[:rows],
            lines=by_row.lines[:rows],
            tables=self.tables,
            max_context=context,
        )

    def two_ways(self, layout: Layout) -> Layout:
        """The same slots, each of which sees all of its row's: as if it stood where the last does, and the others were
        part of the text. (Its keys and values are not written by this.)"""
        others = self.width - 1
        last = self._last[: len(layout.rows)]
        lengths, longest = layout.lengths + others, layout.max_context + others
        return replace(layout, places=last, depths=last, lengths=lengths, max_context=longest)

    def sent(self, shape: Shape, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Room for tables, part behind part, as int32: on the device, and on the host."""
        if shape not in self._sent:
            size = shape.rows * sum(math.prod(part.shape) for part in parts)
            device = self._places.device
            there = torch.zeros(size, dtype=torch.int32, device=device)
            self._sent[shape] = there, on_host((size,), torch.int32, device)
        return self._sent[shape]


class CapturedBlockDrafter(CapturedDrafter[DraftRow, BlockBuffers], BlockDrafter):
    """Block drafter by CUDA graphs."""

    def __init__(self, head: BlockHead, settings: BlockTreeSettings | None = None) -> None:
        """head: one for which `fused_head.why_not` is None."""
        super().__init__(head, settings)
        self.fast = FastBlock(head)
        self.max_ahead = max(self.max_ahead, self.max_depth + 1)
        self._parts: dict[int, list[Part]] = {}

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
            levels = levels_of(self._received(state), self._shape(state).most)
        yield levels

    def _received(self, state: CapturedState) -> Table:
        """The tables of a state's rows, on the host."""
        buffers, shape = self._buffers[state.pool], self._shape(state)
        parts = self._parts_of(shape)
        _, here = buffers.sent(shape, parts)
        buffers.was_sent[0].wait()
        own = (part[: len(state.rows)] for part in _split(here, shape.rows, parts))
        return Table(*(part if part.is_floating_point() else part.long() for part in own))

    def _parts_of(self, shape: Shape) -> list[Part]:
        """What a table consists of; found by making one, of nothing."""
        if shape.most not in self._parts:
            config, weight = self.head.config, self.head.fc.weight
            hidden = weight.new_zeros(1, config.num_drafts, config.hidden_size)
            with torch.no_grad():
                table = self._table(hidden, torch.zeros(1, dtype=torch.int64, device=weight.device), shape.most)
            tensors = (getattr(table, field.name) for field in fields(table))
            self._parts[shape.most] = [Part(tuple(part.shape[1:]), part.is_floating_point()) for part in tensors]
        return self._parts[shape.most]

    def _new_buffers(self, pool: PagePool, store: KVStore, number: int) -> BlockBuffers:
        return BlockBuffers(self.fast, self.max_ahead, pool, store, number)

    def _shape_of(self, num_rows: int, keep: int | None) -> Shape:
        return Shape(padded(num_rows, ROWS), keep or self.settings.nodes)

    def _num_slots(self, shape: Shape) -> int:
        return self.num_slots

    def _num_ahead(self, state: CapturedState) -> int:
        return 1

    def _send(self, buffers: BlockBuffers, shape: Shape, number: int) -> None:
        there, here = buffers.sent(shape, self._parts_of(shape))
        here.copy_(there, non_blocking=True)

    # Graphs

    def _replay_pass(self, buffers: BlockBuffers, shape: Shape, number: int, context: int) -> None:
        there, _ = buffers.sent(shape, self._parts_of(shape))
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
        table = self._table(hidden, roots.long(), shape.most)
        for part, field in zip(_split(there, rows, self._parts_of(shape)), fields(table), strict=True):
            part.copy_(getattr(table, field.name))


def _split(sent: Tensor, rows: int, parts: Sequence[Part]) -> list[Tensor]:
    """The tensors [rows, ...] of tables that lie one behind the other."""
    flat = sent.split([rows * math.prod(part.shape) for part in parts])
    return [
        (own.view(torch.float32) if part.is_float else own).view(rows, *part.shape)
        for own, part in zip(flat, parts, strict=True)
    ]

"""EAGLE-3 drafter by CUDA graphs: every draft pass is one graph, and beams stay on the device.

The graph `root` gives the first level of the trees, and `expand` each later one. `captured` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.model import PagePool
from graft.model.attention import KernelStep
from graft.model.captures import ROWS, padded
from graft.model.kernels import gate
from graft.model.kv_cache import PAGE, KVStore
from graft.model.layout import Layout
from graft.model.noise import ComingDraws
from graft.spec_decode.proposers.captured import CapturedDrafter
from graft.spec_decode.proposers.captured_state import CapturedState
from graft.spec_decode.proposers.draft_buffers import ByRow, DraftBuffers
from graft.spec_decode.proposers.drafter import KEPT_OF_A_LEVEL, PassesOnDevice, TreeSettings
from graft.spec_decode.proposers.eagle3 import kernels as eagle3_kernels
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.eagle3.fused_head import FastHead
from graft.spec_decode.proposers.eagle3.head import Eagle3Head
from graft.spec_decode.proposers.recurrent import RecurrentRow
from graft.tree.device.buffers import Level

_FEW_ROWS, _MOST_BEAMS = 8, 128  # with more than 8 rows, there are at most 128 beams in all


class Eagle3Buffers(DraftBuffers):
    """Static tensors, including those of beams and levels."""

    def __init__(self, fast: FastHead, settings: TreeSettings, pool: PagePool, store: KVStore, number: int) -> None:
        weight, device, num_passes = fast.head.fc.weight, pool.device, settings.depth + 1
        super().__init__(pool, store, fast.rotary(pool.tables.shape[1] * PAGE), number, num_passes)
        max_rows = self.max_rows
        sizes = [(rows, num_beams(rows, settings.topk)) for rows in (*ROWS, max_rows) if rows <= max_rows]
        most = max(rows * beams for rows, beams in sizes)
        # The head's output at the last entry, by row of the block tables.
        self.root = weight.new_zeros(pool.num_table_rows, weight.shape[0])
        self.hidden = weight.new_zeros(most, weight.shape[0])  # the head's outputs at beams
        self.beams = eagle3_kernels.Beams.make(most, 1, num_passes, device)
        # By number of beams in a row: the row of each beam, each row's first beam, and its number of beams.
        self.rows_of = {
            beams: (
                torch.arange(max_rows, device=device).repeat_interleave(beams).int(),
                (torch.arange(max_rows, device=device) * beams).int(),
                torch.full((max_rows,), beams, dtype=torch.int32, device=device),
            )
            for beams in range(1, settings.topk + 1)
        }
        num_numbers = num_passes * 3 * max(rows * beams * beams for rows, beams in sizes)
        self._levels = torch.zeros(num_numbers, dtype=torch.int64, device=device)  # see `eagle3_kernels.spread`

    @property
    def by_table_row(self) -> tuple[Tensor, ...]:
        return (self.root,)

    def levels(self, shape: Shape) -> Tensor:
        """The levels of a round, [passes, 3, nodes] on the device."""
        size = 3 * self.num_passes * shape.rows * shape.count(1)
        return self._levels[:size].view(self.num_passes, 3, -1)


class Shape(NamedTuple):
    """Shape of a round's levels."""

    rows: int  # with padding
    beams: int  # of a row
    keep: int | None  # nodes to keep of a level; all if None
    knows_draws: bool

    def count(self, number: int) -> int:
        """Nodes of a row in a level. All levels after the first, 0, are alike."""
        most = self.beams if number == 0 else self.beams * self.beams
        return most if self.keep is None else min(max(self.keep, self.beams), most)


class CapturedEagle3Drafter(CapturedDrafter[RecurrentRow, Eagle3Buffers], Eagle3Drafter):
    """Drafts with an EAGLE-3 head by CUDA graphs."""

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None) -> None:
        """head: one for which `capturable.why_not` is None."""
        super().__init__(head, settings)
        self.fast = FastHead(head, self.settings.eight_bits)

    def levels(
        self,
        state: Any,
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Level]:
        if not isinstance(state, CapturedState):
            yield from super().levels(state, roots, keep, draws)
            return
        shape = self._shape_of(len(state.rows), keep, draws is not None)
        for number in range(self.max_passes):
            with self._captures.lock, state.pool.lock:
                buffers = self._make_pass(state, roots, shape, number, draws)
                numbers = buffers.levels(shape)[number].to("cpu", copy=True)  # waits for the device
            yield self._level(numbers, len(state.rows), shape.count(number))

    @staticmethod
    def _level(numbers: Tensor, num_rows: int, count: int) -> Level:
        """A level of `count` nodes a row, from its numbers [3, nodes] on the host."""
        nodes = numbers.shape[1]
        size, strides = (num_rows, count), (count, 1)
        floats = numbers.view(torch.float32)  # q and path probabilities share the last part
        return Level(
            numbers.as_strided(size, strides, 0),
            numbers.as_strided(size, strides, nodes),
            floats.as_strided(size, strides, 4 * nodes),
            floats.as_strided(size, strides, 5 * nodes),
        )

    def _new_buffers(self, pool: PagePool, store: KVStore, number: int) -> Eagle3Buffers:
        return Eagle3Buffers(self.fast, self.settings, pool, store, number)

    def _shape_of(self, num_rows: int, keep: int | None, knows_draws: bool = False) -> Shape:
        rows = padded(num_rows, ROWS)
        return Shape(rows, num_beams(rows, self.settings.topk, keep), keep, knows_draws)

    # Rounds on the device

    def level_sizes(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> tuple[int, ...]:
        shape = self._shape_of(num_rows, keep)
        return tuple(shape.count(number) for number in range(self.max_passes))

    def beams_of(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> int:
        return self._shape_of(num_rows, keep).beams

    def run_passes(self, asked: PassesOnDevice, add_level: Callable[[int, Tensor, Tensor, Tensor], None]) -> None:
        num_rows = asked.num_rows
        buffers, shape = self._buffers[asked.pool], self._shape_of(num_rows, asked.keep, asked.draws is not None)
        by_row = buffers.round.by_row(num_rows)
        by_row.table_rows[:num_rows].copy_(asked.table_rows)
        by_row.lengths[:num_rows].copy_(asked.lengths)
        if asked.draws is not None:
            self._load_draws(buffers, *(part[:num_rows] for part in asked.draws))
        levels = buffers.levels(shape)
        for number in range(asked.num_passes):
            with gate.under(asked.made[number : number + 1]):
                if number == 0:
                    self._run_root(buffers, shape)
                else:
                    self._run_expand(buffers, shape, asked.context)
            count = num_rows * shape.count(number)
            tokens, parents, floats = levels[number]
            add_level(number, tokens[:count], parents[:count], floats.view(torch.float32)[:count])

    # Graphs

    def _replay_pass(self, buffers: Eagle3Buffers, shape: Shape, number: int, context: int) -> None:
        if number == 0:
            self._replay(buffers, ("root", shape), partial(self._run_root, buffers, shape))
            return
        # Trial runs before the capture change the beams.
        moving = (buffers.hidden, *vars(buffers.beams).values())
        self._replay(buffers, ("expand", shape, context), partial(self._run_expand, buffers, shape, context), moving)

    def _enter(self, buffers: Eagle3Buffers, features: Tensor, tokens: Tensor, by_row: ByRow, layout: Layout) -> None:
        """Run the head, and keep the output at each row's last entry."""
        outputs = self._run_head(buffers, tokens, self.fast.fuse(features), None, layout)
        eagle3_kernels.keep_last(outputs, by_row.begins, by_row.counts, by_row.table_rows, buffers.root)

    @torch.no_grad()
    def _run_root(self, buffers: Eagle3Buffers, shape: Shape) -> None:
        table_rows = buffers.round.by_row(shape.rows).table_rows[: shape.rows]
        root = eagle3_kernels.take_roots(buffers.root, table_rows, buffers.hidden, shape.beams)
        self._spread(buffers, shape, root, True)

    @torch.no_grad()
    def _run_expand(self, buffers: Eagle3Buffers, shape: Shape, context: int) -> None:
        count, beams = shape.rows * shape.beams, buffers.beams.first(shape.rows, shape.beams)
        by_row = buffers.round.by_row(shape.rows)
        rows, starts, counts = buffers.rows_of[shape.beams]
        layout = Layout(
            rows=rows[:count],
            places=beams.cache_places.flatten(),
            depths=beams.depths.flatten(),
            paths=beams.entries.flatten(0, 1),
            starts=starts[: shape.rows],
            counts=counts[: shape.rows],
            lengths=by_row.lengths[: shape.rows],
            table_rows=by_row.table_rows[: shape.rows],
            tables=buffers.tables,
            max_context=context,
        )
        hidden = buffers.hidden[:count]
        self._run_head(buffers, beams.tokens.flatten(), hidden, beams.origins.flatten(), layout, out=hidden)
        self._spread(buffers, shape, hidden, False)

    def _run_head(
        self,
        buffers: Eagle3Buffers,
        tokens: Tensor,
        hidden: Tensor,
        origins: Tensor | None,
        layout: Layout,
        out: Tensor | None = None,
    ) -> Tensor:
        step, keys, values = KernelStep(layout), buffers.keys[0], buffers.values[0]
        return self.fast.run(tokens, hidden, origins, step, keys, values, buffers.rotary, out)

    def _spread(self, buffers: Eagle3Buffers, shape: Shape, outputs: Tensor, is_first: bool) -> None:
        beams, draws = buffers.beams.first(shape.rows, shape.beams), None
        if shape.knows_draws:
            draws = buffers.draws(shape.rows, self.head.d2t)._replace(num_passes=None if is_first else beams.num_passes)
        best = self.fast.likeliest(outputs, shape.beams, draws)
        eagle3_kernels.spread(*best, self.head.d2t, beams, buffers.levels(shape), shape.keep, is_first)


def num_beams(rows: int, topk: int, keep: int | None = None) -> int:
    """Nodes of a row that a pass expands. With many rows, each gets few verified nodes, so few are expanded."""
    topk = min(topk, keep or topk)
    if rows <= _FEW_ROWS:
        return topk
    each = max(_MOST_BEAMS // rows, 2)
    return min(topk, 1 << (each.bit_length() - 1))  # a power of two, since kernels are compiled for each number

"""DeviceRound: everything of a round on the device but the models.

`propose` makes the step to verify from the texts, and `finish` extends the texts by its outcome. Both may run inside
CUDA graphs. A DeviceRound owns the memory that the kernels share, and calls them in order. It depends on no model or
engine: callers pass drafted levels, chosen tokens and hidden states. See `inputs_layout` for what the host sends, and
`results_layout` for what it gets back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.tree.device.buffers import (
    MAX_BARRED,
    NUM_BUCKETS,
    NUM_SUCCESSORS,
    Draws,
    Entries,
    Others,
    Pool,
    PoolShape,
    Ranked,
    Tables,
    Texts,
)
from graft.tree.device.fixed import FixedTree
from graft.tree.device.kernels import kernels_for

MAX_TOKENS = 32  # new tokens of a row in a round; trees are at most 31 deep, as the last one is the target's own
MAX_TREE_TOKENS = 512  # tokens of a step, all rows together
MAX_NODES = 127  # nodes of a row
NUM_AGREEMENTS = 3
_WIDTHS = (4, 16, 48)  # classes of the number of candidates, by twice the mean number of nodes of a row
_MOST_COPIES, _MOST_PLACES, _MOST_BEAMS, _WAVES = 40, 10, 12, 5


class RoundShape(NamedTuple):
    """The sizes that a graph is captured for."""

    rows: int  # with padding
    tokens: int  # roots and nodes of the step, with padding

    @property
    def is_plain(self) -> bool:
        """Whether the step has only roots."""
        return self.tokens <= self.rows

    @property
    def cap(self) -> int:
        """The most nodes of a row. It is lower with many rows, because few of them get many nodes."""
        return min(max(2 * MAX_NODES // max(self.rows // 2, 2), 15) | 1, MAX_NODES)

    def pool(self, levels: tuple[int, ...]) -> PoolShape:
        most = 2 * max(self.tokens - self.rows, 1) // self.rows
        width = next((width for width in _WIDTHS if width >= most), _WIDTHS[-1])
        places = max(width // 4, 1)
        return PoolShape(
            self.rows,
            copy_nodes=min(width, _MOST_COPIES),
            num_places=min(places, _MOST_PLACES),
            levels=levels,
            num_waves=_WAVES,
            beam=min(places, _MOST_BEAMS),
        )


class Sources(NamedTuple):
    """Numbers of the sources of candidates; 0 is the root. A source that is not used has None."""

    num_sources: int  # including the root
    num_buckets: int  # of scores
    num_kinds: int = 1  # of rows, see `Draws`
    drafted: int | None = None
    copies: int | None = None  # copies of the row's own text; copies of finished texts have the next number
    tables: int | None = None  # the table of 3-grams; those of 2-grams and 1-grams have the next numbers
    attached: int = 0  # nodes of the templates of a `FixedTree`
    is_calibrated: bool = True  # False: the drafter is the only source, and its q are the acceptance probabilities

    @property
    def table(self) -> tuple[int, int, int]:
        """The shape of the calibration table: kinds of rows times agreements, sources and buckets."""
        return self.num_kinds * NUM_AGREEMENTS, self.num_sources, self.num_buckets


def packed(parts: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[int, Callable[[Tensor], dict[str, Tensor]]]:
    """Pack several tensors into one int32 tensor. Returns its size, and a function that makes their views of it."""
    places, end = {}, 0
    for name, (dtype, shape) in parts.items():
        size = math.prod(shape) * dtype.itemsize // 4
        places[name] = (end, end + size, dtype, shape)
        end += -(-size // 4) * 4  # kernels are compiled for addresses that are multiples of 16 bytes

    def views(numbers: Tensor) -> dict[str, Tensor]:
        return {name: numbers[a:b].view(dtype).view(shape) for name, (a, b, dtype, shape) in places.items()}

    return end, views


def inputs_layout(max_rows: int, num_passes: int, sources: Sources, num_gates: int = 0) -> dict[str, Any]:
    """What the host sends for a round. Padding rows have table row 0 and cap -1."""
    i32, i64, f32, by_row = torch.int32, torch.int64, torch.float32, (max_rows + 1,)
    return {
        "table_rows": (i32, by_row),
        "caps": (i32, by_row),  # the most nodes; 0: only the root; -1: unused
        "max_depths": (i32, by_row),
        "owners": (i64, by_row),  # whose finished texts the row may copy
        "groups": (i32, by_row),  # see `Others`
        "num_prompt_tokens": (i32, by_row),
        "salts": (i64, by_row),  # whose table entries it uses
        "kinds": (i32, by_row),  # see `Draws`
        "powers": (torch.float64, (max_rows + 1, NUM_BUCKETS)),
        "barred": (i32, (max_rows + 1, 3 + MAX_BARRED)),  # see `barred_numbers`
        "seeds": (i64, by_row),
        "temperatures": (f32, by_row),
        "draft_temperatures": (f32, by_row),
        "top_k": (i64, by_row),
        "top_p": (f32, by_row),
        "min_p": (f32, by_row),
        "total": (i32, (1,)),  # nodes of all rows together
        "drafts": (i32, (1,)),  # 1 if the first draft pass is made
        "thresholds": (f32, (num_passes + 2,)),  # a pass is made if the reach of its beams is above
        "acceptance_probs": (f32, sources.table),
        "gates": (f32, (num_gates,)),  # a row stops at a gate if the q of its likeliest path is no higher
    }


def results_layout(max_rows: int, num_passes: int, sources: Sources, num_gates: int = 0) -> dict[str, Any]:
    """What the host gets back from a round."""
    i32, f32 = torch.int32, torch.float32
    most = max(RoundShape(rows, 0).cap * rows for rows in range(1, max_rows + 1))
    table = sources.table
    return {
        "counts": (i32, (max_rows + 1,)),  # new tokens; 0 for the row of padding
        "tokens": (i32, (max_rows, MAX_TOKENS)),
        "places": (i32, (max_rows, MAX_TOKENS)),  # places of the accepted nodes in their trees
        "made": (i32, (num_passes + 2,)),  # whether each pass was made
        "reaches": (f32, (num_passes + 2,)),  # P(one of its beams is accepted), summed over the rows
        "num_nodes": (i32, (max_rows,)),  # verified nodes; -1 in padding rows
        "paths": (f32, (most,)),  # [rows, cap] path probabilities of the likeliest nodes, best first
        "needs": (i32, (most,)),  # draft passes that each of these needed
        "step": (i32, (2, MAX_TREE_TOKENS)),  # tokens and parents of the step
        "origins": (i32, (MAX_TREE_TOKENS,)),  # the source of each
        "tried": (i32, table),
        "fitted": (i32, table),
        "confidences": (f32, (max_rows, num_gates)),  # q of the likeliest path at each gate that the row reached
    }


AddLevel = Callable[[int, Tensor, Tensor, Tensor], None]


class Walked(NamedTuple):
    """Accepted paths, found by the host, of R rows with padding."""

    num_tokens: int  # of the step, without padding
    counts: Tensor  # [R] int32 new tokens of each row; 0 for padding
    tokens: Tensor  # [R, MAX_TOKENS] int32
    nodes: Tensor  # [R, MAX_TOKENS] int32 the step's token after which each was chosen


@contextmanager
def alongside(stream: Any, work: Callable[[], None]) -> Iterator[None]:
    """Launch `work` on a stream of its own, and let it run beside what is launched in the context.

    What follows the context waits for both, so that a capture has no loose end. stream: None without a GPU.
    """
    if stream is None:
        work()
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            work()
        yield
    finally:
        current.wait_stream(stream)


class DeviceRound:
    """The memory and the kernels of a round, without the models."""

    def __init__(
        self,
        max_rows: int,
        num_table_rows: int,
        context: int,
        past_tokens: int,
        levels: Callable[[int], tuple[int, ...]],  # from a number of rows to the drafted nodes of each pass
        num_beams: Callable[[int], int],
        num_passes: int,
        depths_of_pass: int,  # the most levels that a pass gives
        sources: Sources,
        known: Tables | None,
        device: torch.device,
        kernels: Any = None,
        fixed: FixedTree | None = None,
    ) -> None:
        """kernels: a module of `kernels`; None: the one for the device. fixed: rules for the trees; None: none."""
        self.kernels: Any = kernels_for(device) if kernels is None else kernels
        self.max_rows, self.sources, self.num_passes, self.device = max_rows, sources, num_passes, device
        self._levels, self._num_beams, self._depths_of_pass = levels, num_beams, depths_of_pass
        self.texts = Texts(num_table_rows, context, past_tokens, device)
        self.tables = known
        self._fixed = fixed or FixedTree()
        num_gates = len(self._fixed.gates)
        self.num_inputs, self.inputs_in = packed(inputs_layout(max_rows, num_passes, sources, num_gates))
        self.num_results, self.results_in = packed(results_layout(max_rows, num_passes, sources, num_gates))
        self.numbers = torch.zeros(self.num_inputs, dtype=torch.int32, device=device)
        self.results = torch.zeros(self.num_results, dtype=torch.int32, device=device)
        self.inputs, self.found = self.inputs_in(self.numbers), self.results_in(self.results)
        inputs = self.inputs
        self.draws = Draws(inputs["kinds"], inputs["seeds"], inputs["powers"], inputs["barred"])
        self._others = Others(inputs["owners"], inputs["groups"], inputs["num_prompt_tokens"])
        self._pool_shapes: dict[RoundShape, PoolShape] = {}
        self.pool = Pool(max_rows, self._capacity(), device)
        self._gates = torch.tensor(self._fixed.gates, dtype=torch.int32, device=device)
        self._splits = self._fixed.numbers().to(device)
        self.stops = torch.zeros(max_rows, dtype=torch.int32, device=device)  # the gate that stopped each row
        self._attached_from = known
        if known is None and self._fixed.splits:
            self._attached_from = Tables.make((1, 1, 1), (False,) * 3, torch.zeros(4, dtype=torch.int64), False, device)
        # Views are kept by shape, because making them takes longer than a kernel on a CPU.
        self._ranks: dict[RoundShape, Ranked] = {}
        self._ranked_nodes = torch.zeros_like(self.found["paths"], dtype=torch.int32)
        self._second_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._roots = torch.zeros(max_rows, 1, dtype=torch.int32, device=device)
        self._places = torch.zeros(max_rows, _MOST_PLACES, dtype=torch.int32, device=device)
        by_row = torch.zeros(3, max_rows + 1, dtype=torch.int32, device=device)
        self._accepted, self._committed, self._begins = by_row
        self._nodes = torch.zeros(max_rows, MAX_TOKENS, dtype=torch.int32, device=device)
        self._emitted = torch.zeros(max_rows, MAX_TOKENS + 1, dtype=torch.int64, device=device)
        self._entries = torch.zeros(4, max(MAX_TREE_TOKENS, max_rows), dtype=torch.int32, device=device)

    def _capacity(self) -> int:
        """Places of a row in the pool, for the largest shape."""
        return max(self._pool_shape(RoundShape(rows, MAX_TREE_TOKENS)).width for rows in range(1, self.max_rows + 1))

    def memory(self) -> dict[str, int]:
        """Bytes by purpose. They can be computed on the device "meta", where nothing is allocated."""
        texts, known = self.texts, self.tables
        by_row = [part for owner in (self.pool, self) for part in vars(owner).values()]
        searched = texts.own.shape[1] + len(texts.past)
        shapes = [RoundShape(rows, MAX_TREE_TOKENS).pool(()) for rows in range(1, self.max_rows + 1)]
        return {
            "texts": texts.own.nbytes + texts.lengths.nbytes,
            "finished texts": texts.past.nbytes + texts.owners.nbytes,
            "tables": known.entries.nbytes + known.tags.nbytes if known is not None else 0,
            "candidates": sum(part.nbytes for part in by_row if isinstance(part, Tensor)),
            "lookups": max(
                sum(self.kernels.lookup_bytes(shape.num_rows, places, searched) for places in (1, shape.num_places))
                for shape in shapes
            ),
        }

    @property
    def made(self) -> Tensor:
        """[passes + 1] int32: whether each draft pass is made. A pass must run behind the gate of its flag."""
        return self.found["made"]

    @property
    def roots(self) -> Tensor:
        """[R] int32: the last token of each row's text, valid once `propose` has begun."""
        return self.pool.tokens[:, 0]

    # Before the step

    def propose(
        self,
        shape: RoundShape,
        columns: Tensor,  # [6, room] int32, written: see `ranking.lay_out`
        by_row: Tensor,  # [4, rows] int32, written; 0 for rows beyond the shape's
        max_context: int,
        draft: Callable[[AddLevel], None] | None,
        stride: int = 0,
        choose_total: Callable[[Ranked], None] | None = None,
    ) -> None:
        """Write the step to verify.

        draft: runs all passes, each behind the gate of its flag, and adds their nodes. stride: see `ranking.lay_out`.
        choose_total: sets the input `total` once the likeliest nodes of each row are known.
        """
        inputs, found, rows, sources, kernels = self.inputs, self.found, shape.rows, self.sources, self.kernels
        table_rows, caps = inputs["table_rows"], inputs["caps"]
        pool_shape, ranked = self._pool_shape(shape), self._ranked(shape)
        by_row.zero_()
        kernels.begin(self.pool, pool_shape, self.texts, table_rows)
        if shape.is_plain:
            ranked.counts.copy_(caps[:rows].clamp(max=0))
        else:
            probs, max_depths = inputs["acceptance_probs"], inputs["max_depths"]
            found["made"].zero_()
            found["reaches"].zero_()
            found["confidences"].zero_()
            self.stops.fill_(len(self._fixed.gates))

            def copy_at_roots() -> None:
                if sources.copies is not None:
                    self._copy(pool_shape, self._roots[:rows], 1, max_context)

            with alongside(self._second_stream, copy_at_roots):
                if draft is not None:
                    found["made"][:1].copy_(inputs["drafts"])
                    draft(lambda *level: self._add_level(pool_shape, *level))
            if draft is not None and sources.copies is not None:
                places = self._places.flatten()[: rows * pool_shape.num_places].view(rows, -1)
                kernels.choose_places(self.pool, pool_shape, found["made"], places, max_depths)
                self._copy(pool_shape, places, pool_shape.first_copy, max_context)
            if sources.tables is not None:
                assert self.tables is not None
                kernels.follow(
                    *(self.pool, pool_shape, self.tables, inputs["salts"], probs, max_depths, self.draws, self.texts),
                    *(table_rows, sources.tables),
                )
            if self._fixed.splits:
                kernels.attach(
                    *(self.pool, pool_shape, self.stops, self._splits, self._fixed.is_chain, self._attached_from),
                    *(inputs["salts"], max_depths, self.draws, sources.attached),
                )
            if sources.is_calibrated:
                kernels.merge(self.pool, pool_shape, probs, inputs["kinds"], sources.drafted or 0)
            kernels.rank(self.pool, pool_shape, caps, ranked)
            if choose_total is not None:
                choose_total(ranked)
            kernels.select(ranked, caps, inputs["total"])
        kernels.lay_out(
            *(self.pool, pool_shape, ranked, self.texts, table_rows, columns, by_row, found["origins"]),
            shape.tokens,
            stride,
        )

    def _add_level(self, shape: PoolShape, number: int, tokens: Tensor, parents: Tensor, q: Tensor) -> None:
        inputs, found, drafted = self.inputs, self.found, self.sources.drafted
        assert drafted is not None
        probs = inputs["acceptance_probs"] if self.sources.is_calibrated else None
        self.kernels.add_level(
            *(self.pool, shape, number, tokens, parents, q, probs, self.draws),
            *(inputs["caps"], inputs["thresholds"], found["reaches"], found["made"]),
            drafted,
            self._num_beams(shape.num_rows),
            self._depths_of_pass,
        )
        start = number * self._depths_of_pass
        first, end = (
            sum(gate <= depth for gate in self._fixed.gates) for depth in (start, start + self._depths_of_pass)
        )
        if first < end:
            self.kernels.stop_rows(
                *(self.pool, shape, number, first, end, self._gates, inputs["gates"]),
                *(self.stops, found["confidences"], found["made"]),
            )

    def _copy(self, shape: PoolShape, places: Tensor, first: int, max_context: int) -> None:
        """Add copies of earlier text below the places [R, P]."""
        inputs, source = self.inputs, self.sources.copies
        assert source is not None
        self.kernels.add_copies(
            *(self.pool, shape, self.texts, inputs["table_rows"], self._others, places),
            *(inputs["acceptance_probs"], inputs["max_depths"], self.draws, source, first, max_context),
        )

    def _pool_shape(self, shape: RoundShape) -> PoolShape:
        if shape not in self._pool_shapes:
            self._pool_shapes[shape] = self._new_pool_shape(shape)
        return self._pool_shapes[shape]

    def _new_pool_shape(self, shape: RoundShape) -> PoolShape:
        """How many candidates each source may add to a row."""
        levels = self._levels(shape.rows)
        if self.sources.is_calibrated:
            return shape.pool(levels)
        # The drafter alone proposes; after it comes room for templates.
        return PoolShape(shape.rows, 0, 0, levels, num_waves=1, beam=-(-self._fixed.most_attached // NUM_SUCCESSORS))

    def _ranked(self, shape: RoundShape) -> Ranked:
        if shape not in self._ranks:
            size = (shape.rows, shape.cap)
            columns = (self._ranked_nodes, self.found["paths"], self.found["needs"])
            nodes, paths, needs = (part[: math.prod(size)].view(size) for part in columns)
            self._ranks[shape] = Ranked(nodes, paths, needs, self.found["num_nodes"][: shape.rows])
        return self._ranks[shape]

    # After the step

    def finish(
        self,
        shape: RoundShape,
        columns: Tensor,  # [6, room] int32 the step, as `propose` wrote it
        by_row: Tensor,  # [4, rows] int32
        chosen: Tensor | Walked,  # [T] the token chosen after each of the step's tokens, or the paths walked so far
        successors: Tensor | None,  # [tokens, k] int32 the target's likeliest tokens after each; None: learn nothing
        logits: Tensor | None,  # [tokens, k] float32
    ) -> None:
        """Walk down the trees, extend the texts, count proposals for the calibration, and learn successors.

        Afterwards `moves` and `entries` say what the engine and the drafter have to do.
        """
        inputs, found, rows = self.inputs, self.found, shape.rows
        table_rows, starts, sizes = inputs["table_rows"][:rows], by_row[0], by_row[1]
        counts, new = found["counts"][:rows], found["tokens"][:rows]
        size = chosen.num_tokens if isinstance(chosen, Walked) else len(chosen)
        found["step"][:, :size].copy_(columns[:2, :size])
        if isinstance(chosen, Walked):
            for part, walked in zip((counts, new, self._nodes[:rows]), chosen[1:], strict=True):
                part.copy_(walked)
        else:
            self.kernels.walk(
                *(columns[0, :size], columns[1, :size], chosen, starts, sizes, counts, new, self._nodes[:rows]),
                most=1 if shape.is_plain else shape.cap + 1,
            )
        self.kernels.advance(
            *(self.texts, table_rows, starts, counts, new, self._nodes[:rows], found["places"][:rows]),
            *(self._accepted[:rows], self._committed[:rows], self.pool.factors, self._emitted[:rows]),
        )
        if successors is None or logits is None:
            return
        found["tried"].zero_()
        found["fitted"].zero_()
        if self.sources.is_calibrated and not shape.is_plain:
            self.kernels.count(
                *(self.pool, self._pool_shape(shape), counts, self._emitted, inputs["kinds"]),
                *(found["tried"], found["fitted"]),
            )
        step = (columns[0, :size], columns[1, :size], columns[2, :size], columns[4, :size])
        self.learn(step, starts, self.pool.before, inputs["salts"], successors, logits, rows, is_text=False)

    def learn(
        self,
        step: Sequence[Tensor],  # tokens, parents, places and rows
        starts: Tensor,
        before: Tensor,
        salts: Tensor,
        successors: Tensor,
        logits: Tensor,
        num_rows: int,
        is_text: bool,
    ) -> None:
        """Let the tables learn the successors of a step's tokens; see `outcome.learn`."""
        if self.tables is not None:
            tokens, parents, places, rows = step
            of_step = (tokens, parents, places, rows, starts, before, salts, successors, logits)
            self.kernels.learn(self.tables, *of_step, num_rows, is_text)

    def walked(self, shape: RoundShape) -> tuple[Tensor, Tensor, Tensor]:
        """By row, the step's tokens that the walk reached, the tokens chosen after them, and how many they are."""
        rows = shape.rows
        return self._nodes[:rows], self.found["tokens"][:rows], self.found["counts"][:rows]

    def candidates(self, shape: RoundShape, most: int) -> Tensor:
        """[5, rows, most] int32 the likeliest nodes of each row, best first, whether or not they are verified.

        Places in the pool, tokens, parents' places, sources, and the bits of path probabilities, which are 0 after the
        last. They are those of the last `propose`.
        """
        pool, rows = self.pool, shape.rows
        width = self._pool_shape(shape).width
        paths, order = pool.paths[:rows, 1:width].sort(dim=1, descending=True, stable=True)
        nodes = 1 + order[:, :most]
        parts = (part[:rows].gather(1, nodes) for part in (pool.tokens, pool.parents, pool.sources))
        return torch.stack([nodes.int(), *parts, paths[:, :most].contiguous().view(torch.int32)])

    def retrieved(self, shape: RoundShape) -> np.ndarray:
        """[rows] expected tokens from copies below the roots alone: the likeliest of each depth, summed up.

        Called between these copies and the draft passes, where the host sees this memory.
        """
        own = slice(1, self._pool_shape(shape).first_level)
        paths, depths = (part[: shape.rows, own].cpu().numpy() for part in (self.pool.paths, self.pool.depths))
        rows, places = np.nonzero(paths)
        likeliest = np.zeros((shape.rows, MAX_TOKENS + 1), dtype=np.float32)
        np.maximum.at(likeliest, (rows, depths[rows, places].clip(max=MAX_TOKENS)), paths[rows, places])
        return likeliest.sum(axis=1)

    def moves(self, shape: RoundShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What an engine commits, by row: table row, committed length, accepted places, and how many."""
        rows = shape.rows
        table_rows, places = self.inputs["table_rows"][:rows], self.found["places"][:rows]
        return table_rows, self._committed[:rows], places, self._accepted[:rows]

    def entries(self, shape: RoundShape) -> Entries:
        """The new tokens for a drafter, as a padded flat list."""
        rows, size = shape.rows, min(shape.tokens, shape.rows * MAX_TOKENS)
        of_rows, places, tokens, nodes = (part[:size] for part in self._entries)
        begins, counts, lengths = (part[: rows + 1] for part in (self._begins, self.found["counts"], self._committed))
        self.kernels.line_up(counts, lengths, self.found["tokens"], self._nodes, begins, of_rows, places, tokens, nodes)
        table_rows = self.inputs["table_rows"][: rows + 1]
        return Entries(of_rows, places, tokens, nodes, begins, counts, lengths, table_rows)

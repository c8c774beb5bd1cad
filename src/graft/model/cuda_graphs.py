"""CUDA graphs of the target model: `CapturedTarget` runs a flat step as one graph per number of tokens and context.

A step is padded to the next of a few sizes, and its longest context rounded up to the next of a few contexts, so that
few graphs serve all rounds. Inputs and outputs are static buffers that runners share as long as they take turns, round
by round; else each has its own. The KV store is one pool of pages. Without a GPU the same code runs, and calls what
would be replayed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.errors import GraftError
from graft.model.attention import KernelStep
from graft.model.captures import (
    CONTEXTS,
    Captures,
    Event,
    Run,
    context_for,
    first_line,
    is_shortage,
    num_bytes,
    on_device,
    on_host,
    whole,
)
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.matmul import FEW
from graft.model.kv_cache import PAGE, KVCache, KVStore, PagePool, Row
from graft.model.layout import Layout
from graft.model.llama import FastLayers, Rotary, touched_module, why_not
from graft.model.runner import TargetRunner, outputs_of, side_by_side
from graft.model.step import COLUMNS, LONG_TEXT, Chunk, FlatStep
from graft.model.verified import NUM_SUCCESSORS, Step, VerifyOutput
from graft.progress import Report
from graft.tree.tree import DraftTree

# Small steps are often one row's tree, large ones many rows' or a prompt's.
STEP_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_DECODED = 512  # tokens of the largest step that trees may fill
_USUAL_ROOM = 512  # tokens that the buffers hold at first
_MAX_PATH = 128  # tokens of a tree's path, the root included
_FIRST_TOKENS = 16384  # that the pool of a library's engine holds at first
_MOVED = (1, 4, 16, 64, 256)  # rows of a commit


class StepBuffers:
    """Static inputs and outputs of some graphs, with room for so many tokens.

    A runner writes over the output of its own last step, and not over another's that is still in use.
    """

    def __init__(self, room: int, vocab_size: int, num_hidden: int, like: Tensor) -> None:
        device = like.device
        self.room = room
        self.user: Callable[[], object | None] = lambda: None  # the runner of the last step
        self._outputs: list[weakref.ref[VerifyOutput]] = []  # of the last step
        num_rows = whole(room + 1)  # one more than there can be: what a step is padded with is a row too
        size = COLUMNS * whole(room) + 4 * num_rows
        self.numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._here = on_host((size,), torch.int32, device)
        self._loaded = Event(device)
        self.columns, self.by_row = self._parts(self.numbers, num_rows)
        self.here_columns, self.here_by_row = (part.numpy() for part in self._parts(self._here, num_rows))
        num_highest = min(NUM_SUCCESSORS, vocab_size)
        self.logits = torch.empty(room, vocab_size, device=device)  # float32
        self.hidden = like.new_zeros(room, num_hidden)
        # The likeliest tokens after each token and their logits, [room, k]: on the device, then on the host.
        self.best_tokens = on_host((room, num_highest), torch.int32, device)
        self.best_logits = on_host((room, num_highest), torch.float32, device)
        self.step = Step(
            tokens=self.columns[0],
            parents=self.columns[1],
            rows=self.columns[4],
            depths=self.columns[3],
            starts=self.by_row[0],
            counts=self.by_row[1],
            best=torch.zeros(room, dtype=torch.int32, device=device),
            chosen=on_host((room,), torch.int64, device),
            judged=Event(device),
        )

    @property
    def is_in_use(self) -> bool:
        return any(output() is not None for output in self._outputs)

    def outputs_of(self, step: FlatStep) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        """The output of a step that has been run."""
        tree, chunks = outputs_of(step, self.logits, self.hidden, (self.best_tokens, self.best_logits), self.step)
        self._outputs = [weakref.ref(output) for output in (tree, *chunks) if output is not None]
        return tree, chunks

    @staticmethod
    def _parts(numbers: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        by_row, columns = numbers.split((4 * num_rows, len(numbers) - 4 * num_rows))
        return columns.view(COLUMNS, -1), by_row.view(4, num_rows)

    def lay_out(self, rows: Sequence[Row], tree: DraftTree | None, chunks: Sequence[Chunk]) -> FlatStep:
        """The step in the host's buffer."""
        self._loaded.wait()
        return FlatStep(rows, tree, chunks, self.here_columns, self.here_by_row)

    def load(self, step: FlatStep, size: int) -> None:
        """Sends the step to the device, padded with tokens of a row that is nobody's."""
        num_tokens, num_rows = step.num_tokens, len(step.rows)
        self.here_columns[:, num_tokens:size] = 0
        self.here_columns[4, num_tokens:size] = num_rows
        self.here_by_row[:, num_rows : size + 1] = 0
        self.numbers.copy_(self._here, non_blocking=True)
        self._loaded.record()

    def take(self, logits: Tensor, hidden: Tensor) -> None:
        """Stores a forward's output, and sends the top-k tokens after each token to the host."""
        size = len(logits)
        self.logits[:size].copy_(logits)
        self.hidden[:size].copy_(hidden)
        tokens, values, _ = topk_kernels.highest(self.logits[:size], self.best_tokens.shape[1])
        self.step.best[:size].copy_(tokens[:, 0])
        self.best_tokens[:size].copy_(tokens, non_blocking=True)
        self.best_logits[:size].copy_(values, non_blocking=True)


class Moves:
    """Static inputs of the graphs that commit accepted paths."""

    def __init__(self, rows: int, device: torch.device) -> None:
        size = 3 * whole(rows) + rows * _MAX_PATH
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        self._here = on_host((size,), torch.int32, device)
        self._loaded = Event(device)
        (self.lines, self.lengths, self.counts), self.places = self._parts(self._there, rows)
        by_row, places = self._parts(self._here, rows)
        self._by_row, self._places = [part.numpy() for part in by_row], places.numpy()

    @staticmethod
    def _parts(numbers: Tensor, rows: int) -> tuple[list[Tensor], Tensor]:
        by_row, places = numbers[: 3 * whole(rows)].view(3, -1), numbers[3 * whole(rows) :].view(rows, _MAX_PATH)
        return [part[:rows] for part in by_row], places

    def load(self, moves: Sequence[tuple[Row, Sequence[int]]]) -> None:
        """Rows and the places of their accepted tokens below the root."""
        self._loaded.wait()
        rows = [(row.line, row.length, len(path)) for row, path in moves]
        for part, values in zip(self._by_row, zip(*rows, strict=True) if rows else [()] * 3, strict=True):
            part[: len(rows)] = values
            part[len(rows) :] = 0
        for number, (_, path) in enumerate(moves):
            self._places[number, : len(path)] = path
        self._there.copy_(self._here, non_blocking=True)
        self._loaded.record()


class Graphs(Captures):
    """Fused weights, KV store and CUDA graphs of one model, shared by all runners that read the same hidden states."""

    def __init__(self, model: PreTrainedModel, num_hidden: int, exact: bool, store: KVStore | None = None) -> None:
        """num_hidden: how many layers' inputs a step returns. exact, store: see `CapturedTarget`."""
        super().__init__(model.device)
        self.model = model
        self._exact = exact
        self._num_hidden = num_hidden
        config = model.config.get_text_config()
        self.store = store or KVStore(config.num_hidden_layers)
        self.pool: PagePool | None = None
        self.layers: FastLayers | None = None
        self._given_up: FastLayers | None = None
        self.buffers: list[StepBuffers] = []
        self.moves: dict[int, Moves] = {}
        self.rotary: Rotary | None = None
        self._weights: tuple[int, ...] = ()
        self.num_resized = -1  # of the pool, when graphs over its memory could be made

    def refresh(self) -> None:
        """Drops all graphs if the model's weights have moved, or somebody has added a hook to the model.

        Not while it decodes: the check takes milliseconds.
        """
        if self._weights and self.pool is not None and self.pool.is_in_use:
            return
        weights = (*(p.data_ptr() for p in self.model.parameters()), touched_module(self.model) is None)
        if weights == self._weights:
            return
        self.forget()
        reason = self.failure or why_not(self.model)
        self.layers = FastLayers(self.model, self._exact) if reason is None else None
        if self.layers is not None:
            reason = None if self.layers.can_be_exact else "its weights' sizes are not multiples of 64"
            if self.store.keys is None:
                like = next(self.model.parameters())
                self.store.shape(like, (self.layers.kv_heads, self.layers.head_dim))
        if self._exact and reason is not None:
            self._weights = ()  # to look again: the owner may take a hook away
            raise self._not_exact(reason)
        self._weights = (*(p.data_ptr() for p in self.model.parameters()), touched_module(self.model) is None)

    def settle(self) -> Tensor:
        """The block tables on the device; graphs over memory that has moved since are dropped."""
        assert self.pool is not None
        if self.pool.num_resized != self.num_resized:
            self.forget()
            self.num_resized = self.pool.num_resized
            positions = self.pool.tables.shape[1] * PAGE
            self.rotary = self.layers.rotary(positions) if self.layers is not None else None
        return self.pool.sync()

    def buffers_for(self, user: object, num_tokens: int, vocab_size: int) -> StepBuffers:
        """Buffers of a runner's next step: those of its last, or others that nobody uses."""
        mine = next((buffers for buffers in self.buffers if buffers.user() is user), None)
        mine = mine or next((buffers for buffers in self.buffers if not buffers.is_in_use), None)
        if mine is None or mine.room < num_tokens:
            room = _USUAL_ROOM
            while room < num_tokens:
                room *= 2
            if mine is not None:
                self.forget()
                self.buffers.remove(mine)
                del mine  # before there are others
            like = next(self.model.parameters())
            hidden_size = self._num_hidden * self.model.config.get_text_config().hidden_size
            mine = StepBuffers(room, vocab_size, hidden_size, like)
            self.buffers.append(mine)
        mine.user = weakref.ref(user)
        return mine

    def _not_exact(self, reason: str) -> GraftError:
        kind = type(self.model).__name__
        return GraftError(f"exact steps were asked for, and {kind} cannot have them here ({reason}): drop exact")

    def give_up(self, error: Exception) -> None:
        """Falls back to transformers' own eager forward from now on.

        Raises the error instead if memory was short, which may pass, or exact steps were asked for.
        """
        if is_shortage(error) or isinstance(error, GraftError):
            raise error
        self.run_eagerly(first_line(error))

    def run_eagerly(self, reason: str) -> None:
        """Falls back to eager steps from now on, with one warning that gives the reason."""
        if self._exact:
            raise self._not_exact(reason)
        if self.failure is None:
            warnings.warn(
                f"{type(self.model).__name__} cannot be captured in CUDA graphs, so its steps are slower and not "
                f"exact: {reason}",
                stacklevel=6,
            )
        self._given_up, self.layers = self.layers, None  # graphs of others may use what they have
        self.failure = reason
        self.forget()

    def memory_report(self) -> dict[str, int]:
        rotary = self.rotary
        return {
            "cache": self.store.nbytes,
            "rotary tables": num_bytes((rotary.cos, rotary.sin)) if rotary is not None else 0,
            "graphs": self.num_graph_bytes,
            "logits": sum(buffers.logits.nbytes for buffers in self.buffers),
        }


# By model, hidden layers, exactness and the pool that is shared with another model, if any.
_GRAPHS: weakref.WeakValueDictionary[tuple[int, tuple[int, ...], bool, int | None], Graphs] = (
    weakref.WeakValueDictionary()
)


class CapturedTarget(TargetRunner):
    """A TargetRunner whose steps replay CUDA graphs. Their output is valid until its own next step."""

    sizes: tuple[int, ...] = STEP_SIZES
    contexts: tuple[int, ...] = CONTEXTS

    def __init__(
        self,
        model: PreTrainedModel,
        hidden_layers: Sequence[int] = (),
        chunk_size: int = 256,
        exact: bool = False,
        pool: PagePool | None = None,
        store: KVStore | None = None,
    ) -> None:
        """exact: a token's bits depend on its own text alone in large batches too. pool, store: see `TargetRunner`."""
        super().__init__(model, hidden_layers, chunk_size)
        self.is_exact = exact
        key = (id(model), self._hidden_layers, exact, id(pool) if pool is not None else None)
        self._graphs = _GRAPHS.get(key) or Graphs(model, len(self._hidden_layers), exact, store)
        _GRAPHS[key] = self._graphs
        self._store = self._graphs.store
        if pool is not None and self._graphs.pool is not pool:
            self._use_pool(pool)
        if exact or pool is not None:
            # Says now if exact steps cannot be. And where the pages are another's, who opens rows, nobody asks later.
            self._graphs.refresh()

    @property
    def pool(self) -> PagePool:
        graphs = self._graphs
        if graphs.pool is None:
            self._use_pool(PagePool(self.device, self.max_positions, first_pages=_FIRST_TOKENS // PAGE))
            assert graphs.pool is not None
        return graphs.pool

    @property
    def _shared_pool(self) -> PagePool | None:
        return self._graphs.pool

    def _use_pool(self, pool: PagePool) -> None:
        self._graphs.forget()
        self._graphs.pool = pool
        self._graphs.num_resized = -1
        pool.add_store(self._store)

    def open(self, num_rows: int, num_slots: int) -> KVCache:
        with self._graphs.lock:
            self._refresh()
            return super().open(num_rows, num_slots)

    def open_like(self, texts: Sequence[Sequence[int]], salts: Sequence[str], num_slots: int) -> KVCache:
        with self._graphs.lock:
            self._refresh()
            return super().open_like(texts, salts, num_slots)

    def _refresh(self) -> None:
        self._graphs.refresh()
        if self._graphs.failure is None and not self._graphs.num_captured:
            self.progress(Report("graphs", 0, 1, "kernels"))  # which the first forward compiles

    @property
    def step_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in self.sizes if size <= _DECODED) if self._graphs.failure is None else ()

    @property
    def max_tokens(self) -> int | None:
        return self.sizes[-1] if self._graphs.failure is None else None

    @property
    def num_setups(self) -> int:
        return self._graphs.num_setups

    @property
    def mode(self) -> str:
        graphs = self._graphs
        if graphs.failure is not None:
            return f"eager: {graphs.failure}"
        how = "captured" if graphs.num_captured else "to be captured"
        if graphs.layers is None:
            return how
        if self.is_exact:
            return f"{how}, exact in any batch"
        return f"{how}, exact up to {FEW} tokens a step" if graphs.layers.is_mostly_exact else how

    def memory_report(self) -> dict[str, int]:
        return self._graphs.memory_report()

    def step_bytes(self, max_tokens: int) -> int:
        config, like = self.model.config.get_text_config(), next(self.model.parameters())
        heads, size = config.num_attention_heads, like.element_size()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        most = max_tokens + min(LONG_TEXT, self.max_positions or LONG_TEXT)
        splits = attention_kernels.tiles_for(head_dim, like.dtype).count_splits(most)
        by_token = (
            self.vocab_size * (4 + size)  # logits, as the model makes them and in float32
            + config.num_hidden_layers * config.hidden_size * size  # inputs of all layers
            + heads * splits * (head_dim + 2) * 4  # the attention's partial sums
        )
        return 2 * max_tokens * by_token  # graphs of other sizes and contexts share less than all of it

    def warm_up(self, max_tokens: int) -> None:
        """Captures the graphs of all sizes up to `max_tokens`, at short contexts."""
        rooms = [PAGE * self.pool.num_pages] if self.pool.is_fixed else []
        most = min(max_tokens, self.pool.max_slots or max_tokens, *rooms)
        sizes = [size for size in self.sizes if size <= most] or [self.sizes[0]]
        cache = self.open(1, sizes[-1])
        try:
            for number, size in enumerate(reversed(sizes)):  # the largest first, which the others' memory is part of
                self.progress(Report("graphs", number, len(sizes), f"{size} tokens"))
                cache.rows[0].length = 0
                self.step(None, None, [Chunk(cache.rows[0], [0] * size)])
                self.synchronize()
        finally:
            cache.release()

    @torch.no_grad()
    def step(
        self, cache: KVCache | None, tree: DraftTree | None, chunks: Sequence[Chunk] = (), num_run: int = 0
    ) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        graphs, rows = self._graphs, cache.rows if cache is not None else []
        if graphs.failure is not None or any(row.offset for row in rows):  # graphs take positions from the texts
            return super().step(cache, tree, chunks, num_run)
        # A graph runs all nodes: with few tokens a step takes as long as its weights take to be read.
        self._make_room(rows, tree, chunks)
        num_tokens = tree.num_tokens if tree is not None else 0
        num_tokens += sum(len(chunk.tokens) for chunk in chunks)
        size = self._size_for(num_tokens)
        with graphs.lock, self.pool.lock, on_device(graphs.device):
            tables = graphs.settle()
            buffers = graphs.buffers_for(self, size, self.vocab_size)
            step = buffers.lay_out(rows, tree, chunks)
            buffers.load(step, size)
            run = self._captured(buffers, tables, size, max([row.length for row in step.rows], default=0))
            if run is not None:
                run()
                buffers.step.judged.record()
                outputs = buffers.outputs_of(step)
        if run is None:
            return super().step(cache, tree, chunks, num_run)
        for chunk in chunks:
            chunk.row.length += len(chunk.tokens)
        return outputs

    def _size_for(self, num_tokens: int) -> int:
        """The size that a step of so many tokens is padded to."""
        size, most = next((size for size in self.sizes if size >= num_tokens), None), self.sizes[-1]
        if size is None:
            raise GraftError(
                f"a step of {num_tokens} tokens is more than the {most} that one can have: verify fewer nodes"
            )
        return size

    def _captured(self, buffers: StepBuffers, tables: Tensor, size: int, longest: int) -> Run | None:
        """The graph of a step's size and context, captured at first use; None if that fails."""
        graphs, context = self._graphs, context_for(longest, self.contexts)
        key = ("step", id(buffers), size, context)  # they live as long as their graphs
        if key in graphs.steps:
            return graphs.steps[key]
        count = graphs.num_captured + 1
        self.progress(Report("graphs", count, count + 1, f"{size} tokens, context {context}"))
        try:
            return graphs.captured(key, self._make_run(buffers, tables, size, context))
        except Exception as error:  # whatever a model, a compiler or a driver may raise
            graphs.give_up(error)
            return None

    def _make_run(self, buffers: StepBuffers, tables: Tensor, size: int, context: int) -> Run:
        """One forward over static inputs: no shape and no branch in it depends on what they hold."""
        tokens, parents, places, depths, rows, strips = (column[:size] for column in buffers.columns)
        starts, counts, lengths, lines = (column[: size + 1] for column in buffers.by_row)
        layers, rotary = self._graphs.layers, self._graphs.rotary
        writer = KVCache(self.pool, self._store, [])  # only to find slots

        @torch.no_grad()
        def run() -> None:
            paths = layer_kernels.lay_out(parents, places, depths, starts, rows, min(size, _MAX_PATH))
            by_row = (starts, counts, lengths, lines)
            # One token is a chain, whatever it belongs to.
            layout = Layout(rows, places, depths, paths, *by_row, tables, context, strips, only_chains=size == 1)
            step = KernelStep(layout)
            if layers is not None and rotary is not None:
                out, inputs = layers(tokens, step, *self._store.stored, rotary, self._hidden_layers)
                buffers.take(out, side_by_side(inputs, out))
                return
            at = lengths[rows.long()]
            slots = (at + places).long()
            pages = tables[lines[rows.long()].long(), (slots // PAGE).clamp(max=tables.shape[1] - 1)]
            writer.write_at(pages.long() * PAGE + slots % PAGE)
            positions = self._clamped((at + depths).long())
            out, hidden = self._run_model(writer, tokens.long()[None], positions[None], step)
            buffers.take(out[0], hidden[0])

        return run

    def commit(self, cache: KVCache, paths: Sequence[Sequence[int]]) -> None:
        graphs = self._graphs
        if graphs.failure is not None or not graphs.steps:  # kernels may not run here
            return super().commit(cache, paths)
        # Places rise along a path, so that only one without gaps ends at its own length.
        moves = [(row, path) for row, path in zip(cache.rows, paths, strict=True) if path and path[-1] != len(path)]
        if moves:
            with graphs.lock, self.pool.lock, on_device(graphs.device):
                for first in range(0, len(moves), _MOVED[-1]):
                    self._move(moves[first : first + _MOVED[-1]])
        cache.advance([1 + len(path) for path in paths])

    def _move(self, moves: Sequence[tuple[Row, Sequence[int]]]) -> None:
        """Moves keys and values of accepted paths to the places behind their roots."""
        graphs, rows = self._graphs, next(rows for rows in _MOVED if rows >= len(moves))
        tables = graphs.settle()
        if rows not in graphs.moves:
            graphs.moves[rows] = Moves(rows, self.device)
        numbers = graphs.moves[rows]
        pairs = self._store.pairs

        def run() -> None:
            for keys, values in pairs:
                attention_kernels.commit(
                    keys, values, tables, numbers.lines, numbers.lengths, numbers.places, numbers.counts
                )

        if ("move", rows) not in graphs.steps:
            numbers.load([])  # warm-up runs move nothing
        step = graphs.captured(("move", rows), run)
        numbers.load(moves)
        step()

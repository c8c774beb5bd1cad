"""CUDA graphs of the target model: `CapturedTarget` replays one graph per padded number of tokens and context.

Steps are padded to one of a few sizes, and the longest context is rounded up to one of a few lengths, so few graphs
serve all rounds. Inputs and outputs are static buffers, which runners share if they take turns. Without a GPU, the same
code runs and calls the function instead of replaying a graph.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.errors import GraftError
from graft.model.attention import KernelStep
from graft.model.captures import (
    CONTEXTS,
    ROWS,
    Captures,
    Event,
    Run,
    context_for,
    first_line,
    is_out_of_memory,
    num_bytes,
    on_device,
    padded,
    pinned_zeros,
    round_up,
)
from graft.model.families import NotDescribedError, describe
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.matmul import FEW
from graft.model.kv_cache import PAGE, KVCache, KVStore, PagePool, Row
from graft.model.layout import Layout
from graft.model.likeness import why_unlike
from graft.model.llama import FastLayers, Rotary
from graft.model.overrides import owners_attention
from graft.model.plain_modules import changed_module, settings_of
from graft.model.runner import StepOutput, TargetRunner, concat_hidden
from graft.model.step import COLUMNS, LONG_TEXT, Chunk, FlatStep, Part
from graft.model.verified import NUM_SUCCESSORS, VerifyOutput
from graft.progress import Report
from graft.tree.tree import DraftTree

# Small steps are often the tree of one row; large ones are trees of many rows, or prompts. Matrix products are computed
# in tiles of up to 128 tokens, so sizes in between would be no faster: 192 tokens take as long as 256.
STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_MAX_TREE_STEP = 512  # the largest step size for trees
_FIRST_ROOM = 512  # initial size of the buffers, in tokens
_MAX_PATH = 128  # tokens of a tree's path, the root included
_FIRST_TOKENS = 16384  # initial size of a growing page pool, in tokens


class StepBuffers:
    """Static inputs and outputs of graphs, for up to `room` tokens.

    A runner overwrites the output of its own last step, but no other runner's output that is still in use.
    """

    def __init__(self, room: int, vocab_size: int, num_hidden: int, like: Tensor) -> None:
        device = like.device
        self.room = room
        self.user: Callable[[], object | None] = lambda: None  # the runner of the last step
        self._outputs: list[weakref.ref[VerifyOutput]] = []  # of the last step
        num_rows = round_up(room + 1)  # one extra row for the padding tokens
        size = COLUMNS * round_up(room) + 4 * num_rows
        self.numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = pinned_zeros((size,), torch.int32, device)
        self._loaded = Event(device)
        self.columns, self.by_row = self._parts(self.numbers, num_rows)
        self.host_columns, self.host_by_row = (part.numpy() for part in self._parts(self._host, num_rows))
        num_highest = min(NUM_SUCCESSORS, vocab_size)
        self.logits = torch.empty(room, vocab_size, device=device)  # float32
        self.hidden = like.new_zeros(room, num_hidden)
        self.best = torch.zeros(room, dtype=torch.int32, device=device)  # the likeliest token after each
        # The likeliest tokens after each token and their logits, [room, k].
        self.top_tokens = torch.zeros(room, num_highest, dtype=torch.int32, device=device)
        self.top_logits = torch.zeros(room, num_highest, device=device)

    @property
    def is_in_use(self) -> bool:
        return any(output() is not None for output in self._outputs)

    @property
    def output(self) -> StepOutput:
        return StepOutput(self.logits, self.hidden, (self.top_tokens, self.top_logits))

    def outputs_of(self, parts: Sequence[Part]) -> list[VerifyOutput]:
        """The output of the step that was run last, by its parts."""
        outputs = list(map(self.output.of, parts))
        self._outputs = [weakref.ref(output) for output in outputs]
        return outputs

    @staticmethod
    def _parts(numbers: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        by_row, columns = numbers.split((4 * num_rows, len(numbers) - 4 * num_rows))
        return columns.view(COLUMNS, -1), by_row.view(4, num_rows)

    def lay_out(self, rows: Sequence[Row], tree: DraftTree | None, chunks: Sequence[Chunk]) -> FlatStep:
        """Write the step into the host's buffers."""
        self._loaded.wait()
        return FlatStep(rows, tree, chunks, self.host_columns, self.host_by_row)

    def load(self, step: FlatStep, size: int) -> None:
        """Send the step to the device, padded with tokens of an extra row."""
        num_tokens, num_rows = step.num_tokens, len(step.rows)
        self.host_columns[:, num_tokens:size] = 0
        self.host_columns[4, num_tokens:size] = num_rows
        self.host_by_row[:, num_rows : size + 1] = 0
        self.numbers.copy_(self._host, non_blocking=True)
        self._loaded.record()

    def store_outputs(self, logits: Tensor, hidden: Tensor) -> None:
        """Store a forward's output, and the top-k tokens after each token."""
        size = len(logits)
        self.logits[:size].copy_(logits)
        self.hidden[:size].copy_(hidden)
        tokens, values, _ = topk_kernels.highest(self.logits[:size], self.top_tokens.shape[1])
        self.best[:size].copy_(tokens[:, 0])
        self.top_tokens[:size].copy_(tokens)
        self.top_logits[:size].copy_(values)


class Graphs(Captures):
    """Fused weights, KV store and CUDA graphs of one model, shared by all runners that read the same hidden states."""

    def __init__(self, model: PreTrainedModel, num_hidden: int, exact: bool, store: KVStore | None = None) -> None:
        """num_hidden: number of layers whose inputs a step returns. exact, store: see `CapturedTarget`."""
        super().__init__(model.device)
        self.model = model
        self._exact = exact
        self._num_hidden = num_hidden
        config = model.config.get_text_config()
        self.store = store or KVStore(config.num_hidden_layers)
        self.pool: PagePool | None = None
        self.layers: FastLayers | None = None
        self.not_fused: str | None = "nothing was run yet"  # why there are no fused layers
        self._given_up: FastLayers | None = None
        self.buffers: list[StepBuffers] = []
        self.rotary: list[Rotary] | None = None  # by layer
        self._weights: list[Any] = []
        self.num_resized = -1  # the pool's value when these graphs were captured

    def refresh(self) -> None:
        """Drop all graphs if the model's weights have moved, or if hooks were added or removed.

        The check takes milliseconds, so it is skipped while anything is decoded.
        """
        if self._weights and self.pool is not None and self.pool.is_in_use:
            return
        if self._fingerprint() == self._weights:
            return
        self.forget()
        reason = self.failure or self._fuse()
        if self.layers is not None:
            reason = None if self.layers.can_be_exact else "its weights' inputs are not multiples of 64"
            if self.store.keys is None:
                attentions = [layer.mixer for layer in self.layers.what.layers]
                heads = [(attention.kv_heads, attention.head_dim) for attention in attentions]
                self.store.shape_layers(next(self.model.parameters()), heads)
        if self._exact and reason is not None:
            self._weights = []  # check again next time: the owner may remove a hook
            raise self._not_exact(reason)
        self._weights = self._fingerprint()

    def _fuse(self) -> str | None:
        """Make fused layers, if the model has a description and they give what its own code gives; else say why not."""
        self.layers = None
        try:
            what = describe(self.model)
        except NotDescribedError as error:
            self.not_fused = str(error)
        else:
            layers = FastLayers(what, self._exact)
            self.not_fused = why_unlike(self.model, what, layers)
            self.layers = layers if self.not_fused is None else None
        return self.not_fused

    def _fingerprint(self) -> list[Any]:
        """The weights' addresses, what the modules hold beside them, and the attention that the owner chose."""
        addresses = [p.data_ptr() for p in self.model.parameters()]
        chosen = owners_attention(self.model.config.get_text_config())
        return [*addresses, chosen, settings_of(self.model), changed_module(self.model)]

    def sync_tables(self) -> Tensor:
        """The current block tables on the device. Drops graphs whose memory has moved."""
        assert self.pool is not None
        if self.pool.num_resized != self.num_resized:
            self.forget()
            self.num_resized = self.pool.num_resized
            positions = self.pool.tables.shape[1] * PAGE
            self.rotary = self.layers.rotary(positions) if self.layers is not None else None
        return self.pool.sync()

    def buffers_for(self, user: object, num_tokens: int, vocab_size: int) -> StepBuffers:
        """Buffers for a runner's next step: those of its last step, or others that are not in use."""
        mine = next((buffers for buffers in self.buffers if buffers.user() is user), None)
        mine = mine or next((buffers for buffers in self.buffers if not buffers.is_in_use), None)
        if mine is None or mine.room < num_tokens:
            room = _FIRST_ROOM
            while room < num_tokens:
                room *= 2
            if mine is not None:
                self.forget()
                self.buffers.remove(mine)
                del mine  # frees its memory before the new allocation
            like = next(self.model.parameters())
            hidden_size = self._num_hidden * self.model.config.get_text_config().hidden_size
            mine = StepBuffers(room, vocab_size, hidden_size, like)
            self.buffers.append(mine)
        mine.user = weakref.ref(user)
        return mine

    def _not_exact(self, reason: str) -> GraftError:
        kind = type(self.model).__name__
        return GraftError(f"exact steps were asked for, but {kind} cannot have them here ({reason}): drop exact")

    def fall_back_to_eager(self, error: Exception) -> None:
        """Run transformers' own eager forward from now on, with one warning.

        Raises an error instead if memory was short, which may be temporary, or if exact steps were requested.
        """
        if is_out_of_memory(error) or isinstance(error, GraftError):
            raise error
        reason = first_line(error)
        if self._exact:
            raise self._not_exact(reason)
        if self.failure is None:
            warnings.warn(
                f"{type(self.model).__name__} cannot be captured in CUDA graphs, so its steps are slower and not "
                f"exact: {reason}",
                stacklevel=5,
            )
        self._given_up, self.layers = self.layers, None  # kept alive: other graphs may still use its tensors
        self.failure = reason
        self.forget()

    def memory_report(self) -> dict[str, int]:
        tables = [table for rotary in set(self.rotary or ()) for table in (rotary.cos, rotary.sin) if table is not None]
        return {
            "cache": self.store.nbytes,
            "rotary tables": num_bytes(tables),
            "graphs": self.num_graph_bytes,
            "logits": sum(buffers.logits.nbytes for buffers in self.buffers),
        }


# By model, hidden layers, exactness and the pool shared with another model, if any.
_GRAPHS: weakref.WeakValueDictionary[tuple[int, tuple[int, ...], bool, int | None], Graphs] = (
    weakref.WeakValueDictionary()
)


class CapturedTarget(TargetRunner):
    """A TargetRunner whose steps replay CUDA graphs. A step's output is valid until the runner's next step."""

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
        """exact: a token's bits depend only on its own text, even in large batches. pool, store: see `TargetRunner`."""
        super().__init__(model, hidden_layers, chunk_size)
        self.is_exact = exact
        key = (id(model), self._hidden_layers, exact, id(pool) if pool is not None else None)
        self._graphs = _GRAPHS.get(key) or Graphs(model, len(self._hidden_layers), exact, store)
        _GRAPHS[key] = self._graphs
        self._store = self._graphs.store
        if pool is not None and self._graphs.pool is not pool:
            self._use_pool(pool)
        if exact or pool is not None:
            # Now, so that exact steps fail early. If the pool is shared, its owner opens all rows, so this never would.
            self._graphs.refresh()

    @property
    def _opened_pool(self) -> PagePool | None:
        return self._graphs.pool

    def _new_pool(self) -> PagePool:
        return PagePool(self.device, self.max_positions, first_pages=_FIRST_TOKENS // PAGE)

    def _use_pool(self, pool: PagePool) -> None:
        self._graphs.forget()
        self._graphs.pool = pool
        self._graphs.num_resized = -1
        pool.add_store(self._store)

    def refresh(self) -> None:
        with self._graphs.lock:
            self._graphs.refresh()
            if self._graphs.failure is None and not self._graphs.num_captured:
                self.progress(Report("graphs", 0, 1, "kernels"))  # the first forward compiles them

    @property
    def step_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in self.sizes if size <= _MAX_TREE_STEP) if self._graphs.failure is None else ()

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
        how = "captured" if graphs.num_captured else "not captured yet"
        if graphs.layers is None:
            return how
        if self.is_exact:
            return f"{how}, exact in any batch"
        return f"{how}, exact up to {FEW} tokens a step" if graphs.layers.is_mostly_exact else how

    @property
    def not_fused(self) -> str | None:
        graphs = self._graphs
        if graphs.layers is None and graphs.failure is None:
            self.refresh()
        return graphs.failure or graphs.not_fused

    def memory_report(self) -> dict[str, int]:
        return self._graphs.memory_report()

    def step_bytes(self, max_tokens: int) -> int:
        config, like = self.model.config.get_text_config(), next(self.model.parameters())
        heads, size = config.num_attention_heads, like.element_size()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        head_dim = max(head_dim, getattr(config, "global_head_dim", None) or 0)  # Gemma 4 has two sizes
        most = max_tokens + min(LONG_TEXT, self.max_positions or LONG_TEXT)
        splits = attention_kernels.tiles_for(head_dim, like.dtype).count_splits(most)
        by_token = (
            self.vocab_size * (4 + size)  # logits, in the model's dtype and in float32
            + config.num_hidden_layers * config.hidden_size * size  # inputs of all layers
            + heads * splits * (head_dim + 2) * 4  # the attention's partial sums
        )
        return 2 * max_tokens * by_token  # twice, since graphs of other sizes and contexts do not share all of it

    def warm_up(self, max_tokens: int) -> None:
        """Capture the graphs of all sizes up to `max_tokens`, for short contexts."""
        rooms = [PAGE * self.pool.num_pages] if self.pool.is_fixed else []
        most = min(max_tokens, self.pool.max_slots or max_tokens, *rooms)
        sizes = [size for size in self.sizes if size <= most] or [self.sizes[0]]
        cache = self.open(1, sizes[-1])
        try:
            for number, size in enumerate(reversed(sizes)):  # the largest first, so that the others reuse its memory
                self.progress(Report("graphs", number, len(sizes), f"{size} tokens"))
                cache.rows[0].length = 0
                self.step(None, None, [Chunk(cache.rows[0], [0] * size)])
                self.synchronize()
        finally:
            cache.release()

    @torch.no_grad()
    def step(
        self, cache: KVCache | None, tree: DraftTree | None, chunks: Sequence[Chunk] = (), num_already_run: int = 0
    ) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        graphs, rows = self._graphs, cache.rows if cache is not None else []
        if graphs.failure is not None or any(row.offset for row in rows):  # graphs ignore rotary offsets
            return super().step(cache, tree, chunks, num_already_run)
        # `num_already_run` is ignored: a small step takes as long as reading the weights, however few tokens it has.
        self._make_room(rows, tree, chunks)
        num_tokens = tree.num_tokens if tree is not None else 0
        num_tokens += sum(len(chunk.tokens) for chunk in chunks)
        size = self.size_for(num_tokens)
        with graphs.lock, self.pool.lock, on_device(graphs.device):
            tables = graphs.sync_tables()
            buffers = graphs.buffers_for(self, size, self.vocab_size)
            step = buffers.lay_out(rows, tree, chunks)
            buffers.load(step, size)
            run = self.captured_step(buffers, tables, size, max([row.length for row in step.rows], default=0))
            if run is not None:
                run()
                outputs = buffers.outputs_of([part for part in (step.tree, *step.chunks) if part is not None])
        if run is None:
            return super().step(cache, tree, chunks, num_already_run)
        for chunk in chunks:
            chunk.row.length += len(chunk.tokens)
        return outputs.pop(0) if tree is not None else None, outputs

    def rows_for(self, num_rows: int) -> int:
        return padded(num_rows, ROWS) if self.is_captured else num_rows

    @contextmanager
    def launching(self, num_tokens: int) -> Iterator[tuple[Any, Tensor]]:
        graphs = self._graphs
        if graphs.failure is not None:
            with super().launching(num_tokens) as given:
                yield given
            return
        with graphs.lock, self.pool.lock, on_device(graphs.device):
            tables = graphs.sync_tables()
            yield graphs.buffers_for(self, self.size_for(num_tokens), self.vocab_size), tables

    def run_step(self, inputs: Any, tables: Tensor, rows: Sequence[Row], num_tokens: int) -> StepOutput | None:
        if not isinstance(inputs, StepBuffers) or any(row.offset for row in rows):  # graphs ignore rotary offsets
            return super().run_step(inputs, tables, rows, num_tokens)
        run = self.captured_step(inputs, tables, self.size_for(num_tokens), max(row.length for row in rows))
        if run is None:
            return None
        run()
        return inputs.output

    def capture(self, key: tuple[Any, ...], run: Run) -> Run:
        """The graph of other work on a step's buffers, captured under `key` at first use."""
        return self._graphs.captured(key, run)

    def drop_captures(self, owner: int) -> None:
        """Drop the graphs of `capture` whose keys begin with this number."""
        for key in [key for key in self._graphs.steps if key[0] == owner]:
            del self._graphs.steps[key]

    @property
    def is_captured(self) -> bool:
        return self._graphs.failure is None

    def has_captured(self, key: tuple[Any, ...]) -> bool:
        return key in self._graphs.steps

    def commit_moves(self, tables: Tensor, moves: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        if not self.is_captured:  # kernels may not run here
            return super().commit_moves(tables, moves)
        table_rows, lengths, places, counts = moves
        for keys, values in self._store.pairs:
            attention_kernels.commit(keys, values, tables, table_rows, lengths, places, counts)

    def size_for(self, num_tokens: int) -> int:
        if not self.is_captured:
            return num_tokens
        size = next((size for size in self.sizes if size >= num_tokens), None)
        if size is None:
            raise GraftError(
                f"a step of {num_tokens} tokens is more than the maximum of {self.sizes[-1]}: verify fewer nodes"
            )
        return size

    def captured_step(self, buffers: StepBuffers, tables: Tensor, size: int, longest: int) -> Run | None:
        """The graph for a step's size and context, captured at first use; None if the capture fails."""
        graphs, context = self._graphs, context_for(longest, self.contexts)
        key = ("step", id(buffers), size, context)  # the id is unique: buffers live as long as their graphs
        if key in graphs.steps:
            return graphs.steps[key]
        count = graphs.num_captured + 1
        self.progress(Report("graphs", count, count + 1, f"{size} tokens, context {context}"))
        try:
            return graphs.captured(key, self._make_run(buffers, tables, size, context))
        except Exception as error:  # whatever a model, a compiler or a driver may raise
            graphs.fall_back_to_eager(error)
            return None

    def _make_run(self, buffers: StepBuffers, tables: Tensor, size: int, context: int) -> Run:
        """A function for one forward over static inputs. No shape and no branch depends on their contents."""
        tokens, parents, places, depths, rows, strips = (column[:size] for column in buffers.columns)
        starts, counts, lengths, table_rows = (column[: size + 1] for column in buffers.by_row)
        layers, rotary = self._graphs.layers, self._graphs.rotary
        writer = KVCache(self.pool, self._store, [])  # only writes to slots

        @torch.no_grad()
        def run() -> None:
            paths = layer_kernels.lay_out(parents, places, depths, starts, rows, min(size, _MAX_PATH))
            by_row = (starts, counts, lengths, table_rows)
            # A single token is always a chain.
            layout = Layout(rows, places, depths, paths, *by_row, tables, context, strips, only_chains=size == 1)
            step = KernelStep(layout)
            if layers is not None and rotary is not None:
                out, inputs = layers(tokens, step, self._store.by_layer, rotary, self._hidden_layers)
                buffers.store_outputs(out, concat_hidden(inputs, out))
                return
            at = lengths[rows.long()]
            slots = (at + places).long()
            pages = tables[table_rows[rows.long()].long(), (slots // PAGE).clamp(max=tables.shape[1] - 1)]
            writer.write_at(pages.long() * PAGE + slots % PAGE)
            positions = self._clamped((at + depths).long())
            out, hidden = self._run_model(writer, tokens.long()[None], positions[None], step)
            buffers.store_outputs(out[0], hidden[0])

        return run

    def commit(self, cache: KVCache, paths: Sequence[Sequence[int]]) -> None:
        graphs = self._graphs
        if graphs.failure is not None or not graphs.steps:  # kernels may not run here
            return super().commit(cache, paths)
        # Places rise along a path. So if the last place equals the path's length, nothing has to move.
        moves = [(row, path) for row, path in zip(cache.rows, paths, strict=True) if path and path[-1] != len(path)]
        if moves:
            by_row = torch.tensor([(row.block_table_row, row.length, len(path)) for row, path in moves]).int().T
            width = max(len(path) for _, path in moves)
            places = torch.tensor([[*path, *[0] * (width - len(path))] for _, path in moves]).int()
            with graphs.lock, self.pool.lock, on_device(graphs.device):
                table_rows, lengths, counts = by_row.contiguous().to(self.device)
                self.commit_moves(graphs.sync_tables(), (table_rows, lengths, places.to(self.device), counts))
        cache.advance([1 + len(path) for path in paths])

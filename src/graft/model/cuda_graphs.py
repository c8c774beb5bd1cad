"""CUDA graphs of the target model: `CapturedTarget` runs a verify as one graph per bucket of rows, width and context.

A tree is padded to the next of a few widths, and its context length is rounded up to the next of a few contexts, so
that few graphs serve all rounds. A graph is bound to addresses: KV caches are leased from an arena that outlives
generations. Without a GPU the same code runs, and calls what would be replayed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.errors import GraftError
from graft.model.arena import (
    ALIGNED,
    CONTEXTS,
    Arena,
    ArenaCache,
    Arenas,
    Event,
    Run,
    first_line,
    is_shortage,
    new_pool,
    next_power,
    num_bytes,
    on_host,
    whole,
)
from graft.model.attention import Paths
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.matmul import FEW
from graft.model.kv_cache import CacheLimit, TreeCache, WritePosition
from graft.model.llama import FastLayers, touched_module, why_not
from graft.model.runner import TargetRunner, side_by_side
from graft.model.verified import NUM_SUCCESSORS, Step, VerifyOutput
from graft.progress import Report
from graft.spec_decode.tree import PADDING, DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPT_WIDTHS = (64, 128, 256)  # of chunks of a prompt
_MAX_LOGITS = 2**31  # bytes of logits that an arena's steps may keep, if there are several


class Inputs:
    """Inputs of a step (tree and lengths) in one int32 tensor, so that one transfer takes all of them to the device."""

    def __init__(self, numbers: Tensor, rows: int, width: int) -> None:
        self.numbers = numbers
        self._head, tokens, parents = numbers.split((ALIGNED + whole(rows), *[whole(rows * width)] * 2))
        self.width, self.lengths = self._head[:1], self._head[ALIGNED : ALIGNED + rows]
        self.tokens, self.parents = (part[: rows * width].view(rows, width) for part in (tokens, parents))

    @staticmethod
    def num_numbers(rows: int, width: int) -> int:
        return ALIGNED + whole(rows) + 2 * whole(rows * width)

    def fill(self, tree: DraftTree, lengths: Sequence[int]) -> None:
        """Writes the trees of the first rows. Other rows get length 0 and keep whatever tree they had before.

        Padding nodes get the parent -1, so that no walk down the tree reaches them.
        """
        rows, width = tree.tokens.shape
        head = self._head.numpy()
        head[0], head[ALIGNED : ALIGNED + rows], head[ALIGNED + rows :] = width, lengths, 0
        self.tokens.numpy()[:rows, :width] = tree.tokens.numpy()
        self.parents.numpy()[:rows, :width] = np.where(tree.sources.numpy() == PADDING, -1, tree.parents.numpy())


class GraphBuffers:
    """Static inputs and outputs of the CUDA graphs of one number of rows and one width."""

    def __init__(self, rows: int, width: int, vocab_size: int, device: torch.device) -> None:
        size, num_highest = Inputs.num_numbers(rows, width), min(NUM_SUCCESSORS, vocab_size)
        self.inputs = Inputs(torch.zeros(size, dtype=torch.int32, device=device), rows, width)
        self._staged = Inputs(on_host((size,), torch.int32, device), rows, width)
        self._loaded = Event(device)
        best = torch.zeros(rows, width, dtype=torch.int32, device=device)
        chosen = on_host((rows * width,), torch.int64, device)
        self.step = Step(self.inputs.tokens, self.inputs.parents, best, chosen, Event(device))
        self.logits = torch.empty(rows, width, vocab_size, device=device)  # float32
        # On the host: the likeliest tokens after each node and their logits, [rows, width, k].
        self.best_tokens = on_host((rows, width, num_highest), torch.int32, device)
        self.best_logits = on_host((rows, width, num_highest), torch.float32, device)

    def load(self, tree: DraftTree, lengths: Sequence[int]) -> None:
        self._loaded.wait()
        self._staged.fill(tree, lengths)
        self.inputs.numbers.copy_(self._staged.numbers, non_blocking=True)
        self._loaded.record()

    def take_logits(self, logits: Tensor) -> None:
        """Stores a forward's logits, and sends the top-k tokens of each node to the host."""
        self.logits.copy_(logits)
        num_highest = self.best_tokens.shape[2]
        tokens, values, _ = topk_kernels.highest(self.logits.flatten(0, 1), num_highest)
        self.step.best.copy_(tokens[:, 0].view_as(self.step.best))
        self.best_tokens.copy_(tokens.view_as(self.best_tokens), non_blocking=True)
        self.best_logits.copy_(values.view_as(self.best_logits), non_blocking=True)


@dataclass(eq=False, kw_only=True)
class StepArena(Arena):
    """An arena of the target model."""

    hidden: Tensor  # [rows, width, layers * H] of the last step, where the drafter's own graphs find them


class Graphs(Arenas):
    """Fused weights, arenas and CUDA graphs of one model, shared by all runners that ask for the same hidden states."""

    def __init__(self, model: PreTrainedModel, num_hidden: int, exact: bool) -> None:
        """num_hidden: how many layers' inputs a step returns. exact: see `CapturedTarget`."""
        super().__init__(model.device)
        self.model = model
        self._exact = exact
        self._num_hidden = num_hidden
        self.layers: FastLayers | None = None
        self._given_up: FastLayers | None = None
        self.cache_shape: tuple[int, int] | None = None  # key/value heads and head_dim
        self._weights: tuple[int, ...] = ()

    def make_room(self, arena: Arena, num_logits: int) -> None:
        """Drops the least recently used graphs of an arena until its logits and `num_logits` more fit in memory."""
        while (kept := _graph_buffers(arena)) and 4 * num_logits + num_bytes(b.logits for b in kept) > _MAX_LOGITS:
            oldest = next(key for key, buffers in arena.buffers.items() if buffers is kept[0])
            del arena.buffers[oldest]
            arena.steps = {key: run for key, run in arena.steps.items() if key[:2] != oldest}

    def refresh(self) -> None:
        """Drops all graphs if the model's weights have moved, or somebody has added a hook to the model.

        Not while it decodes: the check takes milliseconds.
        """
        if not all(arena.is_free for arena in self.arenas):
            return
        weights = (*(p.data_ptr() for p in self.model.parameters()), touched_module(self.model) is None)
        if weights == self._weights:
            return
        self.arenas.clear()
        reason = self.failure or why_not(self.model)
        self.layers = FastLayers(self.model, self._exact) if reason is None else None
        if self.layers is not None:
            self.cache_shape = (self.layers.kv_heads, self.layers.head_dim)
            reason = None if self.layers.can_be_exact else "its weights' sizes are not multiples of 64"
        if self._exact and reason is not None:
            self._weights = ()  # to look again: the owner may take a hook away
            raise self._not_exact(reason)
        self._weights = (*(p.data_ptr() for p in self.model.parameters()), touched_module(self.model) is None)

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
        for arena in self.arenas:
            arena.forget()

    def memory_report(self) -> dict[str, int]:
        outputs = [buffers.logits for arena in self.arenas for buffers in _graph_buffers(arena)]
        return super().memory_report() | {"logits": num_bytes(outputs)}

    def make_arena(self, rows: int, slots: int, max_positions: int | None) -> StepArena:
        assert self.cache_shape is not None
        model, config = self.model, self.model.config.get_text_config()
        shape = (config.num_hidden_layers, rows, slots, *self.cache_shape)
        # Zeros: attention through masks reads slots that nobody has written, and NaN times zero is NaN.
        keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        rotary = self.layers.rotary(min(slots, max_positions or slots)) if self.layers is not None else None
        hidden = keys.new_zeros(rows, PROMPT_WIDTHS[-1], self._num_hidden * config.hidden_size)
        return StepArena(keys, values, rotary, new_pool(model.device), hidden=hidden)


def _graph_buffers(arena: Arena) -> list[GraphBuffers]:
    """Of verify steps, the least recently used first; an arena also keeps those of commits."""
    return [buffers for buffers in arena.buffers.values() if isinstance(buffers, GraphBuffers)]


_GRAPHS: weakref.WeakValueDictionary[tuple[int, tuple[int, ...], bool], Graphs] = weakref.WeakValueDictionary()


class CapturedTarget(TargetRunner):
    """A TargetRunner whose `verify` replays a CUDA graph. Its output is valid until the next `verify`."""

    widths: tuple[int, ...] = WIDTHS
    prompt_widths: tuple[int, ...] = PROMPT_WIDTHS
    contexts: tuple[int, ...] = CONTEXTS

    def __init__(
        self,
        model: PreTrainedModel,
        hidden_layers: Sequence[int] = (),
        chunk_size: int = 256,
        exact: bool = False,
    ) -> None:
        """exact: a token's bits depend on its own text alone in large batches too."""
        super().__init__(model, hidden_layers, chunk_size)
        self.is_exact = exact
        key = (id(model), self._hidden_layers, exact)
        self._graphs = _GRAPHS.get(key) or Graphs(model, len(self._hidden_layers), exact)
        _GRAPHS[key] = self._graphs
        if exact:
            self._graphs.refresh()  # says now if that cannot be

    def open(self, num_rows: int, num_slots: int) -> TreeCache:
        with self._graphs.lock:
            return self._open(num_rows, num_slots)

    def _open(self, num_rows: int, num_slots: int) -> TreeCache:
        graphs = self._graphs
        graphs.refresh()
        if graphs.failure is None and graphs.cache_shape is None:
            graphs.cache_shape = self._find_cache_shape()
        if graphs.failure is not None:
            return super().open(num_rows, num_slots)
        if not graphs.arenas and graphs.num_captured == 0:
            self.progress(Report("graphs", 0, 1, "kernels"))  # which the first forward compiles
        return graphs.lease(num_rows, num_slots + self._num_more, self.max_positions)

    def keep_to(self, limit: CacheLimit) -> None:
        super().keep_to(limit)
        self._graphs.keep_to(limit)

    def num_slots_of(self, num_rows: int, num_slots: int) -> int:
        return next_power(num_rows) * (num_slots + self._num_more)

    @property
    def _num_more(self) -> int:
        """Slots after a text for the padding nodes of a step."""
        return max(self.widths[-1], self.prompt_widths[-1])

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

    def warm_up(self, cache: TreeCache, width: int) -> None:
        self.verify(cache, DraftTree.chain(torch.zeros(cache.num_rows, width, dtype=torch.int64)))
        self.synchronize()

    @torch.no_grad()
    def verify(self, cache: TreeCache, tree: DraftTree) -> VerifyOutput:
        width = next((width for width in self.widths if width >= tree.width), None)
        if width is None or not isinstance(cache, ArenaCache):
            return super().verify(cache, tree)
        return self._replay(cache, tree, next_power(cache.num_rows), width) or super().verify(cache, tree)

    @torch.no_grad()
    def prefill(self, cache: TreeCache, row: int, tokens: Sequence[int]) -> Iterator[VerifyOutput]:
        """Prefills the first row by graphs, always: a prompt's bits must not depend on how much of it was cached."""
        if row > 0 or not isinstance(cache, ArenaCache):
            yield from super().prefill(cache, row, tokens)
            return
        for start in range(0, len(tokens), self.chunk_size):
            chunk = tokens[start : start + self.chunk_size]
            width = next((width for width in self.prompt_widths if width >= len(chunk)), None)
            verified: VerifyOutput | None = None
            if width is not None:
                verified = self._replay(cache, DraftTree.chain(torch.tensor([chunk])), 1, width)
            if verified is None:
                yield from super().prefill(cache, row, chunk)
                continue
            cache.advance([len(chunk)])
            self.wait_for(verified)
            yield verified

    def _replay(self, cache: ArenaCache, tree: DraftTree, rows: int, width: int) -> VerifyOutput | None:
        """A forward of the cache's first rows by a CUDA graph; None if steps cannot be captured."""
        if self._graphs.failure is not None:
            return None
        num_rows = len(tree.tokens)
        lengths = cache.lengths[:num_rows]
        if max(lengths) + width > cache.num_slots:
            raise GraftError(f"the cache holds {cache.num_slots} tokens and {max(lengths) + width} are needed")
        arena = cast(StepArena, cache.arena)
        with self._graphs.lock, torch.cuda.device_of(arena.keys):
            buffers, run = self._step(arena, tree, lengths, rows, width)
            if run is None:
                return None
            cache.aim_at_first(num_rows)
            run()
            buffers.step.judged.record()
        part = (slice(num_rows), slice(tree.width))
        highest = (buffers.best_tokens[part], buffers.best_logits[part])
        return VerifyOutput(tree.tokens, buffers.logits[part], arena.hidden[part], highest, buffers.step)

    def _step(
        self, arena: StepArena, tree: DraftTree, lengths: Sequence[int], rows: int, width: int
    ) -> tuple[GraphBuffers, Run | None]:
        """The graph of the tree's bucket, with the tree loaded; captured at first use, None if that fails."""
        context = arena.context_for(lengths, self.contexts)
        buffers: GraphBuffers | None = arena.buffers.pop((rows, width), None)
        if buffers is None:
            self._graphs.make_room(arena, rows * width * self.vocab_size)
            buffers = GraphBuffers(rows, width, self.vocab_size, self.device)
        arena.buffers[rows, width] = buffers  # last, as the most recently used
        buffers.load(tree, lengths)  # before a capture too: its warm-up runs write to the slots of this tree
        key = (rows, width, context)
        if key in arena.steps:
            return buffers, arena.steps[key]
        count = self._graphs.num_captured + 1
        self.progress(Report("graphs", count, count + 1, f"width {width}, context {context}"))
        try:
            return buffers, self._graphs.captured(arena, key, self._make_run(arena, buffers, context))
        except Exception as error:  # whatever a model, a compiler or a driver may raise
            self._graphs.give_up(error)
            return buffers, None

    def _make_run(self, arena: StepArena, buffers: GraphBuffers, context: int) -> Run:
        """One forward over static inputs: no shape and no branch in it depends on what they hold."""
        inputs = buffers.inputs
        rows, width = inputs.tokens.shape
        layers, rotary = self._graphs.layers, arena.rotary
        writer = ArenaCache(arena, rows)  # only to find slots: it has no lease and no lengths
        keys, values = arena.keys[:, :rows], arena.values[:, :rows]

        @torch.no_grad()
        def run() -> None:
            tokens, depths, paths = layer_kernels.lay_out(inputs.tokens, inputs.parents, inputs.width)
            seen = Paths(inputs.lengths, depths, paths, context)
            if layers is not None and rotary is not None:
                out, inputs_of_layers = layers(tokens, seen, keys, values, rotary, self._hidden_layers)
                hidden = side_by_side(inputs_of_layers, out)
            else:
                lengths = inputs.lengths.long()
                writer.aim_on_device(lengths, width)
                out, hidden = self._run_model(writer, tokens, self._clamped(lengths[:, None] + depths), seen)
            buffers.take_logits(out)
            arena.hidden[:rows, :width].copy_(hidden)

        return run

    @torch.no_grad()
    def _forward(self, cache: TreeCache, tree: DraftTree, aim: WritePosition, num_logits: int = 0) -> VerifyOutput:
        """The fused layers without a graph: for prompt chunks of further rows, and trees wider than any bucket."""
        layers = self._graphs.layers
        rotary = cache.arena.rotary if isinstance(cache, ArenaCache) else None
        if layers is None or rotary is None or not isinstance(cache, ArenaCache):
            return super()._forward(cache, tree, aim, num_logits)
        arena, (rows, end) = cache.arena, cache.aimed
        tokens, tree = tree.tokens, tree.to(self.device)
        depths, paths = (numbers.int().contiguous() for numbers in (tree.depths(), tree.paths()))
        seen = Paths(aim.lengths.int(), depths, paths, end)
        keys, values = arena.keys[:, rows], arena.values[:, rows]
        try:
            with self._graphs.lock, torch.cuda.device_of(keys):
                logits, inputs = layers(tree.tokens, seen, keys, values, rotary, self._hidden_layers, num_logits)
        except Exception as error:  # as in a capture
            self._graphs.give_up(error)
            return super()._forward(cache, tree, aim, num_logits)
        return VerifyOutput(tokens, logits.float(), side_by_side(inputs, tree.tokens[..., None].to(logits.dtype)))

    def _find_cache_shape(self) -> tuple[int, int] | None:
        """Key/value heads and head_dim, by a forward of one token; None if keys and values differ in shape."""
        cache = TreeCache(self._num_layers, 1, 1)
        TargetRunner.verify(self, cache, DraftTree.roots(torch.zeros(1, dtype=torch.int64)))
        key, value = (stored.shape[3:] for stored in cache.stored)
        if key != value:
            self._graphs.run_eagerly("its keys and values differ in size")
            return None
        return key[0], key[1]

"""CapturedTarget: a target step as one CUDA graph, replayed for every tree of its bucket.

A tree is padded to the next of a few widths, and its text's length counts as the next of a few contexts, so that few
graphs serve all rounds. A graph is bound to addresses: caches are leased from an arena that outlives generations.
Without a GPU the same code runs, and what would be replayed is called.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.errors import GraftError
from graft.report import Report
from graft.settings import require
from graft.target import kernels, layer_kernels
from graft.target.attention import Paths
from graft.target.cache import Aim, TreeCache
from graft.target.fast_layers import FastLayers, Rotary, touched_module, why_not
from graft.target.runner import TargetRunner
from graft.target.verified import Verified
from graft.tree import DraftTree

WIDTHS = (1, 8, 16, 32, 64, 128)
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536)
_MAX_LOGITS = 2**31  # bytes of logits that an arena's steps may keep, if there are several
_ALIGNED = 4  # int32 numbers to 16 bytes, at which all inputs start: kernels are compiled for alignments
_WHOLE_SLOTS = 4096  # above it, an arena's slots are a multiple of it; below, a power of two

Run = Callable[[], tuple[Tensor, ...]]


class Inputs:
    """What a step reads, at fixed addresses, all in one tensor: a tree from the host takes one transfer."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        nodes = _whole(rows * width)
        self._numbers = torch.zeros(_ALIGNED + _whole(rows) + 2 * nodes, dtype=torch.int32, device=device)
        self._head, tokens, parents = self._numbers.split((_ALIGNED + _whole(rows), nodes, nodes))
        self.width, self.lengths = self._head[:1], self._head[_ALIGNED : _ALIGNED + rows]
        self.tokens, self.parents = (part[: rows * width].view(rows, width) for part in (tokens, parents))

    def load(self, tree: DraftTree, lengths: Sequence[int]) -> None:
        """Takes in the trees of the first rows. Other rows have no text, and whatever tree they had before."""
        rows, width = tree.tokens.shape
        head = [width, *[0] * (_ALIGNED - 1), *lengths]
        head += [0] * (len(self._head) - len(head))
        if tree.tokens.device == self._numbers.device:
            self._head.copy_(_numbers(head, self._numbers.device), non_blocking=True)
            self.tokens[:rows, :width].copy_(tree.tokens)
            self.parents[:rows, :width].copy_(tree.parents)
            return
        staged = Inputs(len(self.tokens), self.tokens.shape[1], torch.device("cpu"))
        staged._head[:] = torch.tensor(head)
        staged.tokens[:rows, :width], staged.parents[:rows, :width] = tree.tokens, tree.parents
        self._numbers.copy_(staged._numbers.pin_memory(), non_blocking=True)


@dataclass(eq=False)
class Step:
    """A captured forward of one bucket."""

    inputs: Inputs
    logits: Tensor  # [rows, width, V] float32
    run: Run  # gives the hidden states asked for, [rows, width, H] each


@dataclass(eq=False)
class Arena:
    """Tensors of a cache that stay where they are, and the steps bound to them. One cache at a time has them."""

    keys: Tensor  # [layers, rows, slots, kv_heads, head_dim]
    values: Tensor
    rotary: Rotary | None
    pool: Any  # of memory that its graphs share; None without a GPU
    steps: dict[tuple[int, int, int], Step] = field(default_factory=dict)  # by rows, width and context
    places: dict[tuple[int, int], tuple[Inputs, Tensor]] = field(default_factory=dict)  # by rows and width
    lessee: weakref.ref[ArenaCache] | None = None

    @property
    def is_free(self) -> bool:
        return self.lessee is None or self.lessee() is None

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    def make_room(self, num_bytes: int) -> None:
        """Forgets all steps if their logits and so many bytes more are too much; those in use are captured again."""
        if self.places and num_bytes + _num_bytes(logits for _, logits in self.places.values()) > _MAX_LOGITS:
            self.forget()

    def forget(self) -> None:
        self.steps.clear()
        self.places.clear()
        self.pool = _new_pool(self.keys.device)

    def holds(self, num_rows: int, num_slots: int) -> bool:
        return self.keys.shape[1] >= num_rows and self.num_slots >= num_slots


class ArenaCache(TreeCache):
    """A cache in an arena. What it holds stays in place: rows that stay move up within it."""

    def __init__(self, arena: Arena, num_rows: int, lease: Callable[[int, int], ArenaCache] | None = None) -> None:
        """lease: where a larger arena is to be had."""
        super().__init__(len(arena.keys), num_rows, arena.num_slots)
        self.arena = arena
        self.num_rows_at_first = num_rows
        self._lease = lease
        self._keys, self._values = arena.keys, arena.values

    def aim_at_all(self) -> None:
        """Readies all rows for a step, which finds its slots by itself."""
        self._rows = slice(0, self.num_rows)

    @property
    def aimed(self) -> tuple[slice, int]:
        """The rows of the current forward, and how many slots it may read."""
        return self._rows, self._end

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        if not self.arena.steps:  # kernels may not run here
            return super().commit(paths)
        if any(list(path) != list(range(1, len(path) + 1)) for path in paths):
            keys, values = self.arena.keys[:, self._rows], self.arena.values[:, self._rows]
            longest = max(map(len, paths))
            padded = [place for path in paths for place in (*path, *[0] * (longest - len(path)))]
            lengths, counts, places = _on_device(
                keys.device, self.lengths[self._rows], [len(path) for path in paths], padded
            )
            with torch.cuda.device_of(keys):
                kernels.commit(keys, values, lengths, places.view(len(paths), longest), counts)
        self.advance([1 + len(path) for path in paths])

    def keep(self, rows: Sequence[int]) -> None:
        kept = list(rows)
        if kept and kept != list(range(len(kept))):
            longest = max(self.lengths[row] for row in kept)
            for stored in (self.arena.keys, self.arena.values):
                stored[:, : len(kept), :longest] = stored[:, kept, :longest]
        self.lengths = [self.lengths[row] for row in kept]

    def join(self, other: TreeCache) -> None:
        """Takes in another cache's rows behind its own, in a larger arena where they do not fit."""
        first, num_rows = self.num_rows, self.num_rows + other.num_rows
        if not self.arena.holds(_power(num_rows), other.num_slots):
            self._move(num_rows, max(self.num_slots, other.num_slots))
        for own, new in ((self.arena.keys, other._keys), (self.arena.values, other._values)):
            if new is not None:
                for row, length in enumerate(other.lengths):
                    own[:, first + row, :length] = new[:, row, :length]
        self.lengths = self.lengths + other.lengths
        self.num_rows_at_first = max(self.num_rows_at_first, num_rows)

    def _move(self, num_rows: int, num_slots: int) -> None:
        """To an arena of that size, where steps are captured anew."""
        assert self._lease is not None
        old, self.arena = self.arena, self._lease(num_rows, num_slots).arena
        longest = max(self.lengths, default=0)
        for stored, before in ((self.arena.keys, old.keys), (self.arena.values, old.values)):
            stored[:, : self.num_rows, :longest] = before[:, : self.num_rows, :longest]
        old.lessee, self.arena.lessee = None, weakref.ref(self)
        self.num_slots = self.arena.num_slots
        self._keys, self._values = self.arena.keys, self.arena.values


class Graphs:
    """What runners of one model that ask for the same hidden states share: fused weights, arenas, captured steps."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.arenas: list[Arena] = []
        self.failure: str | None = None  # why there are none
        self.num_captured = 0
        self.layers: FastLayers | None = None
        self.cache_shape: tuple[int, int] | None = None  # key/value heads and head_dim
        self._weights: tuple[int, ...] = ()
        self._is_cuda = model.device.type == "cuda"
        self._stream = torch.cuda.Stream(model.device) if self._is_cuda else None

    def refresh(self) -> None:
        """Starts anew if the model's weights lie elsewhere than before, or somebody has hooked into the model."""
        weights = (*(p.data_ptr() for p in self.model.parameters()), touched_module(self.model) is None)
        if weights == self._weights:
            return
        self.arenas.clear()
        self.layers = FastLayers(self.model) if self.failure is None and why_not(self.model) is None else None
        if self.layers is not None:
            self.cache_shape = (self.layers.kv_heads, self.layers.head_dim)
        self._weights = (*(p.data_ptr() for p in self.model.parameters()), touched_module(self.model) is None)

    def lease(self, num_rows: int, num_slots: int, max_positions: int | None) -> ArenaCache:
        """A cache of at least that size. A free arena that is too small makes room for a larger one."""
        rows, slots = _power(num_rows), _slots(num_slots)
        free = [arena for arena in self.arenas if arena.is_free]
        arena = next((arena for arena in free if arena.holds(rows, slots)), None)
        self.arenas = [other for other in self.arenas if other is arena or other not in free]
        free.clear()
        if arena is None:
            arena = self._make_arena(rows, slots, max_positions)
            self.arenas.append(arena)
        cache = ArenaCache(arena, num_rows, lambda rows, slots: self.lease(rows, slots, max_positions))
        arena.lessee = weakref.ref(cache)
        return cache

    def capture(self, run: Run, pool: Any) -> Run:
        """What replays `run`, or without a GPU calls it. Runs it first, since libraries set themselves up then."""
        self.num_captured += 1
        if self._stream is None:
            return _calling(run)
        current = torch.cuda.current_stream(self.model.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay

    def give_up(self, reason: str) -> None:
        """From now on transformers' own forward is run, eagerly."""
        if self.failure is None:
            warnings.warn(
                f"{type(self.model).__name__} cannot be captured in CUDA graphs, so its steps are slower and not "
                f"exact: {reason}",
                stacklevel=6,
            )
        self.failure, self.layers = reason, None
        for arena in self.arenas:
            arena.forget()

    def memory_report(self) -> dict[str, int]:
        caches = [t for arena in self.arenas for t in (arena.keys, arena.values)]
        tables = [t for arena in self.arenas if arena.rotary for t in (arena.rotary.cos, arena.rotary.sin)]
        outputs = [logits for arena in self.arenas for _, logits in arena.places.values()]
        segments = torch.cuda.memory_snapshot() if self._is_cuda else []
        pools = {arena.pool for arena in self.arenas}
        return {
            "cache": _num_bytes(caches),
            "rotary tables": _num_bytes(tables),
            "logits": _num_bytes(outputs),
            "graphs": sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) in pools),
        }

    def _make_arena(self, rows: int, slots: int, max_positions: int | None) -> Arena:
        assert self.cache_shape is not None
        model = self.model
        shape = (model.config.get_text_config().num_hidden_layers, rows, slots, *self.cache_shape)
        # Zeros: attention through masks reads slots that nobody has written, and NaN times zero is NaN.
        keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        rotary = self.layers.rotary(min(slots, max_positions or slots)) if self.layers is not None else None
        return Arena(keys, values, rotary, _new_pool(model.device))


_GRAPHS: weakref.WeakValueDictionary[tuple[int, tuple[int, ...]], Graphs] = weakref.WeakValueDictionary()


class CapturedTarget(TargetRunner):
    """A TargetRunner whose `verify` replays a graph. What it gives is valid until the next `verify`."""

    widths: tuple[int, ...] = WIDTHS
    contexts: tuple[int, ...] = CONTEXTS

    def __init__(
        self,
        model: PreTrainedModel,
        hidden_layers: Sequence[int] = (),
        chunk_size: int = 256,
        exact_width: int | None = None,
    ) -> None:
        """exact_width: the one width of all steps, so that a token's bits do not depend on what it is verified with."""
        super().__init__(model, hidden_layers, chunk_size)
        if exact_width is not None:
            self.widths = (exact_width,)
        self._is_exact = exact_width is not None
        key = (id(model), self._hidden_layers)
        self._graphs = _GRAPHS.get(key) or Graphs(model)
        _GRAPHS[key] = self._graphs

    def open(self, num_rows: int, num_slots: int) -> TreeCache:
        graphs = self._graphs
        graphs.refresh()
        if graphs.failure is None and graphs.cache_shape is None:
            graphs.cache_shape = self._find_cache_shape()
        if graphs.failure is not None:
            return super().open(num_rows, num_slots)
        if not graphs.arenas and graphs.num_captured == 0:
            self.progress(Report("graphs", 0, 1, "kernels"))  # which the first forward compiles
        return graphs.lease(num_rows, num_slots + self.widths[-1], self.max_positions)

    def memory_report(self) -> dict[str, int]:
        return self._graphs.memory_report()

    def warm_up(self, cache: TreeCache, width: int) -> None:
        self.verify(cache, DraftTree.chain(torch.zeros(cache.num_rows, width, dtype=torch.int64)))
        self.synchronize()

    @torch.no_grad()
    def verify(self, cache: TreeCache, tree: DraftTree) -> Verified:
        width = next((width for width in self.widths if width >= tree.width), None)
        require(
            width is not None or not self._is_exact,
            f"exact steps are {self.widths[-1]} nodes wide and a tree has {tree.width}: give the engine its budget",
        )
        if width is None or not isinstance(cache, ArenaCache) or self._graphs.failure is not None:
            return super().verify(cache, tree)
        longest = max(cache.lengths)
        if longest + width > cache.num_slots:
            raise GraftError(f"the cache holds {cache.num_slots} tokens and {longest + width} are needed")
        num_rows = cache.num_rows_at_first if self._is_exact else cache.num_rows
        with torch.cuda.device_of(cache.arena.keys):
            step = self._step(cache.arena, tree, cache.lengths, _power(num_rows), width)
            if step is None:
                return super().verify(cache, tree)
            cache.aim_at_all()
            hidden = step.run()
        rows, width = tree.tokens.shape
        return Verified(tree.tokens, step.logits[:rows, :width], tuple(state[:rows, :width] for state in hidden))

    def _step(self, arena: Arena, tree: DraftTree, lengths: Sequence[int], rows: int, width: int) -> Step | None:
        """The step of the tree's bucket with the tree in it; captured if there is none yet, None if that fails."""
        longest = max(lengths)
        context = min(next((c for c in self.contexts if c >= longest), arena.num_slots), arena.num_slots)
        if (rows, width) not in arena.places:
            arena.make_room(4 * rows * width * self.vocab_size)
            logits = torch.empty(rows, width, self.vocab_size, device=self.device)
            arena.places[rows, width] = Inputs(rows, width, self.device), logits
        inputs, logits = arena.places[rows, width]
        inputs.load(tree, lengths)  # before a capture too: its trial runs write where the tree's own will
        key = (rows, width, context)
        if key not in arena.steps:
            count = self._graphs.num_captured + 1
            self.progress(Report("graphs", count, count + 1, f"width {width}, context {context}"))
            try:
                run = self._graphs.capture(self._make_run(arena, inputs, logits, context), arena.pool)
                arena.steps[key] = Step(inputs, logits, run)
            except Exception as error:  # whatever a model, a compiler or a driver may raise
                self._graphs.give_up(_first_line(error))
                return None
        return arena.steps[key]

    def _make_run(self, arena: Arena, inputs: Inputs, logits: Tensor, context: int) -> Run:
        """One forward over static inputs: no shape and no branch in it depends on what they hold."""
        rows, width = inputs.tokens.shape
        layers, rotary = self._graphs.layers, arena.rotary
        writer = ArenaCache(arena, rows)  # only to find slots: it has no lease and no lengths
        keys, values = arena.keys[:, :rows], arena.values[:, :rows]

        @torch.no_grad()
        def run() -> tuple[Tensor, ...]:
            tokens, depths, paths = layer_kernels.lay_out(inputs.tokens, inputs.parents, inputs.width)
            seen = Paths(inputs.lengths, depths, paths, context)
            if layers is not None and rotary is not None:
                out, hidden = layers(tokens, seen, keys, values, rotary, self._hidden_layers)
            else:
                lengths = inputs.lengths.long()
                writer.aim_on_device(lengths, width)
                out, hidden = self._run_model(writer, tokens, self._clamped(lengths[:, None] + depths), seen)
            logits.copy_(out)
            return hidden

        return run

    @torch.no_grad()
    def _forward(self, cache: TreeCache, tree: DraftTree, aim: Aim, num_logits: int = 0) -> Verified:
        """The same layers, eagerly: chunks of prompts, and trees of unusual widths."""
        layers = self._graphs.layers
        rotary = cache.arena.rotary if isinstance(cache, ArenaCache) else None
        if layers is None or rotary is None or not isinstance(cache, ArenaCache):
            return super()._forward(cache, tree, aim, num_logits)
        arena, (rows, end) = cache.arena, cache.aimed
        depths, paths = (numbers.int().contiguous() for numbers in (tree.depths(), tree.paths()))
        seen = Paths(aim.lengths.int(), depths, paths, end)
        keys, values = arena.keys[:, rows], arena.values[:, rows]
        try:
            with torch.cuda.device_of(keys):
                logits, hidden = layers(tree.tokens, seen, keys, values, rotary, self._hidden_layers, num_logits)
        except Exception as error:  # as in a capture
            self._graphs.give_up(_first_line(error))
            return super()._forward(cache, tree, aim, num_logits)
        return Verified(tree.tokens, logits.float(), hidden)

    def _find_cache_shape(self) -> tuple[int, int] | None:
        """By a forward of one token; None if keys and values are of different shapes."""
        cache = TreeCache(self._num_layers, 1, 1)
        TargetRunner.verify(self, cache, DraftTree.roots(torch.zeros(1, dtype=torch.int64)))
        key, value = (stored.shape[3:] for stored in cache.stored)
        if key != value:
            self._graphs.give_up("its keys and values differ in size")
            return None
        return key[0], key[1]


def _calling(run: Run) -> Run:
    """Like a graph's replay: outputs stay where those of the first run are."""
    outputs = run()

    def replay() -> tuple[Tensor, ...]:
        for fixed, new in zip(outputs, run(), strict=True):
            fixed.copy_(new)
        return outputs

    return replay


def _new_pool(device: torch.device) -> Any:
    """Memory for graphs that stay and go together: a pool that all graphs have left cannot be used again."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """int32 on the host, from where the device takes them without waiting."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")


def _on_device(device: torch.device, *lists: Sequence[int]) -> list[Tensor]:
    """int32 tensors by one transfer."""
    sizes = [_whole(len(numbers)) for numbers in lists]
    padded = [n for numbers, size in zip(lists, sizes, strict=True) for n in (*numbers, *[0] * (size - len(numbers)))]
    parts = _numbers(padded, device).to(device, non_blocking=True).split(sizes)
    return [part[: len(numbers)] for part, numbers in zip(parts, lists, strict=True)]


def _whole(number: int, part: int = _ALIGNED) -> int:
    return -(-number // part) * part


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _slots(number: int) -> int:
    """Doubled for a longer text while that is cheap, and in steps further on."""
    return max(_power(number), CONTEXTS[0]) if number <= _WHOLE_SLOTS else _whole(number, _WHOLE_SLOTS)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]

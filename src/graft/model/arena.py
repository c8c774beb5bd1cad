"""Arenas: KV caches at fixed addresses, so that the CUDA graphs captured over them outlive a generation.

Without a GPU the same code runs, and calls what would be replayed.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from graft.model.kernels import attention as attention_kernels
from graft.model.kv_cache import CacheLimit, Claim, TreeCache
from graft.model.llama import Rotary

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536)
ALIGNED = 4  # int32 numbers to 16 bytes, at which all inputs start: kernels are compiled for alignments
_WHOLE_SLOTS = 4096  # above it, an arena's slots are a multiple of it; below, a power of two

MAX_PATH = 128  # tokens of a round, at most
_PATIENCE = 5.0  # seconds without further captures after one ran out of memory

_SHORTAGES = ("out of memory", "alloc_failed")  # words of errors that are of no type of their own
_MAX_FAILURES = 8  # in a row, of captures that may be others' doing; a model that cannot be captured fails at each try

Run = Callable[[], None]


class CaptureError(RuntimeError):
    """A CUDA graph capture failed: the work cannot be captured, or another thread used the device meanwhile."""


class Event:
    """A CUDA event on the current stream; without a GPU it has always happened."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Numbers:
    """Static int32 inputs of CUDA graphs, taken from the host to the device in one transfer.

    Columns hold one number per row; tables hold up to `room` numbers per row.
    """

    def __init__(self, num_columns: int, num_tables: int, rows: int, room: int, device: torch.device) -> None:
        self._rows, self._room, self._num_columns = rows, room, num_columns
        size = num_columns * whole(rows) + num_tables * whole(rows * room)
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        self._here = on_host((size,), torch.int32, device)
        self._array = self._here.numpy()
        self._loaded = Event(device)

    def column(self, number: int) -> Tensor:
        """[rows], on the device."""
        start = number * whole(self._rows)
        return self._there[start : start + self._rows]

    def table(self, number: int, rows: int, width: int) -> Tensor:
        """[rows, width] where `load` puts a table of that width, on the device."""
        start = self._start_of_table(number)
        return self._there[start : start + rows * width].view(rows, width)

    def load(self, columns: Sequence[Sequence[int]], tables: Sequence[Sequence[Sequence[int]]], width: int) -> None:
        """Writes columns and tables; missing rows, and the rest of a table's row, are zero."""
        self._loaded.wait()
        self._array[:] = 0
        for number, column in enumerate(columns):
            start = number * whole(self._rows)
            self._array[start : start + len(column)] = column
        for number, table in enumerate(tables):
            start = self._start_of_table(number)
            for row, numbers in enumerate(table):
                self._array[start + row * width : start + row * width + len(numbers)] = numbers
        self._there.copy_(self._here, non_blocking=True)
        self._loaded.record()

    def _start_of_table(self, number: int) -> int:
        return self._num_columns * whole(self._rows) + number * whole(self._rows * self._room)


class Lease:
    """Token of an arena's use: the arena is free again when its cache drops this."""


@dataclass(eq=False)
class Arena:
    """A KV cache at fixed addresses, and the CUDA graphs captured over it. It is leased to one cache at a time."""

    keys: Tensor  # [layers, rows, slots, kv_heads, head_dim]
    values: Tensor
    rotary: Rotary | None
    pool: Any  # memory pool that its graphs share; None without a GPU
    steps: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # CUDA graphs, by bucket
    buffers: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # static inputs and outputs, by bucket
    lease: weakref.ref[Lease] | None = None
    claim: Claim | None = None  # of a limit, on its slots

    @property
    def is_free(self) -> bool:
        return self.lease is None or self.lease() is None

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    def forget(self) -> None:
        self.steps.clear()
        self.buffers.clear()
        self.pool = new_pool(self.keys.device)

    def context_for(self, lengths: Sequence[int], contexts: Sequence[int]) -> int:
        """The smallest of `contexts` that covers all `lengths`; all slots if none does."""
        longest = max(lengths)
        return min(next((context for context in contexts if context >= longest), self.num_slots), self.num_slots)

    def holds(self, num_rows: int, num_slots: int) -> bool:
        return self.keys.shape[1] >= num_rows and self.num_slots >= num_slots


class ArenaCache(TreeCache):
    """A KV cache in an arena. Rows that stay are moved up within the arena."""

    def __init__(
        self,
        arena: Arena,
        num_rows: int,
        owner: Arenas | None = None,
        max_positions: int | None = None,
        num_needed: int = 0,
    ) -> None:
        """owner: captures its graphs and leases larger arenas. num_needed: slots that were asked for."""
        super().__init__(len(arena.keys), num_rows, arena.num_slots)
        self._owner, self._max_positions, self._num_needed = owner, max_positions, num_needed
        self._lease = Lease() if owner is not None else None
        arena.lease = weakref.ref(self._lease) if self._lease is not None else arena.lease
        self.arena = arena
        self._keys, self._values = arena.keys, arena.values

    def aim_at_first(self, num_rows: int) -> None:
        """Makes the first rows those of the current forward, whose graph finds the slots by itself."""
        self._rows = slice(0, num_rows)

    @property
    def num_needed(self) -> int:
        return self._num_needed

    @property
    def aimed(self) -> tuple[slice, int]:
        """The rows of the current forward, and how many slots it may read."""
        return self._rows, self._end

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        if not self.arena.steps:  # kernels may not run here
            return super().commit(paths)
        if any(list(path) != list(range(1, len(path) + 1)) for path in paths):
            assert self._owner is not None and self._rows.start == 0
            self._owner.move(self.arena, self.lengths[self._rows], paths)
        self.advance([1 + len(path) for path in paths])

    def reserving(self, num_rows: int) -> Self:
        assert self._owner is not None
        rows = next_power(num_rows)
        while rows > self.num_rows and not self._owner.has_plenty(rows * self._num_needed):
            rows //= 2
        return self._with_room(max(rows, self.num_rows), self._num_needed)

    def _with_room(self, num_rows: int, num_slots: int) -> Self:
        """The same rows, copied to a larger arena if they do not fit; its graphs are captured anew."""
        if self.arena.holds(next_power(num_rows), num_slots):
            there = self._with_lengths(self.lengths)
            there._num_needed = num_slots
            return there
        assert self._owner is not None
        lease = self._owner.lease(num_rows, num_slots, self._max_positions)
        longest = max(self.lengths, default=0)
        for stored, before in ((lease.arena.keys, self.arena.keys), (lease.arena.values, self.arena.values)):
            stored[:, : self.num_rows, :longest] = before[:, : self.num_rows, :longest]
        there = self._with_lengths(self.lengths)
        for name in ("arena", "_keys", "_values", "_lease", "_num_needed", "num_slots"):
            setattr(there, name, getattr(lease, name))
        return there


class Arenas:
    """All arenas of one model, and the capture of their CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arenas: list[Arena] = []
        self.limit: CacheLimit | None = None  # on the slots of all of them
        self.failure: str | None = None  # why there are none
        # Held by whoever leases, captures or starts a step: engines in several threads may share arenas, and
        # warm-up runs, in a CUDA stream of their own, must not share static buffers with a running step.
        self.lock = threading.RLock()
        self.num_captured = 0
        self.num_shortages = 0  # captures that there was no memory for
        self.num_failures = 0  # other captures that failed
        self._num_in_a_row = 0  # of them, since one succeeded
        self._no_memory_until = -math.inf  # by time.monotonic
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None

    @abstractmethod
    def make_arena(self, rows: int, slots: int, max_positions: int | None) -> Arena: ...

    def lease(self, num_rows: int, num_slots: int, max_positions: int | None) -> ArenaCache:
        """A KV cache of at least that size, in the smallest free arena that holds it.

        Of the free arenas the smallest and the largest are kept for reuse, the others are dropped; before a new one is
        made, all of them are.
        """
        rows, slots = next_power(num_rows), _slots(num_slots)
        with self.lock:
            if not self.has_plenty(rows * slots):
                slots = num_slots
            free = sorted((arena for arena in self.arenas if arena.is_free), key=lambda arena: arena.keys.numel())
            arena = next((arena for arena in free if arena.holds(rows, slots)), None)
            kept = [] if arena is None else [arena, free[0], free[-1]]
            self._drop([other for other in free if other not in kept])
            free.clear()
            if arena is None:
                claim = self.limit.claim(rows * slots) if self.limit is not None else None
                arena = self.make_arena(rows, slots, max_positions)
                arena.claim = claim
                self.arenas.append(arena)
            return ArenaCache(arena, num_rows, self, max_positions, num_slots)

    def has_plenty(self, num_slots: int) -> bool:
        """Whether an arena may be larger than is needed now."""
        return self.limit is None or self.limit.has_plenty(num_slots)

    @property
    def num_free_slots(self) -> int:
        return sum(arena.keys.shape[1] * arena.num_slots for arena in self.arenas if arena.is_free)

    def keep_to(self, limit: CacheLimit) -> None:
        """Sets the limit on all arenas; existing ones count, free ones are dropped first."""
        if self.limit is limit:
            return
        self.limit = limit
        limit.add_keeper(self)
        self.drop_free()
        for arena in self.arenas:
            arena.claim = limit.claim(arena.keys.shape[1] * arena.num_slots)

    def drop_free(self) -> None:
        """Drops the arenas that are not leased."""
        self._drop([arena for arena in self.arenas if arena.is_free])

    def _drop(self, gone: Sequence[Arena]) -> None:
        self.arenas = [arena for arena in self.arenas if arena not in gone]
        for arena in gone:
            arena.steps.clear()  # they refer to the arena: its memory would stay until the garbage collector runs
            arena.buffers.clear()

    @property
    def num_setups(self) -> int:
        """Captures made, or tried in vain, so far: rounds with one are not counted in measured times."""
        return self.num_captured + self.num_shortages + self.num_failures

    def captured(self, arena: Arena, key: tuple[Any, ...], run: Run, moving: Sequence[Tensor] = ()) -> Run:
        """The CUDA graph of `run`, captured under `key` at first use.

        Where memory is short, or another thread disturbs the capture, `run` itself is returned: the same bits, only
        slower. A later call tries again.

        moving: tensors that `run` changes; they are restored after the warm-up runs.
        """
        if key in arena.steps:
            step: Run = arena.steps[key]
            return step
        for is_last in (False, True):
            if time.monotonic() < self._no_memory_until:
                break
            before = [part.clone() for part in moving]
            try:
                arena.steps[key] = captured = self.capture(run, arena.pool)
                self.num_captured += 1
                self._num_in_a_row = 0
                return captured
            except Exception as error:  # whatever a model, a compiler or a driver may raise
                if not is_shortage(error):
                    if not isinstance(error, CaptureError) or self._num_in_a_row == _MAX_FAILURES:
                        raise
                    self.num_failures += 1
                    self._num_in_a_row += 1
                    continue
                self.num_shortages += 1
                if not self._make_memory(arena) or is_last:
                    self._no_memory_until = time.monotonic() + _PATIENCE
            finally:
                for part, old in zip(moving, before, strict=True):
                    part.copy_(old)
        return run

    def _make_memory(self, arena: Arena) -> bool:
        """Frees unused arenas and cached memory. Returns whether anything was freed."""
        if not arena.steps:
            arena.pool = new_pool(self.device)  # what a capture has begun and not ended cannot be used again
        free = [other for other in self.arenas if other.is_free and other is not arena]
        num_free = len(free)
        self._drop(free)
        free.clear()
        if not self._is_cuda:
            return num_free > 0
        reserved = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device) < reserved

    def capture(self, run: Run, pool: Any) -> Run:
        """Captures `run` in a CUDA graph after two warm-up runs; without a GPU, runs it once and returns it."""
        if self._stream is None:
            run()
            return run
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    run()
        finally:
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except Exception as error:
            raise CaptureError(str(error)) from error
        replay: Run = graph.replay
        return replay

    def move(self, arena: Arena, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Moves keys and values of each row's accepted path to the slots after its root. lengths: committed tokens."""
        rows = next_power(len(lengths))
        key = ("move", rows)
        with self.lock, torch.cuda.device_of(arena.keys):
            if key not in arena.buffers:
                arena.buffers[key] = Numbers(2, 1, rows, MAX_PATH, self.device)
            moves: Numbers = arena.buffers[key]
            keys, values = arena.keys[:, :rows], arena.values[:, :rows]

            def run() -> None:
                attention_kernels.commit(keys, values, moves.column(0), moves.table(0, rows, MAX_PATH), moves.column(1))

            if key not in arena.steps:
                moves.load((), (), MAX_PATH)  # warm-up runs move nothing: all paths are empty
            step = self.captured(arena, key, run)
            moves.load((lengths, [len(path) for path in paths]), (paths,), MAX_PATH)
            step()

    def memory_report(self) -> dict[str, int]:
        """Bytes of GPU memory by purpose."""
        caches = [t for arena in self.arenas for t in (arena.keys, arena.values)]
        tables = [t for arena in self.arenas if arena.rotary for t in (arena.rotary.cos, arena.rotary.sin)]
        segments = torch.cuda.memory_snapshot() if self._is_cuda else []
        pools = {arena.pool for arena in self.arenas}
        return {
            "cache": num_bytes(caches),
            "rotary tables": num_bytes(tables),
            "graphs": sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) in pools),
        }


def on_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in pinned host memory, for asynchronous copies."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def new_pool(device: torch.device) -> Any:
    """A memory pool for graphs that are dropped together: a pool whose graphs are all gone cannot be used again."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def whole(number: int, part: int = ALIGNED) -> int:
    return -(-number // part) * part


def next_power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _slots(number: int) -> int:
    """Slots of an arena: the next power of two while that is cheap, then multiples of `_WHOLE_SLOTS`."""
    return max(next_power(number), CONTEXTS[0]) if number <= _WHOLE_SLOTS else whole(number, _WHOLE_SLOTS)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error is an out-of-memory error, or was caused by one."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in words for word in _SHORTAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]

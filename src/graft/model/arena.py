"""Arenas: where caches stay in place, so that captured CUDA graphs, bound to addresses, outlive generations.

Without a GPU the same code runs, and what would be replayed is called.
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
_PATIENCE = 5.0  # seconds without captures when there was no memory for one

_SHORTAGES = ("out of memory", "alloc_failed")  # words of errors that are of no type of their own
_MAX_FAILURES = 8  # in a row, of captures that may be others' doing; a model that cannot be captured fails at each try

Run = Callable[[], None]


class CaptureError(RuntimeError):
    """What runs could not be captured: it cannot be, or another thread asked something of the device meanwhile."""


class Event:
    """A point in what the device was given to do; without a GPU it is always past."""

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
    """What the host tells graphs of the rows: int32 numbers at fixed addresses, taken to the device in one transfer.

    Some columns, a number a row, and some tables, up to `room` numbers a row.
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
        """Rows beyond those given have zeros, and so has a table behind a row's numbers."""
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
    """The use of an arena, for as long as a cache has this."""


@dataclass(eq=False)
class Arena:
    """Tensors of a cache that stay where they are, and the steps bound to them. One lease at a time is out."""

    keys: Tensor  # [layers, rows, slots, kv_heads, head_dim]
    values: Tensor
    rotary: Rotary | None
    pool: Any  # of memory that its graphs share; None without a GPU
    steps: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # what was captured, by bucket
    places: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # what steps of several buckets read and write
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
        self.places.clear()
        self.pool = new_pool(self.keys.device)

    def context_for(self, lengths: Sequence[int], contexts: Sequence[int]) -> int:
        """Of some lengths of texts the least that holds these; all slots if none does."""
        longest = max(lengths)
        return min(next((context for context in contexts if context >= longest), self.num_slots), self.num_slots)

    def holds(self, num_rows: int, num_slots: int) -> bool:
        return self.keys.shape[1] >= num_rows and self.num_slots >= num_slots


class ArenaCache(TreeCache):
    """A cache in an arena. What it holds stays in place: rows that stay move up within it."""

    def __init__(
        self,
        arena: Arena,
        num_rows: int,
        owner: Arenas | None = None,
        max_positions: int | None = None,
        num_needed: int = 0,
    ) -> None:
        """owner: who captures what is done to it, and has larger arenas. num_needed: slots that were asked for."""
        super().__init__(len(arena.keys), num_rows, arena.num_slots)
        self._owner, self._max_positions, self._num_needed = owner, max_positions, num_needed
        self._lease = Lease() if owner is not None else None
        arena.lease = weakref.ref(self._lease) if self._lease is not None else arena.lease
        self.arena = arena
        self._keys, self._values = arena.keys, arena.values

    def aim_at_first(self, num_rows: int) -> None:
        """Readies the first rows for a step, which finds its slots by itself."""
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
        """The same rows, in a larger arena where they do not fit; its steps are captured anew."""
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
    """Arenas of one kind, leased to one cache at a time, and how their steps are captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arenas: list[Arena] = []
        self.limit: CacheLimit | None = None  # on the slots of all of them
        self.failure: str | None = None  # why there are none
        # Held by whoever leases, captures or starts a step: engines in several threads may share arenas, and trial
        # runs, in a stream of their own, must have what steps share to themselves.
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
        """A cache of at least that size, in the smallest arena that has it.

        Of those that nobody has, the smallest and the largest stay for who needs them next; the others go, and all of
        them before a new one is made.
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
        """From now on; what there is counts too, as far as it is in use."""
        if self.limit is limit:
            return
        self.limit = limit
        limit.add_keeper(self)
        self.drop_free()
        for arena in self.arenas:
            arena.claim = limit.claim(arena.keys.shape[1] * arena.num_slots)

    def drop_free(self) -> None:
        """Lets go of what nobody has."""
        self._drop([arena for arena in self.arenas if arena.is_free])

    def _drop(self, gone: Sequence[Arena]) -> None:
        self.arenas = [arena for arena in self.arenas if arena not in gone]
        for arena in gone:
            arena.steps.clear()  # which have it in turn: else its memory would stay until a search for cycles
            arena.places.clear()

    @property
    def num_setups(self) -> int:
        """What was done once, or in vain: rounds in which it was are no measure."""
        return self.num_captured + self.num_shortages + self.num_failures

    def captured(self, arena: Arena, key: tuple[Any, ...], run: Run, moving: Sequence[Tensor] = ()) -> Run:
        """What replays `run`, captured under `key` if it is not yet; where there is no memory for that, or another
        thread breaks into it, `run` itself, which does the same to the bit, only slower. A later call tries again.

        moving: what trial runs change, and a capture must not.
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
        """Gives back what nobody uses. Returns whether that was anything."""
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
        """What replays `run`, or without a GPU calls it. Runs it first, since libraries set themselves up then."""
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
        """Moves the tokens of each row's path together behind its root, which comes behind so many tokens."""
        rows = next_power(len(lengths))
        key = ("move", rows)
        with self.lock, torch.cuda.device_of(arena.keys):
            if key not in arena.places:
                arena.places[key] = Numbers(2, 1, rows, MAX_PATH, self.device)
            moves: Numbers = arena.places[key]
            keys, values = arena.keys[:, :rows], arena.values[:, :rows]

            def run() -> None:
                attention_kernels.commit(keys, values, moves.column(0), moves.table(0, rows, MAX_PATH), moves.column(1))

            if key not in arena.steps:
                moves.load((), (), MAX_PATH)  # trial runs move nothing: all paths are empty
            step = self.captured(arena, key, run)
            moves.load((lengths, [len(path) for path in paths]), (paths,), MAX_PATH)
            step()

    def memory_report(self) -> dict[str, int]:
        """Bytes by what they are for."""
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
    """Zeros on the host that a device reads and writes without waiting."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def new_pool(device: torch.device) -> Any:
    """Memory for graphs that stay and go together: a pool that all graphs have left cannot be used again."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def whole(number: int, part: int = ALIGNED) -> int:
    return -(-number // part) * part


def next_power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _slots(number: int) -> int:
    """Doubled for a longer text while that is cheap, and in steps further on."""
    return max(next_power(number), CONTEXTS[0]) if number <= _WHOLE_SLOTS else whole(number, _WHOLE_SLOTS)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error is for want of memory, or came in the wake of one that was."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in words for word in _SHORTAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]

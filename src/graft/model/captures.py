"""Captures: CUDA graphs over static buffers, captured at first use and found by key.

A graph is bound to memory addresses. If inputs, outputs or KV stores move, their graphs must be dropped (`forget`).
Without a GPU, the same code runs and calls the function instead of replaying a graph.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # numbers of rows that batches are padded to
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
ALIGNED = 4  # int32 numbers in 16 bytes, the alignment of all inputs, since kernels are compiled for an alignment
_RETRY_SECONDS = 5.0  # pause between captures after one ran out of memory

_OUT_OF_MEMORY = ("out of memory", "alloc_failed")  # in messages of errors that have no type of their own
_MAX_FAILURES = 8  # in a row: another thread may disturb some captures, but not so many

_NOTHING = nullcontext()
_CAPTURE_LOCK = threading.Lock()  # captures in several threads would share the allocator's state

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


class Captures:
    """The CUDA graphs of one network."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: dict[tuple[Any, ...], Run] = {}
        self.failure: str | None = None  # why steps run eagerly, if they do
        # Held while a step is captured or started. Engines in several threads may share graphs, and warm-up runs use
        # their own CUDA stream, so they must not overwrite the static buffers of a running step.
        self.lock = threading.RLock()
        self.num_captured = 0
        self.num_out_of_memory = 0  # captures that failed for lack of memory
        self.num_failures = 0  # captures that failed for other reasons
        self._num_failures_in_a_row = 0  # since the last success
        self._no_memory_until = -math.inf  # by time.monotonic
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._pool = _new_pool(device)  # memory that the graphs share

    @property
    def num_setups(self) -> int:
        """Captures so far, including failed ones. Rounds with a capture are left out of measured times."""
        return self.num_captured + self.num_out_of_memory + self.num_failures

    def forget(self) -> None:
        """Drop all graphs."""
        self.steps.clear()
        self._pool = _new_pool(self.device)  # a memory pool cannot be reused once all its graphs are gone

    def captured(self, key: tuple[Any, ...], run: Run, moving: Sequence[Tensor] = ()) -> Run:
        """The CUDA graph of `run`, captured under `key` at first use.

        If memory is short or another thread disturbs the capture, returns `run` itself, which is slower and gives the
        same bits. A later call tries again.

        moving: tensors that `run` changes; they are restored after the warm-up runs.
        """
        if key in self.steps:
            return self.steps[key]
        for is_last in (False, True):
            if time.monotonic() < self._no_memory_until:
                break
            before = [part.clone() for part in moving]
            try:
                self.steps[key] = captured = self.capture(run)
                self.num_captured += 1
                self._num_failures_in_a_row = 0
                return captured
            except Exception as error:  # whatever a model, a compiler or a driver may raise
                if not is_out_of_memory(error):
                    if not isinstance(error, CaptureError) or self._num_failures_in_a_row == _MAX_FAILURES:
                        raise
                    self.num_failures += 1
                    self._num_failures_in_a_row += 1
                    continue
                self.num_out_of_memory += 1
                if not self._free_cached_memory() or is_last:
                    self._no_memory_until = time.monotonic() + _RETRY_SECONDS
            finally:
                for part, old in zip(moving, before, strict=True):
                    part.copy_(old)
        return run

    def _free_cached_memory(self) -> bool:
        """Free cached memory. Returns whether there was any."""
        if not self.steps:
            self._pool = _new_pool(self.device)  # a pool with an unfinished capture cannot be reused
        if not self._is_cuda:
            return False
        reserved = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device) < reserved

    def capture(self, run: Run) -> Run:
        """Capture `run` in a CUDA graph after two warm-up runs. Without a GPU: run it once and return it."""
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
            with (
                _CAPTURE_LOCK,
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                run()
        except Exception as error:
            self._pool = _new_pool(self.device)  # the old pool may still be in a capture
            raise CaptureError(str(error)) from error
        replay: Run = graph.replay
        return replay

    @property
    def num_graph_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot() if self._is_cuda else []
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == self._pool)


def padded(count: int, sizes: Sequence[int]) -> int:
    """Round up to one of `sizes`, or to a multiple of the last."""
    return next((size for size in sizes if size >= count), round_up(count, sizes[-1]))


def context_for(longest: int, contexts: Sequence[int] = CONTEXTS) -> int:
    """The smallest of `contexts` that holds `longest`; beyond the largest one, `longest` rounded up."""
    return next((context for context in contexts if context >= longest), round_up(longest, CONTEXTS[0]))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which the device is the current one. It costs nothing in the usual case that it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in pinned host memory, for asynchronous copies."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def _new_pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def round_up(number: int, multiple: int = ALIGNED) -> int:
    return -(-number // multiple) * multiple


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is an out-of-memory error, or was caused by one."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in words for word in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]

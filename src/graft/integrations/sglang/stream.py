"""Functions of the host that a CUDA stream calls, between what was launched before and what is launched behind them."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch

from graft.errors import GraftError

_Result = TypeVar("_Result")

_waiting: dict[int, StreamCall[Any]] = {}  # launched and not called yet, by number
_numbers = itertools.count(1)


class StreamCall(Generic[_Result]):
    """One call. What is launched in the stream behind it waits for it, so that nobody need wait to launch that.

    It is made in a thread of the CUDA driver's: the function must ask nothing of CUDA, and what it reads must not be
    written meanwhile. On a CPU, where there are no streams, it is made in a thread too, which is waited for.
    """

    def __init__(self, function: Callable[[], _Result]) -> None:
        self._function, self._is_inference = function, torch.is_inference_mode_enabled()
        self._ended = threading.Event()
        self._result: list[_Result] = []
        self._error: BaseException | None = None

    def launch(self, device: torch.device) -> None:
        """Into the device's current stream."""
        if device.type != "cuda":
            thread = threading.Thread(target=self._call)
            thread.start()
            thread.join()
            return
        number = next(_numbers)
        _waiting[number] = self
        status = _driver()(torch.cuda.current_stream(device).cuda_stream, _called, number)
        if status:
            del _waiting[number]
            raise GraftError(f"cuLaunchHostFunc gave the error {status}")

    def wait(self) -> _Result:
        """The function's result, once it has been called; what it raises is raised here."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _call(self) -> None:
        is_collecting = gc.isenabled()
        gc.disable()  # memory of the device that is collected in this thread would ask CUDA for something
        try:
            with torch.inference_mode(self._is_inference):
                self._result.append(self._function())
        except BaseException as error:  # of whoever waits, not of the driver's
            self._error = error
        finally:
            if is_collecting:
                gc.enable()
            self._ended.set()


_Called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@_Called  # one for all, which lives as long as the process: the driver is still in it when a call has ended
def _called(number: int) -> None:
    _waiting.pop(number)._call()


@lru_cache(maxsize=1)
def _driver() -> Callable[..., int]:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    launch.argtypes, launch.restype = (ctypes.c_void_p, _Called, ctypes.c_void_p), ctypes.c_int
    return launch

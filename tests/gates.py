"""Gates and clocks: a test says how far decoding has come and what time it is, instead of waiting or racing."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import SimpleNamespace
from typing import Any

PATIENCE = 120.0  # seconds: nothing is waited for so long unless it hangs
_STEPS = ("step", "run_step")  # of prompts alone, and of rounds


class Gate:
    """Lets a target make its first steps, then holds it until it may go on."""

    def __init__(self, target: Any, num_free: int = 4) -> None:
        self._target, self._steps = target, {name: getattr(target, name) for name in _STEPS}
        self._num_free: float = num_free
        self._is_holding = False
        self._changed = threading.Condition()
        for name in _STEPS:
            setattr(target, name, partial(self._pass, name))

    def _pass(self, name: str, *given: Any, **more: Any) -> Any:
        with self._changed:
            self._is_holding = self._num_free == 0
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._num_free > 0, PATIENCE), "nobody opened the gate"
            self._num_free -= 1
        return self._steps[name](*given, **more)

    def wait(self) -> None:
        """Until a step is held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_holding, PATIENCE), "no step came to the gate"

    def let(self, num_steps: float) -> None:
        """So many steps more are made."""
        with self._changed:
            self._num_free += num_steps
            self._is_holding = False
            self._changed.notify_all()

    def open(self) -> None:
        """Takes the gate away."""
        for name, step in self._steps.items():
            setattr(self._target, name, step)
        self.let(math.inf)

    def open_when(self, condition: Callable[[], bool]) -> None:
        """Opens it when another thread, or this one later, has brought that about."""
        threading.Thread(target=lambda: (until(condition), self.open()), daemon=True).start()


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread is sure to bring about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


class Clock:
    """The time as a server's event loop and its scheduler see it. It can be put forward."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._loop: Any = None

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def rule(self, loop: Any) -> None:
        """The event loop's timers go by this clock."""
        self._loop = loop
        loop.time = self.monotonic

    def put_forward(self, seconds: float) -> None:
        self._ahead += seconds
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: None)  # it looks at its timers again

    def put_forward_until(self, future: Future[Any], seconds: float = 6.0) -> Any:
        """Puts the clock forward, again if a timer was set only then, until the future has its result."""
        while not future.done():
            self.put_forward(seconds)
            wait([future], timeout=0.1)
        return future.result()

    def as_module(self) -> SimpleNamespace:
        """What can stand for the module `time` in code that takes its deadlines from there."""
        return SimpleNamespace(monotonic=self.monotonic, perf_counter=time.perf_counter)

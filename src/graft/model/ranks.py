"""RankGroup: the processes that run one model together, what rank 0 tells the others, and the end of all if one fails.

Rank 0 decides, the others do as they are told: nothing that depends on time, chance or a table can differ between them.
Whatever a rank raises while all work is reported to the others through the store that they met at; they end with that
report, also where they would wait for ever inside a collective operation.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graft.errors import RankError
from graft.settings import require

_LATEST = timedelta(seconds=120)  # that a rank may come to a collective operation after another
_NO_LIMIT = timedelta(days=365)  # rank 0 may have nothing to do for long: a server at night
_POLL = 0.25  # seconds between two looks at the store
_GRACE = 3.0  # seconds in which a thread that waits for a failed rank may find out by itself
_PATIENCE = 1.0  # seconds in which the report of a rank comes whose connection has gone
_FAILURE = "failure"

_GROUP: RankGroup | None = None


def rank_group() -> RankGroup:
    """This process's group; the first call joins it. A GraftError if `torchrun` has started no other processes."""
    global _GROUP
    if _GROUP is None:
        if not dist.is_initialized():
            _initialize()
        require(
            dist.get_world_size() > 1,
            "a tensor-parallel model needs several processes, and this is the only one: torchrun --nproc-per-node 2, "
            "or more",
        )
        _GROUP = RankGroup()
    return _GROUP


def _initialize() -> None:
    """Meets the other processes that `torchrun` has started."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    require(
        all(name in os.environ for name in names),
        "a tensor-parallel model needs several processes: torchrun --nproc-per-node 2 -m graft generate "
        "--tensor-parallel ..., or torchrun with a script of yours",
    )
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device is None else "nccl", timeout=_LATEST, device_id=device)


class RankGroup:
    """All ranks of a job, as one of them sees it."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.failure: str | None = None  # of a rank: nothing can be done together any more
        # A connection of its own: one that waits in the other would keep the watching thread waiting.
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        self._store = dist.PrefixStore("graft", store)
        self._watched = dist.PrefixStore("graft", store.clone())
        self._words: Any = None  # the process group in which rank 0 tells the others what to do
        self._lock = threading.RLock()
        self._is_busy = False
        self._is_home = False  # sent home by rank 0
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="graft-ranks", daemon=True).start()
        atexit.register(self.end)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # What all do

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of what all ranks do at once. What is raised in it ends all of them, and is raised by all."""
        with self._lock:
            if self.failure is not None:
                raise RankError(self.failure)
            self._is_busy = True
            try:
                yield
            except RankError:
                raise
            except BaseException as error:
                cause = self._cause(error)
                if cause is None:
                    self.report(error)
                    raise
                self._report(cause)
                raise RankError(cause) from error
            finally:
                self._is_busy = False

    def meet(self) -> None:
        """Waits for all ranks, as long as none has failed: to load a model may take one much longer than another."""
        if self._words is not None:
            return
        with self.together():
            self._store.set(f"ready/{self.rank}", "")
            while not self._store.check(self._keys("ready")):
                if self.failure is not None:
                    raise RankError(self.failure)
                time.sleep(_POLL)
            # gloo, also beside NCCL: it notices at once that a process has gone.
            self._words = dist.new_group(backend="gloo", timeout=_NO_LIMIT)

    def tell(self, message: Any) -> None:
        """Rank 0's: what the others are to do, together with it."""
        dist.broadcast_object_list([message], src=0, group=self._words, device=torch.device("cpu"))

    def hear(self) -> Any:
        """The others': what rank 0 says next; None when there is no more."""
        words: list[Any] = [None]
        try:
            dist.broadcast_object_list(words, src=0, group=self._words, device=torch.device("cpu"))
        except RuntimeError as error:
            raise RankError(self._cause(error) or f"rank 0 has gone: {_first_line(error)}") from error
        if isinstance(words[0], _End):
            self._is_home = True
            if words[0].failure is not None:
                raise RankError(f"rank 0 failed: {words[0].failure}")
            return None
        return words[0]

    def end(self) -> None:
        """At the exit of a process. Rank 0 sends the others home; what it failed with, if it did, is its last word."""
        if self._is_over.is_set():
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        failure = None if error is None else _named(error)
        if self.failure is None and self._words is None:
            self._report(f"rank {self.rank} failed: {failure or 'it ended before all had loaded the model'}")
        # Another thread may be in the middle of a step.
        elif self.failure is None and self.leads and self._lock.acquire(timeout=_GRACE):
            with suppress(RuntimeError):  # they have gone already
                self.tell(_End(failure))
        self._is_over.set()
        with suppress(RuntimeError):
            self._store.set(f"ended/{self.rank}", "")
            # The store may be rank 0's, and what is in it the others' only way to know why they end.
            until = time.monotonic() + _GRACE + 1
            while self.leads and not self._store.check(self._keys("ended")) and time.monotonic() < until:
                time.sleep(_POLL / 10)

    def _keys(self, what: str) -> list[str]:
        return [f"{what}/{rank}" for rank in range(self.size)]

    # Failing

    def report(self, error: BaseException) -> None:
        """Tells all other ranks that this one cannot go on."""
        self._report(f"rank {self.rank} failed: {_named(error)}")

    def _report(self, what: str) -> None:
        self.failure = what
        with suppress(RuntimeError):  # whoever keeps the store has gone, and so have all
            self._store.compare_set(_FAILURE, "", f"{self.rank} {what}")  # the first report stays

    def _cause(self, error: BaseException) -> str | None:
        """What another rank failed with, if that is why something was raised here; None if it is this rank's own."""
        is_about_others = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "NCCL"))
        )
        until = time.monotonic() + (_PATIENCE if is_about_others else 0)
        while True:
            if (found := self._failure_of_another(self._store)) is not None:
                return found
            if time.monotonic() >= until:
                return f"another rank has gone without a word: {_first_line(error)}" if is_about_others else None
            time.sleep(_POLL / 5)

    def _failure_of_another(self, store: Any) -> str | None:
        try:
            if not store.check([_FAILURE]):
                return None
            rank, _, what = str(store.get(_FAILURE).decode()).partition(" ")
        except RuntimeError:
            return None if self.leads else "rank 0 has gone without a word"
        return None if int(rank) == self.rank else what

    def _watch(self) -> None:
        """The thread that ends a process whose main thread waits, inside a collective operation, for a failed rank."""
        while not self._is_over.wait(_POLL):
            self.failure = self.failure or self._failure_of_another(self._watched)
            if self.failure is None or self._is_over.wait(_GRACE):
                continue
            if self._is_busy or not (self.leads or self._is_home):
                with suppress(RuntimeError):
                    self._watched.set(f"ended/{self.rank}", "")
                print(f"error: {self.failure}", file=sys.stderr, flush=True)
                os._exit(2)


class _End:
    """Rank 0's last word."""

    def __init__(self, failure: str | None) -> None:
        self.failure = failure


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]

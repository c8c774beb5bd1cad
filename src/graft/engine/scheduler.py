"""Scheduler: a server's decode loop in its own thread, with queue, deadlines and shutdown.

The thread survives failures of single requests and steps.
"""

from __future__ import annotations

import math
import threading
import time

from graft.engine.decode_loop import DecodeLoop
from graft.engine.jobs import BusyError, Failure, Job, Update, default_batched_tokens
from graft.engine.page_allocator import failures_logged, log
from graft.engine.rounds import Rounds
from graft.engine.settings import SchedulerSettings
from graft.errors import GraftError
from graft.request.sequence import Sequence
from graft.settings import require

_PATIENCE = 3  # steps in a row that may fail for unknown reasons before all requests are given up


class Scheduler(DecodeLoop):
    """Runs the decode loop of an engine. Nothing else may run the engine's model while the scheduler lives."""

    def __init__(self, engine: Rounds, settings: SchedulerSettings | None = None) -> None:
        settings = settings or SchedulerSettings()
        super().__init__(engine, settings, settings.max_batched_tokens or default_batched_tokens(engine.target.device))
        self.pages.fix_size(self.max_batched_tokens)
        self.pool = self.pages.pool
        self.is_ready = threading.Event()  # set when one-time work is done
        self.may_speculate = False  # until one-time work is done
        self._closing = False
        self._last_deadline = math.inf  # by time.monotonic: all requests end then
        self._next_drop = -math.inf  # by time.monotonic: when to look for requests to drop
        self._thread = threading.Thread(target=self._run, name="graft-scheduler", daemon=True)
        self._thread.start()

    # For other threads

    def check(self, job: Job) -> None:
        """Raise a GraftError if the request could never be decoded here."""
        num_rows, most = len(job.sequences), self.settings.max_rows
        require(num_rows <= most, f"n={num_rows} answers are more than the {most} decoded at once")
        self.pages.check(job)

    def submit(self, *jobs: Job) -> None:
        """Queue the jobs of one request, all or none. In the queue's limit they count as one."""
        for job in jobs:
            self.check(job)
        with self._changed:
            if self._closing:
                raise BusyError("the server is shutting down", is_closing=True)
            # A request that can start at once is accepted even if the queue's limit is 0.
            starts_at_once = not self._waiting and self.pages.has_room_for(jobs[0], self._num_rows)
            num_waiting = self.num_waiting
            if num_waiting >= self.settings.max_waiting and not starts_at_once:
                raise BusyError(f"{num_waiting} requests are waiting already")
            super().submit(*jobs)
            self._next_drop = -math.inf
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End a request before its next round; its listener gets no more updates."""
        with self._changed:
            job.cancelled = True
            self._next_drop = -math.inf
            self._changed.notify()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests. Let the others continue for `drain_seconds`, then end them."""
        with self._changed:
            self._closing = True
            self._last_deadline = min(time.monotonic() + drain_seconds, self._last_deadline)
            self._next_drop = -math.inf
            self._changed.notify()
        self._thread.join()

    @property
    def num_running(self) -> int:
        """Requests that are being prefilled or decoded."""
        return len({job.request for job in self._running})

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        with self._changed:
            return len({job.request for job in self._waiting})

    @property
    def cache_use(self) -> float:
        """Share of the KV cache's pages that running requests have."""
        return 1 - self.pool.num_free / self.pool.num_pages

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_closing(self) -> bool:
        """Whether new requests are refused."""
        return self._closing

    # The thread

    def _run(self) -> None:
        num_failures = 0
        try:
            self._prepare()
            self.is_ready.set()
            while self._wait_for_work():
                try:
                    self._step()
                    num_failures = 0
                except Exception as error:
                    num_failures += 1
                    self._recover(error, gives_up=num_failures >= _PATIENCE)
        except BaseException as error:  # for example a library's panic: no client may wait for ever
            self.is_ready.set()
            with self._changed:
                self._closing = True
                jobs = [*self._waiting, *self._running]
                self._waiting.clear()
            for job in jobs:
                self._fail(job, error)

    def _step(self) -> None:
        if not self._is_anything_running:
            self._prepare()
        self._drop_unwanted()
        self.step()

    def _prepare(self) -> None:
        """Do one-time work. Until it succeeds, all requests are decoded plainly."""
        if not self.may_speculate:
            with failures_logged("one-time work failed: requests are decoded plainly until it succeeds"):
                self.engine.warm_up(self.max_batched_tokens, self.settings.max_rows)
                self.may_speculate = True

    def _recover(self, error: Exception, gives_up: bool) -> None:
        """Continue after a step that failed for an unknown reason. Finished rows are reported and removed."""
        log.error("a step failed", exc_info=error)
        try:
            self._remove_finished()
        except Exception as another:
            self._fail_batches(another)
        if gives_up:  # the next step would fail as well
            with self._changed:
                jobs = [*self._waiting, *(prefill.job for prefill in self._prefills)]
                self._waiting.clear()
            self._release(self._prefills)
            self._prefills = []
            self._fail_batches(error)
            for job in jobs:
                self._fail(job, error)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self.has_work:
                if self._closing:
                    return False
                self._changed.wait()
        return True

    def _drop_unwanted(self) -> None:
        """End requests that were cancelled or are past their deadline, waiting or running."""
        now = time.monotonic()
        if now < self._next_drop:
            return

        def end_of(job: Job) -> float:
            return min(self._last_deadline, math.inf if job.deadline is None else job.deadline)

        def is_unwanted(job: Job) -> bool:
            return job.cancelled or now > end_of(job)

        with self._changed:
            self._next_drop = min(map(end_of, (*self._waiting, *self._running)), default=self._last_deadline)
            dropped = [job for job in self._waiting if is_unwanted(job)]
            for job in dropped:
                self._waiting.remove(job)
        leaving = {job for job in self._running if is_unwanted(job)}
        self._remove(leaving)
        for job in (*dropped, *leaving):
            if not job.cancelled:
                late = Failure("timeout", "the request took longer than allowed")
                self._tell(job, Failure("shutdown", "the server is shutting down") if self._closing else late)

    # What listeners are told

    def _report(self, sequence: Sequence) -> None:
        """Tell a request's listener what is new in one of its answers."""
        job = self._jobs[sequence]
        if job.cancelled or sequence.failure is not None:
            return
        try:
            update = job.next_update(sequence)
        except Exception as error:
            sequence.failure = error
            return
        if update is not None:
            self._tell(job, update)

    def _fail(self, job: Job, error: BaseException) -> None:
        """Tell the listener that its request failed, unless it was cancelled; then cancel it."""
        if job.cancelled:
            return
        if isinstance(error, GraftError):
            self._tell(job, Failure("request", str(error)))
        else:
            log.error("a request failed", exc_info=error)
            self._tell(job, Failure("server", "the request failed; the server's log says why"))
        self.cancel(job)

    def _tell(self, job: Job, news: Update | Failure) -> None:
        try:
            job.listener(news)
        except Exception:
            log.exception("a listener failed")
            self.cancel(job)

"""Scheduler: one thread that decodes many requests together, as one batch. Requests join and leave between rounds.

A new request's prompt is prefilled in chunks, in the same steps that decode others; then its rows join the batch. Rows
take pages of the KV cache as their texts grow. When none are free, the youngest request is preempted: it gives up its
pages, waits, and is prefilled again. Its text does not change.

The thread survives every failure: a batch is always the one before a step or the one after it, so only the requests
whose own step or round failed end without their answers.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from graft.engine.engine import Engine, PrefillChunk, next_chunks
from graft.engine.jobs import BusyError, Failure, Job, Update, default_batched_tokens
from graft.engine.page_allocator import PageAllocator, failures_logged, log
from graft.engine.settings import LEAST_CHUNK, SchedulerSettings
from graft.errors import GraftError
from graft.model import NoRoomError
from graft.model.captures import ROWS, padded
from graft.model.step import LONG_TEXT
from graft.request.batch import Batch
from graft.request.sequence import Sequence
from graft.request.stats import Clock
from graft.settings import require

_PATIENCE = 3  # steps in a row that may fail for unknown reasons before all requests are given up
_WORTH_WAITING = 256  # tokens that two prompts share, from which on the second waits until the first is prefilled


@dataclass(eq=False)
class _Prefill:
    """A request whose prompt is being prefilled."""

    job: Job
    batch: Batch | None = None  # None until it has rows
    unread: list[int] = field(default_factory=list)  # rows to prefill
    seconds: float = 0.0

    @property
    def failure(self) -> Exception | None:
        sequences = self.batch.sequences if self.batch is not None else []
        return next((sequence.failure for sequence in sequences if sequence.failure is not None), None)


class Scheduler:
    """Owns the engine: nothing else may run its model while the scheduler lives."""

    def __init__(self, engine: Engine, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self.engine = engine
        self.max_batched_tokens = self.settings.max_batched_tokens or default_batched_tokens(engine.target.device)
        self.pages = PageAllocator(engine, self.settings, self.max_batched_tokens)
        self.pool = self.pages.pool
        self.is_ready = threading.Event()  # set when one-time work is done
        self._waiting: deque[Job] = deque()
        self._prefills: list[_Prefill] = []  # replaced, never changed: other threads read it
        # The rows that are decoded: those whose rounds the device makes by itself (True), and those that need the host.
        self._batches: dict[bool, Batch] = {}
        self._jobs: dict[Sequence, Job] = {}  # of the batch's sequences; replaced, never changed
        self._clock = Clock()
        self._is_prepared = False  # whether trees can be grown
        self._changed = threading.Condition()
        self._closing = False
        self._last_deadline = math.inf  # by time.monotonic: whatever runs then is ended
        self._next_drop = -math.inf  # by time.monotonic: no request has to be dropped before
        self._thread = threading.Thread(target=self._run, name="graft-scheduler", daemon=True)
        self._thread.start()

    # For other threads

    def check(self, job: Job) -> None:
        """Raise a GraftError if the request could never be decoded here."""
        num_rows, most = len(job.sequences), self.settings.max_rows
        require(num_rows <= most, f"n={num_rows} answers are more than the {most} decoded at once")
        self.pages.check(job)

    def submit(self, *jobs: Job) -> None:
        """Queue the jobs of one request: all of them or none. However many they are, they count as one in the queue."""
        for job in jobs:
            self.check(job)
        with self._changed:
            if self._closing:
                raise BusyError("the server is shutting down", is_closing=True)
            # A request that can start at once is taken even if the queue has no places.
            starts_at_once = not self._waiting and self.pages.has_room_for(jobs[0], self._num_rows)
            num_waiting = self.num_waiting
            if num_waiting >= self.settings.max_waiting and not starts_at_once:
                raise BusyError(f"{num_waiting} requests are waiting already")
            for job in jobs:
                job.request = jobs[0].number
            self._waiting.extend(jobs)
            self._next_drop = -math.inf
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End a request before its next round; its listener gets no more updates."""
        with self._changed:
            job.cancelled = True
            self._next_drop = -math.inf
            self._changed.notify()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let the others continue for a while, then end them."""
        with self._changed:
            self._closing = True
            self._last_deadline = min(time.monotonic() + drain_seconds, self._last_deadline)
            self._next_drop = -math.inf
            self._changed.notify()
        self._thread.join()

    @property
    def num_running(self) -> int:
        """Requests that are prefilled or decoded."""
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
        except BaseException as error:  # for example a library's panic: nobody may wait for ever
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
        self._admit()
        self._extend_rows()
        chunks = self._next_chunks()
        if self._batches:
            self._decode(chunks)
        elif chunks:
            self._prefill(chunks)
        self._join_prefilled()

    def _prepare(self) -> None:
        """Do one-time work. Until it succeeds, all requests are decoded plainly."""
        if not self._is_prepared:
            with failures_logged("one-time work failed: requests are decoded plainly until it succeeds"):
                self.engine.warm_up(self.max_batched_tokens, self.settings.max_rows)
                self._is_prepared = True

    def _recover(self, error: Exception, gives_up: bool) -> None:
        """Continue after a step that failed outside its requests' own work; finished rows are reported and leave."""
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
            while not (self._waiting or self._is_anything_running):
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

    # What is running

    @property
    def _running(self) -> set[Job]:
        """Requests that are prefilled or decoded."""
        return {*self._jobs.values(), *(prefill.job for prefill in self._prefills)}

    @property
    def _is_anything_running(self) -> bool:
        return bool(self._jobs or self._prefills)

    @property
    def _sequences(self) -> list[Sequence]:
        """The sequences that are decoded."""
        return [sequence for batch in self._batches.values() for sequence in batch.sequences]

    @property
    def _num_rows(self) -> int:
        return len(self._jobs) + sum(len(prefill.job.open_answers) for prefill in self._prefills)

    # Admission

    def _admit(self) -> None:
        """Start waiting requests in order, as long as there is room. If nothing runs, there is."""
        while True:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting[0]
                if self._running and not self.pages.has_room_for(job, self._num_rows):
                    return
                if self._shares_a_prefill(job):
                    return
                prefill = _Prefill(self._waiting.popleft())
                self._prefills = [*self._prefills, prefill]
            if not self._open(prefill):
                return

    def _shares_a_prefill(self, job: Job) -> bool:
        """Whether much of its prompt is being prefilled for another request: the prefix cache will have it soon."""
        if self.settings.prefix_cache_tokens == 0:
            return False
        sequence = job.sequences[0]
        count = max(_WORTH_WAITING, len(sequence.ids) // 2)
        return any(
            self.pages.salt(other.job, other.job.sequences[0]) == self.pages.salt(job, sequence)
            and len(sequence.ids) > count < len(other.job.sequences[0].ids)
            and sequence.ids[:count] == other.job.sequences[0].ids[:count]
            for other in self._prefills
        )

    def _open(self, prefill: _Prefill) -> bool:
        """Give a request its rows. False if it has to wait for pages. Called without the lock, which others need."""
        job = prefill.job
        try:
            for sequence in job.open_answers:
                sequence.speculates = sequence.speculates and self._is_prepared
            prefill.batch, prefill.unread = self.pages.open_rows(job)
        except Exception as error:
            self._prefills = [other for other in self._prefills if other is not prefill]
            if isinstance(error, NoRoomError) and self._running:
                with self._changed:
                    self._waiting.appendleft(job)
                return False
            self._fail(job, error)
        return True

    # Prefill

    def _next_chunks(self) -> list[PrefillChunk]:
        """The prompt chunks of the coming step, in the order in which requests came."""
        most = min(self.max_batched_tokens, self.engine.target.max_tokens or math.inf)
        # Beside a long text a step has fewer tokens: the time and memory of attention grow with both.
        reading = (sequence for prefill in self._prefills for sequence in prefill.job.sequences)
        longest = max((len(sequence.ids) for sequence in itertools.chain(self._jobs, reading)), default=0)
        most *= min(LONG_TEXT / max(longest, 1), 1)
        opened = ((prefill.batch, prefill.unread) for prefill in self._prefills)
        unread = ((batch, row) for batch, waiting in opened if batch is not None for row in waiting)
        others = len(self._jobs)
        if True in self._batches:
            others = max(others, padded(len(self._batches[True].sequences), ROWS))
        return next_chunks(unread, max(int(most) - others, LEAST_CHUNK))

    def _prefill(self, chunks: list[PrefillChunk]) -> None:
        """A step of prompt chunks alone, while no request is decoded."""
        start = time.perf_counter()
        try:
            self.engine.prefill(chunks)
        except Exception as error:
            self._fail_prefills(chunks, error)
        self._count_prefill(chunks, time.perf_counter() - start)

    def _prefills_of(self, chunks: list[PrefillChunk]) -> list[_Prefill]:
        batches = {id(part.batch) for part in chunks}
        return [prefill for prefill in self._prefills if id(prefill.batch) in batches]

    def _count_prefill(self, chunks: list[PrefillChunk], seconds: float) -> None:
        for prefill in self._prefills_of(chunks):
            prefill.seconds += seconds

    def _fail_prefills(self, chunks: list[PrefillChunk], error: Exception) -> None:
        failed = [prefill.job for prefill in self._prefills_of(chunks)]
        self._remove(failed)
        for job in failed:
            self._fail(job, error)

    def _join_prefilled(self) -> None:
        for prefill in self._prefills:
            if prefill not in self._prefills:  # preempted for one before it
                continue
            try:
                self._join_if_prefilled(prefill)
            except Exception as error:
                self._remove([prefill.job])
                self._fail(prefill.job, error)

    def _join_if_prefilled(self, prefill: _Prefill) -> None:
        """Move a request's rows, one for each answer, to the batch that is decoded, if its prompt is prefilled."""
        job, batch = prefill.job, prefill.batch
        assert batch is not None
        if (failure := prefill.failure) is not None:
            raise failure
        if any(batch.next_chunk(row, 1).tokens for row in prefill.unread):
            return
        for row in prefill.unread:
            self.pages.keep(job, batch, row)
        if not job.is_preempted:
            for row in range(1, len(batch.sequences)):
                if not self._allocate(job, partial(batch.copy_row, 0, row)):
                    return
        if batch.is_on_device in self._batches:
            self._batches[batch.is_on_device].join(batch)
        else:
            self._batches[batch.is_on_device] = batch
        self._jobs = self._jobs | dict.fromkeys(batch.sequences, job)
        self._prefills = [other for other in self._prefills if other is not prefill]
        job.choosers, job.is_preempted = [], False
        job.joined = job.joined or time.monotonic()
        for sequence in batch.sequences:
            sequence.stats.prefill_seconds += prefill.seconds

    # Pages and preemption

    def _extend_rows(self) -> None:
        """Give every row that is decoded pages for what the coming round writes, the oldest request first."""
        short = [pair for batch in self._batches.values() for pair in self.pages.short_rows(batch)]
        for sequence, row in sorted(short, key=lambda pair: self._jobs[pair[0]].number):
            job = self._jobs.get(sequence)
            if job is None:  # preempted for one before it
                continue
            try:
                self._allocate(job, partial(self.pages.extend, row))
            except Exception as error:
                self._remove([job])
                self._fail(job, error)

    def _allocate(self, job: Job, take: Callable[[], None]) -> bool:
        """Call `take`, which allocates pages for the request. While none are free, preempt the youngest request.

        False if that was the request itself.
        """
        while True:
            try:
                take()
                return True
            except NoRoomError:
                batches = [*self._batches.values(), *(prefill.batch for prefill in self._prefills)]
                if self.pages.trim(batch for batch in batches if batch is not None):
                    continue
                youngest = max(self._running, key=lambda other: other.number)
                if youngest is job and len(self._running) == 1:
                    raise
            self._preempt(youngest)
            if youngest is job:
                return False

    def _preempt(self, job: Job) -> None:
        """Take a request's pages. It waits before all others, is prefilled again, and continues where it was."""
        try:
            for batch in self._batches.values():
                own = [row for row, sequence in enumerate(batch.sequences) if self._jobs[sequence] is job]
                if own:
                    choosers = [batch.chooser.select([row]) for row in own]
                    for row in own:
                        batch.sequences[row].settle()
                        self._report(batch.sequences[row])
                    # The device keeps no sampler on the host: what a row has drawn is its text.
                    job.choosers, job.is_preempted = [] if batch.is_on_device else choosers, True
            self._remove([job])
        except Exception as error:
            self._remove([job])
            self._fail(job, error)
            return
        log.info("the KV cache is full: a request is preempted")
        with self._changed:
            self._waiting.appendleft(job)

    # The round

    def _decode(self, chunks: list[PrefillChunk]) -> None:
        """A round of each batch, the device's own first: it works on while the host makes the other."""
        start = time.perf_counter()
        for is_on_device in sorted(self._batches, reverse=True):
            self._round(self._batches[is_on_device], chunks)
            chunks = []
        seconds = time.perf_counter() - start
        for sequence in self._sequences:
            sequence.stats.decode_seconds += seconds
        self._remove_finished()

    def _round(self, batch: Batch, chunks: list[PrefillChunk]) -> None:
        start = time.perf_counter()
        try:
            self.engine.run_round(batch, self._clock, chunks, partial(self._report_all, batch))
        except Exception as error:
            # Nobody knows whose fault it was, and the rows are in no defined state.
            self._fail_batch(batch, error)
            self._fail_prefills(chunks, error)
        if not batch.is_on_device and self._batches.get(True) is batch:  # the device could not go on
            del self._batches[True]
            if False in self._batches:
                self._batches[False].join(batch)
            else:
                self._batches[False] = batch
        self._count_prefill(chunks, time.perf_counter() - start)

    def _report_all(self, batch: Batch) -> None:
        """Report the results of earlier rounds, while the device works."""
        for sequence in batch.sequences:
            self._report(sequence)

    def _report(self, sequence: Sequence) -> None:
        """Tell a request's listener what is new of one of its answers."""
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

    def _remove_finished(self) -> None:
        """Report rows that have finished or failed, and remove them. May be repeated."""
        failed, finished = dict[Job, Exception](), set[Sequence]()
        for sequence in self._sequences:
            constraint_error = sequence.constraint.error if sequence.constraint is not None else None
            if sequence.finish_reason is None and sequence.failure is None and constraint_error is None:
                continue
            finished.add(sequence)
            self._report(sequence)
            if sequence.failure is not None:
                failed[self._jobs[sequence]] = sequence.failure
            elif constraint_error is not None:
                failed[self._jobs[sequence]] = GraftError(constraint_error)
        for job, error in failed.items():
            self._fail(job, error)
        self._remove_rows({sequence for sequence, job in self._jobs.items() if job in failed or sequence in finished})

    # Leaving

    def _remove(self, jobs: Collection[Job]) -> None:
        """Remove requests that have not finished, prefilled or decoded."""
        if not jobs:
            return
        going = [prefill for prefill in self._prefills if prefill.job in jobs]
        self._prefills = [prefill for prefill in self._prefills if prefill.job not in jobs]
        self._release(going)
        self._remove_rows({sequence for sequence, job in self._jobs.items() if job in jobs})

    def _remove_rows(self, gone: set[Sequence]) -> None:
        """Remove rows from their batches."""
        for batch in list(self._batches.values()):
            self._remove_from(batch, gone.intersection(batch.sequences))

    def _remove_from(self, batch: Batch, gone: set[Sequence]) -> None:
        """Remove rows from a batch. The prefix cache keeps their pages, and the policy learns from finished texts."""
        if not gone:
            return
        for row, sequence in enumerate(batch.sequences):
            if sequence in gone:
                self.pages.keep(self._jobs[sequence], batch, row)
                if sequence.finish_reason is not None and sequence.speculates:
                    with failures_logged("the policy learns nothing from an answer"):
                        self.engine.finish(batch, sequence)
        rows = [row for row, sequence in enumerate(batch.sequences) if sequence not in gone]
        # A failure has changed nothing, so a second try may succeed.
        if rows and (error := self._keep_rows(batch, rows) and self._keep_rows(batch, rows)) is not None:
            self._fail_batch(batch, error, gone)
            return
        for sequence in gone:
            sequence.failure = None  # its traceback holds the whole batch
        if not rows:
            self.pages.release(batch.cache.rows)
            del self._batches[batch.is_on_device]
        self._jobs = {sequence: job for sequence, job in self._jobs.items() if sequence not in gone}
        self.pages.shrink_prefix_cache()

    def _keep_rows(self, batch: Batch, rows: list[int]) -> Exception | None:
        """Keep these rows of the batch alone. Returns the error if that failed and the batch is unchanged."""
        before, going = batch.cache, [row for number, row in enumerate(batch.cache.rows) if number not in set(rows)]
        try:
            batch.keep(rows)
        except Exception as error:
            log.warning("rows could not be removed from the batch", exc_info=error)
            if batch.cache is before:
                return error
            self.pages.release(going)
        return None

    def _release(self, prefills: Iterable[_Prefill]) -> None:
        for batch in (prefill.batch for prefill in prefills if prefill.batch is not None):
            for sequence in batch.sequences:
                sequence.failure = None  # its traceback holds the whole batch
            self.pages.release(batch.cache.rows)

    def _fail_batches(self, error: Exception) -> None:
        for batch in list(self._batches.values()):
            self._fail_batch(batch, error)

    def _fail_batch(self, batch: Batch, error: Exception, gone: Collection[Sequence] = ()) -> None:
        """End all requests of a batch, except those whose rows are gone already."""
        own = set(batch.sequences) | set(gone)
        jobs = {job for sequence, job in self._jobs.items() if sequence in own and sequence not in gone}
        for sequence in own:
            sequence.failure = None
        self._batches = {kind: other for kind, other in self._batches.items() if other is not batch}
        self._jobs = {sequence: job for sequence, job in self._jobs.items() if sequence not in own}
        self.pages.release(batch.cache.rows)
        for job in jobs:
            self._fail(job, error)

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

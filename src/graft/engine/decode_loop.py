"""Decode loop: decodes many requests together, a step at a time. Requests join and leave between rounds.

A new request's prompt is prefilled in chunks, in the same steps that decode others; then its rows join the batch. Rows
take pages of the KV cache as their texts grow. When none are free, the youngest request is preempted: it gives up its
pages, waits, and is prefilled again. Its text does not change.

Each call of `Engine.generate` and the like runs its own loop; a server's thread (`scheduler.py`) runs one for all its
requests. If a step or round fails, only the requests in it end without their answers.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from graft.engine.jobs import Job, default_batched_tokens
from graft.engine.page_allocator import PageAllocator, failures_logged, log
from graft.engine.rounds import PrefillChunk, Rounds
from graft.engine.settings import LEAST_CHUNK, SchedulerSettings
from graft.errors import GraftError
from graft.model import NoRoomError
from graft.model.captures import ROWS, padded
from graft.model.step import LONG_TEXT
from graft.request.batch import Batch
from graft.request.sequence import Sequence
from graft.request.stats import Clock

_MIN_SHARED_TOKENS = 256  # if two prompts share at least this prefix, the second waits until the first is prefilled


@dataclass(eq=False)
class _Prefill:
    """A request whose prompt is being prefilled."""

    job: Job
    batch: Batch | None = None  # None until it has rows
    unread: list[int] = field(default_factory=list)  # rows to prefill
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target): rows to copy afterwards
    seconds: float = 0.0

    @property
    def failure(self) -> Exception | None:
        sequences = self.batch.sequences if self.batch is not None else []
        return next((sequence.failure for sequence in sequences if sequence.failure is not None), None)


class DecodeLoop:
    """Decides which requests each step prefills, decodes, preempts and ends. All of it runs in one thread."""

    def __init__(self, engine: Rounds, settings: SchedulerSettings, max_batched_tokens: int) -> None:
        self.engine, self.settings, self.max_batched_tokens = engine, settings, max_batched_tokens
        self.pages = PageAllocator(engine, settings)
        self.clock = Clock()
        self.may_speculate = True  # whether trees can be grown
        self._changed = threading.Condition()  # held to change or read `_waiting`, which other threads may add to
        self._waiting: deque[Job] = deque()
        self._prefills: list[_Prefill] = []  # replaced, never changed: other threads read it
        # The rows that are decoded: True: in device rounds; False: rows that need the host.
        self._batches: dict[bool, Batch] = {}
        self._jobs: dict[Sequence, Job] = {}  # of the batch's sequences; replaced, never changed

    def submit(self, *jobs: Job) -> None:
        """Queue the jobs of one request."""
        with self._changed:
            for job in jobs:
                job.request = jobs[0].number
            self._waiting.extend(jobs)

    def step(self) -> None:
        """Admit requests, give rows pages, and run a step: a round, chunks of prompts, or both."""
        self._admit()
        self._extend_rows()
        chunks = self._next_chunks()
        if self._batches:
            self._decode(chunks)
        elif chunks:
            self._prefill(chunks)
        self._join_prefilled()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._is_anything_running)

    @property
    def decoded(self) -> list[Sequence]:
        """The sequences that are being decoded."""
        return [sequence for batch in self._batches.values() for sequence in batch.sequences]

    def release(self) -> None:
        """Drop all requests and free their pages, without reports and without keeping pages in the prefix cache."""
        batches = [*self._batches.values()]
        with self._changed:
            self._waiting.clear()
        self._release(self._prefills)
        self._prefills, self._batches, self._jobs = [], {}, {}
        for batch in batches:
            self.pages.release(batch.cache.rows)

    # What is running

    @property
    def _running(self) -> set[Job]:
        """Requests that are being prefilled or decoded."""
        return {*self._jobs.values(), *(prefill.job for prefill in self._prefills)}

    @property
    def _is_anything_running(self) -> bool:
        return bool(self._jobs or self._prefills)

    @property
    def _num_rows(self) -> int:
        return len(self._jobs) + sum(len(prefill.job.open_answers) for prefill in self._prefills)

    # Admission

    def _admit(self) -> None:
        """Start waiting requests in order, as long as there is room. If nothing runs, the first one always starts."""
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
        """Whether another request prefills much of the same prompt, which the prefix cache will then have."""
        if self.settings.prefix_cache_tokens == 0:
            return False
        sequence = job.sequences[0]
        count = max(_MIN_SHARED_TOKENS, len(sequence.ids) // 2)
        return any(
            self.pages.salt(other.job, other.job.sequences[0]) == self.pages.salt(job, sequence)
            and min(len(sequence.ids), len(other.job.sequences[0].ids)) > count
            and sequence.ids[:count] == other.job.sequences[0].ids[:count]
            for other in self._prefills
        )

    def _open(self, prefill: _Prefill) -> bool:
        """Give a request its rows. False if it has to wait for pages. Called without the lock, since it takes time."""
        job, start = prefill.job, time.perf_counter()
        try:
            for sequence in job.open_answers:
                sequence.speculates = sequence.speculates and self.may_speculate
            prefill.batch, prefill.unread, prefill.copies = self.pages.open_rows(job)
            if job.prefill is not None:
                self.engine.take_over(prefill.batch)  # its rows may get rotary offsets, which graphs ignore
                job.prefill(prefill.batch)
        except Exception as error:
            self._prefills = [other for other in self._prefills if other is not prefill]
            self._release([prefill])
            if isinstance(error, NoRoomError) and self._running:
                with self._changed:
                    self._waiting.appendleft(job)
                return False
            self._fail(job, error)
        prefill.seconds += time.perf_counter() - start
        return True

    # Prefill

    def _next_chunks(self) -> list[PrefillChunk]:
        """The prompt chunks of the coming step, in the order in which requests came."""
        if not self._prefills:
            return []
        others = len(self._jobs)
        if True in self._batches:
            others = max(others, padded(len(self._batches[True].sequences), ROWS))
        room = max(self._max_tokens() - others, min(LEAST_CHUNK, self.max_batched_tokens))
        opened = ((prefill.batch, prefill.unread) for prefill in self._prefills)
        chunks: list[PrefillChunk] = []
        for batch, row in ((batch, row) for batch, unread in opened if batch is not None for row in unread):
            chunk = batch.next_chunk(row, room)
            if chunk.tokens:
                chunks.append(PrefillChunk(batch, row, chunk))
                room -= len(chunk.tokens)
            if room == 0:
                break
        return chunks

    def _max_tokens(self) -> int:
        """Token limit of the coming step. It is lower beside long texts: attention's cost grows with both."""
        reading = (sequence for prefill in self._prefills for sequence in prefill.job.sequences)
        longest = max((len(sequence.ids) for sequence in itertools.chain(self._jobs, reading)), default=1)
        most = max(self.max_batched_tokens, default_batched_tokens(self.engine.target.device)) * LONG_TEXT // longest
        return min(self.max_batched_tokens, self.engine.target.max_tokens or most, most)

    def _prefill(self, chunks: list[PrefillChunk]) -> None:
        """Run a step of only prompt chunks, while no request is decoded."""
        start = time.perf_counter()
        # If requests wait, do not wait for the device: admit them while it works.
        is_last = not self._waiting and len(self._prefills_of(chunks)) == len(self._prefills)
        try:
            self.engine.prefill(chunks, waits=is_last)
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
            if prefill not in self._prefills:  # preempted earlier in this loop
                continue
            try:
                self._join_if_prefilled(prefill)
            except Exception as error:
                self._remove([prefill.job])
                self._fail(prefill.job, error)

    def _join_if_prefilled(self, prefill: _Prefill) -> None:
        """If a request's prompt is prefilled, move its rows, one for each answer, to the decoded batch."""
        job, batch = prefill.job, prefill.batch
        assert batch is not None
        if (failure := prefill.failure) is not None:
            raise failure
        if any(batch.next_chunk(row, 1).tokens for row in prefill.unread):
            return
        for row in prefill.unread:
            self.pages.keep(job, batch, row)
        for source, row in prefill.copies:
            if not self._allocate(job, partial(batch.copy_row, source, row)):
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
        """Give every decoded row pages for what the coming round writes, the oldest request first."""
        short = [pair for batch in self._batches.values() for pair in self.pages.short_rows(batch)]
        for sequence, row in sorted(short, key=lambda pair: self._jobs[pair[0]].number):
            job = self._jobs.get(sequence)
            if job is None:  # preempted earlier in this loop
                continue
            try:
                self._allocate(job, partial(self.pages.extend, row))
            except Exception as error:
                self._remove([job])
                self._fail(job, error)

    def _allocate(self, job: Job, take: Callable[[], None]) -> bool:
        """Call `take`, which allocates pages for the request. While none are free, preempt the youngest request.

        Returns False if the request itself was preempted.
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
        """Take a request's pages and put it first in the queue. It will be prefilled again and continue its answers."""
        try:
            for batch in self._batches.values():
                own = [row for row, sequence in enumerate(batch.sequences) if self._jobs[sequence] is job]
                if own:
                    # Device rounds have no sampler on the host to keep: its state follows from the row's text.
                    choosers = [batch.chooser.select([row]) for row in own] if batch.chooser is not None else []
                    for row in own:
                        batch.sequences[row].settle()
                        self._report(batch.sequences[row])
                    job.choosers, job.is_preempted = choosers, True
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
        """Run a round of each batch. The device round is launched first, to overlap with the host's round."""
        start = time.perf_counter()
        for is_on_device in sorted(self._batches, reverse=True):
            self._round(self._batches[is_on_device], chunks)
            chunks = []
        seconds = time.perf_counter() - start
        for sequence in self.decoded:
            sequence.stats.decode_seconds += seconds
        self._remove_finished()

    def _round(self, batch: Batch, chunks: list[PrefillChunk]) -> None:
        start = time.perf_counter()
        try:
            self.engine.run_round(batch, self.clock, chunks, partial(self._report_all, batch))
        except Exception as error:
            # The cause may be any row, and the state of all rows is undefined.
            self._fail_batch(batch, error)
            self._fail_prefills(chunks, error)
        if not batch.is_on_device and self._batches.get(True) is batch:  # device rounds failed: the host takes over
            del self._batches[True]
            if False in self._batches:
                self._batches[False].join(batch)
            else:
                self._batches[False] = batch
        self._count_prefill(chunks, time.perf_counter() - start)

    def _report_all(self, batch: Batch) -> None:
        """Report the results of earlier rounds while the device works."""
        for sequence in batch.sequences:
            self._report(sequence)

    def _remove_finished(self) -> None:
        """Report and remove rows that have finished or failed. May be repeated."""
        failed, finished = dict[Job, Exception](), set[Sequence]()
        for sequence in self.decoded:
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
        """Remove requests that have not finished, whether they are being prefilled or decoded."""
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
                may_learn = sequence.speculates and self._jobs[sequence].prefill is None
                if sequence.finish_reason is not None and may_learn:
                    with failures_logged("learning from an answer failed"):
                        self.engine.finish(batch, sequence)
        rows = [row for row, sequence in enumerate(batch.sequences) if sequence not in gone]
        if rows:
            error = self._keep_rows(batch, rows)
            if error is not None:  # it has changed nothing, so a second try may succeed
                error = self._keep_rows(batch, rows)
            if error is not None:
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
        """Keep only these rows of the batch. Returns the error if that failed and the batch is unchanged."""
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
        """End all requests of a batch with an error, except those whose rows are already gone."""
        own = set(batch.sequences) | set(gone)
        jobs = {job for sequence, job in self._jobs.items() if sequence in own and sequence not in gone}
        for sequence in own:
            sequence.failure = None
        self._batches = {kind: other for kind, other in self._batches.items() if other is not batch}
        self._jobs = {sequence: job for sequence, job in self._jobs.items() if sequence not in own}
        self.pages.release(batch.cache.rows)
        for job in jobs:
            self._fail(job, error)

    # Hooks that the scheduler overrides

    def _report(self, sequence: Sequence) -> None:
        """Called for every answer while the device works, and at its end."""

    def _fail(self, job: Job, error: BaseException) -> None:
        """End a request with an error, which its caller raises."""
        job.error = error

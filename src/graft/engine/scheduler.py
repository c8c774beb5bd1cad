"""Scheduler: one thread that decodes many requests together, as one batch. Requests join and leave between rounds.

A newcomer's prompt is read in chunks, in the same steps in which others are decoded; then its rows join them. Rows take
pages of the KV cache as their texts grow. When none are free, the youngest request gives its own up, waits, and is read
again; its text is the same.

Whatever fails, the thread goes on: a batch is always the one before a step or the one after it, so only requests whose
own step failed, or whose round did, end without their answers.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from graft.engine.engine import Engine, Reading
from graft.engine.jobs import LEAST_CHUNK, BusyError, Failure, Job, SchedulerSettings, Update, usual_step
from graft.engine.memory import num_pages_for
from graft.errors import GraftError
from graft.model import NoRoomError, Row
from graft.model.kv_cache import PAGE
from graft.model.step import LONG_TEXT
from graft.request.batch import Batch
from graft.request.sequence import Sequence
from graft.request.stats import Clock
from graft.settings import require
from graft.spec_decode.policies import MAX_BUDGET

_PATIENCE = 3  # steps in a row that may fail without a known cause, before requests are given up
_WORTH_WAITING = 256  # tokens that two prompts have in common, for which the second waits until the first is read

log = logging.getLogger("graft.server")


@dataclass(eq=False)
class _Newcomer:
    """A request whose text is being read."""

    job: Job
    batch: Batch | None = None  # once it is opened
    unread: list[int] = field(default_factory=list)  # rows to read
    seconds: float = 0.0

    @property
    def num_rows(self) -> int:
        return len(self.job.open_answers)

    @property
    def failure(self) -> Exception | None:
        sequences = self.batch.sequences if self.batch is not None else []
        return next((sequence.failure for sequence in sequences if sequence.failure is not None), None)


class Scheduler:
    """Owns the engine: nothing else may run its model while the scheduler lives."""

    def __init__(self, engine: Engine, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self.engine = engine
        # Slots that a round may write behind a row's committed text: the target's tree, or the drafter's.
        self._ahead = max(MAX_BUDGET + 1, engine.drafter.num_slots if engine.drafter is not None else 0)
        self.max_batched_tokens = self.settings.max_batched_tokens or usual_step(engine.target.device)
        num_pages = num_pages_for(engine, self.settings, self.max_batched_tokens)
        least = _pages(self._ahead + 2)
        require(
            num_pages >= least,
            f"there is memory for {PAGE * num_pages} tokens of KV cache and {PAGE * least} are needed: raise memory, "
            "or max_cache_tokens if it is set",
        )
        engine.target.limit_pages(num_pages, self.settings.max_rows)
        self.pool = engine.target.pool
        self.is_ready = threading.Event()  # what takes long at first is done
        self._waiting: deque[Job] = deque()
        self._newcomers: list[_Newcomer] = []  # replaced, never changed: others may ask meanwhile
        self._batch: Batch | None = None  # what is decoded
        self._jobs: dict[Sequence, Job] = {}  # of the batch's sequences; replaced, never changed
        self._clock = Clock()
        self._is_prepared = False  # whether trees can be grown
        self._changed = threading.Condition()
        self._closing = False
        self._end_of_all = math.inf  # by time.monotonic: what has not ended by then is ended
        self._next_drop = -math.inf  # likewise: before, there is nobody to drop
        self._thread = threading.Thread(target=self._run, name="graft-scheduler", daemon=True)
        self._thread.start()

    # For others, from any thread

    def check(self, job: Job) -> None:
        """Raises a GraftError if the request could never be decoded here."""
        num_rows, most = len(job.sequences), self.settings
        require(num_rows <= most.max_rows, f"n={num_rows} answers are more than the {most.max_rows} decoded at once")
        needed = sum(map(self._num_pages_of_all, job.sequences))
        require(
            needed <= self.pool.num_pages,
            f"the request needs {PAGE * needed} tokens of cache and there are {PAGE * self.pool.num_pages}: ask for "
            "fewer or shorter answers",
        )

    def submit(self, *jobs: Job) -> None:
        """Takes in all of them, which belong together, or none: however many they are, they wait as one request."""
        for job in jobs:
            self.check(job)
        with self._changed:
            if self._closing:
                raise BusyError("the server is shutting down", is_closing=True)
            # One that can start at once need not wait, even where nothing may.
            starts_at_once = not self._waiting and self._is_room_for(jobs[0])
            num_waiting = self.num_waiting
            if num_waiting >= self.settings.max_waiting and not starts_at_once:
                raise BusyError(f"{num_waiting} requests are waiting already")
            for job in jobs:
                job.request = jobs[0].number
            self._waiting.extend(jobs)
            self._next_drop = -math.inf
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Ends a request, before its next round; nothing more is heard of it."""
        with self._changed:
            job.cancelled = True
            self._next_drop = -math.inf
            self._changed.notify()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Takes nothing new, lets what is under way go on for a while, then ends it."""
        with self._changed:
            self._closing = True
            self._end_of_all = min(time.monotonic() + drain_seconds, self._end_of_all)
            self._next_drop = -math.inf
            self._changed.notify()
        self._thread.join()

    @property
    def num_running(self) -> int:
        """Requests of which a prompt is read or an answer decoded."""
        return len({job.request for job in self._running})

    @property
    def num_waiting(self) -> int:
        """Requests of which a prompt waits for room."""
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
        """Whether nothing new is taken any more."""
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
        except BaseException as error:  # a library's panic, say: nobody is to wait for ever
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
        self._make_room()
        reading = self._next_chunks()
        if self._batch is not None:
            self._round(reading)
        elif reading:
            self._read(reading)
        self._join_those_read()

    def _prepare(self) -> None:
        """Until it succeeds, all are decoded plainly."""
        if not self._is_prepared:
            with _logged("trees cannot be grown, for now"):
                self.engine.warm_up(self.max_batched_tokens, self.settings.max_rows)
                self._is_prepared = True

    def _recover(self, error: Exception, gives_up: bool) -> None:
        """After a step that failed beside its requests: what they have got is told, and they go on."""
        log.error("a step failed", exc_info=error)
        try:
            self._settle()
        except Exception as another:
            self._fail_batch(another)
        if gives_up:  # the next would fail as well
            with self._changed:
                jobs = [*self._waiting, *(newcomer.job for newcomer in self._newcomers)]
                self._waiting.clear()
            self._release(self._newcomers)
            self._newcomers = []
            self._fail_batch(error)
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
        """Ends requests that were cancelled or took too long, wherever they are."""
        now = time.monotonic()
        if now < self._next_drop:
            return

        def end_of(job: Job) -> float:
            return min(self._end_of_all, math.inf if job.deadline is None else job.deadline)

        def is_unwanted(job: Job) -> bool:
            return job.cancelled or now > end_of(job)

        with self._changed:
            self._next_drop = min(map(end_of, (*self._waiting, *self._running)), default=self._end_of_all)
            gone = [job for job in self._waiting if is_unwanted(job)]
            for job in gone:
                self._waiting.remove(job)
        leaving = {job for job in self._running if is_unwanted(job)}
        self._leave(leaving)
        for job in (*gone, *leaving):
            if not job.cancelled:
                late = Failure("timeout", "the request took longer than allowed")
                self._tell(job, Failure("shutdown", "the server is shutting down") if self._closing else late)

    # Who is there

    @property
    def _running(self) -> set[Job]:
        """Requests that are read or decoded."""
        return {*self._jobs.values(), *(newcomer.job for newcomer in self._newcomers)}

    @property
    def _is_anything_running(self) -> bool:
        return bool(self._jobs or self._newcomers)

    @property
    def _num_rows(self) -> int:
        return len(self._jobs) + sum(newcomer.num_rows for newcomer in self._newcomers)

    def _is_room_for(self, job: Job) -> bool:
        """Whether it can be read: rows that are decoded already are to have a page each to go on with."""
        num_rows, answers = self._num_rows, job.open_answers
        needed = _pages(len(answers[0].ids) + self._ahead) + (len(answers) - 1) * _pages(self._ahead)
        if job.choosers:  # each answer has a text of its own
            needed = sum(_pages(len(sequence.ids) + self._ahead) for sequence in answers)
        return num_rows + len(answers) <= self.settings.max_rows and needed + num_rows <= self.pool.num_free

    def _num_pages_of_all(self, sequence: Sequence) -> int:
        """Of its whole text."""
        return _pages(sequence.num_prompt_tokens + sequence.settings.most_new_tokens + self._ahead)

    # Joining

    def _admit(self) -> None:
        """Takes in requests in the order in which they came, as long as there is room; where nothing runs there is."""
        while True:
            with self._changed:
                if not self._waiting or (self._running and not self._is_room_for(self._waiting[0])):
                    return
                if self._is_being_read(self._waiting[0]):
                    return
                newcomer = _Newcomer(self._waiting.popleft())
                self._newcomers = [*self._newcomers, newcomer]
            if not self._open(newcomer):
                return

    def _is_being_read(self, job: Job) -> bool:
        """Whether much of its prompt is read for another just now: in a few steps it need not be read again."""
        if self.settings.prefix_cache_tokens == 0:
            return False
        sequence = job.sequences[0]
        count = max(_WORTH_WAITING, len(sequence.ids) // 2)
        return any(
            self._salt(other.job, other.job.sequences[0]) == self._salt(job, sequence)
            and len(sequence.ids) > count < len(other.job.sequences[0].ids)
            and sequence.ids[:count] == other.job.sequences[0].ids[:count]
            for other in self._newcomers
        )

    def _open(self, newcomer: _Newcomer) -> bool:
        """Not under the lock: others ask and go meanwhile. False if it has to wait for others to go."""
        job = newcomer.job
        try:
            self._open_rows(newcomer)
        except NoRoomError as error:
            self._newcomers = [other for other in self._newcomers if other is not newcomer]
            if not self._running:
                self._fail(job, error)
                return True
            with self._changed:
                self._waiting.appendleft(job)
            return False
        except Exception as error:
            self._newcomers = [other for other in self._newcomers if other is not newcomer]
            self._fail(job, error)
        return True

    def _open_rows(self, newcomer: _Newcomer) -> None:
        job, pool = newcomer.job, self.pool
        sequences, is_new = job.open_answers, not job.choosers
        for sequence in sequences:
            sequence.speculates = sequence.speculates and self._is_prepared
        # Answers to a prompt share what is read of it; those that were put back have texts of their own.
        unread = [0] if is_new else list(range(len(sequences)))
        rows: list[Row] = []
        try:
            for number, sequence in enumerate(sequences):
                if number in unread:
                    rows.append(
                        pool.open_with_prefix(sequence.ids, self._salt(job, sequence), self._num_slots_of(sequence))
                    )
                else:
                    rows.append(pool.open_row(0))
            # What one that was put back has drawn so far stays what it was.
            chooser = functools.reduce(lambda one, other: one.concat(other), job.choosers) if job.choosers else None
            batch = self.engine.batch_of(sequences, self.engine.target.cache_of(rows), chooser)
        except Exception:
            for row in rows:
                pool.release(row)
            raise
        if is_new:
            job.num_cached_tokens = rows[0].length
        newcomer.unread, newcomer.batch = unread, batch

    def _num_slots_of(self, sequence: Sequence) -> int:
        """Room for the whole answer if plenty is free, as pages that lie together are read faster; else for a start."""
        whole = self._num_pages_of_all(sequence)
        if self.pool.num_free - whole > self.pool.num_pages // 2:
            return PAGE * whole
        return len(sequence.ids) + self._ahead

    def _next_chunks(self) -> list[Reading]:
        """The chunks of newcomers' texts that the coming step reads, in the order in which they came."""
        most = min(self.max_batched_tokens, self.engine.target.max_tokens or math.inf)
        # Beside a long text a step has fewer tokens: what attention takes, time and memory, grows with both.
        most *= min(LONG_TEXT / max(self._longest_text(), 1), 1)
        room = max(int(most) - len(self._jobs), LEAST_CHUNK)
        reading: list[Reading] = []
        for newcomer in self._newcomers:
            batch = newcomer.batch
            assert batch is not None
            for row in newcomer.unread:
                chunk = batch.rest_of(row, room)
                if chunk.tokens:
                    reading.append(Reading(batch, row, chunk))
                    room -= len(chunk.tokens)
                if room == 0:
                    return reading
        return reading

    def _longest_text(self) -> int:
        """Tokens of the longest text that is decoded or read."""
        reading = (sequence for newcomer in self._newcomers for sequence in newcomer.job.sequences)
        return max((len(sequence.ids) for sequence in itertools.chain(self._jobs, reading)), default=0)

    def _read(self, reading: list[Reading]) -> None:
        """A step of prompts alone: nobody is decoded."""
        start = time.perf_counter()
        try:
            self.engine.read(reading)
        except Exception as error:
            self._fail_readers(reading, error)
        self._count_reading(reading, time.perf_counter() - start)

    def _count_reading(self, reading: list[Reading], seconds: float) -> None:
        batches = {id(part.batch) for part in reading}
        for newcomer in self._newcomers:
            if id(newcomer.batch) in batches:
                newcomer.seconds += seconds

    def _fail_readers(self, reading: list[Reading], error: Exception) -> None:
        batches = {id(part.batch) for part in reading}
        failed = [newcomer.job for newcomer in self._newcomers if id(newcomer.batch) in batches]
        self._leave(failed)
        for job in failed:
            self._fail(job, error)

    def _join_those_read(self) -> None:
        for newcomer in self._newcomers:
            if newcomer not in self._newcomers:  # it has given up its pages for one before it
                continue
            try:
                self._join_if_read(newcomer)
            except Exception as error:
                self._leave([newcomer.job])
                self._fail(newcomer.job, error)

    def _join_if_read(self, newcomer: _Newcomer) -> None:
        """If its text is read, its rows, one an answer, are decoded with the others from now on."""
        job, batch = newcomer.job, newcomer.batch
        assert batch is not None
        if (failure := newcomer.failure) is not None:
            raise failure
        if any(batch.rest_of(row, 1).tokens for row in newcomer.unread):
            return
        for row in newcomer.unread:
            self._keep_pages(job, batch, row)
        if not job.choosers:
            for row in range(1, len(batch.sequences)):
                if not self._with_room(job, lambda row=row: batch.copy_row(0, row)):  # type: ignore[misc]
                    return
        if self._batch is None:
            self._batch = batch
        else:
            self._batch.join(batch)
        self._jobs = self._jobs | dict.fromkeys(batch.sequences, job)
        self._newcomers = [other for other in self._newcomers if other is not newcomer]
        job.choosers = []
        job.joined = job.joined or time.monotonic()
        for sequence in batch.sequences:
            sequence.stats.prefill_seconds += newcomer.seconds

    # Pages

    def _salt(self, job: Job, sequence: Sequence) -> str:
        return self.engine.page_salt(sequence, job.salt)

    def _keep_pages(self, job: Job, batch: Batch, row: int) -> None:
        """Keeps what a row has read and written for others that begin alike."""
        most = self.settings.prefix_cache_tokens
        if most == 0:
            return
        with _logged("a text's pages are not kept"):
            self.engine.keep_pages(batch, row, job.salt)

    def _make_room(self) -> None:
        """Every row that is decoded has pages for what the coming round writes."""
        if self._batch is None:
            return
        ahead = self._ahead
        short = [
            (sequence, row)
            for sequence, row in zip(self._batch.sequences, self._batch.cache.rows, strict=True)
            if PAGE * len(row.pages) < row.length + ahead
        ]
        for sequence, row in sorted(short, key=lambda pair: self._jobs[pair[0]].number):
            job = self._jobs.get(sequence)
            if job is None:  # it has given its pages up
                continue
            try:
                self._with_room(job, lambda row=row: self.pool.ensure(row, row.length + ahead))  # type: ignore[misc]
            except Exception as error:
                self._leave([job])
                self._fail(job, error)

    def _with_room(self, job: Job, take: Callable[[], None]) -> bool:
        """Takes pages for a request; while there are none, the youngest give theirs up. False if that was itself."""
        while True:
            try:
                take()
                return True
            except NoRoomError:
                if self._trim():
                    continue
                youngest = max(self._running, key=lambda other: other.number)
                if youngest is job and len(self._running) == 1:
                    raise
            self._put_back(youngest)
            if youngest is job:
                return False

    def _trim(self) -> bool:
        """Gives back the pages that rows have for later. Whether there were any."""
        before = self.pool.num_free
        batches = [self._batch, *(newcomer.batch for newcomer in self._newcomers)]
        for batch in (batch for batch in batches if batch is not None):
            for sequence, row in zip(batch.sequences, batch.cache.rows, strict=True):
                self.pool.trim(row, len(sequence.ids) + self._ahead)
        return self.pool.num_free > before

    def _put_back(self, job: Job) -> None:
        """The request gives its pages up, waits before all others, and goes on when it has been read again."""
        try:
            batch = self._batch
            own = [row for row, sequence in enumerate(self._sequences) if self._jobs[sequence] is job]
            if batch is not None and own:
                choosers = [batch.chooser.select([row]) for row in own]
                for row in own:
                    batch.sequences[row].settle()
                    self._tell_of(batch.sequences[row])
                job.choosers = choosers
            self._leave([job])
        except Exception as error:
            self._leave([job])
            self._fail(job, error)
            return
        log.info("the cache is full: a request waits, and is read again")
        with self._changed:
            self._waiting.appendleft(job)

    # The round

    @property
    def _sequences(self) -> list[Sequence]:
        return self._batch.sequences if self._batch is not None else []

    def _round(self, reading: list[Reading]) -> None:
        assert self._batch is not None
        start = time.perf_counter()
        try:
            self.engine.run_round(self._batch, self._clock, reading, self._tell_all)
        except Exception as error:
            # Whose fault it was cannot be told, and their rows are no longer what they should be.
            self._fail_batch(error)
            self._fail_readers(reading, error)
            return
        seconds = time.perf_counter() - start
        self._count_reading(reading, seconds)
        for sequence in self._sequences:
            sequence.stats.decode_seconds += seconds
        self._settle()

    def _tell_all(self) -> None:
        """While the device works: tells requests what the rounds before have brought them."""
        for sequence in self._sequences:
            self._tell_of(sequence)

    def _tell_of(self, sequence: Sequence) -> None:
        job = self._jobs[sequence]
        if job.cancelled or sequence.failure is not None:
            return
        try:
            update = _update(job, sequence)
        except Exception as error:
            sequence.failure = error
            return
        if update is not None:
            self._tell(job, update)

    def _settle(self) -> None:
        """Rows that have ended or failed hear of it and go. May be repeated."""
        ended = [
            sequence
            for sequence in self._sequences
            if sequence.finish_reason is not None
            or sequence.failure is not None
            or (sequence.constraint is not None and sequence.constraint.error is not None)
        ]
        if not ended:
            return
        failed = dict[Job, Exception]()
        for sequence in ended:
            self._tell_of(sequence)
            if sequence.failure is not None:
                failed[self._jobs[sequence]] = sequence.failure
            elif sequence.constraint is not None and sequence.constraint.error is not None:
                failed[self._jobs[sequence]] = GraftError(sequence.constraint.error)
        for job, error in failed.items():
            self._fail(job, error)
        self._end({sequence for sequence, job in self._jobs.items() if job in failed or sequence in ended})

    # Leaving

    def _leave(self, jobs: Collection[Job]) -> None:
        """Requests go before they have ended."""
        if not jobs:
            return
        going = [newcomer for newcomer in self._newcomers if newcomer.job in jobs]
        self._newcomers = [newcomer for newcomer in self._newcomers if newcomer.job not in jobs]
        self._release(going)
        self._end({sequence for sequence, job in self._jobs.items() if job in jobs})

    def _end(self, gone: set[Sequence]) -> None:
        """Frees rows; what they have read and written is kept."""
        batch = self._batch
        if batch is None or not gone:
            return
        for row, sequence in enumerate(batch.sequences):
            if sequence in gone:
                self._keep_pages(self._jobs[sequence], batch, row)
                if sequence.finish_reason is not None and sequence.speculates:
                    with _logged("nothing is learned from an answer"):
                        self.engine.policy.finish(sequence)
        rows = [row for row, sequence in enumerate(batch.sequences) if sequence not in gone]
        if rows and (error := self._keep(batch, rows) and self._keep(batch, rows)) is not None:
            self._fail_batch(error, gone)
            return
        for sequence in gone:
            sequence.failure = None  # its traceback has the whole batch
        if not rows:
            self._release_rows(batch.cache.rows)
            self._batch = None
        self._jobs = {sequence: job for sequence, job in self._jobs.items() if sequence not in gone}
        if self.settings.prefix_cache_tokens is not None:
            with _logged("texts are kept longer"):
                self.pool.evict(self.settings.prefix_cache_tokens)

    def _keep(self, batch: Batch, rows: list[int]) -> Exception | None:
        """Goes on with these rows alone. What fails has changed nothing: a second time it may succeed."""
        before, going = batch.cache, [row for number, row in enumerate(batch.cache.rows) if number not in set(rows)]
        try:
            batch.keep(rows)
        except Exception as error:
            log.warning("rows could not go", exc_info=error)
            if batch.cache is before:
                return error
            self._release_rows(going)
        return None

    def _release(self, newcomers: Iterable[_Newcomer]) -> None:
        for batch in (newcomer.batch for newcomer in newcomers if newcomer.batch is not None):
            for sequence in batch.sequences:
                sequence.failure = None  # its traceback has the whole batch
            self._release_rows(batch.cache.rows)

    def _release_rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            with _logged("pages are given back when nobody knows them any more"):
                self.pool.release(row)

    def _fail_batch(self, error: Exception, gone: Collection[Sequence] = ()) -> None:
        """Ends all that are decoded but those that are gone already."""
        jobs = {job for sequence, job in self._jobs.items() if sequence not in gone}
        for sequence in self._jobs:
            sequence.failure = None
        batch, self._batch, self._jobs = self._batch, None, {}
        if batch is not None:
            self._release_rows(batch.cache.rows)
        for job in jobs:
            self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        """Says so, if anybody still listens, and nothing more."""
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


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """What fails inside costs a lesson or a short cut, and no request its answer."""
    try:
        yield
    except Exception:
        log.warning("%s", what, exc_info=True)


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def _update(job: Job, sequence: Sequence) -> Update | None:
    """What the listener has not heard of yet, if anything."""
    assert sequence.text is not None
    index, ended = job.sequences.index(sequence), sequence.finish_reason is not None
    told, count, start = job.told[index], sequence.stats.tokens, sequence.num_prompt_tokens
    if index in job.ended or (told == count and not ended):
        return None
    update = Update(
        index=index,
        text=sequence.text.take(final=ended),
        ids=sequence.ids[start + told : start + count],  # what lies behind a stop string is not the answer's
        logprobs=sequence.logprobs[told:count],
        round=sequence.last_round,
        finish_reason=sequence.finish_reason,
    )
    job.told[index] = count
    job.ended |= {index} if ended else set()
    return update

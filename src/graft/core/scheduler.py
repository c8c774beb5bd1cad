"""Scheduler: one thread that decodes many requests together. Requests join and leave between rounds.

A request's prompt is read on its own, a chunk between two rounds, and its rows then join those that are decoded.
Requests that must not speculate are decoded in a lane of their own, which takes turns with the other by time spent.
When trees do not pay for as many rows as there are, all are decoded there, until there are fewer for whom they do.

Whatever fails, the thread goes on: a batch is always the one before a step or the one after it, so only requests whose
own step failed, or whose round did, end without their answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from graft.core.batch import Batch
from graft.core.pace import Pace
from graft.core.prefix_cache import PageStore
from graft.engine import Engine
from graft.errors import GraftError
from graft.model import CacheLimit, NoRoomError, TreeCache
from graft.round_trace import RoundRecord
from graft.sequence import FinishReason, Sequence, TokenLogprob
from graft.settings import Settings, require
from graft.spec_decode.policies import MAX_BUDGET
from graft.stats import Clock

_PATIENCE = 3  # steps in a row that may fail without a known cause, before requests are given up
_LEAST_CHUNK = 32  # a forward costs as much as this many tokens, however few it reads

log = logging.getLogger("graft.server")


@dataclass(frozen=True)
class SchedulerSettings(Settings):
    """How much is decoded at once."""

    max_rows: int = 16  # answers decoded together
    max_waiting: int = 64  # requests that wait for room; more are refused
    max_cache_tokens: int = 65536  # slots of all caches of the target, whoever has them or had them
    prefix_cache_tokens: int = 8192  # of texts kept, so that the same beginning is not read again; 0 keeps none

    def __post_init__(self) -> None:
        for name, least in (("max_rows", 1), ("max_waiting", 0), ("max_cache_tokens", 256), ("prefix_cache_tokens", 0)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, not {getattr(self, name)}")


class BusyError(Exception):
    """Too many requests are waiting."""


@dataclass(frozen=True)
class Update:
    """What a round brought one of a request's answers."""

    index: int  # of the answer
    text: str
    ids: list[int]
    logprobs: list[TokenLogprob]
    round: RoundRecord | None  # if the sequence is recorded
    finish_reason: FinishReason | None


FailureKind = Literal["request", "timeout", "server"]


@dataclass(frozen=True)
class Failure:
    """The request has ended without its answers. kind: whose fault it is."""

    kind: FailureKind
    message: str


@dataclass(eq=False)
class Job:
    """A request as the scheduler sees it. `listener` is called in the scheduler's thread, and must be quick."""

    sequences: list[Sequence]
    listener: Callable[[Update | Failure], None]
    speculates: bool = True
    salt: str = ""  # whose kept pages it may use
    deadline: float | None = None  # by time.monotonic
    cancelled: bool = False
    num_cached_tokens: int = 0  # of the prompt, those that were not read again
    joined: float | None = None  # when its first round began, by time.monotonic
    told: list[int] = field(default_factory=list)  # tokens of each answer that the listener has heard of
    ended: set[int] = field(default_factory=set)  # answers of whose end it has

    def __post_init__(self) -> None:
        self.told = [0] * len(self.sequences)

    @property
    def num_slots(self) -> int:
        first = self.sequences[0]
        return first.num_prompt_tokens + first.settings.max_new_tokens + MAX_BUDGET + 1


@dataclass
class _Newcomer:
    """A request whose prompt is being read."""

    job: Job
    batch: Batch | None = None  # once it is opened
    chunks: Iterator[int] = field(default_factory=lambda: iter(()))
    is_read: bool = False
    seconds: float = 0.0


@dataclass
class _Lane:
    """What is decoded together by one engine."""

    engine: Engine
    batch: Batch | None = None
    jobs: dict[Sequence, Job] = field(default_factory=dict)  # of the batch's sequences; replaced, never changed
    newcomer: _Newcomer | None = None
    clock: Clock = field(default_factory=Clock)
    seconds: float = 0.0  # spent on rounds

    @property
    def all_jobs(self) -> set[Job]:
        jobs, newcomer = self.jobs, self.newcomer  # others may ask while the scheduler's thread changes them
        return {*jobs.values(), *([newcomer.job] if newcomer is not None else [])}

    @property
    def num_rows(self) -> int:
        return sum(len(job.sequences) for job in self.all_jobs)

    def num_tokens(self, *more: Job) -> int:
        """Tokens of cache that it takes, with more requests if given: every row is as long as the longest."""
        jobs = self.all_jobs | set(more)
        return sum(len(job.sequences) for job in jobs) * max((job.num_slots for job in jobs), default=0)


class Scheduler:
    """Owns the engine: nothing else may run its model while the scheduler lives."""

    def __init__(self, engine: Engine, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        plain = Engine(
            engine.target.model,
            engine.tokenizer,
            policy="off",
            chunk_size=engine.target.chunk_size,
            exact=engine.target.is_exact,
        )
        self._lanes = {True: _Lane(engine), False: _Lane(plain)}
        self._limit = CacheLimit(self.settings.max_cache_tokens)
        least = plain.target.num_slots_of(1, MAX_BUDGET + 3)
        require(least <= self._limit.most, f"max_cache_tokens must be at least {least} here, not {self._limit.most}")
        for lane in self._lanes.values():
            lane.engine.target.keep_to(self._limit)
        self.pages = PageStore(self.settings.prefix_cache_tokens)
        self._waiting: deque[Job] = deque()
        self._pace = Pace() if engine.policy.adapts else None  # none: there are to be trees whatever they cost
        self._is_prepared = False  # whether trees can be grown
        self._num_resting = 0  # rows for which trees do not pay, while all are decoded plainly
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="graft-scheduler", daemon=True)
        self._thread.start()

    # For others, from any thread

    def check(self, job: Job) -> None:
        """Raises a GraftError if the request could never be decoded here."""
        num_rows, most = len(job.sequences), self.settings
        require(num_rows <= most.max_rows, f"n={num_rows} answers are more than the {most.max_rows} decoded at once")
        needed = self._lanes[False].engine.target.num_slots_of(num_rows, job.num_slots)
        require(
            needed <= most.max_cache_tokens,
            f"the request needs {needed} tokens of cache and there are {most.max_cache_tokens}: ask for fewer or "
            "shorter answers",
        )

    def submit(self, job: Job) -> None:
        self.check(job)
        with self._changed:
            if self._closing:
                raise BusyError("the server is shutting down")
            # One that can start at once need not wait, even where nothing may.
            starts_at_once = not self._waiting and self._is_room_for(job)
            if len(self._waiting) >= self.settings.max_waiting and not starts_at_once:
                raise BusyError(f"{len(self._waiting)} requests are waiting already")
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Ends a request, before its next round; nothing more is heard of it."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Takes nothing new, lets what is under way go on for a while, then ends it."""
        end = time.monotonic() + drain_seconds
        with self._changed:
            self._closing = True
            self._changed.notify()
            for job in [*self._waiting, *self._running]:
                job.deadline = end if job.deadline is None else min(end, job.deadline)
        self._thread.join()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def cache_use(self) -> float:
        """Share of the cache that running requests take."""
        return sum(lane.num_tokens() for lane in self._lanes.values()) / self.settings.max_cache_tokens

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        num_failures = 0
        try:
            while self._wait_for_work():
                try:
                    self._step()
                    num_failures = 0
                except Exception as error:
                    num_failures += 1
                    self._recover(error, gives_up=num_failures >= _PATIENCE)
        except BaseException as error:  # a library's panic, say: nobody is to wait for ever
            with self._changed:
                self._closing = True
                jobs = [*self._waiting, *self._running]
                self._waiting.clear()
            for job in jobs:
                self._fail(job, error)

    def _step(self) -> None:
        if not self._is_prepared and not any(lane.batch is not None for lane in self._lanes.values()):
            self._prepare()
        self._drop_unwanted()
        self._take_in()
        busy = [lane for lane in self._lanes.values() if lane.batch is not None]
        if busy:
            self._round(min(busy, key=lambda lane: lane.seconds))

    def _prepare(self) -> None:
        """Until it succeeds, all are decoded plainly."""
        with _logged("trees cannot be grown, for now"):
            self._lanes[True].engine.policy.prepare()
            self._is_prepared = True

    def _recover(self, error: Exception, gives_up: bool) -> None:
        """After a step that failed beside its requests: what they have got is told, and they go on."""
        log.error("a step failed", exc_info=error)
        for lane in self._lanes.values():
            try:
                self._settle(lane)
            except Exception as another:
                self._fail_lane(lane, another)
        if gives_up:  # the next would fail as well
            with self._changed:
                waiting = list(self._waiting)
                self._waiting.clear()
            for lane in self._lanes.values():
                waiting += [lane.newcomer.job] if lane.newcomer is not None else []
                lane.newcomer = None
                self._fail_lane(lane, error)
            for job in waiting:
                self._fail(job, error)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._waiting or any(lane.all_jobs for lane in self._lanes.values())):
                if self._closing:
                    return False
                self._changed.wait()
        return True

    def _drop_unwanted(self) -> None:
        """Ends requests that were cancelled or took too long, wherever they are."""
        now = time.monotonic()

        def is_unwanted(job: Job) -> bool:
            return job.cancelled or (job.deadline is not None and now > job.deadline)

        with self._changed:
            gone = [job for job in self._waiting if is_unwanted(job)]
            for job in gone:
                self._waiting.remove(job)
        for lane in self._lanes.values():
            gone += [job for job in lane.all_jobs if is_unwanted(job)]
            self._leave(lane, gone)
        for job in gone:
            if not job.cancelled:
                what = "the server is shutting down" if self._closing else "the request took longer than allowed"
                self._tell(job, Failure("timeout", what))

    # Joining

    def _take_in(self) -> None:
        """Reads about one chunk of waiting prompts; prompts that are read through join."""
        self._rest_or_wake()
        budget = self._lanes[True].engine.target.chunk_size
        while budget > 0:
            lane = next((lane for lane in self._lanes.values() if lane.newcomer is not None), None) or self._admit()
            if lane is None:
                return
            num_read = self._read_on(lane)
            if num_read is None:
                return
            budget -= num_read

    def _read_on(self, lane: _Lane) -> int | None:
        """Reads another chunk of the prompt of the lane's newcomer, who joins when there is none left. Returns what it
        cost, in tokens; None if the newcomer has to wait for others to go. When this has ended nobody holds what a
        newcomer had that is gone, and the next may have it."""
        newcomer = lane.newcomer
        assert newcomer is not None
        start = time.perf_counter()
        num_read = 0
        try:
            if newcomer.batch is None:
                self._open(lane, newcomer)
            if not newcomer.is_read:
                num_read = next(newcomer.chunks, 0)
            if num_read == 0:
                self._join(lane, newcomer)
        except NoRoomError as error:
            if any(other.batch is not None for other in self._lanes.values()):
                return None
            lane.newcomer = None
            self._fail(newcomer.job, error)
            return 0
        except Exception as error:
            lane.newcomer = None
            self._fail(newcomer.job, error)
            return 0
        newcomer.seconds += time.perf_counter() - start
        return max(num_read, _LEAST_CHUNK) if num_read else 0

    def _admit(self) -> _Lane | None:
        """Takes in the request that has waited longest, if there is room for it; where nothing runs there is."""
        with self._changed:
            if not self._waiting or (self._running and not self._is_room_for(self._waiting[0])):
                return None
            job = self._waiting.popleft()
            lane = self._lane_for(job)
            lane.newcomer = _Newcomer(job)
        return lane

    def _open(self, lane: _Lane, newcomer: _Newcomer) -> None:
        """Not under the lock: a cache may take long, and others ask and go meanwhile."""
        job = newcomer.job
        batch = lane.engine.open(job.sequences)
        with _logged("kept pages are not used"):
            job.num_cached_tokens = self.pages.load(job.sequences[0].ids, _salt(job, batch), _caches(batch), 0)
        newcomer.batch, newcomer.chunks = batch, lane.engine.prefill_row(batch, 0)

    @property
    def _running(self) -> set[Job]:
        """Requests that are read or decoded; one that moves may be in both lanes for a moment."""
        return {job for lane in self._lanes.values() for job in lane.all_jobs}

    @property
    def _num_rows(self) -> int:
        return sum(lane.num_rows for lane in self._lanes.values())

    def _is_room_for(self, job: Job) -> bool:
        own = self._lane_for(job)
        num_tokens = sum(lane.num_tokens(*([job] if lane is own else [])) for lane in self._lanes.values())
        num_rows = self._num_rows + len(job.sequences)
        fits = num_rows <= self.settings.max_rows and num_tokens <= self.settings.max_cache_tokens
        return fits and self._limit.has(own.engine.target.num_slots_of(len(job.sequences), job.num_slots))

    def _join(self, lane: _Lane, newcomer: _Newcomer) -> None:
        """The prompt is read: its rows, one an answer, are decoded with the others from now on."""
        job, batch = newcomer.job, newcomer.batch
        assert batch is not None
        if not newcomer.is_read:
            with _logged("a prompt's pages are not kept"):
                self.pages.save(batch.sequences[0].ids, _salt(job, batch), _caches(batch), 0)
            for row in range(1, len(batch.sequences)):
                batch.copy_row(0, row)
            newcomer.is_read = True
        jobs = dict.fromkeys(job.sequences, job)
        if lane is not self._lanes[False] and self._num_resting and lane.batch is None:  # since its prompt was begun
            try:
                self._leave_to_plain(batch, jobs)
            except torch.OutOfMemoryError:
                self._add(lane, batch, jobs)
        else:
            self._add(lane, batch, jobs)
        job.joined = time.monotonic()
        for sequence in job.sequences:
            sequence.stats.prefill_seconds = newcomer.seconds
        lane.newcomer = None

    def _add(self, lane: _Lane, batch: Batch, jobs: dict[Sequence, Job]) -> None:
        jobs = lane.jobs | jobs
        if lane.batch is None:
            others = [other.seconds for other in self._lanes.values() if other.batch is not None]
            with _logged("rows have no room in advance: they move when they must"):
                batch.reserve(self.settings.max_rows)
            lane.batch, lane.seconds = batch, min(others, default=0.0)
        else:
            lane.batch.join(batch)
        lane.jobs = jobs

    def _lane_for(self, job: Job) -> _Lane:
        """Where a request is decoded from now on."""
        return self._lanes[job.speculates and self._is_prepared and not self._num_resting]

    def _leave_to_plain(self, batch: Batch, jobs: dict[Sequence, Job]) -> None:
        """Adds the rows to plain decoding, which needs nothing but their cache."""
        plain = self._lanes[False]
        room = plain.engine.target.open(len(batch.sequences), max(job.num_slots for job in jobs.values()))
        self._add(plain, Batch(batch.sequences, room.keeping([]).joining(batch.cache), batch.chooser), jobs)

    def _rest_or_wake(self) -> None:
        """Leaves all rows to plain decoding when trees do not pay for as many as there will be, and new ones no longer
        when they are fewer by a good part, or after long."""
        lane, plain, pace = self._lanes[True], self._lanes[False], self._pace
        if pace is None or not (self._waiting or lane.all_jobs):
            return
        num_rows = self._num_speculating()
        if self._num_resting:
            # Fewer by a good part: at the edge of two sizes it would go back and forth. As many: for another trial.
            is_time = num_rows <= 0.75 * self._num_resting or pace.pays(self._num_resting)
            if is_time and pace.pays(num_rows):
                self._num_resting = 0
                lane.engine.policy.reconsider(num_rows)
            return
        if pace.pays(num_rows) or plain.num_tokens(*lane.all_jobs) > self.settings.max_cache_tokens:
            return
        if lane.batch is not None:
            try:
                self._leave_to_plain(lane.batch, lane.jobs)
            except torch.OutOfMemoryError:
                log.warning("there is no memory to leave %d rows to plain decoding", len(lane.batch.sequences))
                pace.restart(num_rows)
                return
            except Exception:
                log.exception("%d rows could not be left to plain decoding", len(lane.batch.sequences))
                pace.restart(num_rows)
                return
        lane.batch, lane.jobs, self._num_resting = None, {}, num_rows

    def _num_speculating(self) -> int:
        """Rows that may speculate: of requests that are there, and of those that wait as far as there is room."""
        jobs = self._running
        num_rows, longest = sum(len(job.sequences) for job in jobs), max((job.num_slots for job in jobs), default=0)
        with self._changed:
            for job in self._waiting:
                num_rows, longest = num_rows + len(job.sequences), max(longest, job.num_slots)
                if num_rows > self.settings.max_rows or num_rows * longest > self.settings.max_cache_tokens:
                    break
                jobs.add(job)
        return sum(len(job.sequences) for job in jobs if job.speculates)

    # The round

    def _round(self, lane: _Lane) -> None:
        assert lane.batch is not None
        start, num_setups, num_rows = time.perf_counter(), lane.engine.num_setups, len(lane.batch.sequences)
        try:
            round = lane.engine.run_round(lane.batch, lane.clock)
        except Exception as error:
            # Whose fault it was cannot be told, and their caches are no longer what they should be.
            self._fail_lane(lane, error)
            return
        seconds = time.perf_counter() - start
        lane.seconds += seconds
        for sequence in lane.batch.sequences:
            sequence.stats.decode_seconds += seconds
        self._settle(lane)
        with _logged("a round's pace is not noted"):
            if self._pace is not None and lane.engine.num_setups == num_setups:  # else later ones will not take as long
                if lane is self._lanes[True]:
                    self._pace.observe(num_rows, seconds, round.num_tokens, round.is_plain)
                elif self._num_resting:
                    self._pace.rested(min(num_rows, self._num_resting))

    def _settle(self, lane: _Lane) -> None:
        """Tells requests what they have got; those that have ended or failed go. May be repeated."""
        if lane.batch is None:
            return
        failed = set[Job]()
        for sequence in lane.batch.sequences:
            job = lane.jobs[sequence]
            if job.cancelled:
                continue
            try:
                if sequence.failure is not None:
                    raise sequence.failure
                if sequence.constraint is not None and sequence.constraint.error is not None:
                    raise GraftError(sequence.constraint.error)
                if (update := _update(job, sequence)) is not None:
                    self._tell(job, update)
            except Exception as error:
                failed.add(job)
                self._fail(job, error)
        self._leave(lane, failed)
        self._end(lane, {sequence for sequence in lane.jobs if sequence.finish_reason is not None})

    # Leaving

    def _leave(self, lane: _Lane, jobs: set[Job] | list[Job]) -> None:
        """Requests go before they have ended."""
        if lane.newcomer is not None and lane.newcomer.job in jobs:
            lane.newcomer = None
        self._end(lane, {sequence for sequence, job in lane.jobs.items() if job in jobs})

    def _end(self, lane: _Lane, gone: set[Sequence]) -> None:
        """Frees rows; what they have read and written is kept as pages."""
        if lane.batch is None or not gone:
            return
        for row, sequence in enumerate(lane.batch.sequences):
            if sequence in gone:
                job = lane.jobs[sequence]
                with _logged("an answer's pages are not kept"):
                    self.pages.save(sequence.ids, _salt(job, lane.batch), _caches(lane.batch), row)
                if sequence.finish_reason is not None:
                    with _logged("nothing is learned from an answer"):
                        self._lanes[job.speculates].engine.policy.finish(sequence)
        rows = [row for row, sequence in enumerate(lane.batch.sequences) if sequence not in gone]
        if rows and (error := self._keep(lane.batch, rows) and self._keep(lane.batch, rows)) is not None:
            self._fail_lane(lane, error, gone)
            return
        for sequence in gone:
            sequence.failure = None  # its traceback has the whole batch
        lane.batch = lane.batch if rows else None
        lane.jobs = {sequence: job for sequence, job in lane.jobs.items() if sequence not in gone}

    @staticmethod
    def _keep(batch: Batch, rows: list[int]) -> Exception | None:
        """Takes no memory, and what fails has changed nothing: a second time it may succeed."""
        try:
            batch.keep(rows)
        except Exception as error:
            log.warning("rows could not go", exc_info=error)
            return error
        return None

    def _fail_lane(self, lane: _Lane, error: Exception, gone: Collection[Sequence] = ()) -> None:
        """Ends all that are decoded there but those that are gone already."""
        jobs = {job for sequence, job in lane.jobs.items() if sequence not in gone}
        for sequence in lane.jobs:
            sequence.failure = None
        lane.batch, lane.jobs = None, {}
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
        job.cancelled = True

    @staticmethod
    def _tell(job: Job, news: Update | Failure) -> None:
        try:
            job.listener(news)
        except Exception:
            log.exception("a listener failed")
            job.cancelled = True


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """What fails inside costs a lesson or a short cut, and no request its answer."""
    try:
        yield
    except Exception:
        log.warning("%s", what, exc_info=True)


def _caches(batch: Batch) -> list[TreeCache]:
    return [batch.cache] if batch.draft is None else [batch.cache, batch.draft.cache]


def _salt(job: Job, batch: Batch) -> str:
    # Plain decoding keeps nothing for a drafter, so its pages are others.
    return f"{batch.draft is not None}/{job.salt}"


def _update(job: Job, sequence: Sequence) -> Update | None:
    """What the listener has not heard of yet, if anything."""
    assert sequence.text is not None
    index, ended = job.sequences.index(sequence), sequence.finish_reason is not None
    told = job.told[index]
    if index in job.ended or (told == sequence.stats.tokens and not ended):
        return None
    update = Update(
        index=index,
        text=sequence.text.take(final=ended),
        ids=sequence.new_ids[told:],
        logprobs=sequence.logprobs[told:],
        round=sequence.last_round,
        finish_reason=sequence.finish_reason,
    )
    job.told[index] = sequence.stats.tokens
    job.ended |= {index} if ended else set()
    return update

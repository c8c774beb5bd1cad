"""Scheduler: one thread that decodes many requests together. Requests join and leave between rounds.

A request's prompt is read on its own, a chunk between two rounds, and its rows then join those that are decoded.
Requests that must not speculate are decoded in a lane of their own, which takes turns with the other by time spent.
When trees do not pay for as many rows as there are, all are decoded there, until there are fewer for whom they do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import torch

from graft.batch import Batch
from graft.engine import Engine
from graft.errors import GraftError
from graft.policy import MAX_BUDGET
from graft.record import RoundRecord
from graft.sequence import FinishReason, Sequence, TokenLogprob
from graft.serve.pace import Pace
from graft.serve.pages import PageStore
from graft.settings import Settings, require
from graft.stats import Clock
from graft.target import TreeCache

_LEAST_CHUNK = 32  # a forward costs as much as this many tokens, however few it reads

log = logging.getLogger("graft.serve")


@dataclass(frozen=True)
class SchedulerSettings(Settings):
    """How much is decoded at once."""

    max_rows: int = 16  # answers decoded together
    max_waiting: int = 64  # requests that wait for room; more are refused
    max_cache_tokens: int = 65536  # rows times the longest row, in tokens
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
    batch: Batch
    chunks: Iterator[int]
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
        self.pages = PageStore(self.settings.prefix_cache_tokens)
        self._waiting: deque[Job] = deque()
        self._pace = Pace() if engine.policy.adapts else None  # none: there are to be trees whatever they cost
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
        needed = num_rows * job.num_slots
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
        try:
            self._lanes[True].engine.policy.prepare()
            while self._wait_for_work():
                self._drop_unwanted()
                self._take_in()
                busy = [lane for lane in self._lanes.values() if lane.batch is not None]
                if busy:
                    self._round(min(busy, key=lambda lane: lane.seconds))
        except Exception as error:
            with self._changed:
                self._closing = True
                for job in [*self._waiting, *self._running]:
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
            budget -= self._read_on(lane)

    def _read_on(self, lane: _Lane) -> int:
        """Reads another chunk of the prompt of the lane's newcomer, who joins when there is none left. Returns what it
        cost, in tokens. When this has ended nobody holds what a newcomer had, and the next may have it."""
        newcomer = lane.newcomer
        assert newcomer is not None
        start = time.perf_counter()
        try:
            num_read = next(newcomer.chunks, 0)
            if num_read == 0:
                self._join(lane, newcomer)
        except Exception as error:
            lane.newcomer = None
            self._fail(newcomer.job, error)
            return 0
        newcomer.seconds += time.perf_counter() - start
        return max(num_read, _LEAST_CHUNK) if num_read else 0

    def _admit(self) -> _Lane | None:
        """Starts on the request that has waited longest, if there is room for it."""
        with self._changed:
            if not self._waiting or not self._is_room_for(self._waiting[0]):
                return None
            job = self._waiting.popleft()
            lane = self._lane_for(job)
            try:
                batch = lane.engine.open(job.sequences)
                prompt = job.sequences[0].ids
                job.num_cached_tokens = self.pages.load(prompt, _salt(job, batch), _caches(batch), 0)
            except Exception as error:
                self._fail(job, error)
                return None
            lane.newcomer = _Newcomer(job, batch, lane.engine.prefill_row(batch, 0))
        return lane

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
        return num_rows <= self.settings.max_rows and num_tokens <= self.settings.max_cache_tokens

    def _join(self, lane: _Lane, newcomer: _Newcomer) -> None:
        """The prompt is read: its rows, one an answer, are decoded with the others from now on."""
        job, batch = newcomer.job, newcomer.batch
        self.pages.save(batch.sequences[0].ids, _salt(job, batch), _caches(batch), 0)
        for row in range(1, len(batch.sequences)):
            batch.copy_row(0, row)
        job.joined = time.monotonic()
        for sequence in job.sequences:
            sequence.stats.prefill_seconds = newcomer.seconds
        jobs = dict.fromkeys(job.sequences, job)
        if lane is not self._lanes[False] and self._num_resting:  # since its prompt was begun
            self._leave_to_plain(batch, jobs)
        else:
            self._add(lane, batch, jobs)
        lane.newcomer = None

    def _add(self, lane: _Lane, batch: Batch, jobs: dict[Sequence, Job]) -> None:
        if lane.batch is None:
            others = [other.seconds for other in self._lanes.values() if other.batch is not None]
            room = max(self.settings.max_cache_tokens // batch.cache.num_slots, len(batch.sequences))
            with suppress(torch.OutOfMemoryError):  # then it moves when it must
                batch.reserve(min(self.settings.max_rows, room))
            lane.batch, lane.seconds = batch, min(others, default=0.0)
        else:
            lane.batch.join(batch)
        lane.jobs = lane.jobs | jobs

    def _lane_for(self, job: Job) -> _Lane:
        """Where a request is decoded from now on."""
        return self._lanes[job.speculates and not self._num_resting]

    def _leave_to_plain(self, batch: Batch, jobs: dict[Sequence, Job]) -> None:
        """Adds the rows to plain decoding, which needs nothing but their cache."""
        plain = self._lanes[False]
        cache = plain.engine.target.open(len(batch.sequences), max(job.num_slots for job in jobs.values()))
        cache.keep([])
        cache.join(batch.cache)
        self._add(plain, Batch(batch.sequences, cache, batch.chooser), jobs)

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
            jobs = set(lane.jobs.values())
            lane.batch, lane.jobs = None, {}
            for job in jobs:
                self._fail(job, error)
            return
        seconds = time.perf_counter() - start
        lane.seconds += seconds
        if self._pace is not None and lane.engine.num_setups == num_setups:  # else later rounds will not take as long
            if lane is self._lanes[True]:
                self._pace.observe(num_rows, seconds, round.num_tokens, round.is_plain)
            elif self._num_resting:
                self._pace.rested(min(num_rows, self._num_resting))
        failed = set[Job]()
        for sequence in lane.batch.sequences:
            sequence.stats.decode_seconds += seconds
            job = lane.jobs[sequence]
            if sequence.constraint is not None and sequence.constraint.error is not None:
                self._tell(job, Failure("request", sequence.constraint.error))
                failed.add(job)
            elif not job.cancelled and job not in failed:
                self._tell(job, _update(job, sequence))
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
                self.pages.save(sequence.ids, _salt(job, lane.batch), _caches(lane.batch), row)
                if sequence.finish_reason is not None:
                    self._lanes[job.speculates].engine.policy.finish(sequence)
        lane.jobs = {sequence: job for sequence, job in lane.jobs.items() if sequence not in gone}
        rows = _without([row for row, s in enumerate(lane.batch.sequences) if s in gone], len(lane.batch.sequences))
        if rows:
            lane.batch.keep(rows)
        else:
            lane.batch = None

    def _fail(self, job: Job, error: Exception) -> None:
        if isinstance(error, GraftError):
            self._tell(job, Failure("request", str(error)))
        else:
            log.error("a request failed", exc_info=error)
            self._tell(job, Failure("server", "the request failed; the server's log says why"))

    @staticmethod
    def _tell(job: Job, news: Update | Failure) -> None:
        try:
            job.listener(news)
        except Exception:
            log.exception("a listener failed")
            job.cancelled = True


def _without(gone: list[int], num_rows: int) -> list[int]:
    """The rows that stay, in an order that moves few of them: the last ones take the places of those that go."""
    num_left = num_rows - len(gone)
    last = iter([row for row in range(num_left, num_rows) if row not in gone])
    return [next(last) if row in gone else row for row in range(num_left)]


def _caches(batch: Batch) -> list[TreeCache]:
    return [batch.cache] if batch.draft is None else [batch.cache, batch.draft.cache]


def _salt(job: Job, batch: Batch) -> str:
    # Plain decoding keeps nothing for a drafter, so its pages are others.
    return f"{batch.draft is not None}/{job.salt}"


def _update(job: Job, sequence: Sequence) -> Update:
    assert sequence.text is not None
    index = job.sequences.index(sequence)
    told = job.told[index]
    ended = sequence.finish_reason is not None
    job.told[index] = sequence.stats.tokens
    return Update(
        index=index,
        text=sequence.text.take(final=ended),
        ids=sequence.new_ids[told:],
        logprobs=sequence.logprobs[told:],
        round=sequence.last_round,
        finish_reason=sequence.finish_reason,
    )

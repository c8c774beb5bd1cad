"""Requests to a scheduler, and the texts that they get alone."""

import queue
from contextlib import contextmanager

from gates import PATIENCE
from graft import Engine
from graft.engine.jobs import Failure, Job
from graft.engine.scheduler import Scheduler
from graft.engine.settings import SchedulerSettings
from graft.model.sampler import SamplingSettings
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model


def new_model():
    return tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=2048, num_hidden_layers=1)


def assert_unused(pool):
    """All pages are free, and all rows of the block tables: as many can be opened as there are."""
    assert pool.num_free == pool.num_pages, "pages are not given back"
    before = pool.num_resized
    rows = [pool.open_row(0) for _ in range(pool.num_table_rows - 1)]
    assert pool.num_resized == before, "rows of the block tables are not given back"
    for row in rows:
        pool.release(row)


@contextmanager
def schedulers():
    """Makes schedulers that are ready, each over a model of its own, and closes them."""
    made = []

    def make(policy="graft", drafter=None, **settings):
        engine = Engine(new_model(), byte_tokenizer(), policy=policy, drafter=drafter, budget=12)
        made.append(Scheduler(engine, SchedulerSettings(**{"max_cache_tokens": 65536, **settings})))
        assert made[-1].is_ready.wait(PATIENCE), "its first steps, to warm up, would count as those of requests"
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()
        assert scheduler.num_running == scheduler.num_waiting == 0 == scheduler.cache_use
        assert_unused(scheduler.pool)


@contextmanager
def scheduler_over(engine, **settings):
    """A scheduler of an engine, which is closed in the end."""
    scheduler = Scheduler(engine, SchedulerSettings(**{"max_cache_tokens": 4096, "max_batched_tokens": 64, **settings}))
    try:
        yield scheduler
    finally:
        scheduler.close()


def undisturbed(scheduler):
    """While this is held the scheduler takes nobody in: all who ask meanwhile come at once."""
    return scheduler._changed


class Asked:
    """A request and all that was heard of it."""

    def __init__(self, scheduler, prompt, *, speculates=True, deadline=None, constraint=None, salt="", **options):
        engine = scheduler.engine
        self.scheduler, self.news = scheduler, queue.SimpleQueue()
        sequences = engine.new_sequences(engine.encode(prompt), SamplingSettings(**options))
        for sequence in sequences:
            sequence.speculates = speculates
            sequence.constraint = constraint() if constraint is not None else None
        self.job = Job(sequences, self.news.put, salt=salt, deadline=deadline)
        self.updates = []
        scheduler.submit(self.job)

    def next(self):
        news = self.news.get(timeout=PATIENCE)
        self.updates.append(news)
        return news

    def wait(self):
        """All answers' texts, or what went wrong."""
        open_answers = set(range(len(self.job.sequences)))
        while open_answers:
            news = self.next()
            if isinstance(news, Failure):
                return news
            if news.finish_reason is not None:
                open_answers.remove(news.index)
        return [sequence.text.text for sequence in self.job.sequences]


_ALONE = {}


def alone(model, prompt, **options):
    """Texts of plain decoding, each decoded once: all tests ask the same model."""
    asked = repr((prompt, sorted(options.items())))
    if asked not in _ALONE:
        answers = Engine(model, byte_tokenizer(), policy="off").generate(prompt, **options)
        _ALONE[asked] = [choice.text for choice in answers.choices]
    return _ALONE[asked]


class Watched(Scheduler):
    """Tells which requests it has preempted."""

    def __init__(self, *given):
        self.preempted = []
        super().__init__(*given)

    def _preempt(self, job):
        self.preempted.append(job)
        super()._preempt(job)


class Unsettled(Watched):
    """Preempts the youngest request every seventh round, as if the cache were full."""

    num_rounds = 0

    def _extend_rows(self):
        self.num_rounds += 1
        if self.num_rounds % 7 == 0 and len(self._running) > 1 and self._batch:
            self._preempt(max(self._running, key=lambda job: job.number))
        super()._extend_rows()


def watched(schedule, monkeypatch, drafter=None, policy="graft", kind=Watched, max_rows=8, **settings):
    """A scheduler, and the requests that it has preempted."""
    monkeypatch.setattr("scheduling.Scheduler", kind)
    scheduler = schedule(policy, drafter, max_rows=max_rows, max_batched_tokens=64, **settings)
    return scheduler, scheduler.preempted


def unsettled(schedule, monkeypatch, drafter=None, policy="graft", **settings):
    """A scheduler that preempts every few rounds, and the requests that it has preempted."""
    return watched(schedule, monkeypatch, drafter, policy, Unsettled, **settings)

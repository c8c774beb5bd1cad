"""Fault injection while requests are decoded together: all others get the text they get alone, and the server goes on.

A scenario in which requests join, are read, decoded, preempted, end and are cancelled is run once to list
every point at which something could fail: each call of a function of Graft, each allocation, each call of a grammar's
matcher, each call of a listener. Then it is run again for each of them, and fails there. Nobody names these points, so
code that is new has its own.
"""

import asyncio
import itertools
import logging
import sys
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graft
from graft import Engine
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.engine import decode_loop, page_allocator
from graft.engine import engine as engines
from graft.engine import scheduler as scheduling
from graft.engine.jobs import Failure, Job, Update
from graft.engine.scheduler import Scheduler
from graft.engine.settings import SchedulerSettings
from graft.model.sampler import SamplingSettings
from graft.request.detokenizer import decoded_before
from graft.server.grammar import Grammars, GrammarSpec, LLMatcher
from graft.spec_decode.policies import make_policy
from heads import SMALL_TREE, make_head
from scheduling import assert_unused
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

SOURCE = str(Path(graft.__file__).parent)
# What looks after the rest must not fail.
GUARD = tuple(str(Path(module.__file__)) for module in (decode_loop, scheduling, page_allocator))
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'
LONG = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. "


_ASKING = ("_tell", "check", "has_room_for")  # a listener that asks for more: what it does is its own affair
_FORWARDS = ("_decode", "_prefill")  # where nearly all is arithmetic


class FaultError(RuntimeError):
    """What is raised where nothing else would be."""


class Driven(Scheduler):
    """Runs in the thread of the test, until there is nothing left to do. Its cache is full every few rounds."""

    num_steps = 0

    def run_to_the_end(self):
        self._run()

    def _wait_for_work(self):
        return bool(self._waiting or self._running)

    def _extend_rows(self):
        self.num_steps += 1
        if self.num_steps % 6 == 5 and len(self._running) > 1:
            self._preempt(max(self._running, key=lambda job: job.number))
        super()._extend_rows()


class Asked:
    """A request, what its listener heard, and what it should have heard."""

    def __init__(self, world, name, prompt, speculates=True, matcher=None, is_recorded=False, hear=None, **options):
        self.name, self.news, self._hear, self._world = name, [], hear, world
        sequences = world.engine.new_sequences(
            world.engine.encode(prompt), SamplingSettings(ignore_eos=True, **options)
        )
        for sequence in sequences:
            sequence.speculates, sequence.is_recorded = speculates, is_recorded
            sequence.constraint = world.grammars.constraint(matcher) if matcher is not None else None
        self.job = Job(sequences, self.listen)

    def listen(self, news):
        self.news.append(news)
        if self._hear is not None:
            self._hear(len(self.news))
        self._world.heard(self)

    @property
    def failure(self):
        return next((news for news in self.news if isinstance(news, Failure)), None)

    def check(self, expected):
        """Whole texts, each piece and each end told once; or nothing more after a failure."""
        if self.failure is not None:
            assert self.news[-1] is self.failure, f"{self.name} heard more after its failure"
            return
        assert [sequence.text.text for sequence in self.job.sequences] == expected, self.name
        for index, (sequence, text) in enumerate(zip(self.job.sequences, expected, strict=True)):
            own = [news for news in self.news if isinstance(news, Update) and news.index == index]
            assert "".join(news.text for news in own) == text, self.name
            assert [token for news in own for token in news.ids] == sequence.new_ids, self.name
            assert [news.finish_reason is not None for news in own] == [False] * (len(own) - 1) + [True], self.name


class World:
    """A scheduler, and requests of every kind."""

    def __init__(self, shared, tracer):
        self.shared, self.tracer = shared, tracer
        self.engine, self.grammars = shared.make_engine(), shared.grammars
        settings = SchedulerSettings(max_rows=5, max_batched_tokens=40, max_cache_tokens=2048, prefix_cache_tokens=256)
        self.scheduler = Driven(self.engine, settings)
        self.asked, matcher = [], shared.matcher
        late = {"max_new_tokens": 6, "temperature": 1.0, "seed": 4, "logprobs": 1, "stop": ["q", "zz"]}

        def hear(count):
            if count == 2:
                self.ask("late", LONG + "And", is_recorded=True, **late)
            if count == 6:
                self.scheduler.cancel(gone.job)

        self.ask("first", LONG, max_new_tokens=12, hear=hear)
        self.ask("json", "give", matcher=matcher, max_new_tokens=8)
        self.ask("plain", "abcabc", speculates=False, max_new_tokens=5, frequency_penalty=0.5)
        gone = self.ask("gone", "never mind", max_new_tokens=60)
        self.ask("two", "ab" * 40, n=2, max_new_tokens=4, temperature=0.8, seed=1, top_p=0.9)
        self.ask("penalty", "dcdcdc", max_new_tokens=6, repetition_penalty=1.3, logit_bias={30: 1.0})
        self.ask("expired", "too late", max_new_tokens=5).job.deadline = 0.0
        self.ask("read again", LONG, max_new_tokens=4, temperature=0.7, seed=9)

    def ask(self, name, prompt, **options):
        asked = Asked(self, name, prompt, **options)
        self.asked.append(asked)
        self.scheduler.submit(asked.job)
        return asked

    def heard(self, asked):
        self.tracer.at(("listener", asked.name, "_tell"), lambda: {asked.job})

    def run(self):
        with self.tracer:
            self.scheduler.run_to_the_end()

    def check(self, allowed):
        """That only those failed who may, and nothing is left behind; and that another is answered."""
        scheduler, expected = self.scheduler, self.shared.expected
        for asked in self.asked:
            if asked.name == "expired":
                assert asked.failure == Failure("timeout", "the request took longer than allowed")
            elif asked.job.cancelled:
                assert asked.name == "gone" or asked.job in allowed
            else:
                assert asked.failure is None or asked.job in allowed, (asked.name, asked.failure)
                asked.check(expected[asked.name])
        for _ in range(2):  # and again, over what the first has left
            assert not scheduler.is_closing and scheduler.num_running == scheduler.num_waiting == 0
            assert_unused(scheduler.pool)
            assert scheduler.pool.num_prefix_tokens <= scheduler.settings.prefix_cache_tokens
            more = self.ask("more", "one more", max_new_tokens=5)
            scheduler.run_to_the_end()
            assert more.failure is None
            more.check(expected["more"])


class Shared:
    """What all runs have in common, made once."""

    def __init__(self, constrained, make_drafter=Eagle3Drafter):
        self.model = tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=2048, num_hidden_layers=1)
        self.tokenizer = byte_tokenizer()
        self.head = make_head(self.model)
        self.grammars, self.matcher = constrained
        self.make_drafter = make_drafter
        self.expected = {}
        plain = Engine(self.model, self.tokenizer, policy="off")
        listing = World(self, Tracer())
        listing.ask("late", LONG + "And", max_new_tokens=6, temperature=1.0, seed=4, logprobs=1, stop=["q", "zz"])
        listing.ask("more", "one more", max_new_tokens=5)
        for asked in listing.asked:
            for sequence in asked.job.sequences:
                for _ in plain.rounds([sequence]):
                    pass
            self.expected[asked.name] = [sequence.text.text for sequence in asked.job.sequences]

    def make_engine(self):
        drafter = self.make_drafter(self.head, SMALL_TREE)
        target = engines.target_for(self.model, drafter.hidden_layers, 32)
        policy = make_policy("graft", target, drafter, budget=6, pass_cost=0.01)
        return Engine(self.model, self.tokenizer, policy, drafter, chunk_size=32)


class Tracer:
    """Lists the points that are passed, or fails at one of them."""

    def __init__(self, point=None, count=0):
        self.points, self.allowed = Counter(), None
        self._point, self._count = point, count

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def at(self, point, allowed, error=FaultError):
        self.points[point] += 1
        if point == self._point and self.points[point] == self._count and self.allowed is None:
            self.allowed = allowed()
            raise error(f"at {point}, time {self._count}")


class CallTracer(Tracer):
    """Calls of Graft's functions, by function and caller, and of a grammar's matcher."""

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, arg):
        if event == "c_call" and isinstance(getattr(arg, "__self__", None), LLMatcher):
            self.at((arg.__name__, _place(frame), _phase(frame)), lambda: _those_who_may_fail(frame))
        elif event == "call" and _is_ours(frame.f_code.co_filename):
            caller = frame.f_back
            if caller is not None and caller.f_code.co_filename != weakref.__file__:  # errors in finalizers are ignored
                self.at((_place(frame), _place(caller), _phase(caller)), lambda: _those_who_may_fail(frame))


class AllocationTracer(Tracer, TorchDispatchMode):
    """Tensors that are made, by operation and by the line of Graft that makes them."""

    def __init__(self, point=None, count=0):
        Tracer.__init__(self, point, count)
        TorchDispatchMode.__init__(self)

    __enter__, __exit__ = TorchDispatchMode.__enter__, TorchDispatchMode.__exit__

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        # Of a point that is to fail only operations of its name matter, until it has failed.
        matters = self._point is None or (name == self._point[0] and self.allowed is None)
        if matters and not (name.endswith("_") or func.is_view):
            frame = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
                frame = frame.f_back
            if frame is not None:
                point = (name, _place(frame), _phase(frame))
                self.at(point, lambda: _those_who_may_fail(frame), torch.OutOfMemoryError)
        return func(*args, **(kwargs or {}))


def _place(frame):
    code = frame.f_code
    return f"{code.co_filename.removeprefix(SOURCE)}:{code.co_qualname}"


def _phase(frame):
    """What the scheduler is about."""
    while frame is not None and frame.f_code.co_filename not in GUARD:
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else ""


def _is_ours(file):
    return file.startswith(SOURCE) and file not in GUARD


def _those_who_may_fail(frame):
    """Requests whose own step it is, and nobody else's: of a round that is all who are in it."""
    while frame is not None:
        place, own = _place(frame), frame.f_locals
        if place == "/engine/rounds.py:Rounds._learn_prompts" and "part" in own:  # a prompt is taken in
            return {job for job in own_jobs(frame) if own["part"].batch.sequences[own["part"].row] in job.sequences}
        if place == "/engine/rounds.py:Rounds._settle" and "sequence" in own:
            return {job for job in own_jobs(frame) if own["sequence"] in job.sequences}
        if place == "/engine/rounds.py:Rounds._extend" and "sequence" in own:
            sequence = own["sequence"]  # it takes in its tokens
            return {job for job in own_jobs(frame) if sequence in job.sequences}
        if place == "/engine/page_allocator.py:PageAllocator.keep":
            return set()
        if place in ("/engine/scheduler.py:Scheduler._tell", "/engine/decode_loop.py:DecodeLoop._preempt"):
            return {own["job"]}
        if place == "/engine/scheduler.py:Scheduler._report":
            return {own["job"]}
        if place in ("/engine/decode_loop.py:DecodeLoop._open", "/engine/decode_loop.py:DecodeLoop._join_if_prefilled"):
            return {own["prefill"].job}
        if place == "/engine/decode_loop.py:DecodeLoop._extend_rows" and "job" in own:
            return {own["job"]}
        if place == "/engine/decode_loop.py:DecodeLoop._prefill" or (
            place == "/engine/decode_loop.py:DecodeLoop._decode" and "seconds" not in own
        ):
            return set(own_jobs(frame))
        frame = frame.f_back
    return set()


def own_jobs(frame):
    """Of all who are in the step."""
    while frame.f_code.co_name not in _FORWARDS:
        frame = frame.f_back
    scheduler, chunks = frame.f_locals["self"], frame.f_locals["chunks"]
    batches = [part.batch for part in chunks]
    readers = {prefill.job for prefill in scheduler._prefills if prefill.batch in batches}
    decoded = set(scheduler._jobs.values()) if frame.f_code.co_name == "_decode" else set()
    return decoded | readers


@pytest.fixture(scope="module")
def constrained():
    """Grammars and one of them compiled, which takes threads."""
    grammars = Grammars(byte_tokenizer(), BYTE_VOCAB, [2])
    return grammars, asyncio.run(grammars.compile(GrammarSpec("JSON schema", SCHEMA)))


@pytest.fixture(scope="module")
def shared(constrained):
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        yield Shared(constrained)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    prepare(monkeypatch)


def prepare(patch):
    """No thread of its own, turns by a clock that always ticks alike, and no log that keeps errors, and so memory."""
    patch.setattr(scheduling.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-3, monotonic=lambda: 1.0)
    for module in (decode_loop, scheduling):
        patch.setattr(module, "time", clock)
    patch.setattr(logging.getLogger("graft.server"), "disabled", True)
    decoded_before.cache_clear()


def listed(shared, kind):
    """All points of a run in which nothing fails, and how often it comes to each."""
    decoded_before.cache_clear()
    world = World(shared, kind())
    world.run()
    points = Counter(world.tracer.points)
    world.check(allowed=set())
    return Counter(
        {point: number for point, number in points.items() if point[2] not in _ASKING or "listener" in point}
    )


def fail_at(shared, kind, point, count):
    """Runs the scenario with a failure at a point, and checks what became of all. False if it never came there."""
    decoded_before.cache_clear()
    world = World(shared, kind(point, count))
    world.run()
    if world.tracer.allowed is None:
        return False
    try:
        world.check(world.tracer.allowed)
    except BaseException as error:
        error.add_note(f"after a failure at {point}, time {count}")
        raise
    return True


def fail_everywhere(shared, kind, part=0, of=1, every=1, counts=lambda number: {1}):
    """Fails at one part of all points; of those inside forwards, which all end alike, at every so manieth."""
    points = listed(shared, kind) & listed(shared, kind)  # without what the first run made once
    outside = [point for point in points if point[2] not in _FORWARDS]
    inside = [point for point in points if point[2] in _FORWARDS][::every]
    chosen = [*outside, *inside][part::of]
    failed = [fail_at(shared, kind, point, count) for point in chosen for count in sorted(counts(points[point]))]
    assert failed and sum(failed) >= 0.75 * len(failed), "runs are alike: most come to their points"


def first_of(parts):
    """All parts; those behind the first are for the slow suite."""
    return [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, parts))]


@pytest.mark.parametrize("part", first_of(30))
def test_a_failing_function_harms_only_its_own_request_or_round(shared, part):
    fail_everywhere(shared, CallTracer, part, of=30, every=64)


@pytest.mark.parametrize("part", first_of(9))
def test_a_failing_allocation_harms_only_its_own_request_or_round(shared, part):
    fail_everywhere(shared, AllocationTracer, part, of=9, every=72)


@pytest.mark.parametrize("part", first_of(2))
@pytest.mark.parametrize("time", ["first", pytest.param("last", marks=pytest.mark.slow)])
def test_a_failing_listener_harms_only_its_own_request(shared, part, time):
    fail_everywhere(shared, Tracer, part, of=2, counts=lambda number: {1 if time == "first" else number})


@pytest.fixture
def captured(constrained, monkeypatch):
    """The code of a GPU, with plain kernels, where what would be replayed is called."""
    pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")
    import plain_kernels
    from captured_parts import SmallDrafter, small_target

    plain_kernels.use_plain_kernels(monkeypatch)
    monkeypatch.setattr("graft.engine.engine.target_for", small_target)
    return Shared(constrained, SmallDrafter)


@pytest.mark.filterwarnings("ignore:.*cannot be captured")
@pytest.mark.parametrize("kind", [CallTracer, AllocationTracer])
def test_a_failure_with_captured_steps_harms_no_other_request(captured, kind):
    """A run takes seconds here, so a few points stand for all."""
    fail_everywhere(captured, kind, of=420 if kind is CallTracer else 390, every=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:.*cannot be captured")
@pytest.mark.parametrize("kind", [CallTracer, AllocationTracer])
def test_a_failure_at_any_point_with_captured_steps_harms_no_other_request(captured, kind):
    fail_everywhere(captured, kind)

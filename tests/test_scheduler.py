"""The scheduler: requests decoded together get the texts they get alone, whichever others join, leave or fail."""

import asyncio
import json
import random
import threading
import time

import pytest
import torch

from gates import PATIENCE, Clock, Gate, until
from graft import Engine, GraftError
from graft.drafters.drafter import DraftState, TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.engine.device_rounds import DeviceRounds
from graft.engine.jobs import BusyError, Failure
from graft.engine.scheduler import Scheduler
from graft.engine.settings import SchedulerSettings
from graft.model import PagePool
from graft.model.kv_cache import PAGE
from graft.request.batch import Batch
from graft.server.grammar import Grammars, GrammarSpec
from heads import make_head
from proposers import Oracle, RandomTrees
from scheduling import Asked, alone, new_model, undisturbed, unsettled, watched
from tiny import BYTE_VOCAB, byte_tokenizer


@pytest.fixture(scope="module")
def model():
    """For answers given alone. A scheduler's model is its own: two threads must not run one at once."""
    return new_model()


def various_options(rng):
    options = {"max_new_tokens": rng.randint(1, 24), "seed": rng.randrange(1000)}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "top_p": rng.choice([0.8, 1.0])}
    if rng.random() < 0.3:
        options |= {"top_k": 20, "frequency_penalty": 0.4}
    if rng.random() < 0.2:
        options |= {"repetition_penalty": 1.3, "min_tokens": 1, "logit_bias": {30: 2.0}}
    return options


@pytest.mark.parametrize("kind", ["graft", "random trees", "head"])
def test_a_requests_text_is_the_same_alone_and_in_any_batch(model, schedule, kind):
    rng = random.Random(3)
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)) if kind == "head" else None
    policy = RandomTrees(10, BYTE_VOCAB) if kind == "random trees" else "graft"
    scheduler = schedule(policy, drafter, max_batched_tokens=48, max_rows=6, prefix_cache_tokens=512, max_waiting=64)
    beginnings = ["".join(rng.choices("abcdef", k=rng.choice([3, 70, 150]))) for _ in range(4)]
    asked = []
    for number in range(30 if kind == "graft" else 20):
        prompt = rng.choice(beginnings) + "".join(rng.choices("xyz", k=rng.randint(0, 20)))
        options = various_options(rng) | {"n": 2 if number % 9 == 0 else 1}
        asked.append((Asked(scheduler, prompt, speculates=rng.random() < 0.8, **options), prompt, options))
        if rng.random() < 0.3:  # some are cancelled while they wait, are read, or are decoded
            scheduler.cancel(rng.choice(asked)[0].job)
        if rng.random() < 0.3:
            time.sleep(0.02)
    for request, prompt, options in asked:
        if not request.job.cancelled:
            assert request.wait() == alone(model, prompt, **options)
            pieces = ["".join(u.text for u in request.updates if u.index == i) for i in range(options["n"])]
            assert pieces == [sequence.text.text for sequence in request.job.sequences]
            assert sum(len(u.ids) for u in request.updates) == sum(s.stats.tokens for s in request.job.sequences)
            plain = [sequence for sequence in request.job.sequences if not sequence.speculates]
            assert not any(sequence.stats.nodes for sequence in plain), "decoded plainly, whoever is beside them"


@pytest.mark.parametrize("with_head", [False, True])
def test_a_beginning_that_was_read_before_is_not_read_again(model, schedule, with_head):
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)) if with_head else None
    scheduler = schedule("dense" if with_head else "graft", drafter, max_batched_tokens=50)
    beginning = "It was a dark and stormy night. " * 9
    options = {"max_new_tokens": 44, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    first = Asked(scheduler, beginning, **options)
    assert first.wait() == alone(model, beginning, **options)
    known = first.job.sequences[0].ids
    follow_up = [*known, 40, 41, 42]
    second = Asked(scheduler, follow_up, **options)
    assert second.wait() == alone(model, follow_up, **options)
    assert first.job.num_cached_tokens == 0
    assert second.job.num_cached_tokens == (len(known) - 10) // PAGE * PAGE - 1 == 5 * PAGE - 1, "the answer too"
    assert scheduler.pool.num_prefix_hits == 5 * PAGE - 1
    if with_head:
        fresh = Engine(model, byte_tokenizer(), policy="dense", drafter=drafter, budget=12)
        stats = fresh.generate(follow_up, **options).stats
        assert second.job.sequences[0].stats.accepted == stats.accepted, "the drafter knows what it would have read"


def test_pages_read_without_the_drafter_do_not_serve_requests_that_draft(model, schedule):
    """Its kept pages hold nothing of the drafter's, which would propose from nowhere."""
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3))
    scheduler = schedule("dense", drafter)
    prompt, options = "It was a dark and stormy night. " * 4 + "It", {"max_new_tokens": 12, "ignore_eos": True}
    cached, accepted = [], []
    for speculates in (False, True, False, True):
        request = Asked(scheduler, prompt, speculates=speculates, **options)
        assert request.wait() == alone(model, prompt, **options)
        cached.append(request.job.num_cached_tokens)
        accepted.append(request.job.sequences[0].stats.accepted)
    assert cached == [0, 0, 2 * PAGE - 1, 2 * PAGE - 1], "each finds what its own kind has read"
    fresh = Engine(model, byte_tokenizer(), policy="dense", drafter=drafter, budget=12)
    expected = fresh.generate(prompt, **options).stats.accepted
    assert accepted == [0, expected, 0, expected]


def test_a_prompt_that_is_to_be_scored_is_scored_whole_though_it_was_read_before(model, schedule):
    scheduler = schedule("off", max_batched_tokens=50)
    prompt = "It was a dark and stormy night. " * 6
    Asked(scheduler, prompt, max_new_tokens=3).wait()
    with undisturbed(scheduler):  # before it is taken in
        request = Asked(scheduler, prompt, max_new_tokens=3)
        request.job.sequences[0].num_prompt_logprobs = 2
    request.wait()
    ids = scheduler.engine.encode(prompt)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(dim=1)
    found = request.job.sequences[0].prompt_logprobs
    assert [each.token for each in found] == ids[1:]
    for place, each in enumerate(found):
        assert each.logprob == pytest.approx(float(expected[place, each.token]), abs=1e-4)
        assert list(each.alternatives) == expected[place].topk(2).indices.tolist()


def test_kept_pages_are_never_read_under_another_salt(schedule):
    scheduler = schedule()
    prompt = "abcdefgh" * 20
    cached = []
    for salt in ("one", "two", "one"):
        request = Asked(scheduler, prompt, salt=salt, max_new_tokens=5)
        request.wait()
        cached.append(request.job.num_cached_tokens)
    assert cached[:2] == [0, 0] and cached[2] > 0
    assert scheduler.pool.num_prefix_hits == cached[2]


def test_a_prefix_that_another_request_is_reading_is_waited_for(model, schedule):
    scheduler = schedule(max_batched_tokens=64)
    beginning = "It was a dark and stormy night. " * 12
    with undisturbed(scheduler):  # all of them before the first is taken in
        asked = [Asked(scheduler, f"{beginning}{number}", salt="a", max_new_tokens=5) for number in range(3)]
        other = Asked(scheduler, beginning, salt="b", max_new_tokens=5)
    for number, request in enumerate(asked):
        assert request.wait() == alone(model, f"{beginning}{number}", max_new_tokens=5)
    assert [request.job.num_cached_tokens > 300 for request in (*asked, other)] == [False, True, True, False]
    other.wait()


def test_more_than_can_wait_are_refused_and_those_that_wait_come_in_turn(model, schedule):
    scheduler = schedule(max_rows=1, max_waiting=2)
    gate = Gate(scheduler.engine.target)
    running = Asked(scheduler, "abc", max_new_tokens=1500)
    gate.wait()
    waiting = [Asked(scheduler, f"ask {i}", max_new_tokens=3) for i in range(2)]
    with pytest.raises(BusyError, match="2 requests are waiting"):
        Asked(scheduler, "one more")
    scheduler.cancel(running.job)
    gate.open()
    assert [request.wait() for request in waiting] == [alone(model, f"ask {i}", max_new_tokens=3) for i in range(2)]


def test_the_cache_is_bounded(schedule):
    scheduler = schedule(max_cache_tokens=300)
    with pytest.raises(GraftError, match="needs 384 tokens of cache and there are 256"):
        Asked(scheduler, "abc", max_new_tokens=200)
    with pytest.raises(GraftError, match="n=20 answers"):
        Asked(scheduler, "abc", n=20)
    gate = Gate(scheduler.engine.target)
    asked = [Asked(scheduler, "abc", max_new_tokens=100) for _ in range(4)]
    gate.wait()
    assert scheduler.num_running == 1 and scheduler.cache_use <= 1
    gate.open()
    assert len({request.wait()[0] for request in asked}) == 1


class Broken:
    """A constraint that cannot be met after a few tokens."""

    error = None

    def __init__(self, after):
        self._left = after

    def mask(self, scores):
        return scores

    def take(self, token):
        self._left -= 1
        if self._left <= 0:
            self.error = "nothing may follow"


def test_a_request_that_fails_ends_alone(model, schedule, monkeypatch):
    scheduler, clock = schedule(), Clock()
    monkeypatch.setattr("graft.engine.scheduler.time", clock.as_module())
    good = [Asked(scheduler, f"good {i}", max_new_tokens=60) for i in range(2)]
    bad = Asked(scheduler, "bad", max_new_tokens=60, constraint=lambda: Broken(after=7))
    rude = Asked(scheduler, "rude", max_new_tokens=60)
    rude.job.listener = lambda news: 1 / 0
    late = Asked(scheduler, "late", max_new_tokens=1500, ignore_eos=True, deadline=clock.monotonic() + 600)
    late.next()
    clock.put_forward(600)
    assert bad.wait() == Failure("request", "nothing may follow")
    assert late.wait() == Failure("timeout", "the request took longer than allowed")
    assert [request.wait() for request in good] == [alone(model, f"good {i}", max_new_tokens=60) for i in range(2)]


# What fails


def failing(times, error, function):
    """The function, which raises the first `times` times."""
    left = [times]

    def maybe(*given, **more):
        if left[0] > 0:
            left[0] -= 1
            raise error
        return function(*given, **more)

    return maybe


OUT_OF_MEMORY = torch.OutOfMemoryError("none is left")
LONG = {"max_new_tokens": 50, "ignore_eos": True}


@pytest.mark.parametrize(
    "part",
    [
        (DraftState, "select"),
        (PagePool, "keep_prefix"),
        (PagePool, "release"),
        (DeviceRounds, "finish_text"),
    ],
)
def test_a_failure_while_a_row_leaves_harms_no_request(model, schedule, monkeypatch, part):
    scheduler = schedule("dense", Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)))
    gate = Gate(scheduler.engine.target, num_free=0)
    others = [Asked(scheduler, f"abc {number}" * 20, **LONG) for number in range(2)]
    gate.let(5)
    for request in others:
        request.next()
    monkeypatch.setattr(*part, failing(1, OUT_OF_MEMORY, getattr(*part)))
    short = Asked(scheduler, "short" * 20, max_new_tokens=3)
    gate.open()
    assert short.wait() == alone(model, "short" * 20, max_new_tokens=3)
    assert [request.wait() for request in others] == [alone(model, f"abc {number}" * 20, **LONG) for number in range(2)]
    assert scheduler.is_alive
    assert Asked(scheduler, "one more", max_new_tokens=5).wait() == alone(model, "one more", max_new_tokens=5)


def test_rows_that_can_never_leave_end_with_the_server_going_on(model, schedule, monkeypatch):
    scheduler, expected = schedule(), alone(model, "short", max_new_tokens=9)
    gate = Gate(scheduler.engine.target)
    long = Asked(scheduler, "long", **LONG)
    gate.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "keep", failing(1000, OUT_OF_MEMORY, Batch.keep))
        short = Asked(scheduler, "short", max_new_tokens=9)
        gate.open()
        assert short.wait() == expected
        assert long.wait().kind == "server"
    assert Asked(scheduler, "one more", max_new_tokens=5).wait() == alone(model, "one more", max_new_tokens=5)


def test_submit_and_cancel_do_not_block_while_a_row_is_opened(model, schedule, monkeypatch):
    scheduler = schedule()
    opened, may_go_on, open_with_prefix = threading.Event(), threading.Event(), scheduler.pool.open_with_prefix

    def slow(*given):
        opened.set()
        assert may_go_on.wait(PATIENCE)
        return open_with_prefix(*given)

    monkeypatch.setattr(scheduler.pool, "open_with_prefix", slow)
    first, gone = Asked(scheduler, "first", max_new_tokens=5), Asked(scheduler, "gone", max_new_tokens=5)
    assert opened.wait(PATIENCE)
    done = threading.Event()

    def others():
        scheduler.cancel(gone.job)
        scheduler.cancel(Asked(scheduler, "another", max_new_tokens=5).job)
        assert scheduler.num_running == 1
        done.set()

    threading.Thread(target=others, daemon=True).start()
    assert done.wait(PATIENCE / 2), "they wait for the lock"
    may_go_on.set()
    assert first.wait() == alone(model, "first", max_new_tokens=5)


def test_a_request_that_is_cancelled_while_its_row_is_opened_frees_it(model, schedule):
    scheduler = schedule(max_rows=1)
    pool, open_with_prefix = scheduler.pool, scheduler.pool.open_with_prefix

    def and_cancel(*given):
        row = open_with_prefix(*given)
        scheduler.cancel(gone.job)
        return row

    with undisturbed(scheduler):
        gone = Asked(scheduler, "gone", max_new_tokens=1500)
        pool.open_with_prefix = and_cancel
    until(lambda: not (scheduler.num_running or scheduler.num_waiting))
    pool.open_with_prefix = open_with_prefix
    assert gone.news.empty() or not isinstance(gone.next(), Failure)
    assert Asked(scheduler, "next", max_new_tokens=4).wait() == alone(model, "next", max_new_tokens=4)


# Prompts are read while others are decoded


@pytest.mark.parametrize("kind", ["graft", "random trees", "head"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_prompt_that_is_read_while_others_are_decoded_changes_no_text(model, schedule, kind, options, monkeypatch):
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)) if kind == "head" else None
    policy = RandomTrees(10, BYTE_VOCAB) if kind == "random trees" else "graft"
    scheduler = schedule(policy, drafter, max_batched_tokens=40)
    mixed, run_round = [], scheduler.engine.run_round

    def note(batch, clock, reading=(), meanwhile=lambda: None):
        mixed.append((len(batch.sequences), len({id(part.batch) for part in reading})))
        run_round(batch, clock, reading, meanwhile)

    monkeypatch.setattr(scheduler.engine, "run_round", note)
    options = options | {"max_new_tokens": 28, "ignore_eos": True}
    gate = Gate(scheduler.engine.target, num_free=0)
    long = options | {"max_new_tokens": 56}  # they are decoded until all prompts are read, however much is accepted
    running = [Asked(scheduler, f"abab {number}", seed=number, **long) for number in range(2)]
    gate.let(5)
    for request in running:
        request.next()
    prompts = ["x" * 300, "yz" * 10, "short", "w" * 130]
    late = [Asked(scheduler, prompt, seed=7, n=2 if prompt == "short" else 1, **options) for prompt in prompts]
    gate.open()
    for number, request in enumerate(running):
        assert request.wait() == alone(model, f"abab {number}", seed=number, **long)
    for prompt, request in zip(prompts, late, strict=True):
        assert request.wait() == alone(model, prompt, seed=7, n=2 if prompt == "short" else 1, **options)
    assert max(number for rows, number in mixed if rows >= 2) >= 2, "several are read in one step"


def test_a_step_has_no_more_tokens_of_prompts_than_allowed(schedule, monkeypatch):
    scheduler, sizes = schedule("off", max_batched_tokens=80), []
    rounds, target = scheduler.engine.device_rounds, scheduler.engine.target
    run, step = rounds.run, target.step

    def note(batch, clock, chunks, meanwhile):
        sizes.append((len(batch.sequences), sum(len(chunk.tokens) for chunk in chunks)))
        return run(batch, clock, chunks, meanwhile)

    def note_prompts(cache, tree, chunks=()):
        sizes.append((0, sum(len(chunk.tokens) for chunk in chunks)))
        return step(cache, tree, chunks)

    monkeypatch.setattr(rounds, "run", note)
    monkeypatch.setattr(target, "step", note_prompts)
    gate = Gate(scheduler.engine.target)
    running = Asked(scheduler, "abc", max_new_tokens=1500, ignore_eos=True)
    gate.wait()
    asked = Asked(scheduler, "x" * 300, max_new_tokens=3)
    gate.open()
    asked.wait()
    gate = Gate(scheduler.engine.target, num_free=0)
    gate.wait()
    assert (1, 79) in sizes and max(sum(size) for size in sizes) == 80
    sizes.clear()
    monkeypatch.setattr("graft.engine.decode_loop.LONG_TEXT", 24)  # 512 of 24 tokens are as much work as 40 of 303
    asked = Asked(scheduler, "y" * 300, max_new_tokens=1)
    gate.open()
    asked.wait()
    scheduler.cancel(running.job)
    assert max(sum(size) for size in sizes) in range(36, 41)


def test_a_listener_hears_of_no_token_behind_a_stop_string(model, schedule):
    """Trees bring several tokens at once, and the text is looked at a round later."""
    prompt, options = "grafting", {"max_new_tokens": 40, "ignore_eos": True, "logprobs": 1}
    plainly = Engine(model, byte_tokenizer(), policy="off")
    free = plainly.generate(prompt, **options)
    expected = plainly.generate(prompt, stop=[free.text[9:11]], **options)
    scheduler = schedule(Oracle(free.ids, len(free.prompt_ids), depth=4))
    for own in (options, {**options, "logprobs": None}):
        request = Asked(scheduler, prompt, stop=[free.text[9:11]], **own)
        assert request.wait() == [expected.text] and 2 < len(expected.ids) < 40
        assert [token for update in request.updates for token in update.ids] == expected.ids
        told = [each.token for update in request.updates for each in update.logprobs]
        assert told == (expected.ids if own is options else [])


# When the cache is full


VARIOUS = [
    {"seed": 1},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"repetition_penalty": 1.3, "logit_bias": {30: 2.0}, "seed": 4},
    {"temperature": 1.0, "n": 2, "seed": 5, "top_k": 30, "min_tokens": 20},
]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        *((options, "graft") for options in VARIOUS),
        *((options, kind) for options in VARIOUS[2::2] for kind in ("random trees", "head")),
        *(
            pytest.param(options, kind, marks=pytest.mark.slow)
            for options in (*VARIOUS[:2], VARIOUS[3])
            for kind in ("random trees", "head")
        ),
    ],
)
def test_a_request_that_was_preempted_and_read_again_has_the_same_text(model, schedule, monkeypatch, kind, options):
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)) if kind == "head" else None
    policy = RandomTrees(10, BYTE_VOCAB) if kind == "random trees" else "graft"
    kept = 0 if kind == "random trees" else None
    scheduler, backs = unsettled(schedule, monkeypatch, drafter, policy, prefix_cache_tokens=kept)
    options = {"max_new_tokens": 30, "ignore_eos": True, **options}
    with undisturbed(scheduler):
        asked = [Asked(scheduler, f"text {number} " * 9, **options) for number in range(3)]
    for number, request in enumerate(asked):
        texts = request.wait()
        assert texts == alone(model, f"text {number} " * 9, **options)
        for index, text in enumerate(texts):
            own = [update for update in request.updates if update.index == index]
            assert "".join(update.text for update in own) == text, "every piece is told once"
            assert [token for update in own for token in update.ids] == request.job.sequences[index].new_ids
    assert asked[2].job in backs and asked[0].job not in backs, "the youngest go"


def test_a_request_that_was_preempted_goes_on_before_those_that_wait(schedule, monkeypatch):
    scheduler, backs = unsettled(schedule, monkeypatch, policy="off", max_rows=2)
    heard = []
    with undisturbed(scheduler):  # all of them before the first is taken in
        asked = {
            name: Asked(scheduler, name, max_new_tokens=count, ignore_eos=True)
            for name, count in (("first", 120), ("second", 20), ("third", 3), ("fourth", 3))
        }
        for name, request in asked.items():
            put = request.job.listener
            request.job.listener = lambda news, name=name, put=put: (heard.append(name), put(news))
    for request in asked.values():
        request.wait()
    others = [name for name in heard if name != "first"]
    assert asked["second"].job in backs
    assert others == sorted(others, key=["second", "third", "fourth"].index), "each in its turn"


def test_a_constrained_request_that_was_preempted_goes_on_in_its_grammar(schedule, monkeypatch):
    schema = '{"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 10, "maxItems": 20}'
    scheduler, backs = unsettled(schedule, monkeypatch)
    grammars = Grammars(scheduler.engine.tokenizer, BYTE_VOCAB, [2])
    matcher = asyncio.run(grammars.compile(GrammarSpec("JSON schema", schema)))

    def ask(number):
        options = {"max_new_tokens": 150, "temperature": 1.0, "seed": 3, "n": 2}
        return Asked(scheduler, f"give {number}", constraint=lambda: grammars.constraint(matcher), **options)

    with undisturbed(scheduler):
        asked = [ask(number) for number in range(3)]
    texts = [request.wait() for request in asked]
    assert asked[2].job in backs
    assert all(set(json.loads(text)) <= {"ab", "cd"} for both in texts for text in both)
    assert [ask(number).wait() for number in range(3)] == texts


def test_closing_ends_a_request_that_is_just_being_preempted(schedule, monkeypatch):
    scheduler, _ = unsettled(schedule, monkeypatch)

    class AndClose(list):
        """Called in the scheduler's thread, before the request goes back to those that wait."""

        def append(self, job):
            super().append(job)
            threading.Thread(target=scheduler.close).start()
            until(lambda: scheduler.is_closing)

    scheduler.preempted = AndClose()
    with undisturbed(scheduler):
        asked = [Asked(scheduler, f"text {number}", max_new_tokens=1500, ignore_eos=True) for number in range(2)]
    assert [request.wait() for request in asked] == [Failure("shutdown", "the server is shutting down")] * 2
    assert scheduler.preempted == [asked[1].job]


def test_when_the_cache_is_full_the_youngest_wait_and_all_texts_are_the_same(model, schedule, monkeypatch):
    scheduler, backs = watched(schedule, monkeypatch, max_cache_tokens=8 * PAGE)
    options = {"max_new_tokens": 80, "ignore_eos": True, "temperature": 1.0}
    with undisturbed(scheduler):
        asked = [Asked(scheduler, f"ask {number} " * 10, seed=number, **options) for number in range(4)]
    for number, request in enumerate(asked):
        assert request.wait() == alone(model, f"ask {number} " * 10, seed=number, **options)
    assert backs and asked[0].job not in backs


def test_a_request_that_needs_the_whole_cache_is_decoded_alone(model, schedule, monkeypatch):
    scheduler, _ = watched(schedule, monkeypatch, max_cache_tokens=10 * PAGE)
    room = 10 * PAGE - scheduler.pages.slots_ahead
    options = {"max_new_tokens": room - 400, "ignore_eos": True}
    large = [Asked(scheduler, "x" * 400, **options) for _ in range(2)]
    small = Asked(scheduler, "small", max_new_tokens=20)
    assert [request.wait() for request in large] == [alone(model, "x" * 400, **options)] * 2
    assert small.wait() == alone(model, "small", max_new_tokens=20)
    with pytest.raises(GraftError, match="tokens of cache and there are 640"):
        Asked(scheduler, "x" * 401, max_new_tokens=room - 400)


def test_pages_for_later_are_given_back_before_anybody_goes(model, schedule, monkeypatch):
    """One takes 6 of 15 pages at once and soon needs 4 of them; two others begin with 3 each and come to need 5."""
    scheduler, backs = watched(schedule, monkeypatch, max_cache_tokens=15 * PAGE)
    trim, trimmed = scheduler.pages.trim, []
    monkeypatch.setattr(scheduler.pages, "trim", lambda batches: trimmed.append(trim(batches)) or trimmed[-1])
    # All decoded plainly, a token a round, so that nobody is far ahead.
    gate = Gate(scheduler.engine.target)
    whole = Asked(scheduler, "abc", speculates=False, max_new_tokens=200, ignore_eos=True)
    gate.wait()
    assert scheduler.cache_use == pytest.approx(_pages_of(203 + 128) / 15)
    options = {"max_new_tokens": 75, "ignore_eos": True}
    others = [Asked(scheduler, f"other {number}" * 9, speculates=False, **options) for number in range(2)]
    gate.open()  # both begin in one round
    for number, request in enumerate(others):
        assert request.wait() == alone(model, f"other {number}" * 9, **options)
    assert True in trimmed and not backs
    assert whole.wait() == alone(model, "abc", max_new_tokens=200, ignore_eos=True)


def _pages_of(num_tokens):
    return -(-num_tokens // PAGE)


def mixed_load(scheduler, rng, count):
    asked = []
    for number in range(count):
        prompt = "".join(rng.choices("abcdef", k=rng.choice([3, 70, 150, 400])))
        options = {"max_new_tokens": rng.randint(1, 40), "n": 2 if number % 5 == 0 else 1, "seed": number}
        asked.append((Asked(scheduler, prompt, speculates=rng.random() < 0.6, **options), prompt, options))
        if rng.random() < 0.2:
            scheduler.cancel(rng.choice(asked)[0].job)
        if rng.random() < 0.3:
            time.sleep(0.01)
    return asked


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (1300, 0),
        pytest.param(2500, 512, marks=pytest.mark.slow),
        (1300, None),
        pytest.param(6000, None, marks=pytest.mark.slow),
    ],
)
def test_the_cache_never_takes_more_than_it_may_and_gives_all_pages_back(model, schedule, most, kept):
    scheduler = schedule(max_cache_tokens=most, max_rows=8, prefix_cache_tokens=kept, max_batched_tokens=64)
    pool = scheduler.pool
    assert pool.num_pages == most // PAGE and pool.is_fixed
    for request, prompt, options in mixed_load(scheduler, random.Random(most), 20):
        if not request.job.cancelled:
            assert request.wait() == alone(model, prompt, **options)
    scheduler.close()
    assert pool.num_pages == most // PAGE == pool.num_free
    if kept is not None:
        assert pool.num_prefix_tokens <= kept


def test_the_kv_cache_takes_at_most_its_share_and_the_free_memory_of_a_gpu():
    from graft.engine.memory import _room

    gib = 1 << 30
    assert _room(0.5, free=123 * gib, total=140 * gib, reserved=16 * gib) == (70 - 16 - 1) * gib, "and the context"
    assert _room(0.5, free=83 * gib, total=140 * gib, reserved=16 * gib) == (70 - 16 - 1) * gib, "others' is not ours"
    assert _room(0.9, free=20 * gib, total=140 * gib, reserved=16 * gib) == 20 * gib, "more is not there"
    assert _room(0.1, free=123 * gib, total=140 * gib, reserved=16 * gib) < 0


def test_the_size_of_the_cache_follows_from_the_memory_that_it_may_take(monkeypatch):
    from graft.engine import memory

    engine = Engine(new_model(), byte_tokenizer(), drafter=Eagle3Drafter(make_head(new_model())), budget=12)
    size = memory.bytes_per_token(engine)
    monkeypatch.setattr(memory, "total_memory", lambda: 1000 * PAGE * size)
    assert memory.num_pages_for(engine, SchedulerSettings(memory=0.5), 512) == 500
    assert memory.num_pages_for(engine, SchedulerSettings(), 512) == 250
    assert memory.num_pages_for(engine, SchedulerSettings(max_cache_tokens=700), 512) == 10
    assert memory.num_pages_for(engine, SchedulerSettings(max_rows=1, memory=0.5), 512) == 2 * (2048 // PAGE + 4), "all"
    engine.generate("abc", max_new_tokens=2)
    assert size == sum(store.bytes_per_token for store in engine.target.pool.stores), "what tokens do take"


def test_a_cache_that_is_too_small_for_anything_is_refused():
    with pytest.raises(GraftError, match="there is memory for 0 tokens of KV cache and 192 are needed"):
        Scheduler(Engine(new_model(), byte_tokenizer()), SchedulerSettings(memory=1e-9))
    with pytest.raises(GraftError, match="memory must be a share"):
        SchedulerSettings(memory=85)

"""The scheduler: requests decoded together get the texts they get alone, whichever others join, leave or fail."""

import queue
import random
import threading
import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graft import Engine, GraftError
from graft.core import pace as paces
from graft.core.batch import _places
from graft.core.pace import Pace
from graft.core.prefix_cache import PAGE, PageStore
from graft.core.scheduler import BusyError, Failure, Job, Scheduler, SchedulerSettings
from graft.model import TargetRunner, TreeCache
from graft.model.sampler import Sampler, SamplingSettings
from graft.spec_decode.policies import Policy, make_policy
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter, Eagle3State
from proposers import RandomTrees
from test_drafter import make_head
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model


def new_model():
    return tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def model():
    """For answers given alone. A scheduler's model is its own: two threads must not run one at once."""
    return new_model()


@pytest.fixture
def schedule():
    """Makes schedulers, each over a model of its own, and closes them."""
    made = []

    def make(policy="graft", drafter=None, chunk_size=256, **settings):
        engine = Engine(new_model(), byte_tokenizer(), policy=policy, drafter=drafter, budget=12, chunk_size=chunk_size)
        made.append(Scheduler(engine, SchedulerSettings(**settings)))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()
        assert scheduler.num_running == scheduler.num_waiting == 0 == scheduler.cache_use


class Asked:
    """A request and all that was heard of it."""

    def __init__(self, scheduler, prompt, *, speculates=True, deadline=None, constraint=None, salt="", **options):
        engine = scheduler._lanes[True].engine
        self.scheduler, self.news = scheduler, queue.SimpleQueue()
        sequences = engine.new_sequences(engine.encode(prompt), SamplingSettings(**options))
        for sequence in sequences:
            sequence.constraint = constraint
        self.job = Job(sequences, self.news.put, speculates, salt=salt, deadline=deadline)
        self.updates = []
        scheduler.submit(self.job)

    def next(self):
        news = self.news.get(timeout=60)
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


def alone(model, prompt, **options):
    answers = Engine(model, byte_tokenizer(), policy="off").generate(prompt, **options)
    return [choice.text for choice in answers.choices]


def various_options(rng):
    options = {"max_new_tokens": rng.randint(1, 24), "seed": rng.randrange(1000)}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "top_p": rng.choice([0.8, 1.0])}
    if rng.random() < 0.3:
        options |= {"top_k": 20, "frequency_penalty": 0.4}
    if rng.random() < 0.2:
        options |= {"repetition_penalty": 1.3, "min_tokens": 1, "logit_bias": {30: 2.0}}
    return options


@pytest.mark.parametrize("kind", ["graft", "head"])
def test_rows_are_left_to_plain_decoding_while_trees_do_not_pay(model, schedule, kind):
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)) if kind == "head" else None
    scheduler = schedule(drafter=drafter, chunk_size=16, prefix_cache_tokens=512)
    lanes, most_at_once = scheduler._lanes, []
    scheduler._pace = Pace()
    scheduler._pace.pays = lambda num_rows: num_rows < 3
    long = Asked(scheduler, "long " * 120, seed=9, max_new_tokens=3)  # which is read while others come and go
    options = {"max_new_tokens": 60, "temperature": 0.8, "frequency_penalty": 0.3}
    prompts = ["abcabc" * 15, "bcd" * 20, "abcabc" * 15 + "d", "xyz", "fed" * 30]
    asked = [Asked(scheduler, prompt, seed=number, **options) for number, prompt in enumerate(prompts)]
    while any(request.job.sequences[0].finish_reason is None for request in asked):
        most_at_once.append((lanes[True].num_rows, lanes[False].num_rows))
        time.sleep(0.001)
    for number, (request, prompt) in enumerate(zip(asked, prompts, strict=True)):
        assert request.wait() == alone(model, prompt, seed=number, **options)
    assert max(plain for _, plain in most_at_once) >= 3
    assert long.wait() == alone(model, "long " * 120, seed=9, max_new_tokens=3)
    later = Asked(scheduler, prompts[0], seed=0, **options)  # alone, with a tree, over kept pages
    assert later.wait() == alone(model, prompts[0], seed=0, **options)
    assert later.job.sequences[0].stats.nodes > 0


def slow_with_trees(num_rows):
    """A pace by which trees do not pay for so many rows."""
    pace = Pace()
    for number in range(100):
        pace.observe(num_rows, 1.0 + number % 2, num_rows, is_plain=number % 2 == 0)
    assert not pace.pays(num_rows)
    return pace


def test_under_steady_load_trees_get_another_trial_too(schedule, monkeypatch):
    monkeypatch.setattr(paces, "_REST", 20)
    scheduler = schedule(max_rows=4)
    scheduler._pace, tried = slow_with_trees(4), []
    monkeypatch.setattr(scheduler._lanes[True].engine.policy, "reconsider", tried.append)
    with scheduler._changed:  # all of them before the first is taken in
        asked = [Asked(scheduler, f"abab {number}", max_new_tokens=40, ignore_eos=True) for number in range(16)]
    for request in asked:
        request.wait()
    assert asked[0].job.sequences[0].stats.nodes == 0 < asked[-1].job.sequences[0].stats.nodes
    assert tried[0] == 4


def test_rows_are_not_left_to_plain_decoding_where_the_cache_has_no_room_for_them(model, schedule):
    scheduler = schedule(chunk_size=16, max_cache_tokens=2000, prefix_cache_tokens=0)
    scheduler._pace, uses = Pace(), []
    scheduler._pace.pays = lambda num_rows: scheduler._lanes[True].newcomer is None
    short = [Asked(scheduler, "abc", speculates=False, max_new_tokens=200, ignore_eos=True) for _ in range(3)]
    for request in short:
        request.next()
    short[0].job.listener = lambda news: (uses.append(scheduler.cache_use), short[0].news.put(news))
    long = Asked(scheduler, "x" * 600, max_new_tokens=3)  # beside it every short row would be as long
    assert long.wait() == alone(model, "x" * 600, max_new_tokens=3)
    for request in short:
        request.wait()
    assert max(uses) <= 1


def test_trees_are_to_pay_for_the_rows_that_the_cache_has_room_for(schedule):
    scheduler = schedule(max_cache_tokens=1000)  # for three of them
    scheduler._pace, counts = Pace(), []
    scheduler._pace.pays = lambda num_rows: counts.append(num_rows) or True
    asked = [Asked(scheduler, "abc", max_new_tokens=200, ignore_eos=True) for _ in range(6)]
    for request in asked:
        request.wait()
    assert max(counts) == 3


def test_rows_for_which_there_is_no_memory_elsewhere_stay_for_another_trial(model, schedule, monkeypatch, caplog):
    def has_none(batch, jobs):
        raise torch.OutOfMemoryError

    scheduler = schedule()
    monkeypatch.setattr(scheduler, "_leave_to_plain", has_none)
    asked = [Asked(scheduler, f"abab {i}", max_new_tokens=40, ignore_eos=True) for i in range(2)]
    asked[0].next()
    scheduler._pace = slow_with_trees(2)
    expected = [alone(model, f"abab {i}", max_new_tokens=40, ignore_eos=True) for i in range(2)]
    assert [request.wait() for request in asked] == expected
    assert caplog.text.count("there is no memory to leave 2 rows to plain decoding") == 1


@pytest.mark.parametrize("kind", ["graft", "random trees", "head"])
def test_a_requests_text_is_the_same_alone_and_in_any_batch(model, schedule, kind):
    rng = random.Random(3)
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)) if kind == "head" else None
    policy = RandomTrees(10, BYTE_VOCAB) if kind == "random trees" else "graft"
    scheduler = schedule(policy, drafter, chunk_size=48, max_rows=6, prefix_cache_tokens=512, max_waiting=64)
    beginnings = ["".join(rng.choices("abcdef", k=rng.choice([3, 70, 150]))) for _ in range(4)]
    asked = []
    for number in range(64 if kind == "graft" else 24):
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


@pytest.mark.parametrize("with_head", [False, True])
def test_a_beginning_that_was_read_before_is_not_read_again(model, schedule, with_head):
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)) if with_head else None
    scheduler = schedule("dense" if with_head else "graft", drafter, chunk_size=50)
    beginning = "It was a dark and stormy night. " * 9
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    first = Asked(scheduler, beginning, **options)
    assert first.wait() == alone(model, beginning, **options)
    known = first.job.sequences[0].ids
    follow_up = [*known, 40, 41, 42]
    second = Asked(scheduler, follow_up, **options)
    assert second.wait() == alone(model, follow_up, **options)
    assert first.job.num_cached_tokens == 0
    assert second.job.num_cached_tokens == (len(known) - 10) // PAGE * PAGE - 1 == 5 * PAGE - 1, "the answer too"
    if with_head:
        fresh = Engine(model, byte_tokenizer(), policy="dense", drafter=drafter, budget=12)
        stats = fresh.generate(follow_up, **options).stats
        assert second.job.sequences[0].stats.accepted == stats.accepted, "the drafter knows what it would have read"


def test_kept_pages_are_never_read_under_another_salt(schedule):
    scheduler = schedule()
    prompt = "abcdefgh" * 20
    texts = [Asked(scheduler, prompt, salt=salt, max_new_tokens=5) for salt in ("one", "two", "one")]
    cached = []
    for request in texts:
        request.wait()
        cached.append(request.job.num_cached_tokens)
    assert cached[:2] == [0, 0] and cached[2] > 0


def filled_cache(text, layers=2):
    cache = TreeCache(layers, 1, len(text))
    cache.append(0, [torch.tensor(text, dtype=torch.float).view(1, 1, -1, 1, 1).expand(2, layers, -1, 1, 2)])
    return cache


def test_pages_go_when_they_were_not_used_for_longest_the_ends_of_texts_first():
    store = PageStore(4 * PAGE)
    texts = [[number] * (2 * PAGE + 9) for number in range(3)]
    for text in texts[:2]:
        store.save(text, "", [filled_cache(text)], 0)
    assert store.num_tokens == 4 * PAGE

    def num_known(text):
        return store.load(text, "", [TreeCache(2, 1, 200)], 0)

    assert num_known(texts[0]) == 2 * PAGE - 1
    store.save(texts[2][: PAGE + 1], "", [filled_cache(texts[2])], 0)
    assert [num_known(text) for text in texts] == [2 * PAGE - 1, PAGE - 1, PAGE - 1]


def test_what_a_page_holds_is_what_was_saved():
    text = list(range(300))
    store = PageStore(1000)
    store.save(text, "", [filled_cache(text)], 0)
    cache = TreeCache(2, 2, 300)
    assert store.load([*text[:200], 7], "", [cache], 1) == 3 * PAGE - 1 == cache.lengths[1]
    assert cache.read(1, 0, 3 * PAGE - 1)[1, 1, :, 0, 0].tolist() == text[: 3 * PAGE - 1]


def test_rows_of_joined_caches_stay_what_they_were():
    rng = random.Random(0)
    cache, texts = TreeCache(2, 0, 0), []
    for _ in range(30):
        if texts and rng.random() < 0.5:
            kept = _places(set(rng.sample(range(len(texts)), rng.randint(0, len(texts)))))
            cache = cache.keeping(kept)
            texts = [texts[row] for row in kept]
        else:
            texts.append([rng.random() for _ in range(rng.randint(1, 400))])
            cache = cache.joining(filled_cache(texts[-1]))
        assert cache.lengths == [len(text) for text in texts]
        for row, text in enumerate(texts):
            assert cache.read(row, 0, len(text))[0, 1, :, 0, 1].tolist() == pytest.approx(text)


def test_a_cache_that_has_no_memory_for_others_stays_what_it_was(monkeypatch):
    def has_none(*_):
        raise torch.OutOfMemoryError

    cache, other = filled_cache([1, 2, 3]), filled_cache([4] * 400)
    monkeypatch.setattr(torch.Tensor, "new_zeros", has_none)
    with pytest.raises(torch.OutOfMemoryError):
        cache.joining(other)
    assert cache.lengths == [3] and cache.num_slots == 3
    assert cache.read(0, 0, 3)[0, 0, :, 0, 0].tolist() == [1, 2, 3]


def test_a_cancelled_request_frees_its_row_at_once(model, schedule):
    scheduler = schedule(max_rows=1)
    long = Asked(scheduler, "long", max_new_tokens=1500)
    short = Asked(scheduler, "short", max_new_tokens=4)
    long.next()
    assert scheduler.num_running == 1 and scheduler.num_waiting == 1 and scheduler.cache_use > 0
    scheduler.cancel(long.job)
    assert short.wait() == alone(model, "short", max_new_tokens=4)
    assert long.job.sequences[0].finish_reason is None


def test_a_long_prompt_does_not_stall_those_who_are_decoded(schedule):
    scheduler = schedule("off", chunk_size=16)
    running = Asked(scheduler, "abc", max_new_tokens=1000)
    running.next()
    before = running.job.sequences[0].stats.tokens
    late = Asked(scheduler, "x" * 800, max_new_tokens=1)
    late.wait()
    assert running.job.sequences[0].stats.tokens >= before + 800 // 16 - 5, "a round between two chunks"
    scheduler.cancel(running.job)


def test_more_than_can_wait_are_refused_and_those_that_wait_come_in_turn(model, schedule):
    scheduler = schedule(max_rows=1, max_waiting=2)
    running = Asked(scheduler, "abc", max_new_tokens=1500)
    running.next()
    waiting = [Asked(scheduler, f"ask {i}", max_new_tokens=3) for i in range(2)]
    with pytest.raises(BusyError, match="2 requests are waiting"):
        Asked(scheduler, "one more")
    scheduler.cancel(running.job)
    assert [request.wait() for request in waiting] == [alone(model, f"ask {i}", max_new_tokens=3) for i in range(2)]


def test_the_cache_is_bounded(schedule):
    scheduler = schedule(max_cache_tokens=300)
    with pytest.raises(GraftError, match="needs 331 tokens of cache and there are 300"):
        Asked(scheduler, "abc", max_new_tokens=200)
    with pytest.raises(GraftError, match="n=20 answers"):
        Asked(scheduler, "abc", n=20)
    asked = [Asked(scheduler, "abc", max_new_tokens=100) for _ in range(4)]
    asked[0].next()
    assert scheduler.num_running == 1 and scheduler.cache_use <= 1
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

    def num_allowed(self, tokens):
        return len(tokens)


def test_a_request_that_fails_ends_alone(model, schedule):
    scheduler = schedule()
    good = [Asked(scheduler, f"good {i}", max_new_tokens=60) for i in range(2)]
    bad = Asked(scheduler, "bad", max_new_tokens=60, constraint=Broken(after=7))
    rude = Asked(scheduler, "rude", max_new_tokens=60)
    rude.job.listener = lambda news: 1 / 0
    late = Asked(scheduler, "late", max_new_tokens=1500, ignore_eos=True, deadline=time.monotonic() + 0.2)
    assert bad.wait() == Failure("request", "nothing may follow")
    assert late.wait() == Failure("timeout", "the request took longer than allowed")
    assert [request.wait() for request in good] == [alone(model, f"good {i}", max_new_tokens=60) for i in range(2)]


def test_after_a_round_that_crashed_the_next_requests_are_answered(model, schedule, monkeypatch):
    scheduler = schedule()
    engine = scheduler._lanes[True].engine
    run_round, crashes = engine.run_round, [True]

    def crash_once(batch, clock):
        if crashes and crashes.pop():
            raise RuntimeError("out of memory")
        run_round(batch, clock)

    monkeypatch.setattr(engine, "run_round", crash_once)
    assert Asked(scheduler, "abc").wait() == Failure("server", "the request failed; the server's log says why")
    assert Asked(scheduler, "abc", max_new_tokens=9).wait() == alone(model, "abc", max_new_tokens=9)


def test_a_request_may_be_decoded_plainly_beside_others_that_speculate(model, schedule):
    scheduler = schedule()
    options = {"max_new_tokens": 80, "ignore_eos": True}
    plain = Asked(scheduler, "abab", speculates=False, **options)
    graft = Asked(scheduler, "abab", **options)
    assert plain.wait() == graft.wait() == alone(model, "abab", **options)
    stats = plain.job.sequences[0].stats
    assert stats.nodes == 0 and stats.rounds == 80 and graft.job.sequences[0].stats.nodes > 0


def test_closing_lets_requests_end_and_takes_no_more(model, schedule):
    scheduler = schedule()
    running = Asked(scheduler, "abc", max_new_tokens=50)
    scheduler.close(drain_seconds=60)
    assert running.wait() == alone(model, "abc", max_new_tokens=50)
    with pytest.raises(BusyError, match="shutting down"):
        Asked(scheduler, "abc")


def test_closing_ends_what_takes_too_long(schedule):
    scheduler = schedule()
    running = Asked(scheduler, "abc", max_new_tokens=1800)
    running.next()
    scheduler.close(drain_seconds=0)
    assert running.wait() == Failure("timeout", "the server is shutting down")


def test_trees_are_narrower_in_larger_batches(model):
    """Where a step costs by the token, what pays for one row does not pay for sixteen."""
    policy = make_policy("graft", TargetRunner(model))
    policy.restore_costs(
        {
            "step_sizes": torch.tensor([1, 2, 4, 8, 16, 32, 64]),
            # flat up to eight tokens, then by the token
            "step_seconds": torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64),
        }
    )
    num_nodes = {}
    for num_rows in (1, 4, 8, 16, 64):
        paths = torch.tensor([0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1]).repeat_interleave(num_rows)
        plans = policy.budget.plans(paths.cumsum(0).tolist(), num_rows)
        num_nodes[num_rows] = policy.budget.best(plans).num_nodes / num_rows
    assert num_nodes[1] == 7 and num_nodes[64] == 0
    assert list(num_nodes.values()) == sorted(num_nodes.values(), reverse=True)


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
LONG = {"max_new_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize("part", [(TreeCache, "joining"), (Sampler, "joining"), (Eagle3State, "joining")])
def test_a_request_that_cannot_join_leaves_nothing_behind(model, schedule, monkeypatch, part):
    drafter = Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3))
    scheduler = schedule("dense", drafter)
    first = Asked(scheduler, "first text here", **LONG)
    first.next()
    monkeypatch.setattr(*part, failing(1, OUT_OF_MEMORY, getattr(*part)))
    assert Asked(scheduler, "second one", max_new_tokens=20).wait().kind == "server"
    third = Asked(scheduler, "third one is here", max_new_tokens=20)
    assert third.wait() == alone(model, "third one is here", max_new_tokens=20)
    assert first.wait() == alone(model, "first text here", **LONG)


@pytest.mark.parametrize(
    "part",
    [
        (TreeCache, "keeping"),
        (Sampler, "keeping"),
        (Eagle3State, "keeping"),
        (PageStore, "save"),
        (Policy, "finish"),
        (TreeCache, "read"),
    ],
)
def test_what_fails_when_a_row_leaves_harms_nobody(model, schedule, monkeypatch, part):
    scheduler = schedule("dense", Eagle3Drafter(make_head(model), TreeSettings(depth=3, topk=3)))
    others = [Asked(scheduler, f"abc {number}" * 20, **LONG) for number in range(2)]
    for request in others:
        request.next()
    monkeypatch.setattr(*part, failing(1, OUT_OF_MEMORY, getattr(*part)))
    short = Asked(scheduler, "short" * 20, max_new_tokens=3)
    assert short.wait() == alone(model, "short" * 20, max_new_tokens=3)
    assert [request.wait() for request in others] == [alone(model, f"abc {number}" * 20, **LONG) for number in range(2)]
    assert scheduler.is_alive
    assert Asked(scheduler, "one more", max_new_tokens=5).wait() == alone(model, "one more", max_new_tokens=5)


def test_rows_that_can_never_leave_end_with_the_server_going_on(model, schedule, monkeypatch):
    scheduler, expected = schedule(), alone(model, "short", max_new_tokens=9)
    long = Asked(scheduler, "long", **LONG)
    long.next()
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "keeping", failing(1000, OUT_OF_MEMORY, Sampler.keeping))
        assert Asked(scheduler, "short", max_new_tokens=9).wait() == expected
        assert long.wait().kind == "server"
    assert Asked(scheduler, "one more", max_new_tokens=5).wait() == alone(model, "one more", max_new_tokens=5)


def test_rows_leave_without_large_temporaries(monkeypatch):
    """The rows behind take the places of those that go, one by one, and nothing is allocated for it."""
    cache = TreeCache(2, 0, 0)
    texts = [[float(row)] * 300 for row in range(4)]
    for text in texts:
        cache = cache.joining(filled_cache(text))
    sampler = Sampler([SamplingSettings(frequency_penalty=0.5, seed=row) for row in range(4)], [[1]] * 4, [], 50, "cpu")
    allocated = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            before = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in before:
                allocated.append((func, out.shape))
            return out

    with Counting():
        cache, sampler = cache.keeping([0, 3, 2]), sampler.keeping([0, 3, 2])
    assert not allocated
    assert [cache.read(row, 0, 300)[0, 0, 0, 0, 0].item() for row in range(3)] == [0, 3, 2]
    assert sampler._seeds.tolist() == [0, 3, 2]


def test_asking_and_going_do_not_wait_while_a_cache_is_opened(model, schedule):
    scheduler = schedule()
    engine, opened, may_go_on = scheduler._lanes[True].engine, threading.Event(), threading.Event()
    open_cache = engine.open

    def slow(sequences):
        opened.set()
        assert may_go_on.wait(60)
        return open_cache(sequences)

    engine.open = slow
    first, gone = Asked(scheduler, "first", max_new_tokens=5), Asked(scheduler, "gone", max_new_tokens=5)
    assert opened.wait(60)
    done = threading.Event()

    def others():
        scheduler.cancel(gone.job)
        scheduler.cancel(Asked(scheduler, "another", max_new_tokens=5).job)
        assert scheduler.num_running == 1
        done.set()

    threading.Thread(target=others, daemon=True).start()
    assert done.wait(5), "they wait for the lock"
    may_go_on.set()
    assert first.wait() == alone(model, "first", max_new_tokens=5)


def test_a_request_that_is_cancelled_while_its_cache_is_opened_frees_it(model, schedule):
    scheduler = schedule(max_rows=1)
    engine, open_cache = scheduler._lanes[True].engine, scheduler._lanes[True].engine.open

    def and_cancel(sequences):
        batch = open_cache(sequences)
        scheduler.cancel(gone.job)
        return batch

    with scheduler._changed:
        gone = Asked(scheduler, "gone", max_new_tokens=1500)
        engine.open = and_cancel
    while scheduler.num_running or scheduler.num_waiting:
        time.sleep(0.01)
    engine.open = open_cache
    assert gone.news.empty() or not isinstance(gone.next(), Failure)
    assert Asked(scheduler, "next", max_new_tokens=4).wait() == alone(model, "next", max_new_tokens=4)


def test_a_policy_that_cannot_be_prepared_leaves_all_to_plain_decoding(model, monkeypatch):
    engine = Engine(new_model(), byte_tokenizer(), budget=12)
    monkeypatch.setattr(engine.policy, "prepare", failing(1, OUT_OF_MEMORY, engine.policy.prepare))
    scheduler = Scheduler(engine)
    first, later = (Asked(scheduler, "abab", max_new_tokens=40) for _ in range(2))
    expected = alone(model, "abab", max_new_tokens=40)
    assert first.wait() == later.wait() == expected and first.job.sequences[0].stats.nodes == 0
    assert Asked(scheduler, "abab", max_new_tokens=40).wait() == expected
    scheduler.close()


# What caches take


class Slots:
    """Counts the slots of all tensors of keys that a target's caches have, whenever there is another."""

    def __init__(self, monkeypatch, num_layers, num_heads=2):
        self.live, self.most = [], 0
        for owner, name in ((torch.Tensor, "new_zeros"), (torch, "zeros")):
            monkeypatch.setattr(owner, name, self._noting(getattr(owner, name), num_layers, num_heads))

    def _noting(self, function, num_layers, num_heads):
        def note(*given, **more):
            made = function(*given, **more)
            is_scheduler = threading.current_thread().name == "graft-scheduler"  # not who answers alone
            if is_scheduler and made.dim() == 5 and made.shape[0] == num_layers and made.shape[3] == num_heads:
                self.live = [tensor for tensor in [*self.live, weakref.ref(made)] if tensor() is not None]
                self.most = max(self.most, sum(t.shape[1] * t.shape[2] for t in (r() for r in self.live)) // 2)
            return made

        return note


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


@pytest.mark.parametrize("most", [1300, 2500, 6000])
def test_caches_never_take_more_than_they_may(model, schedule, monkeypatch, most):
    slots = Slots(monkeypatch, num_layers=3)
    scheduler = schedule(max_cache_tokens=most, max_rows=8, prefix_cache_tokens=0, chunk_size=64)
    scheduler._pace = Pace()
    scheduler._pace.pays = lambda num_rows: num_rows < 3  # rows move to plain decoding and back
    for request, prompt, options in mixed_load(scheduler, random.Random(most), 40):
        if not request.job.cancelled:
            assert request.wait() == alone(model, prompt, **options)
    assert most // 3 < slots.most <= most
    scheduler.close()
    assert scheduler._limit.num_taken == 0

"""Pages of the KV cache under pressure: shared, copied, given back, grown; and who else touches them meanwhile."""

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no captured steps")

import plain_kernels
from graft import Engine, SamplingSettings
from graft.engine.decode_loop import DecodeLoop
from graft.engine.jobs import Job
from graft.engine.round_memory import RoundMemory
from graft.engine.settings import SchedulerSettings
from graft.model import NoRoomError, PagePool, cuda_graphs
from graft.model.cuda_graphs import CapturedTarget
from graft.model.kv_cache import PAGE, KVStore
from proposers import Oracle
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]


class Small(CapturedTarget):
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts = (16, 32)


@pytest.fixture
def captured(monkeypatch):
    """Engines run captured steps; without a GPU they are called in place of replayed."""
    if not torch.cuda.is_available():
        plain_kernels.use_plain_kernels(monkeypatch)
    monkeypatch.setattr(
        "graft.engine.engine.target_for",
        lambda model, layers=(), chunk_size=256, exact=False: Small(model, layers, chunk_size, exact),
    )


def test_the_pool_does_not_grow_while_another_thread_starts_a_step(captured, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_FIRST_TOKENS", 8 * PAGE)
    model = tiny_model("llama", max_position_embeddings=4096)
    expected = Engine(model, policy="off").generate(PROMPT, max_new_tokens=12).ids
    engine = Engine(tiny_model("llama", max_position_embeddings=4096), policy="off")
    load, others, moved = RoundMemory.load, [], []

    def load_while_another_takes_pages(*given):
        load(*given)
        if len(others) < 3:
            rows = []
            take = threading.Thread(target=lambda: rows.append(engine.target.pool.open_row(PAGE * 8 << len(others))))
            others.append((take, rows))
            before = engine.target.pool.num_resized
            take.start()
            take.join(timeout=0.2)
            moved.append(engine.target.pool.num_resized != before)  # a graph would write to what was there before

    monkeypatch.setattr(RoundMemory, "load", load_while_another_takes_pages)
    assert engine.generate(PROMPT, max_new_tokens=12).ids == expected and moved == [False] * 3
    for take, rows in others:
        take.join()
        assert rows
    assert engine.target.pool.num_resized > 2


# The pool


def pool_of(num_pages=None, num_rows=7, max_positions=4096, **changes):
    pool = PagePool(torch.device("cpu"), max_positions, num_pages, num_rows, **changes)
    store = KVStore(2)
    pool.add_store(store)
    store.shape(torch.zeros(1), (1, 4))
    return pool, store


def text_of(num_pages, first=0):
    return list(range(first, first + num_pages * PAGE + 1))


def test_a_copy_needs_no_more_pages_than_it_keeps():
    pool, _ = pool_of(num_pages=5)
    source, target = pool.open_row(3 * PAGE + 1), pool.open_row(0)
    source.length = 3 * PAGE + 1
    pool.copy(source, target)  # one page is free, and one is copied
    assert target.pages[:3] == source.pages[:3] and target.pages[3] != source.pages[3]
    assert target.length == source.length and pool.num_free == 0
    assert pool.sync()[target.block_table_row, :4].tolist() == target.pages
    pool.release(source)
    assert pool.num_free == 1
    pool.release(target)
    assert pool.num_free == 5


def test_a_copy_that_finds_no_page_changes_nothing():
    pool, _ = pool_of(num_pages=4)
    source, target = pool.open_row(3 * PAGE + 1), pool.open_row(0)
    source.length = 3 * PAGE + 1
    with pytest.raises(NoRoomError):
        pool.copy(source, target)
    assert target.pages == [] and target.length == 0 and pool.num_free == 0
    pool.release(source)
    assert pool.num_free == 4


def test_a_copy_keeps_the_later_pages_of_the_target_row():
    pool, store = pool_of(num_pages=9)
    source, target = pool.open_row(PAGE + 1), pool.open_row(4 * PAGE)
    source.length = PAGE + 1
    keys, _ = store.stored
    keys[:, source.pages[1] * PAGE] = 5.0
    behind = target.pages[1:]
    pool.copy(source, target)
    assert target.pages == [source.pages[0], *behind]
    assert bool((keys[:, behind[0] * PAGE] == 5.0).all())


def kept_by(pool):
    """A text of four pages that the pool keeps and nobody uses."""
    text = text_of(4)
    row = pool.open_row(4 * PAGE)
    row.length = 4 * PAGE
    pool.keep_prefix(row, text, "")
    pool.release(row)
    return text


@pytest.mark.parametrize("is_hit", [False, True])
def test_eviction_takes_the_end_of_a_cached_text_first(is_hit):
    pool, _ = pool_of(num_pages=6)
    text = kept_by(pool)
    if is_hit:
        pool.release(pool.open_with_prefix(text, "", 0))
    pool.release(pool.open_row(3 * PAGE))  # two pages are free, so a kept one goes
    assert pool.open_with_prefix(text, "", 0).length == 3 * PAGE - 1


def test_the_block_tables_on_the_device_list_the_pages_of_a_row_that_has_grown():
    pool, _ = pool_of(num_pages=9)
    row, other = pool.open_row(PAGE), pool.open_row(PAGE)
    for num_pages in (1, 2, 5):
        pool.ensure(row, num_pages * PAGE)
        assert pool.sync()[row.block_table_row, :num_pages].tolist() == row.pages and len(row.pages) == num_pages
    other.length = 1
    pool.copy(other, row)
    assert pool.sync()[row.block_table_row, :5].tolist() == row.pages


def test_a_cached_page_is_found_only_after_the_same_prefix():
    """The same tokens behind another beginning have other keys and values."""
    pool, _ = pool_of(num_pages=12)
    text = kept_by(pool)
    first, others = text[:PAGE], list(range(1000, 1000 + PAGE))
    for changed, num_found in (([*others, *text[PAGE:]], 0), (text[PAGE:], 0), ([*first, *others, *text[PAGE:]], 1)):
        row = pool.open_with_prefix(changed, "", 0)
        assert row.length == max(num_found * PAGE - 1, 0)
        pool.release(row)


def test_trimming_a_row_keeps_the_page_that_it_ends_in():
    pool, _ = pool_of(num_pages=9)
    row = pool.open_row(4 * PAGE)
    for num_slots, num_left in ((3 * PAGE + 1, 4), (3 * PAGE, 3), (PAGE + 1, 2), (1, 1), (0, 0)):
        pool.trim(row, num_slots)
        assert len(row.pages) == num_left == pool.num_pages - pool.num_free


def test_the_prefix_cache_keeps_no_more_of_a_text_than_the_drafter_has_entries_for():
    pool, _ = pool_of(num_pages=9)
    for first, num_entries, num_found in ((0, 2 * PAGE - 1, 1), (1, 2 * PAGE, 2), (2, PAGE - 1, 0), (3, None, 3)):
        text, row = text_of(3, first), pool.open_row(3 * PAGE)
        row.length = 3 * PAGE
        pool.keep_prefix(row, text, "", num_entries)
        pool.release(row)
        again = pool.open_with_prefix(text, "", 0)
        assert again.length == max(num_found * PAGE - 1, 0), "the last token of the last page is read again"
        pool.release(again)
        pool.evict()


def test_pages_that_a_row_shares_are_not_allocated_again():
    pool, _ = pool_of(num_pages=8)
    text = kept_by(pool)
    row = pool.open_with_prefix(text, "", 4 * PAGE)  # three pages of the kept text, and a copy of the fourth
    with pytest.raises(NoRoomError):
        pool.open_row(5 * PAGE)
    other = pool.open_row(4 * PAGE)
    assert len(set(row.pages) | set(other.pages)) == 8
    pool.release(row)
    assert pool.num_free == 4, "and they are free when nobody has them any more"


def test_a_row_grows_into_the_next_page_unless_it_is_used_or_cached():
    pool, _ = pool_of(num_pages=9)
    row, other = pool.open_row(2 * PAGE), pool.open_row(PAGE)
    other.length = PAGE
    pool.keep_prefix(other, text_of(1), "")
    used = other.pages[0]
    pool.ensure(row, 3 * PAGE)
    assert row.pages == [1, 2, used + 1]
    pool.release(other)  # its page is kept, and the last that others get
    pool.trim(row, 2 * PAGE)
    pool.ensure(row, 3 * PAGE)
    assert row.pages == [1, 2, used + 1]
    pool.ensure(row, 6 * PAGE)
    assert row.pages == [1, 2, *range(used + 1, used + 5)] and pool.num_prefix_tokens == PAGE
    pool.ensure(row, 9 * PAGE)
    assert sorted(row.pages) == list(range(1, 10)) and pool.num_prefix_tokens == 0


@pytest.mark.parametrize("num_before", range(10))
def test_a_pool_that_cannot_grow_is_what_it_was(monkeypatch, num_before):
    pool, store = pool_of(first_pages=4)
    other = KVStore(1)
    pool.add_store(other)
    other.shape(torch.zeros(1), (2, 2))
    row = pool.open_row(2 * PAGE)
    before, num_resized, tables = (store.stored, other.stored), pool.num_resized, pool.tables
    made, zeros, torch_zeros = [0], np.zeros, torch.zeros

    def counted(make):
        def made_or_not(*given, **options):
            made[0] += 1
            if made[0] > num_before:
                raise torch.OutOfMemoryError
            return make(*given, **options)

        return made_or_not

    with monkeypatch.context() as scarce:
        scarce.setattr(np, "zeros", counted(zeros))
        scarce.setattr(torch, "zeros", counted(torch_zeros))
        try:
            pool.ensure(row, 20 * PAGE)
            assert made[0] <= num_before
            return
        except torch.OutOfMemoryError:
            pass
    assert (store.stored, other.stored) == before and pool.num_resized == num_resized and pool.tables is tables
    assert len(row.pages) == 2 and pool.num_free == 1
    pool.ensure(row, 20 * PAGE)
    for stored in (*store.stored, *other.stored):
        assert stored.shape[1] == (1 + pool.num_pages) * PAGE, "and page 0, which is nobody's"


def test_pages_freed_while_the_pool_grows_are_free_afterwards(monkeypatch):
    """A collector may end a row in the middle of anything."""
    pool, _ = pool_of(first_pages=4)
    rows = [pool.open_row(PAGE), pool.open_row(PAGE)]
    zeros = torch.zeros

    def ending(*given, **options):
        rows[1:] = []
        return zeros(*given, **options)

    monkeypatch.setattr(torch, "zeros", ending)
    pool.ensure(rows[0], 8 * PAGE)
    assert pool.num_pages - pool.num_free == 8


# Stop strings


def test_the_result_of_a_running_or_cancelled_stream_ends_at_the_stop_string():
    prompt, model = PROMPT, tiny_model(vocab_size=BYTE_VOCAB)
    answer = Engine(model, byte_tokenizer(), policy="off").generate(prompt, max_new_tokens=12).ids
    letters = [byte_tokenizer().decode([token]) for token in answer]
    place = next(n for n in range(1, 5) if letters[n].isascii() and letters[n] not in "".join(letters[:n]))
    policy = Oracle(answer, len(prompt), depth=7)
    engine = Engine(model, byte_tokenizer(), policy=policy)
    for is_looked_at in (True, False):
        stream = engine.stream(prompt, stop=[letters[place]], max_new_tokens=40)
        next(stream._rounds)  # eight tokens, and nobody has looked for stop strings yet
        for _ in range(1 + is_looked_at):
            if not is_looked_at:
                stream.cancel()
            assert stream.result.ids == answer[: place + 1] and stream.result.finish_reason == "stop"
            assert stream.result.text == byte_tokenizer().decode(answer[:place])
            stream.cancel()
    assert engine.target.pool.num_free == engine.target.pool.num_pages


def test_at_the_end_of_the_context_a_row_gets_no_more_slots_than_it_can_hold():
    engine = Engine(tiny_model("llama", max_position_embeddings=64), policy="off")
    loop = DecodeLoop(engine, SchedulerSettings(max_rows=1), max_batched_tokens=64)
    loop.pages.slots_ahead = 1000  # of a drafter with wide and deep trees
    job = Job(engine.new_sequences(PROMPT, SamplingSettings(max_new_tokens=64 - len(PROMPT))))
    loop.submit(job)
    while loop.has_work:
        loop.step()
    assert job.error is None and len(job.sequences[0].new_ids) == 64 - len(PROMPT)


def test_an_engine_without_a_prefix_cache_leaves_that_of_another_alone(captured):
    model = tiny_model("llama", max_position_embeddings=512)
    keeps, other = (Engine(model, policy="off", prefix_cache=keeps) for keeps in (True, False))
    assert keeps.target.pool is other.target.pool
    prompt = PROMPT * 20
    keeps.generate(prompt, max_new_tokens=2)
    other.generate(PROMPT, max_new_tokens=2)
    assert keeps.generate(prompt, max_new_tokens=2).stats.cached_tokens > 0

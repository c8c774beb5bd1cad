"""The kernels do what torch and Python do: the same pools, tables and copies; and all works without them."""

import random
from copy import copy
from dataclasses import replace
from itertools import product
from unittest.mock import patch
from weakref import finalize

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft import Engine, host_pool, kernels, native, tree
from graft.accept import paths, paths_in_python
from graft.buckets import NUM_BUCKETS
from graft.draft.base import Level
from graft.host_pool import HostPool, make_pool
from graft.learn import cost
from graft.learn.calibration import Calibration
from graft.learn.cost import total_gains
from graft.pool import NOBODY, Columns, Pool, before_roots
from graft.retrieve import Judged, Recall, SuffixLookup
from graft.retrieve.base import JudgedTrees, nodes_in_context, nodes_in_context_by_torch
from graft.retrieve.suffix import HostIndex, SuffixIndex
from graft.retrieve.table import HostTables, SuccessorTable, SuccessorTables
from graft.target import Verified
from proposers import random_tree
from tiny import tiny_model

TOKENS = 4  # few, so that equal paths are common
CHANCES = (0.0, 1e-20, 0.004, 0.25, 0.5, 0.9, 1.0)
NUM_SOURCES = 6
DRAFTED = 1

pytestmark = pytest.mark.skipif(kernels.kernels() is None, reason="no C compiler that can build the kernels")


class Text:
    """A history."""

    def __init__(self, ids):
        self.ids = list(ids)


class Both:
    """A pool by torch and one by the kernels, which get the same proposals; a random generator and chances."""

    def __init__(self, seed, num_rows):
        self.rng = random.Random(seed)
        self.num_rows = num_rows
        roots, before, earlier = (self.tokens(1)[:, 0] for _ in range(3))
        salts = self.tokens(1)[:, 0]
        self.pools = [kind(roots, before, earlier, salts) for kind in (Pool, HostPool)]
        self.chances = torch.rand(3, NUM_SOURCES, NUM_BUCKETS, generator=torch.Generator().manual_seed(seed))

    def tokens(self, count, stop=TOKENS):
        return torch.tensor([[self.rng.randrange(stop) for _ in range(count)] for _ in range(self.num_rows)])

    def scores(self, count):
        return torch.tensor([[self.rng.choice(CHANCES) for _ in range(count)] for _ in range(self.num_rows)])

    def add_something(self):
        getattr(self, self.rng.choice(["add", "add_level", "add_rows"]))()

    def add(self):
        count, width = self.rng.randrange(1, 6), self.pools[0].width
        needs = self.rng.choice([None, None, 1, 2, 3])
        sources, evidence = self.tokens(count, NUM_SOURCES - 1) + 1, self.tokens(count, NUM_BUCKETS)
        columns = (self.tokens(count), self.tokens(count, width), self.scores(count), sources, evidence)
        for pool in self.pools:
            pool.add(*columns, needs)

    def add_level(self):
        count = self.rng.randrange(1, 6)
        level = Level(self.tokens(count), self.tokens(count, self.pools[0].width), self.scores(count), torch.empty(0))
        going = [self.rng.random() < 0.7 for _ in range(self.num_rows)]
        one, other = (pool.add_level(level, self.chances, DRAFTED, 2, 0, going, 3) for pool in self.pools)
        assert one == pytest.approx(other)

    def add_rows(self):
        width = self.pools[0].width
        rows = []
        for row in range(self.num_rows):
            depths = self.pools[0].nodes.depths[row].tolist()
            columns = Columns([], [], [], [], [])
            for n in range(self.rng.randrange(5)):
                parent = self.rng.randrange(width + n)
                depths.append(depths[parent] + 1)
                values = (self.rng.randrange(TOKENS), parent, depths[-1], 1 + self.rng.randrange(2), n)
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
            rows.append(columns)
        for pool in self.pools:
            pool.add_rows(rows, self.chances)

    def assert_equal(self):
        one, other = self.pools
        assert one.width == other.width
        for name, field, same in zip(one.nodes._fields, one.nodes, other.nodes, strict=True):
            torch.testing.assert_close(field, same, rtol=1e-5, atol=1e-29, msg=name)


@st.composite
def both_pools(draw):
    both = Both(draw(st.integers(0, 10**6)), draw(st.integers(1, 3)))
    for _ in range(draw(st.integers(0, 6))):
        both.add_something()
    return both


@settings(deadline=None)
@given(both_pools())
def test_the_same_nodes_are_added(both):
    both.assert_equal()


@settings(deadline=None)
@given(both_pools(), st.integers(1, 9))
def test_chains_are_added_alike(both, length):
    width = both.pools[0].width
    parents = torch.tensor([[both.rng.randrange(width), *range(width, width + length - 1)]] * both.num_rows)
    first = both.pools[0].nodes.depths.gather(1, parents[:, :1])
    depths = first + torch.arange(1, length + 1)
    columns = (both.scores(length), both.tokens(length) + 1, both.tokens(length))
    tokens = both.tokens(length)
    for pool in both.pools:
        pool.add_chains(tokens, parents, depths, int(depths.max()), *columns)
    both.assert_equal()


@settings(deadline=None)
@given(both_pools(), st.sampled_from([NOBODY, DRAFTED]), st.booleans(), st.integers(0, 40))
def test_merged_alike_and_the_best_are_the_same(both, drafted, weighed, budget):
    for pool in both.pools:
        pool.merge(drafted, both.chances if weighed else None)
    both.assert_equal()
    assert torch.equal(*(pool.standing for pool in both.pools))
    (one, paths), (other, same_paths) = (pool.best(budget, 9) for pool in both.pools)
    torch.testing.assert_close(paths, same_paths)
    for name in ("tokens", "parents", "sources", "evidence", "probabilities"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), msg=name)
    one, other = (pool.best_gains(budget) for pool in both.pools)
    assert one == pytest.approx(other, abs=1e-5)
    one, other = (pool.values_by_need(3, budget) for pool in both.pools)
    assert [pytest.approx(row, abs=1e-5) for row in one] == other


@settings(deadline=None)
@given(both_pools(), st.integers(0, 12), st.integers(1, 5))
def test_the_same_places_are_looked_up(both, count, max_depth):
    one, other = (pool.places(count, max_depth) for pool in both.pools)
    assert one == other


@settings(deadline=None)
@given(both_pools(), st.data())
def test_the_same_is_counted(both, data):
    for pool in both.pools:
        pool.merge(DRAFTED, both.chances)
    emitted = [data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=4)) for _ in range(both.num_rows)]
    calibrations = [Calibration(list(both.chances[0, 1:])) for _ in both.pools]
    known = {"tried": torch.full_like(both.chances, data.draw(st.sampled_from([16.0, 1023.5]))), "fitted": both.chances}
    for calibration, pool in zip(calibrations, both.pools, strict=True):
        calibration.restore(known)
        for _ in range(3):
            calibration.observe(pool, emitted)
    one, other = (calibration.state() for calibration in calibrations)
    torch.testing.assert_close(one, other)


@settings(deadline=None)
@given(both_pools(), st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_only_the_best_are_kept_alike_and_a_copy_stays_as_it_is(both, counts):
    kept = [copy(pool) for pool in both.pools[1:]]
    both.pools[0] = copy(both.pools[1])
    both.pools[0].keep_best(counts[: both.num_rows])
    both.pools[0].merge()
    assert torch.equal(kept[0].nodes.paths, both.pools[1].nodes.paths)


# Tables


def judgements(rng, count, num_successors, num_salts=2):
    tokens, before, earlier = (torch.tensor([rng.randrange(TOKENS) for _ in range(count)]) for _ in range(3))
    successors = torch.tensor([[rng.randrange(TOKENS) for _ in range(num_successors)] for _ in range(count)])
    shares = torch.rand(count, num_successors, generator=torch.Generator().manual_seed(rng.randrange(999)))
    salts = torch.tensor([rng.randrange(num_salts) for _ in range(count)])
    return Judged(tokens, before - 1, earlier - 1, successors, shares, salts)


def some_tables(kind, bits, isolated):
    orders = [SuccessorTable(order, 1 << bits, isolated=isolated) for order in (3, 2)]
    return kind([*orders, SuccessorTable(1, 64 if isolated else TOKENS, hashed=isolated, isolated=isolated)])


@settings(deadline=None)
@given(
    both_pools(), st.integers(0, 8), st.booleans(), st.integers(1, 8), st.integers(1, 5), st.sampled_from([1, 4, 12])
)
def test_tables_learn_the_same_and_are_followed_alike(both, bits, isolated, num_successors, max_depth, beam):
    rng = both.rng
    tables = [some_tables(kind, bits, isolated) for kind in (SuccessorTables, HostTables)]
    for _ in range(rng.randrange(4)):
        judged = judgements(rng, rng.randrange(1, 20), num_successors)
        if rng.random() < 0.2:  # as of a model in another precision
            judged = replace(judged, shares=judged.shares.bfloat16())
        for each in tables:
            each.learn(judged)
    for one, other in zip(*(each.tables for each in tables), strict=True):
        assert all(torch.equal(column, other.state()[name]) for name, column in one.state().items())
    for pool, each in zip(both.pools, tables, strict=True):
        pool.follow(each, both.chances, first=3, waves=3, beam=beam, max_depth=max_depth)
    both.assert_equal()


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 12))
def test_nodes_of_a_tree_come_in_the_same_order_and_context(seed, num_rows, num_nodes):
    rng = random.Random(seed)
    tree = random_tree(rng, [rng.randrange(9) for _ in range(num_rows)], num_nodes, vocab_size=9)
    histories = [[rng.randrange(9) for _ in range(rng.randrange(1, 4))] for _ in range(num_rows)]
    successors = torch.arange(tree.tokens.numel() * 3).view(-1, 3)
    salts = rng.choice([None, torch.arange(num_rows)])
    one, other = (
        order(tree, histories, salts, successors, successors.float())
        for order in (nodes_in_context, nodes_in_context_by_torch)
    )
    assert all(map(torch.equal, one, other))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 12), st.booleans())
def test_a_round_is_learned_directly_as_it_is_by_way_of_its_nodes(seed, num_rows, num_nodes, isolated):
    rng = random.Random(seed)
    tree = random_tree(rng, [rng.randrange(TOKENS) for _ in range(num_rows)], num_nodes, vocab_size=TOKENS)
    histories = [[rng.randrange(TOKENS) for _ in range(rng.randrange(1, 4))] for _ in range(num_rows)]
    salts = torch.arange(num_rows) if isolated else None
    # As a captured step gives them: part of wider rows.
    found = torch.randint(TOKENS, (num_rows, tree.width + 2, 3), dtype=torch.int32)[:, : tree.width]
    logits = torch.tensor([2.0, 1.03, 0.4]).repeat(num_rows, tree.width + 2, 1)[:, : tree.width]
    verified = Verified(tree.tokens, logits, logits, highest=(found, logits))
    one, other = (some_tables(HostTables, 6, isolated) for _ in range(2))
    one.learn(JudgedTrees(verified, tree, histories, salts))
    other.learn(Judged.of_trees(verified, tree, histories, salts))
    for direct, by_nodes in zip(one.tables, other.tables, strict=True):
        assert all(torch.equal(column, by_nodes.state()[name]) for name, column in direct.state().items())


# Trees


def test_what_the_best_of_all_rows_come_to(monkeypatch):
    paths = torch.rand(5, 9)[:, 2:]
    gains = total_gains(paths)
    monkeypatch.setattr(cost, "kernels", lambda: None)
    assert total_gains(paths) == gains and len(gains) == 7


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 30))
def test_nodes_are_counted_alike(seed, num_rows, num_nodes):
    made = random_tree(random.Random(seed), list(range(num_rows)), num_nodes, vocab_size=TOKENS)
    counts = made.counts_by_source
    with patch.object(tree, "kernels", lambda: None):
        assert replace(made).counts_by_source == counts


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 30))
def test_the_same_path_is_walked(seed, num_rows, num_nodes):
    rng = random.Random(seed)
    tree = random_tree(rng, [rng.randrange(TOKENS) for _ in range(num_rows)], num_nodes, vocab_size=TOKENS)
    chosen = torch.tensor([[rng.randrange(TOKENS) for _ in row] for row in tree.tokens], dtype=torch.int32)
    assert paths(tree, chosen) == paths_in_python(tree, chosen)


# Copies

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4)


@settings(deadline=None)
@given(TEXTS, st.one_of(st.none(), st.integers(0, 60)))
def test_an_index_of_the_kernels_holds_and_finds_the_same(texts, max_tokens):
    one, other = HostIndex(max_tokens), SuffixIndex(max_tokens)
    for text in texts:
        for index in (one, other):
            index.begin()
            index.extend(text[:7])
            index.extend(text[7:])
        assert len(one) == len(other) and one.texts == other.texts
        for pair in product(range(3), repeat=2):
            assert one.occurrences(pair) == other.occurrences(pair)


@settings(deadline=None)
@given(TEXTS, TEXTS, st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_the_same_copies_are_hung(finished, texts, seed, depth, num_nodes, num_drafted, has_room):
    """Below the root and below what was proposed, of texts that grow."""
    options = {"depth": depth, "num_nodes": num_nodes, "num_drafted": num_drafted, "max_past_tokens": 50}
    lookups = [SuffixLookup(**options) for _ in range(2)]
    histories = [Text(text) for text in texts]
    for lookup in lookups:
        for text in finished:
            lookup.finish(Text(text))
    for number in range(3):
        with patch.object(host_pool, "_CAPACITY", 1024 if has_room else 1):
            both = Both(seed + number, len(texts))
        for _ in range(number):
            both.add_something()
        chances = Calibration([*torch.rand(2, NUM_BUCKETS), *SuffixLookup.prior]).chances
        for pool, lookup in zip(both.pools, lookups, strict=True):
            lookup.propose(pool, histories, 3, chances, 6)
        both.assert_equal()
        for history in histories:
            history.ids.append(both.rng.randrange(3))


def test_the_memory_of_an_index_goes_with_it():
    freed = []
    index = HostIndex()
    index.begin()
    index.extend([1, 2, 3])
    finalize(index, freed.append, True)
    del index
    assert freed == [True]


# What cannot be


def test_what_is_out_of_range_is_refused():
    pool = HostPool(*torch.tensor([[1], [2], [3]]))
    one = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(IndexError):
        pool.add(one, one, 0.5 * one, one, one)  # below itself
    with pytest.raises(IndexError):
        pool.add_rows([Columns([5], [0], [1], [1], [NUM_BUCKETS])], torch.ones(3, 2, NUM_BUCKETS))
    table = HostTables([SuccessorTable(1, TOKENS, hashed=False)])
    with pytest.raises(IndexError):
        table.learn(Judged(TOKENS * one[0], one[0], one[0], one, 0.5 * one, one[0]))
    assert pool.width == 1


def test_a_pool_grows_beyond_its_first_room():
    pools = [kind(*torch.tensor([[1, 2], [2, 3], [3, 4]])) for kind in (Pool, HostPool)]
    for pool in pools:
        for n in range(3):
            tokens = torch.arange(700).expand(2, -1) + n
            ones = torch.ones_like(tokens)
            pool.add(tokens, torch.full_like(tokens, n * 699), 0.5 * ones, ones, ones)
    for field, same in zip(pools[0].nodes, pools[1].nodes, strict=True):
        torch.testing.assert_close(field, same)


def test_texts_give_the_pool_that_their_last_tokens_give():
    texts = [[4, 5, 6], [7], [8, 9]]
    roots = torch.tensor([6, 7, 9])
    for one, other in zip(HostPool.of_texts(roots, texts).nodes, Pool(roots, *before_roots(texts)).nodes, strict=True):
        assert torch.equal(one, other)


def test_memory_is_used_again_unless_somebody_may_look_at_it():
    roots, texts = torch.tensor([1, 2]), [[1], [2]]
    pool = HostPool.of_texts(roots, texts)
    address = pool._room.fields.data_ptr()
    del pool
    pool = HostPool.of_texts(roots, texts)
    assert pool._room.fields.data_ptr() == address
    nodes = pool.nodes
    del pool
    other = HostPool.of_texts(roots + 1, texts)
    assert other._room.fields.data_ptr() != address and torch.equal(nodes.tokens[:, 0], roots)


# Without


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "kernels", lambda: None)


def test_without_kernels_torch_does_the_work(no_kernels):
    assert type(make_pool(torch.tensor([3]), [[1, 2, 3]])) is Pool
    assert type(Recall(9)._tables) is SuccessorTables
    assert type(SuffixLookup()._past) is SuffixIndex


def test_the_same_text_with_and_without_kernels(monkeypatch):
    results = []
    for has_kernels in (True, False):
        if not has_kernels:
            monkeypatch.setattr(kernels, "kernels", lambda: None)
        engine = Engine(tiny_model(), budget=16)
        results.append([engine.generate([3, 4, 5], max_new_tokens=60) for _ in range(2)])
    for one, other in zip(*results, strict=True):
        assert one.ids == other.ids and one.stats.rounds == other.stats.rounds


def test_a_compiler_that_fails_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    assert native.load(kernels._SOURCE, ["--no-such-flag"]) is None
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert kernels.kernels.__wrapped__() is None

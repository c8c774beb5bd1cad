"""The C code of `native.c` and `baselines.c` against the slow reference, to the last bit; the same trees everywhere."""

import json
import random
import subprocess
import sys
from array import array
from copy import copy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from graft.bench.baselines.native import extend_leaf, fill, keep_best
from graft.bench.baselines.template import make_template
from graft.errors import GraftError
from graft.spec_decode.calibration import Calibration
from graft.spec_decode.proposers import SuffixLookup, TargetTopK
from graft.spec_decode.proposers.block.tree import Table, levels_of
from graft.spec_decode.proposers.successor_table import SuccessorTable, SuccessorTables
from graft.spec_decode.proposers.suffix import SuffixIndex
from graft.tree import candidates as candidates_module
from graft.tree import native
from graft.tree.candidates import NOBODY, Candidates, Level
from proposers import Text, random_tree

TOKENS = 4  # few, so that equal paths are common
CHANCES = (0.0, 1e-20, 0.004, 0.25, 0.5, 0.9, 1.0)
NUM_SOURCES, NUM_BUCKETS = 7, reference.NUM_BUCKETS
DRAFTED = 1
GOLDEN = Path(__file__).with_name("golden_trees.json")


class Both:
    """A pool and the reference's, which get the same proposals; a random generator and chances."""

    def __init__(self, seed, num_rows):
        self.rng = random.Random(seed)
        self.num_rows = num_rows
        self.texts = [[self.rng.randrange(TOKENS) for _ in range(self.rng.randrange(1, 4))] for _ in range(num_rows)]
        roots = torch.tensor([text[-1] for text in self.texts])
        salts = self.rng.choice([(), [self.rng.randrange(3) for _ in range(num_rows)]])
        self.pools = [kind(roots, self.texts, salts) for kind in (reference.Candidates, Candidates)]
        # Products of such numbers are often equal, or nearly: that is where machines could differ.
        numbers = [self.rng.randrange(1, 20) / 20 for _ in range(3 * NUM_SOURCES * NUM_BUCKETS)]
        self.chances = torch.tensor(numbers).view(3, NUM_SOURCES, NUM_BUCKETS)

    def tokens(self, count, stop=TOKENS):
        return torch.tensor([[self.rng.randrange(stop) for _ in range(count)] for _ in range(self.num_rows)])

    def scores(self, count):
        return torch.tensor([[self.rng.choice(CHANCES) for _ in range(count)] for _ in range(self.num_rows)])

    def add_something(self):
        getattr(self, self.rng.choice(["add", "add_chain", "add_level"]))()

    def add(self):
        count, width = self.rng.randrange(1, 6), self.pools[0].width
        needs = self.rng.choice([None, None, 1, 2, 3])
        sources, score_bucket = self.tokens(count, NUM_SOURCES - 1) + 1, self.tokens(count, NUM_BUCKETS)
        columns = (self.tokens(count), self.tokens(count, width), self.scores(count), sources, score_bucket)
        for candidates in self.pools:
            candidates.add(*columns, needs)

    def add_chain(self):
        length, width = self.rng.randrange(1, 9), self.pools[0].width
        parents = torch.tensor([[self.rng.randrange(width), *range(width, width + length - 1)]] * self.num_rows)
        columns = (self.tokens(length), parents, self.scores(length), self.tokens(length) + 1, self.tokens(length))
        for candidates in self.pools:
            candidates.add(*columns)

    def add_level(self):
        count = self.rng.randrange(1, 6)
        level = Level(self.tokens(count), self.tokens(count, self.pools[0].width), self.scores(count), torch.empty(0))
        going = [self.rng.random() < 0.7 for _ in range(self.num_rows)]
        chances = self.rng.choice([self.chances, None])
        one, other = (candidates.add_level(level, chances, DRAFTED, 2, 0, going, 3) for candidates in self.pools)
        assert one == other

    def assert_equal(self):
        expected, nodes = self.pools[0].rows, self.pools[1].nodes
        agreement = self.pools[1].agreement.tolist()
        names = ("tokens", "parents", "needs", "sources", "score_bucket", "paths", "depths", "before", "earlier")
        columns = [getattr(nodes, name).tolist() for name in names]
        for row, known in enumerate(expected):
            text = self.pools[0].texts[row]
            found = list(zip(*(column[row] for column in columns), agreement[row], strict=True))
            wanted = []
            for n in known:
                own = (n.token, n.parent, n.needs, n.source, n.score_bucket, float(n.path), len(n.words))
                wanted.append((*own, *([*text, *n.words][-2:-4:-1]), n.agreement))
            assert found == wanted


@st.composite
def both_pools(draw):
    both = Both(draw(st.integers(0, 10**6)), draw(st.integers(1, 3)))
    for _ in range(draw(st.integers(0, 6))):
        both.add_something()
    return both


# The pool


@settings(deadline=None)
@given(both_pools())
def test_nodes_are_added(both):
    both.assert_equal()


@settings(deadline=None)
@given(both_pools(), st.sampled_from([NOBODY, DRAFTED]), st.booleans(), st.integers(0, 60), st.data())
def test_equal_paths_become_one_and_the_best_of_all_rows_become_the_tree(both, drafted, weighed, total, data):
    for candidates in both.pools:
        candidates.merge(drafted, both.chances if weighed else None)
    both.assert_equal()
    caps = data.draw(st.lists(st.integers(0, 40), min_size=both.num_rows, max_size=both.num_rows))
    known, candidates = both.pools
    ranking = candidates.ranked(total, caps)
    assert ranking.gains == known.gains(total, caps)
    truths = array("d", [both.rng.uniform(0.2, 1.2) for _ in range(12)])
    assert candidates.ranked(total, caps, truths).gains == known.gains(total, caps, truths=truths)
    for prices in (([total // 2, total], [0.05, 0.2], caps), ([total], [0.0], caps, truths)):
        assert candidates.values_by_need(3, *prices) == known.values_by_need(3, *prices)
    for count in {0, len(ranking) // 2, len(ranking)}:
        assert rows_of(*ranking.tree(99, count)) == as_floats(known.tree(count, caps))
    assert_same_best(both, total)


def rows_of(tree, paths):
    columns = (tree.tokens, tree.parents, tree.sources, tree.score_bucket, tree.probabilities, paths)
    return [list(zip(*(column[row].tolist() for column in columns), strict=True)) for row in range(len(paths))]


def as_floats(rows):
    return [[tuple(map(float, node)) for node in row] for row in rows]


def assert_same_best(both, budget):
    """A budget that is each row's own."""
    known, candidates = both.pools
    assert rows_of(*candidates.best(budget, 99)) == as_floats(
        known.tree(budget * both.num_rows, [budget] * both.num_rows)
    )


@settings(deadline=None)
@given(both_pools(), st.data())
def test_calibration_counts_what_the_target_has_judged(both, data):
    known, candidates = both.pools
    for each in both.pools:
        each.merge(DRAFTED, both.chances)
    emitted = []
    for nodes in known.rows:  # some way down what was proposed, and on: else hardly any deep path comes true
        path = data.draw(st.sampled_from([node.words for node in nodes]))
        more = data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=0 if path else 1, max_size=2))
        emitted.append([*path, *more])
    tried, fitted = torch.full_like(both.chances, 16.0), torch.full_like(both.chances, 4.0)
    expected = [tried.clone(), fitted.clone()]
    for nodes, tested in zip(known.rows, known.judged(emitted), strict=True):
        for place, fits in tested.items():
            cell = (nodes[place].agreement, nodes[place].source, nodes[place].score_bucket)
            expected[0][cell] += 1
            expected[1][cell] += fits
    candidates.count(emitted, tried, fitted, 1024.0)
    assert torch.equal(tried, expected[0]) and torch.equal(fitted, expected[1])
    faded = tried.clone()
    candidates.count(emitted, faded, fitted, 10.0)
    assert (faded <= 10.0).all()


@settings(deadline=None)
@given(both_pools(), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_only_the_best_are_kept_and_a_copy_stays_as_it_is(both, counts):
    kept = copy(both.pools[1])
    before = kept.nodes.paths.clone()
    counts = counts[: both.num_rows]
    both.pools[0].keep_best(counts)
    keep_best(both.pools[1], counts)
    both.assert_equal()
    assert torch.equal(kept.nodes.paths, before)


# Tables


def some_tables(bits, isolated):
    kinds = [(3, bits, isolated), (2, bits, isolated), (1, 6 if isolated else None, isolated)]
    made = [
        SuccessorTable(order, TOKENS if b is None else 1 << b, hashed=b is not None, isolated=isolated)
        for order, b, isolated in kinds
    ]
    return reference.Tables(kinds), SuccessorTables(made)


def learn_something(both, known, tables, num_successors):
    """Trees judged; logits are such that no share is at the edge of a bucket."""
    rng = both.rng
    tree = random_tree(rng, [text[-1] for text in both.texts], rng.randrange(6), vocab_size=TOKENS)
    successors = both_tokens(rng, (*tree.tokens.shape, num_successors))
    logits = torch.tensor([rng.choice([3.0, 5.0, 2.25]) - 1.3 * n for n in range(num_successors)]).sort(
        descending=True
    )[0]
    logits = logits.expand(*tree.tokens.shape, -1).contiguous()
    is_text, salts = rng.random() < 0.3, [rng.randrange(3) for _ in both.texts]
    before, earlier = candidates_module.before_roots(both.texts)
    tables.learn(
        TargetTopK(tree.tokens, tree.parents, tree.sources, successors.int(), logits, before, earlier, salts, is_text)
    )
    ngrams = []
    for row, text in enumerate(both.texts):
        order = range(tree.width) if is_text else reversed(range(tree.width))
        for node in order:
            at, words = 0 if tree.sources[row, node] < 0 else node, []  # padding passes for the root
            while at:
                words.insert(0, int(tree.tokens[row, at]))
                at = int(tree.parents[row, at])
            context = [candidates_module.NO_TOKEN, candidates_module.NO_TOKEN, *text, *words]
            ngram = (context[-1], context[-2], context[-3], salts[row])
            ngrams.append((ngram, successors[row, node].tolist(), logits[row, node].tolist()))
    known.learn(ngrams)


def both_tokens(rng, shape):
    return torch.tensor([rng.randrange(TOKENS) for _ in range(torch.Size(shape).numel())]).view(shape)


tables_and_pools = (both_pools(), st.integers(0, 8), st.booleans(), st.integers(1, 8), st.integers(1, 5))


@settings(deadline=None)
@given(*tables_and_pools, st.sampled_from([1, 4, 12]))
def test_tables_learn_and_are_followed(both, bits, isolated, num_successors, max_depth, beam):
    known, tables = some_tables(bits, isolated)
    for _ in range(both.rng.randrange(4)):
        learn_something(both, known, tables, num_successors)
    for candidates, each in zip(both.pools, (known, tables.structs), strict=True):
        candidates.follow(each, both.chances, first=3, waves=3, beam=beam, max_depth=max_depth)
    both.assert_equal()


@settings(deadline=None)
@given(*tables_and_pools)
def test_templates_are_filled_and_a_leaf_goes_on(both, bits, isolated, num_successors, max_depth):
    known, tables = some_tables(bits, isolated)
    known.kinds, known.rows, tables = known.kinds[2:], known.rows[2:], SuccessorTables(tables.tables[2:])
    for _ in range(both.rng.randrange(3)):
        learn_something(both, known, tables, num_successors)
    templates = [make_template(both.rng.choice([(), (2,), (3, 4, 2), (8, 1)])) for _ in range(both.num_rows)]
    written = [list(zip(t.parents[: t.count], t.ranks[: t.count], t.depths[: t.count], strict=True)) for t in templates]
    both.pools[0].fill(known, written, 0.5, 2, max_depth)
    fill(both.pools[1], tables.structs, templates, 0.5, 2, max_depth)
    both.assert_equal()
    both.pools[0].extend_leaf(known, 0.5, 3, max_depth)
    extend_leaf(both.pools[1], tables.structs, 0.5, 3, max_depth)
    both.assert_equal()


@pytest.mark.parametrize("edge", range(1, NUM_BUCKETS))
def test_a_probability_is_in_the_bucket_of_its_face_value(edge):
    at = torch.tensor(0.5**edge, dtype=torch.float64).sqrt().float()
    around = [torch.nextafter(at, torch.tensor(0.0)), at, torch.nextafter(at, torch.tensor(1.0))]
    for probability in around:
        candidates = Candidates(torch.tensor([1]), [[1]])
        one = torch.ones(1, 1, dtype=torch.int64)
        chances = torch.ones(3, 2, NUM_BUCKETS)
        candidates.add_level(Level(one, 0 * one, probability.view(1, 1), one), chances, 1, 1, 0, [True], 1)
        assert int(candidates.nodes.score_bucket[0, 1]) == reference.bucket_of(probability)


@given(st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=8))
def test_shares_of_logits_are_those_of_a_softmax(logits):
    logits = torch.tensor(sorted(logits, reverse=True))
    table = SuccessorTable(1, 9, hashed=False)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    tokens = torch.arange(len(logits), dtype=torch.int32)
    SuccessorTables([table]).learn(
        TargetTopK(zero, zero, zero, tokens.view(1, 1, -1), logits.view(1, 1, -1), [-1], [-1], [0])
    )
    buckets = (table.state()["entries"][0, : len(logits)] % NUM_BUCKETS).tolist()
    for bucket, share in zip(buckets, logits.double().softmax(dim=0).tolist(), strict=True):
        assert bucket in {reference.bucket_of(share * (1 + error)) for error in (-1e-6, 0, 1e-6)}


# Copies

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    TEXTS,
    TEXTS,
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0, 1, 7]),
)
def test_copies_are_attached(finished, texts, seed, depth, num_nodes, num_drafted, has_room, num_prompt):
    """Below the root and below what was proposed: of texts that grow, some of them a group's, and of finished ones."""
    lookup = SuffixLookup(depth=depth, num_nodes=num_nodes, num_drafted=num_drafted, max_past_tokens=50)
    groups = [random.Random(seed + row).choice([None, 1, 2]) for row in range(len(texts))]
    histories = [Text(list(text), num_prompt, group=group) for text, group in zip(texts, groups, strict=True)]
    for text in finished:
        lookup.finish(Text(list(text), 0))
    while sum(map(len, finished)) > 50 and len(finished) > 1:
        finished = finished[1:]
    with (
        patch.object(candidates_module, "_SPARE", []),
        patch.object(candidates_module, "_CAPACITY", 1024 if has_room else 1),
    ):
        for number in range(3):
            both = Both(seed + number, len(texts))
            for _ in range(number):
                both.add_something()
            chances = Calibration([*both.chances[0, :2], *SuffixLookup.prior]).acceptance_probs
            known = [history.ids for history in histories]
            beside = [
                [
                    (other.ids, num_prompt)
                    for other in histories
                    if other is not own and None is not own.group == other.group
                ]
                for own in histories
            ]
            both.pools[0].attach_copies(known, finished, beside, 3, chances, num_drafted, 6, depth, num_nodes)
            lookup.propose(both.pools[1], histories, 3, chances, 6)
            both.assert_equal()
            for history in histories:
                history.ids.append(both.rng.randrange(3))


@settings(deadline=None)
@given(TEXTS, st.one_of(st.none(), st.integers(0, 60)))
def test_an_index_holds_the_last_texts_that_it_has_room_for(texts, max_tokens):
    index = SuffixIndex(max_tokens)
    for number, text in enumerate(texts, start=1):
        index.begin()
        index.extend(text[:7])
        index.extend(text[7:])
        left = index.texts
        assert left == texts[number - len(left) : number] and len(index) == sum(map(len, left))
        assert max_tokens is None or len(index) <= max_tokens or len(left) == 1
        if max_tokens is not None and len(left) < number:  # one more would have been too many
            assert sum(map(len, texts[number - len(left) - 1 : number])) > max_tokens


# Trees


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 30))
def test_nodes_are_counted_by_source(seed, num_rows, num_nodes):
    rng = random.Random(seed)
    tree = random_tree(rng, [rng.randrange(TOKENS) for _ in range(num_rows)], num_nodes, vocab_size=TOKENS)
    most = int(tree.sources.max())
    assert tree.counts_by_source == [[row.count(n) for n in range(most + 1)] for row in tree.sources.tolist()]


# Failures


def test_a_failure_in_one_of_the_rows_is_told():
    candidates = Candidates(torch.ones(40, dtype=torch.int64), [[1]] * 40)
    parents = torch.zeros(40, 1, dtype=torch.int64)
    parents[33] = 7  # there is no such node
    level = Level(parents, parents, parents + 0.5, parents)
    with pytest.raises(IndexError):
        candidates.add_level(level, None, DRAFTED, 1, 0, [True] * 40, 1)
    assert candidates.width == 1


# The same on every machine


def golden_rounds():
    """Trees of rounds in which everything that proposes has its say, by numbers that are the same everywhere."""
    rounds = []
    for seed in range(12):
        both = Both(seed, 1 + seed % 3)
        both.chances = both.chances.repeat(1, 1, 2)  # copies have as many buckets
        tables = some_tables(5, isolated=seed % 2 == 1)
        for _ in range(4):
            learn_something(both, *tables, 8)
        texts = [Text([both.rng.randrange(3) for _ in range(60)], 0) for _ in both.texts]
        past, lookup = [[both.rng.randrange(3) for _ in range(60)]], SuffixLookup()
        lookup.finish(Text(past[0], 0))
        own = [text.ids for text in texts]
        limits = {"num_places": 10, "max_depth": 8, "length": 32, "num_nodes": 40}
        both.pools[0].attach_copies(own, past, [[] for _ in own], 2, both.chances, **limits)
        lookup.propose(both.pools[1], texts, 2, both.chances, 8)
        for _ in range(5):
            both.add_level()
        for candidates, each in zip(both.pools, (tables[0], tables[1].structs), strict=True):
            candidates.follow(each, both.chances, 4, waves=3, beam=6, max_depth=8)
            candidates.merge(DRAFTED, both.chances)
        both.assert_equal()
        assert_same_best(both, 40)
        tree, shares = both.pools[1].best(40, 8)
        trees = [column.tolist() for column in (tree.tokens, tree.parents, tree.sources, tree.score_bucket)]
        rounds.append([*trees, [[share.hex() for share in row] for row in shares.tolist()]])
    return rounds


def test_the_same_proposals_give_the_tree_that_was_recorded():
    """On another machine. To record anew: python tests/test_native.py"""
    assert golden_rounds() == json.loads(GOLDEN.read_text())


COMPILERS = {"cc": ["cc"], "zig": [sys.executable, "-m", "ziglang", "cc"]}


def works(command, folder):
    """Whether the compiler is there, with the headers of a C library."""
    source = folder / "try.c"
    source.write_text("#include <stdlib.h>\nvoid *room(void) { return malloc(1); }\n")
    try:
        words = [*command, "-fPIC", "-shared", str(source), "-o", str(folder / "try.so")]
        return subprocess.run(words, capture_output=True, timeout=100).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("-O0", marks=pytest.mark.slow),
        pytest.param("-O2 -ffp-contract=off", marks=pytest.mark.slow),  # as the library that all tests call
        "-O3 -march=native -ffp-contract=fast",
    ],
)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_compiler_gives_the_trees_that_were_recorded(monkeypatch, executable_folder, compiler, flags):
    """However hard it tries: a machine that joins a product and a sum in one step is no different."""
    if not works(COMPILERS[compiler], executable_folder):
        pytest.skip(f"there is no {compiler} that makes a library")
    source = Path(native.__file__).with_name("native.c")
    command = [*COMPILERS[compiler], *flags.split(), "-std=c99", "-fPIC", "-shared", str(source)]
    subprocess.run([*command, "-o", str(executable_folder / "_native.abi3.so")], check=True, timeout=600)
    monkeypatch.setattr(native, "HERE", executable_folder)
    native.native.cache_clear()
    try:
        assert Path(native.native()._name).parent == executable_folder
        assert golden_rounds() == json.loads(GOLDEN.read_text())
    finally:
        monkeypatch.undo()
        native.native.cache_clear()


# What cannot be


def test_indices_out_of_range_are_refused():
    candidates = Candidates(torch.tensor([1]), [[3, 2, 1]])
    one = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(IndexError):
        candidates.add(one, one, 0.5 * one, one, one)  # below itself
    table = SuccessorTables([SuccessorTable(1, TOKENS, hashed=False)])
    said = (one[None].int(), 0.5 * one[None])
    with pytest.raises(IndexError):
        table.learn(TargetTopK(TOKENS * one, 0 * one, 0 * one, *said, [1], [1], [0]))
    assert candidates.width == 1


def test_a_tree_of_no_levels_has_no_nodes():
    table = Table(torch.ones(1, 1, 2, dtype=torch.int32), torch.full((1, 1, 2), 0.5), -torch.ones(1, 1, 2).int())
    assert levels_of(table, num_levels=0, num_nodes=4) == []
    assert [level.tokens.tolist() for level in levels_of(table, num_levels=1, num_nodes=4)] == [[[1, 1]]]


def test_a_row_may_not_rank_more_nodes_than_it_has_room_for():
    candidates = Candidates(torch.tensor([1]), [[3, 2, 1]])
    counts, costs, caps, values = array("q", [2]), array("d", [0.0]), array("q", [2]), array("d", [0.0])
    addresses = [column.buffer_info()[0] for column in (counts, costs, caps, values)]
    with pytest.raises(IndexError):
        native.native().graft_values_by_need(candidates.ref, 0, 1, *addresses[:2], 1, addresses[2], None, addresses[3])


def test_memory_is_reused_unless_somebody_has_a_view_of_it():
    roots, texts = torch.tensor([1, 2]), [[1], [2]]
    candidates = Candidates(roots, texts)
    memory = candidates.ref
    del candidates
    candidates = Candidates(roots, texts)
    assert candidates.ref is memory
    nodes = candidates.nodes
    del candidates
    other = Candidates(roots + 1, texts)
    assert other.ref is not memory and torch.equal(nodes.tokens[:, 0], roots)


@pytest.mark.parametrize("trouble", ["not built", "of another machine"])
def test_a_library_that_cannot_be_loaded_says_what_to_do(monkeypatch, tmp_path, trouble):
    monkeypatch.setattr(native, "HERE", tmp_path)
    if trouble == "of another machine":
        (tmp_path / "_native.abi3.so").write_bytes(b"\x7fELF of something else")
    with pytest.raises(GraftError, match=r"_native cannot be loaded .* install the package again"):
        native.native.__wrapped__()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_rounds(), separators=(",", ":")).replace("]],[[", "]],\n[[") + "\n")

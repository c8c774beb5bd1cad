"""The kernels of a round, in C and in Triton, against the reference, to the last bit: see `graft.tree.device`."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest
import torch

from drafted import Level, levels_of
from graft.drafters.block.tree import Table
from graft.drafters.block.tree import grown as grown_on_host
from graft.model.hashing import mix64
from graft.model.kv_cache import Row
from graft.model.noise import NUM_KINDS, RowDraws
from graft.model.step import FlatStep
from graft.tree.device import c_kernels
from graft.tree.device.buffers import MAX_LENGTH, Draws, Others, Pool, PoolShape, Ranked, Tables, Texts, Trees

pytest.importorskip("triton")

import triton
import triton.language as tl

import reference
from graft.spec_decode.calibration import NOISE_ENDS
from graft.tree.device import noise, triton_kernels
from graft.tree.device.round import alongside
from proposers import best_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAFTED, SUFFIX, TRIGRAM = 1, 2, 4  # sources; `past` is the one behind SUFFIX
NUM_SOURCES, NUM_BUCKETS = 7, 32 * 8  # of copies: by match, and in sampled rows by noise
NUM_BEAMS, LEVELS = 4, (4, 8, 8)
NUM_SLOTS, NUM_DRAFTS = 5, 20  # of a block, whose tree one pass gives
VOCABULARY = 9  # of the tables; texts have fewer tokens, so that equal paths are common
CONTEXT = RING = 2048
MOST_NODES, TOTAL, SIZE = 40, 30, 48
Q = (0.0, 1e-9, 0.004, 0.25, 0.5, 0.5**0.5, 0.9, 1.0)


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Judged(NamedTuple):
    """What the target says of the nodes of trees, or of the tokens of texts."""

    tokens: torch.Tensor  # [B, W]
    parents: torch.Tensor  # [B, W]
    successors: torch.Tensor  # [B, W, k] likeliest first
    logits: torch.Tensor  # [B, W, k]
    before: list[int]  # [B] the token before each root
    earlier: list[int]  # [B] the token before that
    is_text: bool

    def ngrams(self):
        """As the reference learns them: of equal ones, the last of a text and the likeliest of a tree stay."""
        for row, (tokens, parents) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True)):
            places = range(len(tokens))
            for place in places if self.is_text else reversed(places):
                words, at = [], place
                while at:
                    words.insert(0, tokens[at])
                    at = parents[at]
                last = [self.earlier[row], self.before[row], tokens[0], *words][:-4:-1]
                yield (*last, 0), self.successors[row, place].tolist(), self.logits[row, place].tolist()


class Case:
    """A random round: texts, drafted levels, what the tables have learned, and acceptance probabilities.

    has_block: one pass drafts a whole tree; else each pass drafts a level.
    """

    def __init__(self, seed, num_passes, has_block):
        self.rng = rng = random.Random(seed)
        self.num_rows, self.num_tokens, self.num_passes = 1 + seed % 3, 3 + seed % 4, num_passes
        lengths = [rng.choice((1, 2, 3, 30, 1500)) for _ in range(self.num_rows)]
        self.texts = [self.tokens(length) for length in lengths]
        self.past = [self.tokens(rng.randrange(1, 60)) for _ in range(6)]
        self.max_depth = rng.choice((3, 12, 40))
        self.caps = [MOST_NODES, *(rng.choice((0, 7, MOST_NODES)) for _ in range(self.num_rows - 1))]
        # Products of such numbers are often equal, or nearly: there machines could differ.
        values = [rng.randrange(1, 20) / 20 for _ in range(3 * NUM_KINDS * NUM_SOURCES * NUM_BUCKETS)]
        self.acceptance_probs = torch.tensor(values).view(3 * NUM_KINDS, NUM_SOURCES, NUM_BUCKETS)
        temperatures = [rng.choice((0.0, 0.3, 0.7, 1.0)) if seed % 2 else 0.0 for _ in range(self.num_rows)]
        self.draws = [
            RowDraws(rng.randrange(2**62), len(text), temperature) if temperature else None
            for text, temperature in zip(self.texts, temperatures, strict=True)
        ]
        self.num_beams, self.num_depths = (0, NUM_SLOTS) if has_block else (NUM_BEAMS, 1)
        self.sizes = (NUM_DRAFTS,) if has_block else LEVELS
        if has_block:
            self.table = table(rng, self.num_rows, NUM_SLOTS, self.num_tokens)
            trees = grown_on_host(self.table, NUM_SLOTS, NUM_DRAFTS)
            self.passes = [levels_of(trees.tokens, trees.parents, trees.probabilities)]
        else:
            self.passes = [[self.level(number)] for number in range(len(LEVELS))]
        self.learned = [self.judged(is_text) for is_text in (False, True, False)]

    def tokens(self, count):
        return [self.rng.randrange(self.num_tokens) for _ in range(count)]

    def level(self, number):
        """A drafted level, whose parents are beams of the level before."""
        count, rows = LEVELS[number], range(self.num_rows)
        first = 1 + sum(LEVELS[: number - 1]) if number else 0
        end = first + NUM_BEAMS if number else 1
        parents = torch.tensor([[self.rng.randrange(first, end) for _ in range(count)] for _ in rows])
        q = torch.tensor([[self.rng.choice(Q) for _ in range(count)] for _ in rows])
        return Level(torch.tensor([self.tokens(count) for _ in rows]), parents, q, q)

    def judged(self, is_text, num_rows=2, width=12):
        rng, nodes = self.rng, num_rows * width
        parents = [[max(n - 1, 0) if is_text else rng.randrange(max(n, 1)) for n in range(width)]] * num_rows
        successors = torch.tensor([rng.sample(range(VOCABULARY), 8) for _ in range(nodes)], dtype=torch.int32)
        spread = [rng.choice((0.0, 1.0, 2.5, 40.0)) for _ in range(nodes)]
        logits = torch.tensor([sorted((s * rng.random() for _ in range(8)), reverse=True) for s in spread])
        before, earlier = ([rng.randrange(-1, self.num_tokens) for _ in range(num_rows)] for _ in range(2))
        tokens = torch.tensor([self.tokens(width) for _ in range(num_rows)])
        shape = (num_rows, width, 8)
        said = (successors.view(shape), logits.view(shape))
        return Judged(tokens, torch.tensor(parents), *said, before, earlier, is_text)

    def expected(self, shape):
        """The reference's candidates, and by pass the probability that a beam is accepted."""
        learned = reference.Tables(((3, 18, False), (2, 18, False), (1, None, False)))
        for judged in self.learned:
            learned.learn(judged.ngrams())
        made, reach = reference.Candidates([text[-1] for text in self.texts], self.texts, (), self.draws), []
        limits = (shape.num_places, self.max_depth, MAX_LENGTH, shape.copy_nodes)
        nobody = [[]] * self.num_rows
        copies = (self.texts, [self.past] * self.num_rows, nobody, SUFFIX, self.acceptance_probs, *limits)
        made.attach_copies(*copies)
        first, going = made.width - 1, [cap > 0 for cap in self.caps]
        for number, levels in enumerate(self.passes[: self.num_passes], start=1):
            for level in levels:
                given = (level, self.acceptance_probs, DRAFTED, number, first, going, self.num_beams)
                reached = made.add_level(*given)
            reach.append(float(np.float32(0) + sum(map(np.float32, reached), np.float32(0))))
        if self.num_passes:
            made.attach_copies(*copies)
        made.follow(learned, self.acceptance_probs, TRIGRAM, shape.num_waves, shape.beam, self.max_depth)
        return made, reach


class OnDevice:
    """The same round by kernels."""

    def __init__(self, case, kernels):
        self.case, self.kernels, rows = case, kernels, case.num_rows
        beam = MOST_NODES // 4
        self.shape = PoolShape(rows, MOST_NODES, beam, case.sizes, num_waves=5, beam=beam)
        self.pool = Pool(rows, self.shape.width + 37, DEVICE)
        self.pool.tokens.fill_(5)
        self.pool.paths.fill_(0.5)  # left by the round before
        self.texts = Texts(rows + 2, CONTEXT, RING, DEVICE)
        self.table_rows = numbers(*range(rows + 1, 1, -1))
        for text, table_row in zip(case.texts, self.table_rows.tolist(), strict=True):
            self.texts.own[table_row, : len(text)] = numbers(*text)
            self.texts.lengths[table_row] = len(text)
        past = [token for text in case.past for token in (*text, -1)]
        self.texts.past[: len(past)] = numbers(*past)
        self.texts.past_end[0] = len(past)
        self.acceptance_probs = case.acceptance_probs.to(DEVICE)
        self.caps, self.max_depths = numbers(*case.caps), numbers(*[case.max_depth] * rows)
        draws = [each or RowDraws(0, 0, 0.0) for each in case.draws]
        powers = [[each.share_power(bucket / 2) for bucket in range(16)] for each in draws]
        self.draws = Draws(
            numbers(*(each.kind for each in draws)),
            torch.tensor([each.seed for each in draws], device=DEVICE),
            torch.tensor(powers, dtype=torch.float64, device=DEVICE),
        )
        factors = mix64(torch.arange(4)) | 1
        self.tables = Tables.make((1 << 18, 1 << 18, VOCABULARY), (True, True, False), factors, False, DEVICE)
        for judged in case.learned:
            self.learn(judged)

    def learn(self, judged):
        rows, width = judged.tokens.shape
        flat = [part.flatten().int().to(DEVICE) for part in (judged.tokens, judged.parents)]
        places, of_rows = numbers(*[*range(width)] * rows), numbers(*(r for r in range(rows) for _ in range(width)))
        before = torch.tensor([judged.before, judged.earlier], dtype=torch.int32, device=DEVICE)
        successors, logits = (part.flatten(0, 1).to(DEVICE) for part in (judged.successors, judged.logits))
        starts = numbers(*range(0, rows * width, width))
        salts = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        of_step = (*flat, places, of_rows, starts, before, salts, successors, logits)
        self.kernels.learn(self.tables, *of_step, rows, judged.is_text)

    def copy(self, places, first):
        """Adds copies of earlier text below the places [R, P]."""
        nobody = torch.zeros_like(self.table_rows)
        others = Others(nobody.long(), nobody, nobody)
        of_rows = (self.table_rows, others, places, self.acceptance_probs, self.max_depths, self.draws)
        self.kernels.add_copies(self.pool, self.shape, self.texts, *of_rows, SUFFIX, first, CONTEXT)

    def drafted(self):
        """The nodes that each pass drafts."""
        case = self.case
        if case.num_depths > 1:
            return [grown(self.kernels, case.table, NUM_SLOTS, NUM_DRAFTS)]
        return [level for (level,) in case.passes]

    def propose(self):
        """All candidates; returns, by pass that was made, the probability that a beam is accepted."""
        case, pool, shape = self.case, self.pool, self.shape
        self.kernels.begin(pool, shape, self.texts, self.table_rows)
        self.copy(torch.zeros_like(self.table_rows)[:, None], first=1)
        most = len(case.sizes)
        made = numbers(*[1] * min(case.num_passes, 1), *[0] * (most + 1))
        thresholds = torch.full((most + 1,), -1.0, device=DEVICE)
        thresholds[case.num_passes] = 1e9  # the pass that is not made
        reaches = torch.zeros(most + 1, device=DEVICE)
        reached = []
        for number, nodes in enumerate(self.drafted()):
            columns = [part.flatten().to(DEVICE) for part in (nodes.tokens, nodes.parents, nodes.probabilities)]
            given = (self.acceptance_probs, self.draws, self.caps, thresholds, reaches, made)
            self.kernels.add_level(pool, shape, number, *columns, *given, DRAFTED, case.num_beams, case.num_depths)
            reached += [float(reaches[number + 1])] if number < case.num_passes else []
        assert made.tolist()[: most + 1] == [number < case.num_passes for number in range(most + 1)]
        places = torch.zeros(case.num_rows, shape.num_places, dtype=torch.int32, device=DEVICE)
        self.kernels.choose_places(pool, shape, made, places, self.max_depths)
        self.copy(places, shape.first_copy)
        salts = torch.zeros(case.num_rows, dtype=torch.int64, device=DEVICE)
        of_rows = (salts, self.acceptance_probs, self.max_depths, self.draws, self.texts, self.table_rows)
        self.kernels.follow(pool, shape, self.tables, *of_rows, TRIGRAM)
        return reached


def listed(columns, paths, num_rows):
    """By row, the nodes that are no padding: their paths' tokens, probabilities and the other columns."""
    tokens, parents, *others = (part.tolist() for part in columns)
    found = []
    for row in range(num_rows):
        nodes = []
        for node in (paths[row] > 0).nonzero().flatten().tolist():
            words, at = [], node
            while at:
                words.append(tokens[row][at])
                at = parents[row][at]
            nodes.append((words[::-1], float(paths[row, node]), *(part[row][node] for part in others)))
        found.append(nodes)
    return found


def assert_same_nodes(made, device, is_merged):
    pool, width, num_rows = device.pool, device.shape.width, len(made.rows)
    there = [pool.tokens, pool.parents, pool.depths, pool.needs, pool.sources, pool.buckets]
    there += [pool.agreement] if is_merged else []
    expected = []
    for nodes in made.rows:
        known = [node for node in nodes if node.path > 0]
        columns = [(len(n.words), n.needs, n.source, n.score_bucket, n.agreement)[: len(there) - 2] for n in known]
        expected.append([(list(n.words), float(n.path), *own) for n, own in zip(known, columns, strict=True)])
    assert listed(there, pool.paths[:, :width].cpu(), num_rows) == expected


def table(rng, num_rows, num_slots, num_tokens, num_parents=3, num_children=4):
    """What follows each of some tokens, slot by slot. Paths are often equally likely, and some tokens have no child."""
    shape = (num_rows, num_slots * num_parents, num_children)
    tokens = torch.tensor([rng.randrange(num_tokens) for _ in range(math.prod(shape))], dtype=torch.int32)
    q = torch.tensor([sorted(rng.choices(Q, k=num_children), reverse=True) for _ in range(math.prod(shape[:2]))])
    places = range(-1, num_parents)
    slots = torch.arange(num_slots).repeat_interleave(num_parents)[:, None]
    chosen = torch.tensor([rng.choice(places) for _ in range(math.prod(shape))]).view(shape)
    entries = ((slots + 1) * num_parents + chosen).where((chosen >= 0) & (slots + 1 < num_slots), -1)
    return Table(tokens.view(shape), q.view(shape), entries.int())


def grown(kernels, table, num_levels, num_nodes):
    """The best-first trees, by a kernel."""
    device = torch.device("cpu") if kernels is c_kernels else DEVICE
    trees = Trees(torch.full((5, len(table.tokens), num_nodes), 77, dtype=torch.int32, device=device))
    kernels.grow(*(part.to(device) for part in table), num_levels, trees)
    return Trees(trees.numbers.cpu())


@pytest.mark.parametrize(
    ("num_rows", "num_parents", "num_children", "num_levels", "num_nodes"),
    [(3, 4, 3, 6, 20), (2, 1, 40, 6, 60), (2, 4, 3, 2, 30), (3, 1, 1, 6, 60), (1, 4, 3, 6, 1)],
)
def test_best_first_trees_are_the_same_in_c_and_in_triton(num_rows, num_parents, num_children, num_levels, num_nodes):
    made = table(random.Random(0), num_rows, 6, 50, num_parents, num_children)
    one, other = (grown(kernels, made, num_levels, num_nodes) for kernels in (c_kernels, triton_kernels))
    assert one.numbers.tolist() == other.numbers.tolist()


CASES = [(seed, *which) for seed, *which in ((0, 0, False), (3, 3, False), (4, 1, True), (1, 1, False), (2, 3, False))]
MORE = [*((seed, 3, False) for seed in range(5, 40)), *((seed, 1, True) for seed in range(5, 20))]


@pytest.mark.parametrize(
    ("kernels", "seed", "num_passes", "has_block"),
    [
        *((c_kernels, *case) for case in (*CASES, *MORE)),
        *((triton_kernels, *case) for case in CASES[:3]),
        *(pytest.param(triton_kernels, *case, marks=pytest.mark.slow) for case in (*CASES[3:], *MORE)),
    ],
)
def test_a_round_is_that_of_the_reference(kernels, seed, num_passes, has_block):
    if kernels is c_kernels and DEVICE.type != "cpu":
        pytest.skip("C reads a CPU's tensors, and here they are on a GPU")
    case = Case(seed, num_passes, has_block)
    device = OnDevice(case, kernels)
    made, reach = case.expected(device.shape)
    assert device.propose() == reach
    assert_same_nodes(made, device, is_merged=False)

    made.merge(DRAFTED, case.acceptance_probs)
    pool, shape, num_rows = device.pool, device.shape, case.num_rows
    kernels.merge(pool, shape, device.acceptance_probs, device.draws.kinds, DRAFTED)
    assert_same_nodes(made, device, is_merged=True)

    nodes = torch.zeros(num_rows, MOST_NODES, dtype=torch.int32, device=DEVICE)
    paths, needs = torch.zeros(nodes.shape, device=DEVICE), torch.zeros_like(nodes)
    ranked = Ranked(nodes, paths, needs, torch.zeros_like(nodes[:, 0]))
    kernels.rank(pool, shape, device.caps, ranked)
    kernels.select(ranked, device.caps, numbers(TOTAL))
    rows = [Row(at, length=len(text) - 1) for at, text in zip(device.table_rows.tolist(), case.texts, strict=True)]
    check_step(device, ranked, FlatStep(rows, best_of(made, TOTAL, case.caps)))

    likely = [[node.words for node in nodes if node.path > 0] for nodes in made.rows]
    check_outcome(device, made, [[*case.rng.choice(words), *case.tokens(3)] for words in likely])


def check_step(device, ranked, expected):
    """The trees as a flat step, with padding behind them."""
    columns, by_row = (torch.full(shape, 77, dtype=torch.int32, device=DEVICE) for shape in ((6, 64), (4, 8)))
    texts, origins = device.texts, torch.zeros(64, dtype=torch.int32, device=DEVICE)
    lay_out, tree = device.kernels.lay_out, (device.pool, device.shape, ranked, texts, device.table_rows)
    lay_out(*tree, columns, by_row, origins, SIZE)
    count, rows = expected.num_tokens, device.case.num_rows
    assert columns[:, :count].tolist() == expected.columns[:, :count].tolist()
    assert by_row[:, :rows].tolist() == expected.by_row[:, :rows].tolist()
    padding = [[rows if column == 4 else 0] * (SIZE - count) for column in range(6)]
    assert columns[:, count:SIZE].tolist() == padding and by_row[:, rows].tolist() == [0] * 4
    wide, spread = MOST_NODES + 2, torch.full((6, 128), 77, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros_like(by_row)
    origins = torch.zeros(128, dtype=torch.int32, device=DEVICE)
    lay_out(*tree, spread, starts, origins, rows * wide, stride=wide)
    for row, (start, size) in enumerate(by_row[:2, :rows].T.tolist()):
        own, rest = spread[:, row * wide : (row + 1) * wide].split([size, wide - size], dim=1)
        assert own.equal(columns[:, start : start + size]) and starts[:2, row].tolist() == [row * wide, size]
        assert rest.tolist() == [[rows if column == 4 else 0] * (wide - size) for column in range(6)]


def check_outcome(device, made, emitted):
    """Texts grow by what was emitted, and proposals are counted."""
    case, texts, rows = device.case, device.texts, device.case.num_rows
    tried, fitted = torch.zeros(2, *case.acceptance_probs.shape, dtype=torch.int32)
    for row, judged in enumerate(made.judged(emitted)):
        for place, fits in judged.items():
            node = made.rows[row][place]
            cell = (3 * made._kind(row) + node.agreement, node.source, node.score_bucket)
            tried[cell] += 1
            fitted[cell] += fits
    width = max(map(len, emitted))
    tokens = torch.zeros(rows, width, dtype=torch.int32, device=DEVICE)
    for row, new in enumerate(emitted):
        tokens[row, : len(new)] = numbers(*new)
    counts, nodes, places = numbers(*map(len, emitted)), torch.zeros_like(tokens), torch.zeros_like(tokens)
    accepted, committed = torch.zeros(2, rows, dtype=torch.int32, device=DEVICE)
    keys = torch.zeros(rows, width + 1, dtype=torch.int64, device=DEVICE)
    starts = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    given = (starts, counts, tokens, nodes, places, accepted, committed)
    device.kernels.advance(texts, device.table_rows, *given, device.pool.factors, keys)
    for text, table_row, new in zip(case.texts, device.table_rows.tolist(), emitted, strict=True):
        ids = [*text, *new]
        assert texts.own[table_row, : texts.lengths[table_row]].tolist() == ids
    assert committed.tolist() == [len(text) - 1 for text in case.texts]
    assert accepted.tolist() == [len(new) - 1 for new in emitted]
    counted = torch.zeros(2, *case.acceptance_probs.shape, dtype=torch.int32, device=DEVICE)
    device.kernels.count(device.pool, device.shape, counts, keys, device.draws.kinds, *counted)
    assert counted.tolist() == torch.stack([tried, fitted]).tolist()


def test_a_tree_of_no_levels_has_no_nodes():
    table = Table(torch.ones(1, 1, 2, dtype=torch.int32), torch.full((1, 1, 2), 0.5), -torch.ones(1, 1, 2).int())
    assert not grown_on_host(table, num_levels=0, num_nodes=4).numbers.any()
    assert grown_on_host(table, num_levels=1, num_nodes=4).tokens.tolist() == [[1, 1, 0, 0]]


@triton.jit
def _noises_kernel(random, buckets, times, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    bits = tl.load(random + at)
    tl.store(buckets + at, noise.noise_bucket_of(bits))
    tl.store(times + at, noise.time_of(bits))


def test_the_bucket_of_a_noise_is_that_of_its_logarithm():
    at_ends = [round(math.exp(-end) * 2**53) + step for end in NOISE_ENDS for step in range(-8, 8)]
    random_bits = torch.tensor([*at_ends, *[0, 1, 2**52, 2**53 - 1] * 4], dtype=torch.int64, device=DEVICE)
    buckets = torch.zeros_like(random_bits, dtype=torch.int32)
    times = torch.zeros_like(random_bits, dtype=torch.float64)
    _noises_kernel[(1,)](random_bits, buckets, times, COUNT=len(random_bits))
    ends = torch.tensor(NOISE_ENDS, dtype=torch.float64, device=DEVICE)
    assert buckets.tolist() == (times[:, None] >= ends).sum(1).tolist()
    assert torch.allclose(times, -torch.log((random_bits.double() + 0.5) / 2**53), rtol=1e-14, atol=0)


def test_what_follows_waits_for_a_second_stream_also_after_an_error(monkeypatch):
    class Stream:
        device = None

        def wait_stream(self, other):
            waits.append((self, other))

    main, second, waits = Stream(), Stream(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(ZeroDivisionError), alongside(second, lambda: waits.append("work")):
        waits.append("beside it")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), alongside(second, lambda: 1 / 0):
        pass
    assert waits == [(second, main), "work", "beside it", (main, second), (second, main), (main, second)]

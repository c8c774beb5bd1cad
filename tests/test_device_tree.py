"""The round's candidates on the device give the trees of the C code, to the last bit."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

pytest.importorskip("triton")

from graft.hashing import mix64
from graft.model.kernels import walk as walk_kernels
from graft.spec_decode.calibration import Calibration
from graft.spec_decode.candidates import DEPTH_FACTORS, Candidates, Level
from graft.spec_decode.proposers import NgramTables, SuffixLookup, TargetTopK
from graft.spec_decode.acceptance import paths as c_paths
from graft.model.step import FlatStep
from graft.model.kv_cache import Row
from graft.tree.device import copies, drafts, outcome, ranking, tables
from graft.tree.device.pool import Pool, PoolShape, bucket_starts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUMBERS = itertools.count(1)
DRAFTED, SUFFIX, PAST, TRIGRAM = 1, 2, 3, 4
NUM_SOURCES, NUM_BUCKETS = 7, 32
CONTEXT, RING = 2048, 2048


class Text:
    owner = group = None
    num_prompt_tokens = 0

    def __init__(self, ids):
        self.ids, self.number = list(ids), next(NUMBERS)


class Both:
    """The same round on the host and on the device."""

    def __init__(self, seed, num_rows=2, vocabulary=5, num_passes=3, isolated=False, most=40):
        self.rng = rng = random.Random(seed)
        self.num_rows, self.vocabulary = num_rows, vocabulary
        self.texts = [Text(rng.randrange(vocabulary) for _ in range(rng.choice((1, 2, 3, 30, 1500)))) for _ in range(num_rows)]
        self.past = [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))] for _ in range(6)]
        self.max_depth = rng.choice((3, 12, 40))
        self.caps = [rng.choice((0, 7, 40, 40)) for _ in range(num_rows)]
        values = [rng.randrange(1, 20) / 20 for _ in range(3 * NUM_SOURCES * NUM_BUCKETS)]
        self.chances = torch.tensor(values).view(3, NUM_SOURCES, NUM_BUCKETS)
        self.topk = 4
        self.num_passes = num_passes
        counts = [self.topk] + [8] * (num_passes - 1)
        self.shape = PoolShape(num_rows, min(40, most), min(10, max(most // 4, 1)), tuple(counts), 5, min(12, max(most // 4, 1)))
        self.levels = [self.level(number, count) for number, count in enumerate(counts)]
        self.most = most

    def level(self, number, count):
        rng, rows = self.rng, range(self.num_rows)
        first, end = (0, 0) if number == 0 else (1 + (0 if number == 1 else self.topk + 8 * (number - 2)), 1 + self.topk + 8 * (number - 1))
        tokens = [[rng.randrange(self.vocabulary) for _ in range(count)] for _ in rows]
        parents = [[rng.randrange(first, end) if number else 0 for _ in range(count)] for _ in rows]
        q = [[rng.choice((0.0, 1e-9, 0.004, 0.25, 0.5, 0.7071067811865476, 0.9, 1.0)) for _ in range(count)] for _ in rows]
        return Level(torch.tensor(tokens), torch.tensor(parents), torch.tensor(q), torch.tensor(q))

    def top_k(self, num_rows, width, is_text):
        rng = self.rng
        tokens = torch.tensor([[rng.randrange(self.vocabulary) for _ in range(width)] for _ in range(num_rows)])
        if is_text:
            parents = torch.arange(width).sub(1).clamp(min=0).expand(num_rows, -1).contiguous()
        else:
            parents = torch.tensor([[rng.randrange(max(place, 1)) for place in range(width)] for _ in range(num_rows)])
        sources = torch.ones_like(tokens)
        sources[:, 0] = 0
        successors = torch.stack(
            [torch.tensor([rng.sample(range(9), 8) for _ in range(width)]) for _ in range(num_rows)]
        ).int()
        logits = torch.tensor(
            [[sorted((rng.choice((0.0, 1.0, 2.5, 40.0)) * rng.random() for _ in range(8)), reverse=True) for _ in range(width)] for _ in range(num_rows)]
        )
        before = [rng.randrange(-1, self.vocabulary) for _ in range(num_rows)]
        earlier = [rng.randrange(-1, self.vocabulary) for _ in range(num_rows)]
        return TargetTopK(tokens, parents, sources, successors, logits, before, earlier, [0] * num_rows, is_text)

    # On the host

    def host(self):
        lookup = SuffixLookup()
        for text in self.past:
            lookup.finish(Text(text))
        ngrams = NgramTables(9)
        for top_k in self.learned:
            ngrams.learn(top_k)
        candidates = Candidates(torch.tensor([text.ids[-1] for text in self.texts]), [text.ids for text in self.texts])
        candidates.most_nodes = self.most
        lookup.propose(candidates, self.texts, SUFFIX, self.chances, self.max_depth)
        first, reach = candidates.width - 1, []
        for number, level in enumerate(self.levels):
            if number < self.made:
                going = [cap > 0 for cap in self.caps]
                reach.append(candidates.add_level(level, self.chances, DRAFTED, number + 1, first, going, self.topk))
        if self.made:
            lookup.propose(candidates, self.texts, SUFFIX, self.chances, self.max_depth)
        ngrams.propose(candidates, self.texts, TRIGRAM, self.chances, self.max_depth)
        return candidates, reach

    # On the device

    def device(self):
        shape, rows = self.shape, self.num_rows
        pool = Pool(rows, shape.width + 37, DEVICE)
        pool.tokens.random_(0, 7)
        pool.paths.fill_(0.5)  # of the round before
        texts = copies.Texts(rows + 2, CONTEXT, RING, DEVICE)
        lines = torch.arange(2, rows + 2, dtype=torch.int32, device=DEVICE).flip(0).contiguous()
        for text, line in zip(self.texts, lines.tolist(), strict=True):
            texts.own[line, : len(text.ids)] = torch.tensor(text.ids, dtype=torch.int32)
            texts.lengths[line] = len(text.ids)
        written = []
        for text in self.past:
            written += [*text, -1]
        texts.past[: len(written)] = torch.tensor(written, dtype=torch.int32)
        texts.past_end[0] = len(written)
        factors, chances = DEPTH_FACTORS.to(DEVICE), self.chances.to(DEVICE)
        owners = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        max_depths = torch.full((rows,), self.max_depth, dtype=torch.int32, device=DEVICE)
        caps = torch.tensor(self.caps, dtype=torch.int32, device=DEVICE)
        roots = torch.zeros(rows, 1, dtype=torch.int32, device=DEVICE)
        places = torch.zeros(rows, shape.num_places, dtype=torch.int32, device=DEVICE)
        made = torch.zeros(self.num_passes + 1, dtype=torch.int32, device=DEVICE)
        made[: self.made] = 1
        thresholds = torch.full((self.num_passes + 1,), -1.0, device=DEVICE)
        thresholds[self.made] = 1e9
        copies.begin(pool, shape, texts, lines)
        own, past = (copies.Found.make(rows, 1, size, DEVICE) for size in (CONTEXT, RING))
        copies.find(pool, texts, lines, owners, roots, own, past, CONTEXT)
        copies.attach(pool, shape, texts, lines, roots, own, past, chances, factors, max_depths, SUFFIX, 1)
        starts, reach = bucket_starts(torch.float32, DEVICE), torch.zeros(rows, device=DEVICE)
        arrived, reached = torch.zeros(1, dtype=torch.int32, device=DEVICE), []
        for number, level in enumerate(self.levels):
            columns = (level.tokens.flatten(), level.parents.flatten(), level.probabilities.flatten())
            columns = [column.contiguous().to(DEVICE) for column in columns]
            drafts.add_level(
                pool, shape, number, *columns, chances, factors, starts, caps, thresholds, reach, made, arrived, DRAFTED, self.topk
            )
            if number < self.made:
                reached.append(reach.tolist())
            assert made[number + 1] == (number + 1 < self.made)
        own, past = (copies.Found.make(rows, shape.num_places, size, DEVICE) for size in (CONTEXT, RING))
        copies.choose_places(pool, shape, made, places, max_depths)
        copies.find(pool, texts, lines, owners, places, own, past, CONTEXT)
        copies.attach(
            pool, shape, texts, lines, places, own, past, chances, factors, max_depths, SUFFIX, shape.first_copy
        )
        known = tables.Tables.make(
            (1 << 18, 1 << 18, 9), (True, True, False), mix64(torch.arange(4)) | 1, False, DEVICE
        )
        for top_k in self.learned:
            learn(known, top_k)
        self.tables = known
        salts = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        tables.follow(pool, shape, known, salts, chances, factors, max_depths, TRIGRAM)
        self.on_device = (pool, texts, lines, caps, chances, factors)
        return pool, reached

    made = 3
    learned = ()


def learn(known, top_k):
    rows, width = top_k.tokens.shape
    flat = [part.flatten().int().to(DEVICE) for part in (top_k.tokens, top_k.parents)]
    places = torch.arange(width, device=DEVICE).repeat(rows).int()
    numbers = torch.arange(rows, device=DEVICE).repeat_interleave(width).int()
    starts = (torch.arange(rows, device=DEVICE) * width).int()
    before = torch.tensor([list(top_k.before), list(top_k.earlier)], dtype=torch.int32, device=DEVICE)
    salts = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    successors, logits = (part.flatten(0, 1).contiguous().to(DEVICE) for part in (top_k.successors, top_k.logits))
    outcome.learn(
        known, *flat, places, numbers, starts, before, salts, successors, logits,
        bucket_starts(torch.float64, DEVICE), outcome.exponential_terms(DEVICE), rows, top_k.is_text,
    )


def nodes_of_host(candidates, row):
    nodes = candidates.nodes
    listed = []
    agreement = candidates.agreement
    for node in range(candidates.width):
        if float(nodes.paths[row, node]) > 0:
            words, at = [], node
            while at:
                words.append(int(nodes.tokens[row, at]))
                at = int(nodes.parents[row, at])
            own = [int(part[row, node]) for part in (nodes.depths, nodes.keys, nodes.needs, nodes.sources, nodes.score_bucket)]
            listed.append((tuple(words[::-1]), float(nodes.paths[row, node]), *own, int(agreement[row, node])))
    return listed


def nodes_of_device(pool, shape, row, merged):
    listed = []
    for node in (pool.paths[row, : shape.width] > 0).nonzero().flatten().tolist():
        words, at = [], node
        while at:
            words.append(int(pool.tokens[row, at]))
            at = int(pool.parents[row, at])
        own = [int(part[row, node]) for part in (pool.depths, pool.keys, pool.needs, pool.sources, pool.buckets)]
        listed.append((tuple(words[::-1]), float(pool.paths[row, node]), *own, int(pool.agreement[row, node]) if merged else 0))
    return listed


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("made", [0, 1, 3])
def test_candidates_merges_and_steps_are_those_of_the_c_code(seed, made):
    both = Both(seed, num_rows=1 + seed % 3, vocabulary=3 + seed % 4)
    both.made = made
    both.learned = [both.top_k(2, 20, bool(number % 2)) for number in range(3)]
    candidates, reach = both.host()
    pool, reached = both.device()
    assert reach == reached
    for row in range(both.num_rows):
        assert nodes_of_device(pool, both.shape, row, False) == nodes_of_host(candidates, row)
    _, texts, lines, caps, chances, factors = both.on_device
    candidates.merge(DRAFTED, both.chances)
    ranking.merge(pool, both.shape, ranking.Scratch(both.num_rows, pool.capacity, DEVICE), chances, factors, DRAFTED)
    for row in range(both.num_rows):
        assert nodes_of_device(pool, both.shape, row, True) == nodes_of_host(candidates, row)
    total = torch.tensor([30], dtype=torch.int32, device=DEVICE)
    ranked = ranking.Ranked.make(both.num_rows, 40, DEVICE)
    ranking.rank(pool, both.shape, caps, ranked, total)
    tree, _ = candidates.ranked(30, both.caps).tree(both.max_depth) if sum(both.caps) else (None, None)
    if tree is None:
        assert ranked.counts.tolist() == [0] * both.num_rows
        return
    rows = [Row(line) for line in lines.tolist()]
    for row, text in zip(rows, both.texts, strict=True):
        row.length = len(text.ids) - 1
    flat = FlatStep(rows, tree)
    size = 48
    columns, by_row = torch.full((6, 64), 77, dtype=torch.int32, device=DEVICE), torch.full((4, 8), 77, dtype=torch.int32, device=DEVICE)
    in_pool = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    ranking.lay_out(pool, both.shape, ranked, texts.lengths, lines, columns, by_row, in_pool, size)
    count = flat.num_tokens
    assert columns[:, :count].tolist() == flat.columns[:, :count].tolist()
    assert by_row[:, : both.num_rows].tolist() == flat.by_row[:, : both.num_rows].tolist()
    assert columns[:, count:size].unique().tolist() in ([0, both.num_rows], [])
    # What was emitted is counted alike.
    emitted = [[both.rng.randrange(both.vocabulary) for _ in range(both.rng.randrange(1, 6))] for _ in rows]
    for row, tokens in enumerate(emitted):  # along a proposed path, where there is one
        listed = [node for node in nodes_of_host(candidates, row) if node[0]]
        if listed:
            emitted[row] = [*both.rng.choice(listed)[0], *tokens]
    tried, fitted = torch.zeros(2, *both.chances.shape)
    candidates.count(emitted, tried, fitted, 1e9)
    width = max(map(len, emitted))
    there = torch.zeros(both.num_rows, width, dtype=torch.int32, device=DEVICE)
    for row, tokens in enumerate(emitted):
        there[row, : len(tokens)] = torch.tensor(tokens)
    lengths = torch.tensor([len(tokens) for tokens in emitted], dtype=torch.int32, device=DEVICE)
    nodes, places = torch.zeros_like(there), torch.zeros_like(there)
    accepted, committed = torch.zeros(2, both.num_rows, dtype=torch.int32, device=DEVICE)
    keys = torch.zeros(both.num_rows, width + 1, dtype=torch.int64, device=DEVICE)
    outcome.advance(texts, lines, by_row[0], lengths, there, nodes, places, accepted, committed, factors, keys)
    for text, line, tokens in zip(both.texts, lines.tolist(), emitted, strict=True):
        ids = [*text.ids, *tokens]
        assert texts.lengths[line] == len(ids) and texts.own[line, : len(ids)].tolist() == ids
    assert committed.tolist() == [len(text.ids) - 1 for text in both.texts]
    counted = torch.zeros(2, *both.chances.shape, dtype=torch.int32, device=DEVICE)
    outcome.count(pool, both.shape, factors, lengths, keys, *counted)
    assert counted.tolist() == torch.stack([tried, fitted]).int().tolist()

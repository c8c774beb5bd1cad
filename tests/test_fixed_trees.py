"""Fixed trees: gates, splits and templates are the slow reference's, in C and, to the last bit, in Triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from drafted import Level
from graft.bench.baselines.template import make_template
from graft.spec_decode.memory import FACTORS
from graft.tree.device import c_kernels
from graft.tree.device.buffers import NUM_TABLES, Tables
from graft.tree.device.fixed import FixedTree, Split
from graft.tree.device.round import DeviceRound, RoundShape, Sources
from test_round import BITS, CONTEXT, CPU, VOCABULARY, History, assert_same

DRAFTED, ADJACENCY = 1, 2
SOURCES = Sources(3, 1, drafted=DRAFTED, attached=ADJACENCY, is_calibrated=False)
GATES = (1, 2, 3)
NEVER = len(GATES)
LEVELS = (3, 5, 5, 4)  # deeper than the last gate
MOST_DRAFTED = sum(LEVELS)
Q = (0.004, 0.25, 0.5, 0.5**0.5, 0.9, 1.0)


class FixedHistory(History):
    """Texts that grow by rounds with fixed trees, and what the reference makes of the same drafts."""

    def __init__(self, seed, modules, is_chain=False, is_one_pass=False):
        super().__init__(seed, [])
        rng, self.is_chain, self.is_one_pass = self.rng, is_chain, is_one_pass
        bits = BITS if self.is_isolated else None
        self.learned = reference.Tables([(1, bits, self.is_isolated)])
        self.widths = (1,) * len(LEVELS) if is_chain else LEVELS
        if is_chain:
            tails = [make_template((1,) * (len(LEVELS) - depth)) for depth in GATES]
            self.splits = [*(Split(9, depth, tail) for depth, tail in zip(GATES, tails, strict=True)), Split(9, 99)]
        else:
            shapes = [rng.choice([(), (2,), (3, 4, 2), (8, 1)]) for _ in GATES]
            self.splits = [Split(rng.randrange(9), *own) for own in zip(GATES, map(make_template, shapes), strict=True)]
            self.splits.append(Split(rng.randrange(20), 99))
        fixed = FixedTree(GATES, tuple(self.splits), is_chain)
        self.rounds = [self.new_round(kernels, fixed) for kernels in modules]
        for row, text in enumerate(self.texts):
            self.write_text(row, text)

    def new_round(self, kernels, fixed):
        sizes = (1, 1, 1 << BITS if self.is_isolated else VOCABULARY)
        only_last = (NUM_TABLES - 1, NUM_TABLES)
        known = Tables.make(sizes, (True, True, self.is_isolated), FACTORS, self.is_isolated, CPU, only_last)
        shape = {"max_rows": 4, "num_table_rows": 6, "context": CONTEXT, "past_tokens": 1}
        levels = (sum(self.widths),) if self.is_one_pass else self.widths
        drafts = {"levels": lambda rows: levels, "num_beams": lambda rows: 2, "num_passes": len(levels)}
        depths = len(LEVELS) if self.is_one_pass else 1
        return DeviceRound(
            **shape,
            **drafts,
            depths_of_pass=depths,
            sources=SOURCES,
            known=known,
            device=CPU,
            kernels=kernels,
            fixed=fixed,
        )

    def level(self, number):
        """A level whose siblings differ, as a drafter gives it; parents are among the first nodes one level up."""
        rng, count = self.rng, self.widths[number]
        first = 1 + sum(self.widths[: number - 1]) if number else 0
        pairs = [(parent, token) for parent in range(first, first + 1 + (number > 0)) for token in range(VOCABULARY)]
        pairs = pairs[:VOCABULARY] if self.is_chain else pairs
        chosen = [rng.sample(pairs, count) for _ in range(self.num_rows)]
        parents = torch.tensor([[parent for parent, _ in own] for own in chosen])
        tokens = torch.tensor([[token for _, token in own] for own in chosen])
        q = torch.tensor([[rng.choice(Q) for _ in own] for own in chosen])
        return Level(tokens, parents, q, q)

    def play(self):
        """One round."""
        rng, rows = self.rng, self.num_rows
        shape = RoundShape(rows, rows * 40)
        # A chain that a banned token cuts short is not a case of the published method.
        draws = None if self.is_chain else self.new_draws()
        levels = [self.level(number) for number in range(len(LEVELS))]
        caps, max_depth = [rng.choice((0, 100, 100)) for _ in range(rows)], rng.choice((2, 4, 31))
        self.thresholds = [rng.choice((0.0, 0.25, 0.6, 1.0)) for _ in GATES]
        passes = [self.joined(levels)] if self.is_one_pass else levels
        given = {
            **{"table_rows": self.table_rows, "caps": caps, "max_depths": [max_depth] * rows, "salts": self.salts},
            **{"total": [shape.tokens], "drafts": [1], "thresholds": [-1.0] * len(passes), "gates": self.thresholds},
        }
        self.chances = torch.ones(SOURCES.table)
        proposed = [self.propose(each, shape, given, passes) for each in self.rounds]
        made = self.expected(caps, max_depth, levels, draws)
        self.check(proposed[0], made, caps)
        finished, came = self.finish(proposed, shape, made)
        for other, *step in zip(self.rounds[1:], proposed[1:], finished[1:], strict=True):
            assert_same((self.rounds[0], proposed[0], finished[0]), (other, *step), shape)
            assert other.stops.equal(self.rounds[0].stops)
        for row, new in enumerate(came):
            self.texts[row] = [*self.texts[row], *new]
            if len(self.texts[row]) > CONTEXT - 40:
                self.texts[row] = self.tokens(3)
                self.write_text(row, self.texts[row])

    def joined(self, levels):
        names = ("tokens", "parents", "probabilities", "path_probabilities")
        return Level(*(torch.cat([getattr(level, name) for level in levels], dim=1) for name in names))

    def expected(self, caps, max_depth, levels, draws):
        made = reference.Candidates([text[-1] for text in self.texts], self.texts, self.salts, draws)
        self.stops = [NEVER] * self.num_rows
        for depth, level in enumerate(levels, start=1):
            if NEVER not in self.stops:
                break
            going = [stop == NEVER and cap > 0 for stop, cap in zip(self.stops, caps, strict=True)]
            start = made.width
            made.add_level(level, None, DRAFTED, depth, 0, going, 2)
            for row, nodes in enumerate(made.rows):
                likeliest = max(node.path for node in nodes[start:])
                if depth in GATES and self.stops[row] == NEVER and likeliest <= np.float32(self.thresholds[depth - 1]):
                    self.stops[row] = GATES.index(depth)
        made.keep_best([self.splits[stop].kept for stop in self.stops])
        if not self.is_chain:
            made.fill(self.learned, [self.splits[stop].template for stop in self.stops], 0.5, ADJACENCY, max_depth)
        for _ in range(len(LEVELS) if self.is_chain else 0):
            length = min(max_depth, len(LEVELS))
            made.extend_leaf(self.learned, 0.5, ADJACENCY, length)
        made.merge()
        return made

    def check(self, proposed, made, caps):
        (columns, by_row), each = proposed, self.rounds[0]
        assert each.stops.tolist()[: self.num_rows] == self.stops
        for row, (start, size) in enumerate(by_row[:2, : self.num_rows].T.tolist()):
            tokens, parents = columns[0, start:].tolist(), columns[1, start:].tolist()
            found = [()]
            for node in range(1, size):
                assert parents[node] < node
                found.append((*found[parents[node]], tokens[node]))
            assert len(set(found)) == size, "no path twice"
            assert set(found[1:]) == {node.words for node in made.rows[row][1:] if node.path > 0 and caps[row]}


KINDS = {
    "trees": {},
    "trees of one pass": {"is_one_pass": True},
    "chains": {"is_chain": True},
    "chains of one pass": {"is_chain": True, "is_one_pass": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_gates_splits_and_templates_in_c_are_those_of_the_reference(kind, seed):
    torch.manual_seed(seed)
    history, stops = FixedHistory(seed, [c_kernels], **KINDS[kind]), set()
    for _ in range(25):
        history.play()
        stops.update(history.stops)
    assert len(stops) > 2, "rows stop at several gates"


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_same_in_triton_to_the_last_bit(kind):
    pytest.importorskip("triton")
    from graft.tree.device import triton_kernels

    for seed in (0, 5):
        torch.manual_seed(seed)
        history = FixedHistory(seed, [c_kernels, triton_kernels], **KINDS[kind])
        for _ in range(4):
            history.play()


def test_a_table_that_does_not_learn_stays_empty():
    history = FixedHistory(1, [c_kernels])
    for _ in range(3):
        history.play()
    tables = history.rounds[0].tables
    first = int(tables.starts[-1])
    assert (tables.entries[:first] == -1).all() and (tables.entries[first:] >= 0).any()


def test_a_split_or_a_rank_that_is_not_there_is_refused():
    """Before C reads or writes there."""
    history = FixedHistory(1, [c_kernels])
    each, shape, row = history.rounds[0], RoundShape(1, 20), torch.zeros(1, dtype=torch.int32)
    pool_shape = each._pool_shape(shape)
    c_kernels.begin(each.pool, pool_shape, each.texts, row + 1)

    def attach(stop, splits):
        of_row = (torch.zeros(1, dtype=torch.int64), row + 9, each.draws, ADJACENCY)
        c_kernels.attach(each.pool, pool_shape, row + stop, splits, False, each.tables, *of_row)

    good = FixedTree(splits=(Split(3, 9, make_template((1,))),)).numbers()
    attach(0, good)
    for stop, splits in ((1, good), (-1, good), (0, FixedTree(splits=(Split(3, 9, [(0, 8, 1)]),)).numbers())):
        with pytest.raises(IndexError):
            attach(stop, splits)

"""Whole rounds: those in C are the slow reference's, and those in Triton are the same to the last bit."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import reference
from compilers import COMPILERS, works
from drafted import Level
from graft.errors import GraftError
from graft.model.noise import NUM_KINDS, RowDraws
from graft.spec_decode.memory import FACTORS
from graft.tree.device import c_kernels
from graft.tree.device.buffers import MAX_LENGTH, NUM_SUCCESSORS, Tables, barred_numbers
from graft.tree.device.kernels import STEPS
from graft.tree.device.round import DeviceRound, RoundShape, Sources

DRAFTED, COPIES, TABLES = 1, 2, 4
SOURCES = Sources(7, 32 * 8, NUM_KINDS, DRAFTED, COPIES, TABLES)  # of copies: by match, and in sampled rows by noise
NUM_BEAMS, LEVELS = 3, (4, 6)
VOCABULARY = 12  # few tokens, so that equal paths are common
CONTEXT, BITS = 300, 6
Q = (0.0, 1e-9, 0.004, 0.25, 0.5, 0.5**0.5, 0.9, 1.0)
CPU = torch.device("cpu")


def new_round(kernels, ring, is_isolated):
    sizes = (1 << BITS, 1 << BITS, VOCABULARY)
    known = Tables.make(sizes, (True, True, False), FACTORS, is_isolated, CPU)
    shape = {"max_rows": 4, "num_table_rows": 6, "context": CONTEXT, "past_tokens": ring}
    drafts = {"levels": lambda rows: LEVELS, "num_beams": lambda rows: NUM_BEAMS, "num_passes": len(LEVELS)}
    return DeviceRound(**shape, **drafts, depths_of_pass=1, sources=SOURCES, known=known, device=CPU, kernels=kernels)


class History:
    """Some texts that grow round by round, and what is learned from them: by kernels, and by the reference."""

    def __init__(self, seed, modules, knows_other_noise=False):
        self.rng = rng = random.Random(seed)
        self.num_rows, self.num_tokens = 1 + seed % 4, 3 + seed % 5
        self.is_isolated, self.knows_other_noise = seed % 3 == 0, knows_other_noise
        self.ring = 64 if seed % 2 else 512  # the smaller one ends in the middle of most texts
        self.rounds = [new_round(kernels, self.ring, self.is_isolated) for kernels in modules]
        self.table_rows = rng.sample(range(1, 6), self.num_rows)
        self.owners = [rng.choice((0, 7)) for _ in range(self.num_rows)]
        # Only C lets answers of a group copy each other.
        is_grouped = len(modules) == 1 and seed % 4 > 1
        self.groups = [rng.choice((0, 3)) if is_grouped else 0 for _ in range(self.num_rows)]
        self.num_prompt_tokens = [rng.choice((0, 1, 5, 30)) for _ in range(self.num_rows)]
        self.salts = [rng.choice((0, 5)) if self.is_isolated else 0 for _ in range(self.num_rows)]
        kinds = ((3, BITS, self.is_isolated), (2, BITS, self.is_isolated), (1, None, self.is_isolated))
        self.learned = reference.Tables(kinds)
        self.texts = [self.tokens(rng.choice((1, 2, 3, 40))) for _ in range(self.num_rows)]
        self.past, self.num_past = [], 0  # (owner, text)
        # Products of such numbers are often equal, or nearly: there machines could differ.
        shape = SOURCES.table
        values = [rng.randrange(1, 20) / 20 for _ in range(shape[0] * shape[1] * shape[2])]
        self.chances = torch.tensor(values).view(shape)
        for row, text in enumerate(self.texts):
            self.write_text(row, text)

    def tokens(self, count):
        return [self.rng.randrange(self.num_tokens) for _ in range(count)]

    def write_text(self, row, text):
        for each in self.rounds:
            each.texts.own[self.table_rows[row], : len(text)] = torch.tensor(text, dtype=torch.int32)
            each.texts.lengths[self.table_rows[row]] = len(text)

    def end_text(self, row):
        """The row's text is finished, and another one takes its place."""
        text, owner = self.texts[row], self.owners[row]
        for token in (*text, -1):
            for each in self.rounds:
                each.texts.past[self.num_past % self.ring], each.texts.owners[self.num_past % self.ring] = token, owner
            self.num_past += 1
        for each in self.rounds:
            each.texts.past_end.copy_(torch.tensor([self.num_past, max(self.num_past - self.ring, 0)]))
        self.past.append((owner, text))
        self.texts[row] = self.tokens(self.rng.choice((1, 2, 25)))
        self.write_text(row, self.texts[row])

    def past_of(self, row):
        """The finished texts that the row may copy, as far as they are still in the ring, which may cut the oldest."""
        left, texts = self.ring, []
        for owner, text in reversed(self.past):
            kept = text[max(len(text) + 1 - left, 0) :]
            left -= len(text) + 1
            texts += [kept] if owner == self.owners[row] else []
            if left <= 0:
                break
        return texts[::-1]

    def beside(self, row):
        """The other answers that the row may copy, each with the tokens of the prompt."""
        group, num_prompt = self.groups[row], self.num_prompt_tokens[row]
        others = [other for other in range(self.num_rows) if other != row and self.groups[other] == group]
        return [(self.texts[other], num_prompt) for other in others if group]

    def new_draws(self):
        """What is known of each row's draws, and their columns for the kernels."""
        rng, draws = self.rng, []
        for text in self.texts:
            temperature = rng.choice((0.0, 0.3, 0.7, 1.0))
            bias = {token: -torch.inf for token in self.tokens(rng.choice((0, 0, 2)))}
            endings, num_unending = self.tokens(rng.choice((0, 2))), rng.choice((0, 1, 3))
            times = None
            if self.knows_other_noise and temperature and rng.random() < 0.6:
                times = [torch.rand(VOCABULARY).mul(4) for _ in range(rng.choice((1, 4)))]
            seed = rng.randrange(2**62)
            draws.append(RowDraws(seed, len(text), temperature, bias, endings, num_unending, times))
        for each in self.rounds:
            inputs = each.inputs
            each.draws.times[:] = [draw.times for draw in draws] if any(draw.times for draw in draws) else []
            for row, draw in enumerate(draws):
                inputs["kinds"][row], inputs["seeds"][row] = draw.kind, draw.seed
                inputs["powers"][row] = torch.tensor([draw.share_power(bucket / 2) for bucket in range(16)])
                barred = barred_numbers(draw.banned, draw.endings, draw.num_unending)
                inputs["barred"][row] = torch.tensor(barred, dtype=torch.int32)
        return draws

    def level(self, number):
        """A drafted level, whose parents are beams of the level before."""
        rng, count, rows = self.rng, LEVELS[number], range(self.num_rows)
        first = 1 + sum(LEVELS[: number - 1]) if number else 0
        end = first + NUM_BEAMS if number else 1
        parents = torch.tensor([[rng.randrange(first, end) for _ in range(count)] for _ in rows])
        q = torch.tensor([[rng.choice(Q) for _ in range(count)] for _ in rows])
        return Level(torch.tensor([self.tokens(count) for _ in rows]), parents, q, q)

    def play(self):
        """One round."""
        rng, rows = self.rng, self.num_rows
        shape = RoundShape(rows, rows * rng.choice((2, 6, 20)))
        draws, levels = self.new_draws(), [self.level(number) for number in range(len(LEVELS))]
        caps, max_depth = [rng.choice((0, 4, 100)) for _ in range(rows)], rng.choice((3, 9, 31))
        total, num_passes = rng.randrange(shape.tokens - rows + 1), rng.randrange(len(LEVELS) + 1)
        given = {
            **{"table_rows": self.table_rows, "caps": caps, "max_depths": [max_depth] * rows, "owners": self.owners},
            **{"groups": self.groups, "num_prompt_tokens": self.num_prompt_tokens},
            **{"salts": self.salts, "total": [total], "drafts": [int(num_passes > 0)]},
            "thresholds": [-1.0 if number < num_passes else 1e9 for number in range(len(LEVELS) + 2)],
        }
        proposed = [self.propose(each, shape, given, levels) for each in self.rounds]
        expected = self.expected(shape, caps, max_depth, total, num_passes, levels, draws)
        self.check_step(proposed[0], shape, expected, caps, total)
        finished, came = self.finish(proposed, shape, expected)
        self.check_outcome(finished[0], expected, came)
        for one, other in pairwise(zip(self.rounds, proposed, finished, strict=True)):
            assert_same(one, other, shape)
        for row, new in enumerate(came):
            self.texts[row] = [*self.texts[row], *new]
            if rng.random() < 0.3 or len(self.texts[row]) > CONTEXT - 40:
                self.end_text(row)

    def propose(self, each, shape, given, levels):
        each.inputs["acceptance_probs"].copy_(self.chances)
        for name, numbers in given.items():
            each.inputs[name][: len(numbers)] = torch.tensor(numbers, dtype=each.inputs[name].dtype)
        columns = torch.full((6, shape.tokens), 77, dtype=torch.int32)
        by_row = torch.full((4, shape.rows + 1), 77, dtype=torch.int32)

        def draft(add_level):
            for number, level in enumerate(levels):
                add_level(number, *(part.flatten() for part in (level.tokens, level.parents, level.probabilities)))

        each.propose(shape, columns, by_row, CONTEXT, draft)
        return columns, by_row

    def expected(self, shape, caps, max_depth, total, num_passes, levels, draws):
        """The reference's candidates of the round."""
        sizes = shape.pool(LEVELS)
        made = reference.Candidates([text[-1] for text in self.texts], self.texts, self.salts, draws)
        rows = range(self.num_rows)
        past, beside = [self.past_of(row) for row in rows], [self.beside(row) for row in rows]
        limits = (sizes.num_places, max_depth, MAX_LENGTH, sizes.copy_nodes)
        copies = (self.texts, past, beside, COPIES, self.chances, *limits)
        made.attach_copies(*copies)
        first, self.reaches = made.width - 1, [0.0]
        for number, level in enumerate(levels[:num_passes], start=1):
            going = [cap > 0 for cap in caps]
            reached = made.add_level(level, self.chances, DRAFTED, number, first, going, NUM_BEAMS)
            self.reaches.append(float(sum(map(reference.np.float32, reached), reference.np.float32(0))))
        if num_passes:
            made.attach_copies(*copies)
        made.follow(self.learned, self.chances, TABLES, sizes.num_waves, sizes.beam, max_depth)
        made.merge(DRAFTED, self.chances)
        return made

    def check_step(self, proposed, shape, made, caps, total):
        columns, by_row = proposed
        found, expected, starts = self.rounds[0].found, [], []
        caps = [min(cap, shape.cap) for cap in caps]
        ranked = made.ranked(total, caps)
        assert found["reaches"][: len(self.reaches)].tolist() == self.reaches
        paths, needs = (found[name][: shape.rows * shape.cap].view(shape.rows, -1) for name in ("paths", "needs"))
        for row, nodes in enumerate(made.rows):
            likely = sorted((node for node in nodes[1:] if node.path > 0), key=lambda node: -node.path)
            likely = likely[: caps[row]]
            assert paths[row].tolist() == [float(node.path) for node in likely] + [0.0] * (shape.cap - len(likely))
            assert needs[row, : len(likely)].tolist() == [node.needs for node in likely]
            places = [0, *(place for its, place in ranked if its == row)]
            assert found["num_nodes"][row] == len(places) - 1
            children, strips = set(), []  # nodes whose strip goes on
            starts.append(len(expected))
            for number, place in enumerate(places):
                node = nodes[place]
                parent = places.index(node.parent)
                goes_on = number > 0 and parent not in children
                strips.append(strips[parent] + 1 if goes_on else 1)
                children |= {parent} if number else set()
                expected.append([node.token, parent, number, len(node.words), row, 0, node.source])
            for number, strip in enumerate(strips):
                expected[starts[row] + number][5] = strip if number in children else -strip
        count = len(expected)
        padding = [[0, 0, 0, 0, shape.rows, 0]] * (shape.tokens - count)
        assert columns.T.tolist() == [numbers[:6] for numbers in expected] + padding
        assert found["origins"][:count].tolist() == [numbers[6] for numbers in expected]
        sizes = [end - start for start, end in pairwise([*starts, count])]
        lengths = [len(text) - 1 for text in self.texts]
        assert by_row[:, :-1].tolist() == [starts, sizes, lengths, self.table_rows] and not by_row[:, -1].any()

    def finish(self, proposed, shape, made):
        """The target chooses a child of most nodes. Returns what the kernels wrote, and by row the new tokens."""
        rng, (columns, by_row) = self.rng, proposed[0]
        tokens, parents, _, _, rows, _ = columns.tolist()
        chosen = []
        for at, row in enumerate(rows):
            start = int(by_row[0, row]) if row < shape.rows else 0
            below = [t for t in range(start + 1, shape.tokens) if rows[t] == row and parents[t] == at - start]
            likely = [tokens[child] for child in below] if rng.random() < 0.8 else []
            chosen.append(rng.choice(likely or self.tokens(1)))
        ids = torch.tensor([rng.sample(range(VOCABULARY), NUM_SUCCESSORS) for _ in chosen], dtype=torch.int32)
        spread = [rng.choice((0.0, 1.0, 2.5, 40.0)) for _ in chosen]
        logits = torch.tensor([sorted((s * rng.random() for _ in range(NUM_SUCCESSORS)), reverse=True) for s in spread])
        finished = []
        for each, step in zip(self.rounds, proposed, strict=True):
            each.finish(shape, *step, torch.tensor(chosen), ids, logits)
            finished.append((each.moves(shape), each.entries(shape)))
        came = []
        for start, size in by_row[:2, : shape.rows].T.tolist():
            own = slice(start, start + size)
            came.append(reference.walk(tokens[own], parents[own], [1] * size, chosen[own]))
        self.nodes, came = [nodes for nodes, _ in came], [new for _, new in came]
        self.learn(made, by_row, columns, ids, logits)
        return finished, came

    def learn(self, made, by_row, columns, ids, logits):
        ngrams = []
        for row, (start, size) in enumerate(by_row[:2, : self.num_rows].T.tolist()):
            parents, tokens = columns[1, start : start + size].tolist(), columns[0, start : start + size].tolist()
            for place in reversed(range(size)):  # the likeliest node's successors stay
                words, at = [], place
                while at:
                    words.insert(0, tokens[at])
                    at = parents[at]
                last = [-1, -1, *self.texts[row], *words][:-4:-1]
                ngrams.append(((*last, self.salts[row]), ids[start + place].tolist(), logits[start + place].tolist()))
        self.learned.learn(ngrams)

    def check_outcome(self, finished, made, came):
        each, rows = self.rounds[0], self.num_rows
        (table_rows, committed, places, accepted), entries = finished
        assert each.found["counts"].tolist()[:rows] == list(map(len, came))
        for row, new in enumerate(came):
            text = [*self.texts[row], *new]
            assert each.found["tokens"][row, : len(new)].tolist() == new
            assert each.texts.own[self.table_rows[row], : each.texts.lengths[self.table_rows[row]]].tolist() == text
            assert places[row, : accepted[row]].tolist() == self.nodes[row] and accepted[row] == len(new) - 1
            assert committed[row] == len(self.texts[row]) - 1 and table_rows[row] == self.table_rows[row]
        flat = [(row, place, token) for row, new in enumerate(came) for place, token in enumerate(new)]
        flat = flat[: len(entries.rows)]
        found = torch.stack([entries.rows, entries.places, entries.tokens], dim=1).tolist()
        assert found == [*map(list, flat), *[[rows, 0, 0]] * (len(found) - len(flat))]
        tried, fitted = torch.zeros(2, *SOURCES.table, dtype=torch.int32)
        for row, judged in enumerate(made.judged(came)):
            for place, fits in judged.items():
                node = made.rows[row][place]
                cell = (3 * made._kind(row) + node.agreement, node.source, node.score_bucket)
                tried[cell] += 1
                fitted[cell] += fits
        assert each.found["tried"].equal(tried) and each.found["fitted"].equal(fitted)
        starts, entries, tags = each.tables.starts.tolist(), each.tables.entries, each.tables.tags
        for number, rows in enumerate(self.learned.rows):
            for row, (tag, successors) in rows.items():
                at = starts[number] + row
                assert entries[at].tolist() == [16 * token + bucket for token, bucket in successors]
                if number < 2:
                    assert int(tags[at]) & reference.MASK == tag


def assert_same(one, other, shape):
    """Two implementations wrote the same. Columns of padding may differ."""
    (here, step, finished), (there, *other) = one, other
    written = [(*step, *moves, *vars(entries).values()) for step, (moves, entries) in ((step, finished), other)]
    assert all(map(torch.equal, *written))
    for name, part in here.found.items():
        assert part.equal(there.found[name]), name
    for owner in ("texts", "tables"):
        for name, part in vars(getattr(here, owner)).items():
            if isinstance(part, torch.Tensor):
                assert part.equal(getattr(getattr(there, owner), name)), name
    rows = slice(0, shape.rows)
    is_node = here.pool.paths[rows] > 0
    for name in ("paths", "tokens", "parents", "depths", "needs", "sources", "buckets", "agreement", "keys"):
        a, b = (getattr(each.pool, name)[rows] for each in (here, there))
        assert a.equal(b) if name == "paths" else a[is_node].equal(b[is_node]), name


@pytest.mark.parametrize("seed", range(24))
def test_rounds_in_c_are_those_of_the_reference(seed):
    torch.manual_seed(seed)
    history = History(seed, [c_kernels], knows_other_noise=seed % 2 == 1)
    for _ in range(25):
        history.play()


# In the last one a small round follows a large one, and rows use the same tables with and without a salt.
QUICK = (0, 5, 153)


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 26))])
def test_rounds_in_triton_are_the_same_to_the_last_bit(seed):
    pytest.importorskip("triton")
    from graft.tree.device import triton_kernels

    history = History(seed, [c_kernels, triton_kernels])
    for _ in range(3 if seed in QUICK else 12):
        history.play()


@pytest.mark.parametrize("flags", [pytest.param("-O0", marks=pytest.mark.slow), "-O3 -march=native -ffp-contract=off"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_compiler_makes_the_same_rounds(monkeypatch, executable_folder, compiler, flags):
    if not works(COMPILERS[compiler], executable_folder):
        pytest.skip(f"there is no {compiler} that makes a library")
    command = [*COMPILERS[compiler], *flags.split(), "-std=c99", "-fPIC", "-shared", str(c_kernels.HERE / "round.c")]
    subprocess.run([*command, "-o", str(executable_folder / "_round.abi3.so")], check=True, timeout=600)
    monkeypatch.setattr(c_kernels, "HERE", executable_folder)
    c_kernels._library.cache_clear()
    try:
        test_rounds_in_c_are_those_of_the_reference(1)
        test_rounds_in_c_are_those_of_the_reference(3)
    finally:
        monkeypatch.undo()
        c_kernels._library.cache_clear()


def test_what_is_out_of_range_is_refused():
    """Before C reads or writes there."""
    history = History(1, [c_kernels])
    each, one = history.rounds[0], torch.ones(1, dtype=torch.int32)
    shape = RoundShape(1, 8).pool(LEVELS)
    with pytest.raises(IndexError):
        c_kernels.begin(each.pool, shape, each.texts, 6 * one)  # there are six texts
    c_kernels.begin(each.pool, shape, each.texts, one)
    of_pass = (each.draws, one, torch.zeros(4), torch.zeros(4), torch.ones(4, dtype=torch.int32))
    level = [torch.full((LEVELS[0],), number, dtype=torch.int32) for number in (5, 1)]
    q = torch.ones(LEVELS[0])
    with pytest.raises(IndexError):  # the first node is its own parent
        c_kernels.add_level(each.pool, shape, 0, *level, q, history.chances, *of_pass, DRAFTED, NUM_BEAMS, 1)
    with pytest.raises(IndexError):
        c_kernels.add_level(each.pool, shape, 0, level[0], 0 * level[1], q, history.chances, *of_pass, 7, NUM_BEAMS, 1)
    ids = torch.zeros(1, NUM_SUCCESSORS, dtype=torch.int32)
    step = (
        VOCABULARY * one,
        0 * one,
        0 * one,
        0 * one,
        0 * one,
        -torch.ones(2, 1, dtype=torch.int32),
        torch.tensor([0]),
    )
    with pytest.raises(IndexError):  # in the table that has a row for each token
        c_kernels.learn(each.tables, *step, ids, torch.zeros(1, NUM_SUCCESSORS), 1, False)


@pytest.mark.parametrize("trouble", ["not built", "of another machine"])
def test_a_library_that_cannot_be_loaded_says_what_to_do(monkeypatch, tmp_path, trouble):
    monkeypatch.setattr(c_kernels, "HERE", tmp_path)
    if trouble == "of another machine":
        (tmp_path / "_round.abi3.so").write_bytes(b"\x7fELF of something else")
    with pytest.raises(GraftError, match=r"_round cannot be loaded .* install the package again"):
        c_kernels._library.__wrapped__()


@pytest.mark.parametrize("edge", range(1, reference.NUM_BUCKETS))
def test_a_probability_is_in_the_bucket_of_its_face_value(edge):
    each, one = new_round(c_kernels, 64, False), torch.ones(1, dtype=torch.int32)
    each.texts.own[1, 0] = each.texts.lengths[1] = 1
    shape = RoundShape(1, 8).pool(LEVELS)
    c_kernels.begin(each.pool, shape, each.texts, one)
    at = torch.tensor(0.5**edge, dtype=torch.float64).sqrt().float()
    q = torch.zeros(LEVELS[0])
    q[:3] = torch.stack([torch.nextafter(at, torch.tensor(0.0)), at, torch.nextafter(at, torch.tensor(1.0))])
    level, of_pass = torch.zeros(LEVELS[0], dtype=torch.int32), (torch.zeros(4), torch.zeros(4), torch.ones(4).int())
    given = (torch.ones(SOURCES.table), each.draws, one, *of_pass, DRAFTED, NUM_BEAMS, 1)
    c_kernels.add_level(each.pool, shape, 0, level, level, q, *given)
    found = each.pool.buckets[0, shape.level_start(0) :][:3].tolist()
    assert found == [reference.bucket_of(own) for own in q[:3].tolist()]


def test_the_round_needs_neither_transformers_nor_our_engine_nor_the_plugin_sglang():
    names = ("acceptance", "calibration", "memory", "planner", "sources", "step_times")
    program = f"""
import importlib.util, sys
sys.modules["transformers"] = sys.modules["sglang"] = None
import graft.drafters, graft.tree.device.round, {", ".join(f"graft.spec_decode.{name}" for name in names)}
import graft.model.sampler, graft.model.verified
assert not [name for name in sys.modules if name in ("graft.engine", "graft.request.batch", "graft.model.runner")]
import graft.integrations.sglang.plugin
graft.integrations.sglang.plugin.register()
if importlib.util.find_spec("triton") is not None:
    import graft.integrations.sglang.trees
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_rounds_in_c_need_no_triton():
    """Their modules are imported where it is not installed."""
    code = "import sys; sys.modules['triton'] = None; import graft.tree.device.round, graft.tree.device.c_kernels"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_in_c_and_in_triton_take_the_same_arguments():
    pytest.importorskip("triton")
    from graft.tree.device import triton_kernels

    for name in (*STEPS, "lookup_bytes"):
        one, other = (inspect.signature(getattr(module, name)) for module in (c_kernels, triton_kernels))
        assert one == other, name

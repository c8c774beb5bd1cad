"""The Triton kernels, on a GPU or in Triton's interpreter: attention against a plain softmax, and bit for bit
between a tree and plain decoding; the commit, the walk and the head's beams against plain PyTorch."""

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from graft.model import attention as model_attention
from graft.model.attention import KernelStep
from graft.model.layout import Layout, bidirectional_columns

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import overlap
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.attention import PAGE, Tiles, scratch_size, tree_attention
from graft.model.kernels.matmul import Products, Tile, can_gate, can_multiply, tile_for
from graft.model.kv_cache import Row
from graft.model.noise import gumbel_noise
from graft.model.step import Chunk, FlatStep
from graft.spec_decode.proposers.block import kernels as block_kernels
from graft.spec_decode.proposers.block import tree as block_tree
from graft.spec_decode.proposers.eagle3 import kernels as eagle3_kernels
from graft.tree.device import walk as walk_kernels
from graft.tree.device.noise import DraftDraws
from graft.tree.tree import PADDING
from proposers import tree_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cannot multiply matrices of bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
# Small enough that short texts have many blocks and splits of both kinds.
SMALL = Tiles(rows=16, keys=16, short_split=32, border=64, long_split=48, combined=64, prefix_stages=2)


in_the_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="calls in a kernel are counted in the interpreter")


def in_both(sizes, quick):
    """Of each size single precision, of these halves as well; the other halves are for the slow suite."""
    halves = [(size, dtype) for size in sizes for dtype in DTYPES[1:]]
    marked = [pytest.param(*half, marks=[] if half[0] in quick else [pytest.mark.slow]) for half in halves]
    return [*((size, torch.float32) for size in sizes), *marked]


NOBODY = -(2**20)  # in place of numbers that may not be read


@dataclass
class Problem:
    """A flat step's queries, and the store they meet, in pages of any order. What belongs to no token is NaN."""

    lengths: list[int]
    trees: list[list[int]]  # of each row the parents of its nodes, by place
    nodes: list[list[int]]  # of each row the places whose queries are in the step
    tables: list[list[int]]  # pages of each row; line 0 and page 0 are nobody's
    query: Tensor  # [T, heads, head_dim]
    keys: Tensor  # [num_slots, kv_heads, head_dim]
    values: Tensor
    padding: int = 0  # tokens of line 0 at the end

    @classmethod
    def make(cls, lengths, trees, nodes=None, kv_heads=1, group=2, head_dim=8, dtype=torch.float32, padding=0, seed=0):
        nodes = nodes or [list(range(len(tree))) for tree in trees]
        sizes = [length + len(tree) for length, tree in zip(lengths, trees, strict=True)]
        num_pages = [-(-size // PAGE) for size in sizes]
        pages = list(range(1, sum(num_pages) + 2))
        random.Random(seed).shuffle(pages)
        tables = [[pages.pop() for _ in range(count)] for count in num_pages]
        generator = torch.Generator().manual_seed(0)
        num_tokens = sum(map(len, nodes)) + padding
        query = torch.randn(num_tokens, kv_heads * group, head_dim, generator=generator)
        keys = torch.full((2, (sum(num_pages) + 2) * PAGE, kv_heads, head_dim), torch.nan)
        problem = cls(lengths, trees, nodes, tables, query.to(DEVICE, dtype), *keys.to(DEVICE, dtype), padding)
        for row, size in enumerate(sizes):
            slots = [problem.slot(row, index) for index in range(size)]
            for stored in (problem.keys, problem.values):
                stored[slots] = torch.randn(size, kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
        return problem

    @classmethod
    def random(cls, lengths, width=5, **shape):
        return cls.make(lengths, [some_tree(width, seed) for seed, _ in enumerate(lengths)], **shape)

    @property
    def num_rows(self):
        return len(self.lengths)

    def slot(self, row, index):
        return self.tables[row][index // PAGE] * PAGE + index % PAGE

    def path(self, row, node):
        path = [node]
        while path[0]:
            path.insert(0, self.trees[row][path[0]])
        return path

    def texts(self):
        """Of every token of the step, its row and where its text is, in order."""
        return [
            (row, [self.slot(row, i) for i in (*range(length), *(length + place for place in self.path(row, node)))])
            for row, length in enumerate(self.lengths)
            for node in self.nodes[row]
        ]

    def layout(self, max_context=None):
        """Rows stand in the block tables in another order than in the step, and there is one that is not in use."""
        paths = [self.path(row, node) for row in range(self.num_rows) for node in self.nodes[row]]
        places = [*(path[-1] for path in paths), *[0] * self.padding]
        depths = [*(len(path) - 1 for path in paths), *[0] * self.padding]
        stored = [path if len(path) - 1 < path[-1] else [] for path in paths] + [[]] * self.padding
        max_path = max(map(len, stored), default=1) or 1
        strips = [
            strips_of(tree) if nodes == list(range(len(tree))) else [-1] * len(nodes)
            for tree, nodes in zip(self.trees, self.nodes, strict=True)
        ]
        counts = [*map(len, self.nodes), 0, 0]
        max_pages = max(map(len, self.tables))
        tables = [[0] * max_pages] * 3 + [table + [0] * (max_pages - len(table)) for table in reversed(self.tables)]
        return Layout(
            rows=ints([row for row, count in enumerate([*counts[:-1], self.padding]) for _ in range(count)]),
            places=ints(places),
            depths=ints(depths),
            paths=ints([path + [NOBODY] * (max_path - len(path)) for path in stored]),
            starts=ints([sum(counts[:row]) for row in range(len(counts))]),
            counts=ints(counts),
            lengths=ints([*self.lengths, 0, 0]),
            table_rows=ints([*(2 + self.num_rows - row for row in range(self.num_rows)), 0, 0]),
            tables=ints(tables),
            max_context=max(self.lengths) if max_context is None else max_context,
            strips=ints([*(number for row in strips for number in row), *[0] * self.padding]),
        )

    def attend(self, tiles=SMALL, max_context=None, strips=None, **options):
        """[T, heads * head_dim], of the tokens that are no padding. strips: in place of the right ones."""
        layout = self.layout(max_context)
        if strips is not None:
            layout = replace(layout, strips=ints(strips))
        plan = attention_kernels.plan(layout, self.query.shape[1] // self.keys.shape[1], tiles)
        out = tree_attention(self.query, self.keys, self.values, layout, plan, tiles=tiles, **options)
        assert not out[len(out) - self.padding :].any(), "padding gets zeros"
        return out[: len(out) - self.padding]

    def expected(self, window=None, chunk=None, softcap=None, sinks=None):
        """Softmax over each token's own text, in double precision."""
        _, heads, head_dim = self.query.shape
        group = heads // self.keys.shape[1]
        out = torch.empty(len(self.query) - self.padding, heads, head_dim, dtype=torch.float64, device=DEVICE)
        for token, (_, slots) in enumerate(self.texts()):
            slots = slots[(len(slots) - 1) // chunk * chunk :] if chunk else slots[-(window or 0) :]
            key, value = (stored[slots].double().repeat_interleave(group, dim=1) for stored in (self.keys, self.values))
            scores = torch.einsum("hd,shd->hs", self.query[token].double(), key) * head_dim**-0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            out[token] = torch.einsum("hs,shd->hd", scores.softmax(dim=1)[:, : len(slots)], value)
        return out.flatten(1)

    def holding(self, texts, query, source):
        """With the keys and values of these slots of the other, in the rows' order, and these queries."""
        self.query[: len(query)] = query
        for row, slots in enumerate(texts):
            own = [self.slot(row, index) for index in range(len(slots))]
            self.keys[own], self.values[own] = source.keys[slots], source.values[slots]
        return self

    @property
    def shape(self):
        (_, heads, head_dim), kv_heads = self.query.shape, self.keys.shape[1]
        return {"kv_heads": kv_heads, "group": heads // kv_heads, "head_dim": head_dim, "dtype": self.query.dtype}

    def decoded_plainly(self, tokens=None):
        """These tokens of the step, or all, each as a row of its own, in which its path is committed."""
        every = self.texts()
        tokens = list(range(len(every))) if tokens is None else tokens
        texts = [every[token][1] for token in tokens]
        plain = Problem.make([len(slots) - 1 for slots in texts], [[0]] * len(texts), seed=1, **self.shape)
        return plain.holding(texts, self.query[tokens], self)


def ints(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def some_tree(width, seed=0):
    rng = random.Random(seed)
    return [0, *(rng.randrange(node) for node in range(1, width))]


def strips_of(tree):
    """Numbers of a tree's nodes in their strips: a node's first child goes on with its strip, and a leaf ends it."""
    parents, numbers = tree[1:], [1]
    for node, parent in enumerate(parents, start=1):
        numbers.append(numbers[parent] + 1 if parents.index(parent) == node - 1 else 1)
    return [number if node in parents else -number for node, number in enumerate(numbers)]


def chain(width):
    """A part of a prompt, or a tree of one path."""
    return [max(place - 1, 0) for place in range(width)]


def check(problem, window=None, tiles=SMALL, tokens=None, **options):
    """Attention is what it should be, and for every token, or for these, has the very bits of plain decoding."""
    options = {"window": window, **options}
    out = problem.attend(tiles, **options)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[out.dtype]
    torch.testing.assert_close(out.double(), problem.expected(**options), atol=tolerance, rtol=tolerance)
    chosen = out if tokens is None else out[tokens]
    assert torch.equal(chosen, problem.decoded_plainly(tokens).attend(tiles, **options))


# No text at all, then lengths around the borders of blocks (16), of short splits (32) and of long ones (64, 112).
LENGTHS = [[0, 1], [15, 16, 17], [30, 32], [63, 61, 65], [111, 150]]


@pytest.mark.parametrize(("lengths", "dtype"), in_both(LENGTHS, quick=[[63, 61, 65]]), ids=str)
def test_a_node_sees_its_text_alone_and_gets_what_plain_decoding_gives_it(lengths, dtype):
    check(Problem.random(lengths, dtype=dtype))


def test_a_path_may_cross_several_splits_and_most_of_it_be_of_earlier_forwards():
    branching = [0, 0, 0, *range(2, 91)]  # a chain below the second child
    check(Problem.make([27, 27], [chain(90), branching], nodes=[[4, 5, 36, 37, 84, 85, 89]] * 2))


LONG_BRANCH = [0, 0, 0, *range(2, 21)]  # 20 nodes down the second child's path
SIDE_BRANCHES = [*chain(20), 3, 11, 21]  # off a path of 20 nodes, one of one node and one of two


def forest(group=2, **shape):
    """Trees of all kinds, a tree of one path, a part of a prompt and padding. Paths cross borders of blocks (16), short
    splits (32), long ones and pages (64), and the strips of long ones are cut for every group."""
    trees = [LONG_BRANCH, some_tree(9, 3), SIDE_BRANCHES, chain(3), [0] * 4, chain(12), [0]]
    return Problem.make([57, 130, 25, 31, 0, 60, 7], trees, group=group, padding=2, **shape)


@pytest.mark.parametrize(
    ("group", "window"),
    [
        (1, None),
        (3, 20),
        *(pytest.param(n, None, marks=pytest.mark.slow) for n in (4, 8, 16)),
        pytest.param(20, 20, marks=pytest.mark.slow),
    ],
)
def test_trees_and_chunks_have_tiles_of_whole_tokens_for_groups_of_any_size(group, window):
    """Sixteen tokens a tile of 16 rows; five, with a row that is not used; four, two, one; more than a tile each."""
    some = {0: [0, 1, 2, 3, 7, 8, 9, 10, 18, 21], 22: range(9), 31: [0, 6, 7, 15, 16, 19, 20, 21, 22], 54: [2]}
    some |= {57: [0, 3], 61: [0, 4, 5, 9, 10, 11], 73: [0]}  # of each row, by its first token
    tokens = [first + place for first, places in some.items() for place in places]
    check(forest(group), window, tokens=tokens if group < 16 else tokens[::4])


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 24},
        {"softcap": 0.7, "sinks": True},
        *(pytest.param(more, marks=pytest.mark.slow) for more in ({"chunk": 64}, {"softcap": 0.7, "window": 20})),
    ],
    ids=str,
)
def test_chunks_soft_caps_and_sinks_are_those_of_a_plain_softmax_in_trees_and_prompts(options):
    """Paths and tiles of a chunk of a prompt cross the borders of chunks, inside of blocks and at splits."""
    problem = Problem.make([57, 0, 60], [LONG_BRANCH, [0] * 4, chain(12)], padding=2)
    if "sinks" in options:
        options = options | {"sinks": torch.tensor([1.5, -2.0], device=DEVICE)}
    check(problem, tokens=[0, 1, 7, 8, 14, 15, 21, 25, 26, 29, 30, 37], **options)


def test_a_sink_takes_its_share_of_whatever_is_seen():
    problem = Problem.make([40], [[0]], group=1)
    none, all_of_it = (torch.tensor([score], device=DEVICE) for score in (-100.0, 100.0))
    assert torch.equal(problem.attend(sinks=none), problem.attend())
    assert problem.attend(sinks=all_of_it).abs().max() < 1e-20


def test_a_node_has_the_same_bits_in_a_strip_and_alone_in_a_tile():
    problem = forest()
    assert torch.equal(problem.attend(), problem.attend(strips=[-1] * len(problem.query)))


@pytest.mark.parametrize(
    "strips",
    [
        [1, 2, -3, 2, -2],  # the third's parent, which has a strip, in a second one: what it has seen counts twice
        [1, 2, -3, 1, 2],  # a strip without its end
        [1, -2, -1, 2, -3],  # nodes of other paths
    ],
    ids=str,
)
def test_a_wrong_strip_is_a_wrong_result(strips):
    problem = Problem.make([30], [[0, 0, 1, 1, 0]])
    scratch = torch.full((scratch_size(problem.layout(), *problem.query.shape[1:], SMALL),), 1e5, device=DEVICE)
    right = problem.attend(scratch=scratch.clone())
    assert torch.equal(right, problem.decoded_plainly().attend())
    assert not torch.equal(right, problem.attend(strips=strips, scratch=scratch))


# Chunks that start inside of a block, at a split's and a page's border, at the text's start and inside of a split.
@pytest.mark.parametrize(
    ("length", "width", "window"),
    [pytest.param(5, 136, None, marks=pytest.mark.slow), (64, 136, 40), (0, 40, 16), (75, 40, None), (75, 40, 16)],
)
def test_a_chunk_gets_the_bits_of_decoding_it_token_by_token(length, width, window):
    """Around borders of tiles, which are 8 tokens, of blocks, splits and pages."""
    tokens = [token for token in (0, 7, 8, 16, 31, 39, 58, 59, 64, 105, 122, 123, 127, 128, 135) if token < width]
    check(Problem.make([length], [chain(width)]), window, tokens=tokens)


def test_a_row_is_no_chain_because_its_last_token_is_as_deep_as_there_are_others():
    """Three nodes of depth 2, whose ancestors are of an earlier forward: places 4, 5 and 6."""
    problem = Problem.make([31, 16], [[0, 0, 0, 1, 1, 2, 2], chain(3)], nodes=[[4, 5, 6], [0, 1, 2]])
    plan = attention_kernels.plan(problem.layout(), 2, SMALL)
    assert plan.chains.tolist() == plain_kernels.plan(problem.layout(), 2, SMALL).chains.tolist() == [0, 1, 0, 0]
    check(problem)


def calls_of(monkeypatch, name):
    """The arguments of every call of one of the kernels' functions, which the interpreter runs as Python."""
    calls, function = [], getattr(attention_kernels, name)
    monkeypatch.setattr(attention_kernels, name, lambda *args: calls.append(args) or function(*args))
    return calls


@in_the_interpreter
@pytest.mark.parametrize("window", [None, 5])
def test_the_splits_of_a_tokens_own_text_are_combined_however_long_others_may_be(window, monkeypatch):
    calls = calls_of(monkeypatch, "_combine")
    Problem.make([3, 30], [some_tree(4), chain(5)]).attend(window=window, max_context=300)
    firsts, lasts = ([int(args[place].handle.data.item()) for args in calls] for place in (5, 6))
    assert firsts == [0] * 9 and lasts == [0] * 4 + [0, 0, 1, 1, 1], "the last of the chain are behind position 32"


def test_one_split_has_the_bits_that_combining_it_with_empty_ones_gives_it():
    """Deep nodes see nothing of the first split, where the root's window begins; decoded plainly, they have but one."""
    problem = Problem.make([31], [[0, 0, 0, 2, 3, 4, 5]])
    assert torch.equal(problem.attend(window=3), problem.decoded_plainly().attend(window=3))


def mixed(width):
    """Parts of prompts, one of them as wide as this, trees and padding in one step."""
    return Problem.make([70, 130, 0, 33], [some_tree(6), chain(width), chain(5), some_tree(3)], padding=2)


@pytest.mark.parametrize(("width", "window"), [(70, None), (20, 40)])
def test_prompts_trees_and_padding_stand_in_one_step(width, window):
    """Of the long prompt, the tokens around borders of tiles, blocks, splits and pages."""
    prompt = [6 + place for place in (0, 7, 8, 13, 14, 15, 29, 30, 61, 62, 69) if place < width]
    check(mixed(width), window, tokens=[*range(6), *prompt, *range(6 + width, 14 + width)])


def test_few_programs_do_all_items_of_a_plan(monkeypatch):
    problem = mixed(20)
    expected = problem.attend()
    monkeypatch.setattr(attention_kernels, "_MOST_PROGRAMS", 3)
    monkeypatch.setattr(attention_kernels, "_LEAST_PROGRAMS", 1)
    assert torch.equal(problem.attend(), expected)


def test_a_plan_holds_every_split_of_whole_blocks_of_prefix_for_every_tile():
    rng = random.Random(0)
    for group in (1, 3, 20):
        for _ in range(6):
            num_rows = rng.choice([1, 5, 9])
            lengths = [rng.choice([0, 15, 16, 33, 300]) for _ in range(num_rows)]
            trees = [make(rng.choice([1, 5, 40])) for make in rng.choices([some_tree, chain], k=num_rows)]
            check_plan(Problem.make(lengths, trees, padding=1).layout(), group)


def check_plan(layout, group):
    """The expected plan, which ours is."""
    ours, expected = (module.plan(layout, group, SMALL) for module in (attention_kernels, plain_kernels))
    for name in ("items", "strips"):
        number = int(getattr(ours, f"num_{name}"))
        assert number == int(getattr(expected, f"num_{name}")) <= len(getattr(ours, name))
        assert torch.equal(getattr(ours, name)[:number], getattr(expected, name)), name
    assert torch.equal(ours.chains, expected.chains)
    return expected


def test_a_plan_has_every_node_of_a_tree_in_one_strip_of_nodes_down_one_path():
    rng = random.Random(0)
    for group in (1, 3, 8, 16):
        trees = [LONG_BRANCH, SIDE_BRANCHES, *(some_tree(rng.choice([9, 40]), rng.random()) for _ in range(4))]
        problem, most = Problem.make([0, 20, 15, 200, 27, 63], trees), SMALL.tokens(group)
        layout, seen = problem.layout(), []
        pieces = {(row, token, size) for row, token, size, _ in check_plan(layout, group).strips.tolist()}
        for row, token, size in pieces:
            start = int(layout.starts[row])
            seen += [start + place for place in problem.path(row, token - start)[-size:]]
        assert sorted(seen) == list(range(len(layout.rows)))
        leaves = [-number for tree in trees for number in strips_of(tree) if number < 0]
        assert len(pieces) == sum(-(-length // most) for length in leaves), "no more than fill a tile each"
        assert len(leaves) == sum(node not in tree[1:] for tree in trees for node in range(len(tree)))


def test_a_plan_may_have_more_rows_and_items_than_a_program_looks_at_at_once(monkeypatch):
    monkeypatch.setattr(attention_kernels, "_PLANNED_AT_ONCE", 4)
    layout = Problem.random([3, 16, 300, 0, 31, 32, 64, 5]).layout()
    expected = check_plan(layout, 4)
    assert len(expected.items) > 8 and len(expected.strips) > 8
    assert int(check_plan(replace(layout, strips=None), 4).num_strips) > int(expected.num_strips)


@pytest.mark.parametrize(("head_dim", "dtype"), in_both([64, 80, 96, 128, 256], quick=[80, 128]), ids=str)
def test_attention_is_right_for_every_head_dim(head_dim, dtype):
    check(Problem.random([21, 40], width=2, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 3), (2, 4), (1, 20)])
def test_query_heads_share_keys_in_groups_of_any_size(kv_heads, group):
    check(Problem.random([50], width=2, kv_heads=kv_heads, group=group))


@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        *(([0, 33], window) for window in (1, 16)),
        *(([100, 130], window) for window in (30, 100, 200)),
        *(pytest.param([0, 33], window, marks=pytest.mark.slow) for window in (30, 100, 200)),
        *(pytest.param([100, 130], window, marks=pytest.mark.slow) for window in (1, 16)),
    ],
    ids=str,
)
def test_keys_outside_the_window_are_not_seen(lengths, window):
    check(Problem.random(lengths, width=4), window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_path_in_the_tiles_of_large_models(dtype):
    """Most of what a deep node sees is of its own forward, while plain decoding has it behind it, in whole blocks."""
    nodes = [4, 27, 28, 29, 63] if DEVICE == "cpu" else list(range(64))
    problem = Problem.make([100], [chain(64)], nodes=[nodes], group=4, head_dim=128, dtype=dtype)
    check(problem, tiles=attention_kernels.tiles_for(128, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strips_in_the_tiles_of_real_use(dtype):
    """A path of 20 nodes is cut, and crosses a split's border at 256."""
    problem = Problem.make([245], [SIDE_BRANCHES], group=4, head_dim=64, dtype=dtype)
    check(problem, tiles=attention_kernels.tiles_for(64, dtype), tokens=[0, 4, 7, 8, 10, 11, 15, 16, 19, 20, 21, 22])


def test_room_for_a_longer_context_changes_nothing():
    problem = Problem.random([3, 70])
    assert torch.equal(problem.attend(), problem.attend(max_context=200))


@pytest.mark.parametrize("window", [None, 24])
def test_leftovers_in_scratch_memory_change_nothing(window):
    problem = Problem.make([3, 70], [chain(60), some_tree(5)])
    size = scratch_size(problem.layout(), *problem.query.shape[1:], SMALL)
    first, second = (
        problem.attend(window=window, scratch=torch.full((size,), rubbish, device=DEVICE))
        for rubbish in (torch.nan, 1e30)
    )
    assert torch.equal(first, second)


def test_any_strides_of_queries_and_store():
    """As they come: queries beside keys and values in one product, and one layer of a store."""
    problem = Problem.random([3, 40])
    expected = problem.attend()
    product = torch.full((len(problem.query), 2 * problem.query.shape[1], 8), torch.nan, device=DEVICE)
    product[:, : problem.query.shape[1]] = problem.query
    problem.query = product[:, : problem.query.shape[1]]
    stored = torch.full((2, 2, *problem.keys.shape), torch.nan, device=DEVICE)  # [kind, layers, ...]
    stored[0, 1], stored[1, 1] = problem.keys, problem.values
    problem.keys, problem.values = stored[0, 1], stored[1, 1]
    assert torch.equal(problem.attend(), expected)


def test_models_of_transformers_attend_by_the_kernels_and_all_layers_share_a_plan(monkeypatch):
    problem = Problem.random([30, 70], head_dim=16)
    tiles = attention_kernels.tiles_for(16, torch.float32)
    expected = problem.attend(tiles, window=40)
    made = []
    make = attention_kernels.plan
    monkeypatch.setattr(attention_kernels, "plan", lambda *args: made.append(args) or make(*args))
    step = KernelStep(problem.layout())
    query = problem.query.transpose(0, 1)[None].contiguous()  # [1, heads, T, D]
    stored = [part.transpose(0, 1)[None] for part in (problem.keys, problem.values)]  # [1, kv_heads, slots, D]
    for _ in range(2):
        out = model_attention._by_kernels(query, *stored, step, model_attention.Scores(window=40))
    assert torch.equal(out.flatten(2)[0], expected) and out.shape == (1, len(problem.query), 2, 16)
    assert len(made) == 1


@pytest.mark.parametrize("num_positions", [1, 31, 32, 33, 63, 64, 65, 112, 113, 300])
def test_splits_are_counted_as_the_kernels_count_them(num_positions):
    starts = [0, 32, *range(64, 400, 48)]
    assert SMALL.count_splits(num_positions) == sum(start < num_positions for start in starts)


@pytest.mark.parametrize("places", [[[2, 3, 5], [1, 2]], [[7], []], [[1, 3, 4, 5, 6, 7], [4]], [[], []]], ids=str)
def test_committing_moves_accepted_tokens_behind_their_root_and_nothing_else(places):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 6 * PAGE, 3, 8)
    tables, lines, lengths = ints([[0, 0], [3, 1], [5, 2], [4, 0]]), ints([2, 1]), ints([61, 5])  # one crosses a page
    table = ints([row + [NOBODY] * (8 - len(row)) for row in places])
    numbers = (tables, lines, lengths, table, ints([len(row) for row in places]))
    ours = keys.clone().to(DEVICE), values.clone().to(DEVICE)
    attention_kernels.commit(*ours, *numbers)

    def slot(row, index):
        return int(tables[lines[row], index // PAGE]) * PAGE + index % PAGE

    for stored in (keys, values):
        old = stored.clone()
        for row, length in enumerate(lengths.tolist()):
            for step, place in enumerate(places[row], start=1):
                stored[:, slot(row, length + step)] = old[:, slot(row, length + place)]
    assert torch.equal(ours[0].cpu(), keys) and torch.equal(ours[1].cpu(), values)


# What a step's tokens are


def test_a_steps_strips_go_down_its_trees_and_prompts():
    trees, prompts = [some_tree(9, 1), [0], LONG_BRANCH, some_tree(22, 2), chain(4)], [5, 1]
    width, rows = max(map(len, trees)), [Row(line) for line in range(len(trees) + len(prompts))]
    parents = [tree + [0] * (width - len(tree)) for tree in trees]
    sources = [[0] + [1] * (len(tree) - 1) + [PADDING] * (width - len(tree)) for tree in trees]
    chunks = [Chunk(row, [3] * count) for row, count in zip(rows[len(trees) :], prompts, strict=True)]
    step = FlatStep(rows[: len(trees)], tree_of([[3] * width] * len(trees), parents, sources), chunks)
    expected = [number for tree in (*trees, *map(chain, prompts)) for number in strips_of(tree)]
    assert step.columns[5, : step.num_tokens].tolist() == expected


def test_paths_are_laid_out_where_trees_branch_and_nothing_is_written_elsewhere(monkeypatch):
    problem = Problem.make([5, 3, 9], [some_tree(7, 1), chain(12), some_tree(5, 2)], padding=3)
    layout = problem.layout()
    parents = ints([*(parent for tree in problem.trees for parent in tree), -1, -1, -1])
    inputs = (parents, layout.places, layout.depths, layout.starts, layout.rows)
    make = Tensor.new_empty  # which the interpreter calls too
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *size, **kind: make(self, *size, **kind).fill_(NOBODY))
    paths = layer_kernels.lay_out(*inputs, layout.paths.shape[1])
    assert torch.equal(paths, layout.paths)
    assert 2 < int((layout.depths != layout.places).sum()) < 11, "there are both kinds"


@pytest.mark.parametrize("normed", [False, True])
def test_rotated_keys_and_values_are_stored_like_pytorch_does(normed):
    """Ragged rows, a head dimension that is no power of two, and a position past the tables."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 5, 3, 12
    problem = Problem.make([62, 3], [some_tree(6, 1), chain(2)], padding=1, kv_heads=kv_heads, head_dim=head_dim)
    layout = problem.layout()
    qkv = torch.randn(len(problem.query), (heads + 2 * kv_heads) * head_dim)
    keys, values = torch.randn(2, *problem.keys.shape)
    cos, sin = torch.randn(2, 64, head_dim // 2)
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if normed else None
    results = []
    for module in (plain_kernels, layer_kernels):
        mine = [t.clone().to(DEVICE) for t in (qkv, keys, values)]
        weights = (*(t.to(DEVICE) for t in norms), 1e-5) if norms else None
        module.rotate_and_store(*mine, layout, cos.to(DEVICE), sin.to(DEVICE), weights)
        mine[0][:, heads * head_dim :] = 0  # keys and values are of no use there any more
        results.append([t.cpu() for t in mine])
    torch.testing.assert_close(results[1], results[0])
    assert int((results[1][1] != keys).any(dim=2).any(dim=1).sum()) == len(qkv), "each token has a slot of its own"


def test_several_layers_store_keys_and_values_without_queries():
    torch.manual_seed(0)
    layers, kv_heads, head_dim = 2, 3, 12
    problem = Problem.make([62, 3], [chain(3), chain(2)], kv_heads=kv_heads, head_dim=head_dim)
    projected = torch.randn(layers, len(problem.query), 2 * kv_heads * head_dim)
    keys, values = torch.randn(2, layers, *problem.keys.shape)
    cos, sin = torch.randn(2, 70, head_dim // 2)
    norms = torch.randn(2, layers, head_dim)
    results = []
    for module in (plain_kernels, layer_kernels):
        mine = [t.clone().to(DEVICE) for t in (projected, keys, values)]
        tables = (cos.to(DEVICE), sin.to(DEVICE))
        module.rotate_and_store(*mine, problem.layout(), *tables, (*norms.to(DEVICE), 1e-5))
        results.append([t.cpu() for t in mine])
    torch.testing.assert_close(results[1], results[0])
    assert not torch.equal(results[1][1], keys)


@pytest.mark.parametrize("width", [4, 11])
def test_a_block_that_sees_all_of_itself(width):
    """Whether it fits a tile, which has 8 tokens here, or not; over prefixes of several splits, and of none."""
    lengths = [70, 0, 31]
    problem = Problem.make(lengths, [chain(width)] * 3, kv_heads=2)
    places, depths, paths = bidirectional_columns(width, 3, SMALL.tokens(2), torch.device(DEVICE))
    layout = replace(problem.layout(), places=places, depths=depths, paths=paths, strips=None)
    plan = attention_kernels.plan(layout, 2, SMALL)
    assert plan.chains.tolist()[:3] == [int(width == 4)] * 3
    layout = replace(layout, only_chains=width == 4)  # nothing is missing without the tail's kernel
    out = tree_attention(problem.query, problem.keys, problem.values, layout, plan, tiles=SMALL).cpu()
    expected = []
    for row, length in enumerate(lengths):
        slots = [problem.slot(row, index) for index in range(length + width)]
        key, value = (part[slots].cpu().repeat_interleave(2, dim=1) for part in (problem.keys, problem.values))
        query = problem.query[row * width : (row + 1) * width].cpu()
        weights = (torch.einsum("thd,shd->ths", query, key) * query.shape[2] ** -0.5).softmax(dim=-1)
        expected.append(torch.einsum("ths,shd->thd", weights, value).flatten(1))
    torch.testing.assert_close(out, torch.cat(expected))


def test_residual_add_and_rms_norm_match_pytorch():
    torch.manual_seed(0)
    stream, delta, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    for more in (delta, None):
        expected = plain_kernels.add_norm(stream, more, weight, 1e-5)
        ours = layer_kernels.add_norm(*(None if t is None else t.to(DEVICE) for t in (stream, more, weight)), 1e-5)
        torch.testing.assert_close(tuple(t.cpu() for t in ours), expected)


def test_silu_and_product_match_pytorch():
    gate_up = torch.randn(2, 2 * 37)
    torch.testing.assert_close(layer_kernels.silu_mul(gate_up.to(DEVICE)).cpu(), plain_kernels.silu_mul(gate_up))


def test_padding_that_stands_behind_the_block_table_is_written_to_no_page_of_a_request():
    problem = Problem.make([3], [chain(2)], padding=2)
    layout = problem.layout()
    far = replace(layout, places=ints([0, 1, 2 * PAGE, 5 * PAGE]), depths=ints([0, 1, 2 * PAGE, 5 * PAGE]))
    assert far.tables.shape[1] == 1
    keys, values = torch.zeros_like(problem.keys), torch.zeros_like(problem.values)
    qkv, cos, sin = torch.ones(4, 4 * 8, device=DEVICE), *torch.ones(2, 9, 4, device=DEVICE)
    layer_kernels.rotate_and_store(qkv, keys, values, far, cos, sin)
    written = values.flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == sorted({0, problem.slot(0, 3), problem.slot(0, 4)})


# Products


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_right(dtype, has_bias):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size).to(DEVICE, dtype) for size in ((40, 256), (192, 256), (192,)))
    bias = bias if has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(Products(x.device).multiply(x, weight, bias).double(), expected, atol=1e-2, rtol=2e-3)


SOME_NUMBERS = sorted(
    {*range(1, 512, 37), *(n for border in (16, 32, 64, 128, 256) for n in (border, border + 1)), 512}
)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32], ids=str)
def test_a_tokens_product_is_the_same_beside_any_number_of_others(dtype):
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*size).to(DEVICE, dtype) for size in ((64, 64), (64,), (512, 64)))
    products = Products(x.device)
    together = products.multiply(x, weight, bias)
    for number in range(1, 513) if DEVICE == "cuda" else SOME_NUMBERS:
        assert torch.equal(products.multiply(x[:number], weight, bias), together[:number]), number
        assert torch.equal(products.multiply(x[-number:], weight, bias), together[-number:]), number


# Every two sizes that a tile may have stand together in one of these.
QUICK_TILES = [(64, 16, 128), (64, 64, 64), (128, 16, 64), (128, 128, 128), (256, 64, 128), (256, 128, 64)]
OTHER_TILES = sorted(set(itertools.product((64, 128, 256), (16, 64, 128), (64, 128))) - set(QUICK_TILES))


@pytest.mark.parametrize(
    ("outputs", "tokens", "inputs", "is_gated", "by_descriptor"),
    [
        *((*sizes, False, True) for sizes in QUICK_TILES),
        *(pytest.param(*sizes, False, True, marks=pytest.mark.slow) for sizes in OTHER_TILES),
        *((*sizes, True, new) for sizes in [(128, 16, 128), (128, 128, 64), (256, 64, 64)] for new in (True, False)),
    ],
)
def test_tiles_change_no_bit(outputs, tokens, inputs, is_gated, by_descriptor):
    """Of products, and of products with their activation; by_descriptor: as newer devices load blocks."""
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*size).to(DEVICE, torch.float16) for size in ((512, 256), (512,), (150, 256)))
    products, bias = Products(x.device), None if is_gated else bias
    # The interpreter leaves the order within a block to NumPy; instructions have their own, in blocks of any size.
    block, rows, least = inputs if DEVICE == "cpu" else 64, 512 // outputs, 128 if is_gated else 64
    expected = products.multiply(x, weight, bias, Tile(64, 16, block, warps=4, stages=2, num_whole=8))
    expected = layer_kernels.silu_mul(expected) if is_gated else expected
    products._by_descriptor = by_descriptor
    for num_whole in {rows, 1, 0} if outputs > least else {rows}:
        tile = Tile(outputs, tokens, inputs, warps=8 if outputs * tokens >= 2**14 else 4, stages=2, num_whole=num_whole)
        assert torch.equal(products.multiply(x, weight, bias, tile, is_gated=is_gated), expected), num_whole


@pytest.mark.parametrize(("dtype", "neurons"), [(torch.float32, 96), *((dtype, 192) for dtype in DTYPES[1:])], ids=str)
def test_a_product_with_its_activation_has_the_bits_of_the_two_kernels(dtype, neurons):
    torch.manual_seed(0)
    weight, x = (torch.randn(*size).to(DEVICE, dtype) for size in ((2 * neurons, 128), (150, 128)))
    products = Products(x.device)
    for number in (1, 16, 17, 40, 150):
        tile = tile_for(number, (2 * neurons, 128), dtype, is_gated=True)
        # The interpreter leaves the order within a block to NumPy.
        separate = products.multiply(x[:number], weight, None, replace(tile, outputs=64, num_whole=neurons // 32))
        expected = layer_kernels.silu_mul(separate)
        assert torch.equal(products.multiply(x[:number], weight, is_gated=True), expected), number


SHAPES = [(6144, 4096), (28672, 4096), (2048, 5632), (51200, 5120), (576, 1536), (128256, 4096), (64, 64), (64, 192)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_leave_nothing_out_and_fit(shape, dtype):
    kinds = (False, True) if can_gate(shape, dtype) else (False,)
    for number, is_gated in itertools.product((1, 17, 64, 96, 128, 200, 256, 384, 512, 4096), kinds):
        for processors, shared_memory in ((132, 227 * 1024), (108, 163 * 1024), (40, 99 * 1024)):
            tile = tile_for(number, shape, dtype, processors, shared_memory, is_gated)
            least = 128 if is_gated and dtype is torch.bfloat16 else 64
            assert shape[0] % tile.outputs == 0 and shape[1] % tile.inputs == 0
            assert 0 <= tile.num_whole <= shape[0] // tile.outputs
            is_whole = tile.num_whole == shape[0] // tile.outputs
            assert tile.outputs >= (least if is_whole else 2 * least), "instructions have 64 rows"
            size = (tile.outputs + tile.tokens) * tile.inputs * dtype.itemsize
            assert tile.stages >= 2 and tile.stages * size <= shared_memory


def test_products_are_our_own_where_they_are_as_fast(monkeypatch):
    made = []
    monkeypatch.setattr(Products, "multiply", lambda self, x, weight, bias: made.append((len(x), len(weight))))
    multiply, always = Products(torch.device("cpu")), Products(torch.device("cpu"), always=True)
    large, small = (torch.zeros(number, 2048, dtype=torch.float16, device="meta") for number in (2048, 64))
    for products in (multiply, always):
        for number in (2048, 2049):
            for weight in (large, small):
                products(torch.zeros(number, 2048, dtype=torch.float16, device="meta"), weight)
    assert made == [(2048, 2048), (2048, 2048), (2048, 64), (2049, 2048), (2049, 64)]


def test_products_need_sizes_of_multiples_of_64():
    assert can_multiply((64, 192))
    assert not can_multiply((65, 64)) and not can_multiply((64, 96))


# Choices


@pytest.mark.parametrize(("vocab_size", "k"), [(5, 4), (1024, 4), (2500, 4), (60, 20)])
def test_top_k_is_ordered_and_the_first_of_equal_values_wins(vocab_size, k):
    torch.manual_seed(0)
    logits = torch.randn(3, vocab_size).round(decimals=1).to(DEVICE)  # many are equal
    logits[1] = -torch.inf
    logits[1, -2:] = 3.0
    tokens, values, total = topk_kernels.highest(logits, k)
    expected = plain_kernels.highest(logits, k)
    torch.testing.assert_close((values, total), expected[1:])
    finite = values > -torch.inf
    assert torch.equal(tokens[finite], expected[0][finite])


def test_sampled_rows_are_ranked_by_logits_over_temperature_and_the_noise_of_their_draws():
    """Two texts of two beams each, the second greedy. Draft ids are not target ids."""
    torch.manual_seed(0)
    vocab_size, passes = 1500, torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    logits = (2 * torch.randn(4, vocab_size)).to(DEVICE)
    to_target = torch.arange(vocab_size, device=DEVICE) * 2
    seeds, positions = torch.tensor([-7, 5], device=DEVICE), torch.tensor([900, 3], dtype=torch.int32, device=DEVICE)
    draws = DraftDraws(seeds, torch.tensor([0.8, 0.0], device=DEVICE), positions, to_target, passes)
    tokens, values, total = topk_kernels.highest(logits, 5, draws)
    noise = gumbel_noise(seeds[:1], positions[:1].long() + 3, 3 * vocab_size)[:, ::3]
    scores = torch.cat([logits[:2] / 0.8 + noise, logits[2:].double()])
    expected = scores.topk(5)
    assert torch.equal(tokens.long(), expected.indices)
    torch.testing.assert_close(values.double(), expected.values, rtol=0, atol=1e-4)
    torch.testing.assert_close(total.double(), scores.logsumexp(dim=1), rtol=0, atol=1e-4)


def test_draft_noise_is_the_samplers_noise_where_it_is_high_and_where_it_is_low():
    """Of equal logits the noise decides, and one logit is so high that the token of the lowest noise is first."""
    seeds, positions = torch.tensor([405], device=DEVICE), torch.tensor([0], device=DEVICE)
    noise = gumbel_noise(seeds, positions, 1024)
    assert noise.max() > 14 and noise.min() < -2.2
    logits = torch.zeros(1, 1024, device=DEVICE)
    logits[0, noise.argmin()] = 20.0
    draws = DraftDraws(seeds, torch.ones(1, device=DEVICE), positions - 1, torch.zeros(1024, device=DEVICE).long())
    _, values, _ = topk_kernels.highest(logits, 8, draws)
    torch.testing.assert_close(values.double(), (logits + noise).topk(8).values, rtol=0, atol=3e-5)


# The head's passes


@pytest.mark.parametrize("keeps_normed", [False, True])
def test_inputs_of_the_eagle3_layer_match_pytorch(keeps_normed):
    torch.manual_seed(0)
    embedding, hidden, norms = torch.randn(9, 12), torch.randn(6, 12), torch.randn(2, 12)
    tokens, origins = torch.tensor([1, 8, 0, 3]), torch.tensor([2, 0, 4, 4], dtype=torch.int32)
    for inputs in ((tokens, embedding, hidden, origins), (tokens, embedding, hidden, None)):
        options = (tuple(norms.to(DEVICE)), 1e-5, keeps_normed)
        there = [None if part is None else part.to(DEVICE) for part in inputs]
        expected = plain_kernels.enter(*inputs, tuple(norms), *options[1:])
        ours = tuple(part.cpu() for part in eagle3_kernels.enter(*there, *options))
        torch.testing.assert_close(ours, expected)


def test_children_of_block_slots_match_pytorch():
    torch.manual_seed(0)
    batch, num_slots, num_parents, num_candidates = 2, 3, 4, 7
    logits = torch.randn(batch, num_slots, num_parents, num_candidates)
    candidates = torch.stack([torch.randperm(50)[:7] for _ in range(6)]).view(batch, num_slots, -1)
    found = block_kernels.children(*(part.to(DEVICE) for part in (logits, candidates)), 5).to_host()
    torch.testing.assert_close(tuple(found), tuple(block_tree.children(logits, candidates, 5)))
    assert (found.entries >= 0).any()
    assert (found.entries[:, -num_parents:] == -1).all(), "the last slot's have no children"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_drafts_are_tokens_of_the_vocabulary():
    """A wrong draft costs nothing; a token that does not exist would end the process."""
    nan = torch.full((2, 1030), torch.nan, device=DEVICE)
    tokens, _, _ = topk_kernels.highest(nan, 3)
    assert bool(((tokens >= 0) & (tokens < 1030)).all())
    candidates = torch.arange(100, 106, device=DEVICE).view(1, 2, 3)
    found = block_kernels.children(torch.full((1, 2, 2, 3), torch.nan, device=DEVICE), candidates, 2).tokens
    assert bool(((found >= 100) & (found < 106)).all())


def test_block_slots_hold_the_root_and_masks():
    embedding, mask, roots = torch.randn(9, 12), torch.randn(12), torch.tensor([8, 0, 3], dtype=torch.int32)
    ours = block_kernels.slots(*(part.to(DEVICE) for part in (roots, embedding, mask)), 4)
    assert torch.equal(ours.cpu(), plain_kernels.slots(roots, embedding, mask, 4))
    assert torch.equal(ours[4:6].cpu(), torch.stack([embedding[0], mask]))


@pytest.mark.parametrize("room", [2, 8])
def test_the_walk_kernel_accepts_what_the_plain_walk_accepts(room):
    """Rows of several sizes, one of no tokens, and behind them a part of a prompt, which is no tree."""
    rng = random.Random(0)
    sizes = [12, 1, 12, 0, 9, 12, 30]
    starts = [sum(sizes[:row]) for row in range(len(sizes))]
    tokens, parents, chosen = [], [], []
    for size in sizes:
        tokens += [rng.randrange(2) for _ in range(size)]
        parents += [0, *(rng.choice([-1, 0, node - 1, rng.randrange(node)]) for node in range(1, size))][:size]
        chosen += [rng.randrange(2) for _ in range(size)]
    step = (ints(tokens), ints(parents), torch.tensor(chosen), ints(starts), ints(sizes), ints([5, 0, 7, 9, 2, 4]))
    results = []
    for function, device in ((walk_kernels.follow, DEVICE), (plain_kernels.follow, "cpu")):
        written = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in (6, 6, 6, (6, room), (6, room))]
        function(*(part.to(device) for part in step), *written, 12)
        results.append([part.tolist() for part in written])
    counts = results[0][0]
    assert results[0] == results[1]
    assert counts[1] == 1 and counts[3] == 0 and (max(counts) == 2 if room == 2 else max(counts) > 2)


def test_the_walk_kernel_reaches_the_end_of_a_tree_of_128_tokens():
    tokens, parents, chosen = ints(list(range(128))), ints(chain(128)), torch.arange(1, 129, device=DEVICE)
    counts, lengths, roots, following, nodes = ints([0]), ints([0]), ints([0]), ints([[0] * 128]), ints([[0] * 128])
    written = (counts, lengths, roots, following, nodes)
    walk_kernels.follow(tokens, parents, chosen, ints([0]), ints([128]), ints([3]), *written, 128)
    assert counts.tolist() == [128] and lengths.tolist() == [131] and roots.tolist() == [128]
    assert following[0].tolist() == list(range(1, 129)) and nodes[0].tolist() == list(range(128))


@pytest.mark.parametrize(("topk", "keep"), [(3, None), (3, 5), (1, None), (1, 5)])
def test_beam_expansion_matches_pytorch_pass_by_pass(topk, keep):
    rows, passes, vocab = 2, 3, 20
    beams = [eagle3_kernels.Beams.make(rows, topk, passes, torch.device(device)) for device in ("cpu", DEVICE)]
    levels = [
        torch.zeros(passes, 3, rows * topk * topk, dtype=torch.int64, device=device) for device in ("cpu", DEVICE)
    ]
    to_target = torch.arange(vocab) * 2
    for number in range(passes + 1):  # one more than there is room for: it is written over the last
        torch.manual_seed(number)
        found = rows * (1 if number == 0 else topk)
        ids = torch.stack([torch.randperm(vocab)[:topk] for _ in range(found)]).int()
        logits, totals = torch.randn(found, topk).sort(dim=1, descending=True).values, torch.full((found,), 3.0)
        for module, own, level in zip((plain_kernels, eagle3_kernels), beams, levels, strict=True):
            if module is plain_kernels and number == passes:
                continue
            inputs = (part.to(level.device) for part in (ids, logits, totals, to_target))
            module.spread(*inputs, own, level, keep, is_first=number == 0)
        if number < passes:
            torch.testing.assert_close({k: v.cpu() for k, v in vars(beams[1]).items()}, vars(beams[0]))
            assert torch.equal(levels[1][number, :2].cpu(), levels[0][number, :2])
            torch.testing.assert_close(*(level[number, 2].cpu().view(torch.float32) for level in levels))


# Launches that overlap


def test_launches_overlap_only_where_that_is_asked_for_and_possible(monkeypatch):
    usual, overlapping = {"OVERLAPS": False}, {"OVERLAPS": True, "launch_pdl": True}
    with overlap.launches(True):
        assert overlap.options(torch.device("cpu")) == usual, "there is nothing to overlap"
        monkeypatch.setattr(overlap, "_is_possible", lambda device: True)
        assert overlap.options(DEVICE) == overlapping
        with overlap.launches(False):
            assert overlap.options(DEVICE) == usual
        monkeypatch.setattr(overlap, "is_on", False)
        assert overlap.options(DEVICE) == usual
        monkeypatch.setattr(overlap, "is_on", True)
    assert overlap.options(DEVICE) == usual

"""Steps of trees and prompts for the attention kernels, and what they should give."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from graft.model.kernels import attention as attention_kernels
from graft.model.kernels.attention import PAGE, Tiles, tree_attention
from graft.model.layout import Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cannot multiply matrices of bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
# Small enough that short texts have many blocks and splits of both kinds.
SMALL = Tiles(rows=16, keys=16, short_split=32, border=64, long_split=48, combined=64, prefix_stages=2)
NOBODY = -(2**20)  # in place of numbers that may not be read
LONG_BRANCH = [0, 0, 0, *range(2, 21)]  # 20 nodes down the second child's path
SIDE_BRANCHES = [0, *range(19), 3, 11, 21]  # off a path of 20 nodes, one of one node and one of two


def in_both(sizes, quick):
    """Of each size single precision, of these halves as well; the other halves are for the slow suite."""
    halves = [(size, dtype) for size in sizes for dtype in DTYPES[1:]]
    marked = [pytest.param(*half, marks=[] if half[0] in quick else [pytest.mark.slow]) for half in halves]
    return [*((size, torch.float32) for size in sizes), *marked]


@dataclass
class Problem:
    """A flat step's queries, and the store they meet, in pages of any order. What belongs to no token is NaN."""

    lengths: list[int]
    trees: list[list[int]]  # of each row the parents of its nodes, by place
    nodes: list[list[int]]  # of each row the places whose queries are in the step
    tables: list[list[int]]  # pages of each row; line 0 and page 0 are nobody's
    query: Tensor  # [T, heads, head_dim]
    keys: Tensor  # [num_slots, kv_heads, head_dim]
    values: Tensor  # [num_slots, kv_heads, value_dim]
    padding: int = 0  # tokens of line 0 at the end

    @classmethod
    def make(
        cls,
        lengths,
        trees,
        nodes=None,
        kv_heads=1,
        group=2,
        head_dim=8,
        value_dim=None,
        dtype=torch.float32,
        padding=0,
        seed=0,
    ):
        nodes = nodes or [list(range(len(tree))) for tree in trees]
        sizes = [length + len(tree) for length, tree in zip(lengths, trees, strict=True)]
        num_pages = [-(-size // PAGE) for size in sizes]
        pages = list(range(1, sum(num_pages) + 2))
        random.Random(seed).shuffle(pages)
        tables = [[pages.pop() for _ in range(count)] for count in num_pages]
        generator = torch.Generator().manual_seed(0)
        num_tokens = sum(map(len, nodes)) + padding
        query = torch.randn(num_tokens, kv_heads * group, head_dim, generator=generator)
        keys, values = (
            torch.full(((sum(num_pages) + 2) * PAGE, kv_heads, size), torch.nan, dtype=dtype, device=DEVICE)
            for size in (head_dim, value_dim or head_dim)
        )
        problem = cls(lengths, trees, nodes, tables, query.to(DEVICE, dtype), keys, values, padding)
        for row, size in enumerate(sizes):
            slots = [problem.slot(row, index) for index in range(size)]
            for stored in (problem.keys, problem.values):
                stored[slots] = torch.randn(size, *stored.shape[1:], generator=generator).to(DEVICE, dtype)
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
        """[T, heads * value_dim], of the tokens that are no padding. strips: in place of the right ones."""
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
        shape = (len(self.query) - self.padding, heads, self.values.shape[2])
        out = torch.empty(shape, dtype=torch.float64, device=DEVICE)
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
        sizes = {"head_dim": head_dim, "value_dim": self.values.shape[2]}
        return {"kv_heads": kv_heads, "group": heads // kv_heads, "dtype": self.query.dtype, **sizes}

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

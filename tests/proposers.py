"""Test policies that propose good, bad and repeated tokens whatever the machine's costs are; and trees."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

import reference
from graft.bench.baselines.dense import Dense
from graft.spec_decode.policy_settings import PolicySettings
from graft.tree.tree import PADDING, DraftTree


@dataclass
class Rows:
    """The draft state of rows that need none."""

    rows: list

    @property
    def lengths(self):
        return [row.length for row in self.rows]

    def select(self, rows):
        return Rows([self.rows[row] for row in rows])

    def copy_row(self, source, target, row):
        self.rows[target] = row

    def concat(self, other):
        return Rows(self.rows + other.rows)


class Scripted:
    """A drafter without a model: in one pass, the trees that a function makes of the rows' lengths and roots."""

    hidden_layers = ()
    max_passes = 1
    num_slots = bytes_per_token = num_setups = 0
    is_captured = False

    def __init__(self, num_nodes, make):
        self.num_nodes = self.max_depth = num_nodes
        self.make = make

    def level_sizes(self, num_rows, keep=None):
        return (self.num_nodes,)

    def beams_of(self, num_rows, keep=None):
        return 0

    def knows(self, draws):
        return False

    def open(self, cache, texts=()):
        return Rows(list(cache.rows))

    def run_passes(self, asked, add_level):
        tree = self.make(asked.state.lengths, asked.roots[: len(asked.state.rows)].tolist())
        add_level(0, *map(asked.flat, nodes_of(tree, self.num_nodes, asked.max_depth)))

    def read(self, *of_a_round):
        """It needs no more than lengths, which are the target's."""

    learn = warm_up = read


class ScriptedTrees(Dense):
    """Verifies all that a `Scripted` drafter proposes."""

    def __init__(self, num_nodes, make):
        super().__init__(None, Scripted(num_nodes, make), PolicySettings(budget=num_nodes))


class RandomTrees(ScriptedTrees):
    """Random trees over a small range of tokens: many wrong proposals, duplicate siblings, padding."""

    def __init__(self, num_nodes: int = 12, vocab_size: int = 61, merge: bool = False, seed: int = 0) -> None:
        rng = random.Random(seed)

        def make(lengths, roots):
            tree = random_tree(rng, roots, num_nodes, vocab_size)
            return each_path_once(tree) if merge else tree

        super().__init__(num_nodes, make)


class Oracle(ScriptedTrees):
    """Knows the answer and proposes it as a chain, with a wrong sibling first at every depth."""

    def __init__(self, answer: list[int], num_prompt_tokens: int, depth: int = 5) -> None:
        def make(lengths, roots):
            done = lengths[0] + 1 - num_prompt_tokens
            tokens, parents, parent = [roots[0]], [0], 0
            for token in answer[done : done + depth]:
                tokens += [(token + 1) % 61, token]
                parents += [parent, parent]
                parent = len(tokens) - 1
            return tree_of([tokens], [parents])

        super().__init__(2 * depth, make)


def nodes_of(tree: DraftTree, size: int, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and q [B, size] of the nodes of trees, as a drafter gives them: depth by depth."""
    tokens, parents = torch.zeros(2, len(tree.tokens), size, dtype=torch.int32)
    q = torch.zeros(len(tree.tokens), size)
    for row, (own_tokens, above, valid) in enumerate(zip(tree.tokens, tree.parents.tolist(), tree.valid, strict=True)):
        depths = [0]
        for node in range(1, tree.width):
            depths.append(depths[above[node]] + 1)
        order = [node for node in range(1, tree.width) if valid[node] and depths[node] <= max_depth]
        numbers = {0: 0} | {node: number for number, node in enumerate(sorted(order, key=depths.__getitem__), start=1)}
        for node, number in list(numbers.items())[1:]:
            tokens[row, number - 1], parents[row, number - 1] = own_tokens[node], numbers[above[node]]
            q[row, number - 1] = 1.0
    return tokens, parents, q


def random_tree(rng: random.Random, roots: list[int], num_nodes: int, vocab_size: int) -> DraftTree:
    tokens, parents, sources = [], [], []
    for root in roots:
        num_real = rng.randint(num_nodes // 2, num_nodes)
        row_sources = [0] + [1] * num_real + [PADDING] * (num_nodes - num_real)
        row_parents = [rng.randrange(max(node, 1)) if node <= num_real else 0 for node in range(num_nodes + 1)]
        tokens.append([root, *(rng.randrange(vocab_size) for _ in range(num_nodes))])
        parents.append(row_parents)
        sources.append(row_sources)
    return tree_of(tokens, parents, sources)


def each_path_once(tree: DraftTree) -> DraftTree:
    """The tree as a pool makes it of the same proposals."""
    pool = reference.Candidates(tree.tokens[:, 0], tree.tokens[:, :1].tolist())
    columns = (tree.tokens, tree.parents, tree.probabilities * tree.valid, tree.sources, torch.zeros_like(tree.tokens))
    pool.add(*(column[:, 1:] for column in columns))
    pool.merge()
    num_rows, most = len(tree.tokens), tree.width - 1
    return best_of(pool, num_rows * most, [most] * num_rows)


def best_of(pool: reference.Candidates, total: int, caps: list[int]) -> DraftTree:
    """The likeliest nodes of all rows, as trees."""
    chosen = [[0] for _ in pool.rows]
    for row, place in pool.ranked(total, caps):
        chosen[row].append(place)
    width = max(map(len, chosen))
    tokens, parents, sources = [], [], []
    for nodes, places in zip(pool.rows, chosen, strict=True):
        padding = width - len(places)
        tokens.append([nodes[place].token for place in places] + [nodes[0].token] * padding)
        parents.append([places.index(nodes[place].parent) for place in places] + [0] * padding)
        sources.append([nodes[place].source for place in places] + [PADDING] * padding)
    return tree_of(tokens, parents, sources)


def tree_of(tokens, parents, sources=None, probabilities=None) -> DraftTree:
    tokens = torch.tensor(tokens)
    if sources is None:
        sources = [[0] + [1] * (tokens.shape[1] - 1)] * len(tokens)
    ones = torch.ones(tokens.shape) if probabilities is None else torch.tensor(probabilities)
    return DraftTree(tokens, torch.tensor(parents), ones, torch.tensor(sources))


def token_paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The token path of every valid node, found by following parents one by one."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    result = []
    for node in tree.valid[row].nonzero().flatten().tolist():
        path = []
        while node != 0:
            path.append(tokens[node])
            node = parents[node]
        result.append(tuple(reversed(path)))
    return result


def assert_is_tree(tree: DraftTree) -> None:
    nodes = torch.arange(tree.width)
    assert (tree.parents[:, 0] == 0).all() and (tree.sources[:, 0] == 0).all()
    assert (tree.parents[:, 1:] < nodes[1:]).all(), "ancestors stand before descendants"
    parent_is_valid = tree.valid.gather(1, tree.parents)
    assert (parent_is_valid | ~tree.valid).all(), "no node hangs on padding"

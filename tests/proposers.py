"""Test policies that propose good, bad and repeated tokens whatever the machine's costs are; texts, trees and walks."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import torch

import reference
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.policies import DraftResult, Policy
from graft.tree.candidates import Candidates
from graft.tree.tree import PADDING, DraftTree

_NUMBERS = itertools.count(1 << 40)  # those of sequences count from 1


@dataclass(eq=False)
class Text:
    """A text as retrievers see it."""

    ids: list[int]
    num_prompt_tokens: int
    owner: int | None = None
    group: int | None = None
    number: int = field(default_factory=lambda: next(_NUMBERS))


def paths(tree: DraftTree, chosen: torch.Tensor) -> Accepted:
    """What is accepted when the token after every node is known: chosen [B, N]."""
    columns = (column.tolist() for column in (tree.tokens, tree.parents, tree.sources, chosen))
    nodes, tokens = zip(*(reference.walk(*row) for row in zip(*columns, strict=True)), strict=True)
    return Accepted(list(nodes), list(tokens))


class RandomTrees(Policy):
    """Random trees over a small range of tokens: many wrong proposals, duplicate siblings, padding."""

    sources = ("root", "random")

    def __init__(self, num_nodes: int = 12, vocab_size: int = 61, merge: bool = False, seed: int = 0) -> None:
        self._num_nodes, self._vocab_size, self._merge = num_nodes, vocab_size, merge
        self._random = random.Random(seed)

    def grow(self, batch, roots, clock):
        tree = random_tree(self._random, roots.tolist(), self._num_nodes, self._vocab_size)
        return DraftResult.without_drafts(each_path_once(tree) if self._merge else tree)


class Oracle(Policy):
    """Knows the answer and proposes it as a chain, with a wrong sibling first at every depth."""

    sources = ("root", "oracle")

    def __init__(self, answer: list[int], num_prompt_tokens: int, depth: int = 5) -> None:
        self._answer, self._num_prompt_tokens, self._depth = answer, num_prompt_tokens, depth

    def grow(self, batch, roots, clock):
        done = len(batch.sequences[0].ids) - self._num_prompt_tokens
        chain = self._answer[done : done + self._depth]
        tokens, parents, parent = [int(roots[0])], [0], 0
        for token in chain:
            tokens += [(token + 1) % 61, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return DraftResult.without_drafts(tree_of([tokens], [parents]))


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
    candidates = Candidates(tree.tokens[:, 0], tree.tokens[:, :1].tolist())
    if tree.width > 1:
        columns = (tree.tokens, tree.parents, tree.probabilities * tree.valid, tree.sources, tree.score_bucket)
        candidates.add(*(column[:, 1:] for column in columns))
    return candidates.best(tree.width - 1, tree.max_depth)[0]


def tree_of(tokens, parents, sources=None, probabilities=None) -> DraftTree:
    tokens = torch.tensor(tokens)
    if sources is None:
        sources = [[0] + [1] * (tokens.shape[1] - 1)] * len(tokens)
    ones = torch.ones(tokens.shape) if probabilities is None else torch.tensor(probabilities)
    return DraftTree(
        max_depth=tokens.shape[1] - 1,
        tokens=tokens,
        parents=torch.tensor(parents),
        probabilities=ones,
        sources=torch.tensor(sources),
        score_bucket=torch.zeros_like(tokens),
    )


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

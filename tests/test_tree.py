"""Properties of `DraftTree`, for trees of any shape."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.model.grammar import pruned
from graft.tree.tree import PADDING, DraftTree
from proposers import assert_is_tree, random_tree, token_paths, tree_of


@st.composite
def trees(draw, max_nodes=24):
    """Random trees with few tokens (so equal siblings are common) and padding."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(0, max_nodes))
    return random_tree(rng, [rng.randrange(5) for _ in range(batch)], nodes, vocab_size=4)


@settings(max_examples=30)
@given(st.integers(1, 70))
def test_a_chain_is_a_tree_of_one_path(length):
    chain = DraftTree.chain(torch.arange(length)[None])
    assert_is_tree(chain)
    assert chain.max_depth == length - 1
    assert chain.parents[0].tolist() == [0, *range(length - 1)]


@given(trees(), st.integers(1, 30))
def test_the_first_places_of_a_tree_are_a_tree(tree, width):
    first = tree.first(width)
    assert_is_tree(first)
    assert first.width == min(width, tree.width)
    assert torch.equal(first.tokens, tree.tokens[:, :width])
    assert torch.equal(first.parents, tree.parents[:, :width]) and torch.equal(first.sources, tree.sources[:, :width])


@pytest.mark.parametrize(
    ("sources", "width"),
    [
        ([[0, 1, 1, PADDING], [0, 1, PADDING, PADDING]], 3),
        ([[0, PADDING, PADDING, PADDING]] * 2, 1),
        ([[0, 1, 1, 1], [0, PADDING, PADDING, PADDING]], 4),
    ],
)
def test_trimming_takes_away_what_is_padding_in_every_row(sources, width):
    tree = tree_of([[1, 2, 3, 4]] * 2, [[0, 0, 0, 0]] * 2, sources)
    trimmed = tree.trimmed()
    assert trimmed.width == width
    assert trimmed.sources.tolist() == [row[:width] for row in sources]


class Never:
    """A constraint that forbids some tokens wherever they come."""

    error = None

    def __init__(self, *forbidden):
        self._forbidden = set(forbidden)

    def num_allowed(self, tokens):
        return next((place for place, token in enumerate(tokens) if token in self._forbidden), len(tokens))


def test_a_pruned_tree_has_the_paths_that_its_constraint_allows():
    for seed in range(20):
        tree = random_tree(random.Random(seed), [3, 4, 5], 12, 6)
        found = pruned(tree, [Never(1, 2), None, Never(4)], [True, True, False])
        assert_is_tree(found)
        paths = [token_paths(tree, row) for row in range(3)]
        allowed = [path for path in paths[0] if not {1, 2} & set(path)]
        assert sorted(token_paths(found, 0)) == sorted(allowed)
        assert sorted(token_paths(found, 1)) == sorted(paths[1])
        assert token_paths(found, 2) == [()], "a row that does not speculate has its root alone"

"""Properties of `DraftTree`, for trees of any shape."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.tree.tree import DraftTree
from proposers import assert_is_tree, random_tree


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
    assert chain.parents[0].tolist() == [0, *range(length - 1)]


@given(trees())
def test_nodes_are_counted_by_source(tree):
    most = int(tree.sources.max())
    assert tree.counts_by_source == [[row.count(n) for n in range(most + 1)] for row in tree.sources.tolist()]
    assert tree.num_nodes == [sum(source > 0 for source in row) for row in tree.sources.tolist()]

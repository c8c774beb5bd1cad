"""Properties of `DraftTree`: masks, depths and positions are right for a tree of any shape."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.spec_decode.tree import PADDING, DraftTree
from proposers import assert_is_tree, random_tree, tree_of


@st.composite
def trees(draw, max_nodes=24):
    """Random trees with few tokens (so equal siblings are common) and padding."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(0, max_nodes))
    return random_tree(rng, [rng.randrange(5) for _ in range(batch)], nodes, vocab_size=4)


def ancestors_of(tree, row, node):
    """The node and all above it, the root last, found by following parents one by one."""
    above = [node]
    while above[-1] != 0:
        above.append(int(tree.parents[row, above[-1]]))
    return above


@given(trees())
def test_the_mask_is_the_ancestor_relation(tree):
    mask = tree.ancestors()
    for row in range(tree.tokens.shape[0]):
        for node in range(tree.width):
            assert mask[row, node].nonzero().flatten().tolist() == sorted(ancestors_of(tree, row, node))


@given(trees())
def test_a_path_leads_from_the_root_to_the_node(tree):
    paths = tree.paths()
    assert paths.shape == (*tree.tokens.shape, tree.max_depth + 1)
    for row in range(tree.tokens.shape[0]):
        for node in range(tree.width):
            path = ancestors_of(tree, row, node)[::-1]
            assert paths[row, node].tolist() == path + [0] * (tree.max_depth + 1 - len(path))


@given(trees())
def test_depths_are_the_numbers_of_steps_to_the_root_and_positions_count_on_from_the_text(tree):
    depths = tree.depths()
    for row in range(tree.tokens.shape[0]):
        assert depths[row].tolist() == [len(ancestors_of(tree, row, node)) - 1 for node in range(tree.width)]
    lengths = torch.arange(len(depths)) * 3 + 7
    assert torch.equal(tree.positions(lengths), depths + lengths[:, None])


@given(trees())
def test_folding_meets_every_ancestor(tree):
    """The largest number on the path, as an operation that does not mind a value twice."""
    values = torch.randint(1000, tree.tokens.shape, generator=torch.Generator().manual_seed(0))
    values[:, 0] = -1  # the root leaves others unchanged
    largest = tree.fold_to_root(values, torch.maximum)
    for row in range(tree.tokens.shape[0]):
        for node in range(tree.width):
            assert largest[row, node] == max(int(values[row, n]) for n in ancestors_of(tree, row, node))


@settings(max_examples=30)
@given(st.integers(1, 70))
def test_a_chain_is_a_tree_whose_mask_is_causal(length):
    chain = DraftTree.chain(torch.arange(length)[None])
    assert_is_tree(chain)
    assert chain.max_depth == length - 1
    assert torch.equal(chain.ancestors()[0], torch.ones(length, length, dtype=torch.bool).tril())
    assert chain.depths()[0].tolist() == list(range(length))


def test_roots_are_trees_of_one_node():
    roots = DraftTree.roots(torch.tensor([4, 5]))
    assert_is_tree(roots)
    assert roots.tokens.tolist() == [[4], [5]] and roots.max_depth == 0
    assert roots.ancestors().tolist() == [[[True]], [[True]]]


@given(trees(), st.integers(1, 30))
def test_the_first_places_of_a_tree_are_a_tree(tree, width):
    first = tree.first(width)
    assert_is_tree(first)
    assert first.width == min(width, tree.width)
    assert torch.equal(first.tokens, tree.tokens[:, :width])
    assert torch.equal(first.ancestors(), tree.ancestors()[:, :width, :width])


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


def test_lists_say_what_the_tensors_say():
    tree = random_tree(random.Random(3), [1, 2], 9, vocab_size=5)
    assert tree.source_lists == tree.sources.tolist()
    assert tree.depth_lists == tree.depths().tolist()


@given(trees())
def test_nodes_are_counted_by_source(tree):
    for sources, counts in zip(tree.sources.tolist(), tree.counts_by_source, strict=True):
        assert counts == [sources.count(source) for source in range(len(counts))]
        assert sum(counts) == len(sources) - sources.count(PADDING)


def test_a_tree_whose_lists_were_asked_for_goes_to_a_device_all_the_same():
    tree = random_tree(random.Random(0), [3, 4], 5, 61)
    assert tree.source_lists == tree.sources.tolist()
    assert tree.to(torch.device("meta")).parents.device.type == "meta"


def test_chains_on_a_device_share_nothing():
    """Others may have gone while a CUDA graph still reads them."""
    first, second = (DraftTree.chain(torch.zeros(1, 3, dtype=torch.int64, device="meta")) for _ in range(2))
    assert first.parents is not second.parents
    assert first.parents.shape == (1, 3)

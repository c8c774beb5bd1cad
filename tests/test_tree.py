"""DraftTree by its properties: whatever is joined, merged and pruned stays a batch of trees."""

import random
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.tree import PADDING, DraftTree, join
from proposers import random_tree, tree_of


@st.composite
def trees(draw, max_nodes=24):
    """Random trees with few tokens (so equal siblings are common), random probabilities and padding."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(0, max_nodes))
    tree = random_tree(rng, [rng.randrange(5) for _ in range(batch)], nodes, vocab_size=4)
    probabilities = torch.tensor([[1.0] + [rng.choice([0.0, 0.25, 0.5, 0.9, 1.0]) for _ in range(nodes)]] * batch)
    return DraftTree(tree.max_depth, tree.tokens, tree.parents, probabilities, tree.sources, tree.evidence)


def token_paths(tree, row):
    """The token path of every valid node, found by following parents one by one."""
    result = []
    for node in range(tree.width):
        if tree.sources[row, node] == PADDING:
            continue
        path = []
        while node != 0:
            path.append(int(tree.tokens[row, node]))
            node = int(tree.parents[row, node])
        result.append(tuple(reversed(path)))
    return result


def assert_is_tree(tree):
    nodes = torch.arange(tree.width)
    assert (tree.parents[:, 0] == 0).all() and (tree.sources[:, 0] == 0).all()
    assert (tree.parents[:, 1:] < nodes[1:]).all(), "ancestors stand before descendants"
    parent_is_valid = tree.valid.gather(1, tree.parents)
    assert (parent_is_valid | ~tree.valid).all(), "no node hangs on padding"


@given(trees())
def test_merging_keeps_every_path_exactly_once(tree):
    merged = tree.merged()
    assert_is_tree(merged)
    for row in range(tree.tokens.shape[0]):
        paths = token_paths(merged, row)
        assert len(paths) == len(set(paths)), "no duplicate siblings"
        assert set(paths) == set(token_paths(tree, row)), "nothing lost, nothing invented"


@given(trees())
def test_a_merged_node_takes_the_best_probability_of_its_equals(tree):
    merged = tree.merged()
    for row in range(tree.tokens.shape[0]):
        best = {}
        valid = [n for n in range(tree.width) if tree.sources[row, n] != PADDING]
        for path, node in zip(token_paths(tree, row), valid, strict=True):
            best[path] = max(best.get(path, 0.0), float(tree.probabilities[row, node]))
        kept = [n for n in range(tree.width) if merged.sources[row, n] != PADDING]
        for path, node in zip(token_paths(merged, row), kept, strict=True):
            assert float(merged.probabilities[row, node]) == best[path]


@given(trees(), st.integers(0, 30))
def test_the_best_nodes_are_closed_under_ancestors_and_are_the_most_probable(tree, budget):
    best = tree.best(budget)
    assert_is_tree(best)
    assert best.width == min(budget + 1, tree.width)
    for row in range(tree.tokens.shape[0]):
        kept = sorted(best.path_probabilities()[row][best.valid[row]].tolist(), reverse=True)
        offered = sorted(tree.path_probabilities()[row][tree.valid[row]].tolist(), reverse=True)
        assert kept == offered[: len(kept)]
        assert not set(token_paths(best, row)) - set(token_paths(tree, row))


@given(trees())
def test_the_mask_is_the_ancestor_relation(tree):
    mask = tree.ancestors()
    for row in range(tree.tokens.shape[0]):
        for node in range(tree.width):
            above, n = {0, node}, node
            while n != 0:
                n = int(tree.parents[row, n])
                above.add(n)
            assert set(mask[row, node].nonzero().flatten().tolist()) == above


@given(trees())
def test_depths_paths_and_positions_agree(tree):
    depths, paths = tree.depths(), tree.paths()
    assert torch.equal(tree.positions(torch.full((len(depths),), 7)), depths + 7)
    for row in range(tree.tokens.shape[0]):
        for node in range(tree.width):
            path = [n for n in paths[row, node].tolist() if n >= 0]
            assert path[0] == 0 and path[-1] == node and len(path) == int(depths[row, node]) + 1
            assert all(int(tree.parents[row, b]) == a for a, b in pairwise(path))


@given(trees(), trees())
def test_joining_keeps_all_paths_of_both(first, second):
    batch = min(len(first.tokens), len(second.tokens))
    one, two = _rows(first, batch), _rows(second, batch)
    joined = join([one, two])
    assert_is_tree(joined)
    for row in range(batch):
        assert set(token_paths(joined, row)) == set(token_paths(one, row)) | set(token_paths(two, row))


@given(trees())
def test_a_path_is_never_more_probable_than_its_beginning(tree):
    probabilities = tree.path_probabilities()
    assert (probabilities <= probabilities.gather(1, tree.parents))[tree.valid].all()


@given(st.lists(st.sampled_from([1.0, 0.9, 0.7071, 0.3333333]), min_size=2, max_size=40), st.integers(1, 40))
def test_rounding_never_lifts_a_certain_child_above_its_parent(chain, width):
    tree = DraftTree.chain(torch.arange(len(chain))[None])
    tree = DraftTree(tree.max_depth, tree.tokens, tree.parents, torch.tensor([chain]), tree.sources, tree.evidence)
    assert_is_tree(tree.ranked()[0].first(width))


@settings(max_examples=30)
@given(st.integers(1, 40))
def test_a_chain_is_a_tree_whose_mask_is_causal(length):
    chain = DraftTree.chain(torch.arange(length)[None])
    assert_is_tree(chain)
    assert torch.equal(chain.ancestors()[0], torch.ones(length, length, dtype=torch.bool).tril())


def test_a_deep_retrieved_path_under_a_merged_node_moves_to_the_kept_one():
    #        root -> 5 -> 6        and again root -> 5 -> 7
    tree = tree_of([[1, 5, 6, 5, 7]], [[0, 0, 1, 0, 3]])
    merged = tree.merged()
    assert merged.sources[0].tolist() == [0, 1, 1, PADDING, 1]
    assert merged.parents[0].tolist() == [0, 0, 1, 0, 1]


def _rows(tree, batch):
    fields = (tree.tokens, tree.parents, tree.probabilities, tree.sources, tree.evidence)
    return DraftTree(tree.max_depth, *(field[:batch] for field in fields))

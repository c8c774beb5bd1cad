"""What becomes of candidates, in examples and properties. `test_native.py` compares every number with a reference."""

import random
from copy import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graft.tree.candidates import AGREED, ALONE, OPPOSED, Candidates
from graft.tree.tree import PADDING
from proposers import assert_is_tree, token_paths

TOKENS = 3  # few, so that equal paths are common
CHANCES = (0.0, 1e-20, 0.004, 0.25, 0.5, 0.9, 1.0)


@st.composite
def pools(draw):
    """Pools of several rows. A level may hang under any nodes before it; some levels come from a draft pass."""
    rng, num_rows = random.Random(draw(st.integers(0, 10**6))), draw(st.integers(1, 3))
    roots = torch.tensor([rng.randrange(TOKENS) for _ in range(num_rows)])
    pool = Candidates(roots, [[8, 7, root] for root in roots.tolist()])
    num_passes = 0
    for number in range(draw(st.integers(0, 6))):
        count, is_drafted = rng.randrange(1, 6), rng.random() < 0.5
        num_passes += is_drafted
        tokens, parents, score_bucket = (
            torch.tensor([[rng.randrange(stop) for _ in range(count)] for _ in range(num_rows)])
            for stop in (TOKENS, pool.width, 4)
        )
        chances = torch.tensor([[rng.choice(CHANCES) for _ in range(count)] for _ in range(num_rows)])
        sources = torch.full_like(tokens, 1 + number % 3)
        pool.add(tokens, parents, chances, sources, score_bucket, num_passes if is_drafted else None)
    return pool


def rows_of(candidates):
    """Each row's nodes as dicts, with the token path of each, found by following parents one by one."""
    columns = {name: column.tolist() for name, column in candidates.nodes._asdict().items()}
    result = []
    for row in range(len(candidates.nodes.tokens)):
        nodes = [{name: column[row][n] for name, column in columns.items()} for n in range(candidates.width)]
        for n, node in enumerate(nodes):
            node["path"] = (*nodes[node["parents"]]["path"], node["tokens"]) if n else ()
        result.append(nodes)
    return result


def merged(candidates):
    """The pool merged; the one given stays as it is."""
    candidates = copy(candidates)
    candidates.merge()
    return candidates


def best_by_path(nodes):
    """Of every path that was proposed: the highest probability of any of its copies."""
    best = {}
    for node in nodes:
        if node["paths"] > 0:
            best[node["path"]] = max(best.get(node["path"], 0.0), node["paths"])
    return best


# The best


@given(pools(), st.integers(0, 40))
def test_the_best_are_the_likeliest_paths_each_once_in_order_and_closed_under_ancestors(pool, budget):
    tree, paths = merged(pool).best(budget, max_depth=6)
    assert_is_tree(tree)
    counts = [min(budget + 1, len(best_by_path(nodes))) for nodes in rows_of(pool)]
    assert tree.width == max(counts), "as wide as the widest row"
    for row, nodes in enumerate(rows_of(pool)):
        best = best_by_path(nodes)
        kept = token_paths(tree, row)
        assert len(kept) == len(set(kept)) == min(budget + 1, len(best)), "each once, as many as there is room for"
        values = paths[row][tree.valid[row]].tolist()
        assert values == [best[path] for path in kept], "the likeliest copy stands for all"
        assert values == sorted(best.values(), reverse=True)[: len(values)]
        assert all(path[:-1] in kept for path in kept)
        assert (paths[row][~tree.valid[row]] == 0).all()
        assert (tree.sources[row].diff().eq(PADDING - tree.sources[row][:-1]) | tree.valid[row][1:]).all()


def test_the_children_of_a_duplicate_move_to_the_node_that_is_kept():
    candidates = Candidates(torch.tensor([1]), [[0, 0, 1]])
    ones = torch.ones(1, 2, dtype=torch.int64)
    candidates.add(torch.tensor([[5, 5]]), torch.tensor([[0, 0]]), torch.tensor([[0.6, 0.5]]), ones, ones)
    candidates.add(torch.tensor([[6, 7]]), torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.8]]), ones + 1, ones)
    tree, paths = merged(candidates).best(9, 2)
    assert tree.tokens.tolist() == [[1, 5, 7, 6]]
    assert tree.parents.tolist() == [[0, 0, 1, 1]]
    assert tree.sources.tolist() == [[0, 1, 2, 2]]
    torch.testing.assert_close(paths, torch.tensor([[1.0, 0.6, 0.4, 0.3]]))


@given(st.lists(st.sampled_from([1.0, 0.9, 0.7071, 1e-9, 3e-5]), min_size=2, max_size=60), st.integers(0, 60))
def test_neither_rounding_nor_underflow_lifts_a_child_above_its_parent(chances, budget):
    chain, length = Candidates(torch.tensor([1]), [[3, 2, 1]]), len(chances)
    tokens = torch.arange(length)[None]
    ones = torch.ones_like(tokens)
    chain.add(tokens, tokens, torch.tensor([chances]), ones, ones)
    tree, _ = merged(chain).best(budget, length)
    assert_is_tree(tree)
    kept = int(tree.valid.sum()) - 1
    assert token_paths(tree, 0) == [tuple(range(depth)) for depth in range(kept + 1)]


# Passes


def test_a_node_needs_the_pass_that_drafted_it_or_its_parent_and_a_copy_that_needs_none_counts_for_it():
    candidates = Candidates(torch.tensor([1]), [[0, 0, 1]])
    one = torch.ones(1, 1, dtype=torch.int64)
    candidates.add(5 * one, 0 * one, torch.tensor([[0.5]]), one, one, needs=1)  # drafted
    candidates.add(6 * one, 1 * one, torch.tensor([[0.5]]), one, one)  # retrieved below it
    candidates.add(5 * one, 0 * one, torch.tensor([[0.3]]), one, one)  # the same as the drafted, retrieved
    assert candidates.nodes.needs.tolist() == [[0, 1, 1, 0]]
    assert merged(candidates).values_by_need(1, [9], [0.0], [9]) == pytest.approx([0.5, 0.75])
    second_is_dear = merged(candidates).values_by_need(1, [1, 2], [0.1, 0.4], [9])
    assert second_is_dear == pytest.approx([0.4, 0.4])
    assert merged(candidates).values_by_need(1, [1], [2.0], [9]) == [0.0, 0.0], "nothing is worth its cost"


# How a proposal stands among the others


def test_a_node_is_weighed_by_whether_other_sources_agree_and_the_drafter_disagrees():
    candidates = Candidates(torch.tensor([1]), [[0, 0, 1]])
    drafted, retrieved = 1, 2
    proposals = [(5, 0, drafted), (6, 0, drafted), (5, 0, retrieved), (7, 0, retrieved), (8, 1, retrieved)]
    for token, parent, source in proposals:
        fields = (torch.tensor([[value]]) for value in (token, parent))
        candidates.add(*fields, torch.tensor([[0.5]]), torch.tensor([[source]]), torch.tensor([[0]]))
    chances = {ALONE: 0.4, OPPOSED: 0.1, AGREED: 0.8}
    candidates.merge(drafted, torch.tensor([[[chances[agreement]]] * 3 for agreement in range(3)]))
    tree, paths = candidates.best(9, 2)
    found = {t: path for t, path in zip(tree.tokens[0].tolist(), paths[0].tolist(), strict=True) if path > 0}
    # 5 is proposed by both; 6 by the drafter alone; 7 against the drafter; 8 where the drafter said nothing, under 5.
    expected = {1: 1.0, 5: 0.8, 6: 0.4, 7: 0.1, 8: 0.8 * 0.4}
    assert found == pytest.approx(expected)

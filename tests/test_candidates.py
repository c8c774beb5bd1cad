"""Properties of `Candidates`, each against the same thing done node by node in plain Python."""

import random
from copy import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graft.tree.candidates import AGREED, ALONE, NO_TOKEN, OPPOSED, Candidates, before_roots
from graft.tree.tree import PADDING
from proposers import assert_is_tree, token_paths

TOKENS = 3  # few, so that equal paths are common
CHANCES = (0.0, 1e-20, 0.004, 0.25, 0.5, 0.9, 1.0)


class Proposals:
    """Rounds of proposals for several rows, and a pool that got them.

    A level may hang under any nodes that were there before it. Some levels come from a draft pass, the others need
    what their parents need.
    """

    def __init__(self, seed, num_rows, num_levels, max_width=6):
        rng = random.Random(seed)
        self.num_rows, self.num_passes = num_rows, 0
        self.roots = torch.tensor([rng.randrange(TOKENS) for _ in range(num_rows)])
        self.levels = []
        width = 1
        for _ in range(num_levels):
            count = rng.randrange(1, max_width)
            needs = None
            if rng.random() < 0.5:
                self.num_passes += 1
                needs = self.num_passes
            tokens, parents, score_bucket = (
                torch.tensor([[rng.randrange(stop) for _ in range(count)] for _ in range(num_rows)])
                for stop in (TOKENS, width, 4)
            )
            chances = torch.tensor([[rng.choice(CHANCES) for _ in range(count)] for _ in range(num_rows)])
            sources = torch.full_like(tokens, 1 + len(self.levels) % 3)
            self.levels.append((tokens, parents, chances, sources, score_bucket, needs))
            width += count
        self.candidates = self.empty()
        for level in self.levels:
            self.candidates.add(*level)

    def empty(self):
        return Candidates(self.roots, [[8, 7, root] for root in self.roots.tolist()])


@st.composite
def proposals(draw, max_levels=6):
    return Proposals(draw(st.integers(0, 10**6)), draw(st.integers(1, 3)), draw(st.integers(0, max_levels)))


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


# What a node carries


@given(proposals())
def test_a_node_carries_what_its_path_amounts_to(proposed):
    for nodes, root in zip(rows_of(proposed.candidates), proposed.roots.tolist(), strict=True):
        for node in nodes:
            text = [8, 7, root, *node["path"]]
            assert (node["depths"], node["before"], node["earlier"]) == (len(node["path"]), text[-2], text[-3])


@given(proposals())
def test_a_path_is_less_likely_than_its_beginning_and_is_their_product(proposed):
    for row, nodes in enumerate(rows_of(proposed.candidates)):
        own = [1.0] + [c for level in proposed.levels for c in level[2][row].tolist()]
        for node, chance in list(zip(nodes, own, strict=True))[1:]:
            parent = nodes[node["parents"]]["paths"]
            assert node["paths"] == pytest.approx(parent * min(chance, 0.999), rel=1e-5, abs=1e-29)
            assert node["paths"] < parent or parent == 0


@given(proposals())
def test_nodes_have_equal_keys_exactly_when_they_have_equal_paths(proposed):
    for nodes in rows_of(proposed.candidates):
        paths, keys = {n["path"] for n in nodes}, {n["keys"] for n in nodes}
        assert len(paths) == len(keys) == len({(n["path"], n["keys"]) for n in nodes})


def test_paths_as_deep_as_any_text_have_keys():
    candidates = Candidates(torch.tensor([1]), [[3, 2, 1]])
    depth = 3000
    tokens = torch.full((1, depth), 5)
    zeros = torch.zeros_like(tokens)
    candidates.add(tokens, torch.arange(depth)[None], torch.ones(1, depth), zeros + 1, zeros)
    assert len(set(candidates.nodes.keys[0].tolist())) == depth + 1
    tried, fitted = torch.zeros(2, 3, 2, 1)
    candidates.count([[5] * depth], tried, fitted, float(depth))
    assert tried.sum() == fitted.sum() == (candidates.nodes.paths[0, 1:] > 0).sum()


@given(proposals(), st.booleans())
def test_proposals_added_level_by_level_and_all_at_once_are_the_same_pool(proposed, first_alone):
    """Also when the first level was there before, with needs of its own."""
    candidates, alone = proposed.empty(), proposed.empty()
    levels = [(*level[:5], None) for level in proposed.levels]
    if first_alone and levels:
        first = (*levels.pop(0)[:5], 2)
        candidates.add(*first)
        alone.add(*first)
    for level in levels:
        alone.add(*level)
    if levels:
        columns = zip(*(level[:5] for level in levels), strict=True)
        tokens, parents, chances, sources, score_bucket = (torch.cat(column, dim=1) for column in columns)
        candidates.add(tokens, parents, chances, sources, score_bucket)
    assert all(map(torch.equal, candidates.nodes, alone.nodes))


# The best


@given(proposals(), st.integers(0, 40))
def test_the_best_are_the_likeliest_paths_each_once_in_order_and_closed_under_ancestors(proposed, budget):
    tree, paths = merged(proposed.candidates).best(budget, max_depth=6)
    assert_is_tree(tree)
    counts = [min(budget + 1, len(best_by_path(nodes))) for nodes in rows_of(proposed.candidates)]
    assert tree.width == max(counts), "as wide as the widest row"
    for row, nodes in enumerate(rows_of(proposed.candidates)):
        best = best_by_path(nodes)
        kept = token_paths(tree, row)
        assert len(kept) == len(set(kept)) == min(budget + 1, len(best)), "each once, as many as there is room for"
        values = paths[row][tree.valid[row]].tolist()
        assert values == [best[path] for path in kept], "the likeliest copy stands for all"
        assert values == sorted(best.values(), reverse=True)[: len(values)]
        assert all(path[:-1] in kept for path in kept)
        assert (paths[row][~tree.valid[row]] == 0).all()
        assert (tree.sources[row].diff().eq(PADDING - tree.sources[row][:-1]) | tree.valid[row][1:]).all()


@given(proposals(), st.integers(0, 40))
def test_each_of_the_best_has_its_proposers_source_evidence_and_its_chance_after_its_parent(proposed, budget):
    tree, paths = merged(proposed.candidates).best(budget, max_depth=6)
    for row, nodes in enumerate(rows_of(proposed.candidates)):
        offered = {(n["path"], n["paths"], n["sources"], n["score_bucket"]) for n in nodes}
        places = [n for n in range(tree.width) if tree.valid[row, n]]
        for place, path in zip(places, token_paths(tree, row), strict=True):
            value = float(paths[row, place])
            assert (path, value, int(tree.sources[row, place]), int(tree.score_bucket[row, place])) in offered
            above = float(paths[row, tree.parents[row, place]])
            assert float(tree.probabilities[row, place]) == pytest.approx(value / above)


def test_what_hangs_under_a_copy_moves_to_the_one_that_is_kept():
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


@pytest.mark.parametrize("budget", [3, 10, 19, 40])
def test_a_path_too_unlikely_for_a_float_is_left_out_rather_than_torn_from_its_beginning(budget):
    candidates, length = Candidates(torch.tensor([1]), [[3, 2, 1]]), 60
    tokens = torch.arange(length)[None]
    ones = torch.ones_like(tokens)
    chances = torch.tensor([[1e-9] * 4 + [1e-7] + [0.7] * 55])
    candidates.add(tokens, tokens, chances, ones, ones)
    tree = merged(candidates).best(budget, length)[0].trimmed()
    assert tree.parents.tolist() == [[0, *range(tree.width - 1)]]


@given(proposals(), st.integers(0, 60), st.data())
def test_the_best_of_all_rows_together_are_a_tree_however_few_are_taken(proposed, total, data):
    rows = rows_of(proposed.candidates)
    caps = data.draw(st.lists(st.integers(0, 20), min_size=len(rows), max_size=len(rows)))
    ranking = merged(proposed.candidates).ranked(total, caps)
    likely = [
        sorted(best_by_path(nodes).values(), reverse=True)[1 : cap + 1] for nodes, cap in zip(rows, caps, strict=True)
    ]
    everything = sorted((path for row in likely for path in row), reverse=True)[:total]
    assert ranking.gains == pytest.approx([sum(everything[: n + 1]) for n in range(len(everything))], abs=1e-5)
    for count in range(len(ranking) + 1):
        tree, paths = ranking.tree(6, count)
        assert_is_tree(tree)
        assert sorted(paths[:, 1:][tree.valid[:, 1:]].tolist(), reverse=True) == everything[:count]
        assert (tree.valid.sum(dim=1) <= torch.tensor(caps) + 1).all()
        assert tree.width == tree.trimmed().width, "no wider than its widest row"


# Passes


@given(proposals(), st.integers(1, 40))
def test_values_by_need_are_those_of_a_pool_that_had_fewer_passes(proposed, total):
    most, rows = proposed.num_passes, rows_of(proposed.candidates)
    caps = [total] * len(rows)
    values = merged(proposed.candidates).values_by_need(most, [total], [0.0], caps)
    for passes, value in enumerate(values):
        chances = []
        for nodes in rows:
            least = {}
            for node in (node for node in nodes if node["paths"] > 0):
                least[node["path"]] = min(node["needs"], least.get(node["path"], node["needs"]))
            best = {path: chance for path, chance in best_by_path(nodes).items() if least[path] <= passes}
            chances += sorted(best.values(), reverse=True)[1:]
        assert value == pytest.approx(sum(sorted(chances, reverse=True)[:total]), abs=1e-5)
    assert all(less <= more + 1e-5 for less, more in pairwise(values)) and len(values) == most + 1


def test_a_node_needs_the_pass_that_drafted_it_or_its_parent_and_a_copy_that_needs_none_counts_for_it():
    candidates = Candidates(torch.tensor([1]), [[0, 0, 1]])
    one = torch.ones(1, 1, dtype=torch.int64)
    candidates.add(5 * one, 0 * one, torch.tensor([[0.5]]), one, one, needs=1)  # drafted
    candidates.add(6 * one, 1 * one, torch.tensor([[0.5]]), one, one)  # retrieved below it
    candidates.add(5 * one, 0 * one, torch.tensor([[0.3]]), one, one)  # the same as the drafted, retrieved
    assert candidates.nodes.needs.tolist() == [[0, 1, 1, 0]]
    assert merged(candidates).values_by_need(1, [9], [0.0], [9]) == pytest.approx([0.5, 0.75])
    assert merged(candidates).values_by_need(1, [1, 2], [0.1, 0.4], [9]) == pytest.approx([0.4, 0.4]), (
        "a second is dear"
    )
    assert merged(candidates).values_by_need(1, [1], [2.0], [9]) == [0.0, 0.0], "nothing is worth its cost"


# How a proposal stands among the others


def test_a_node_is_weighed_by_whether_others_propose_it_too_and_whether_the_drafter_proposes_something_else():
    candidates = Candidates(torch.tensor([1]), [[0, 0, 1]])
    drafted, retrieved = 1, 2
    for token, parent, source in (
        (5, 0, drafted),
        (6, 0, drafted),
        (5, 0, retrieved),
        (7, 0, retrieved),
        (8, 1, retrieved),
    ):
        fields = (torch.tensor([[value]]) for value in (token, parent))
        candidates.add(*fields, torch.tensor([[0.5]]), torch.tensor([[source]]), torch.tensor([[0]]))
    chances = {ALONE: 0.4, OPPOSED: 0.1, AGREED: 0.8}
    candidates.merge(drafted, torch.tensor([[[chances[agreement]]] * 3 for agreement in range(3)]))
    tree, paths = candidates.best(9, 2)
    found = {t: path for t, path in zip(tree.tokens[0].tolist(), paths[0].tolist(), strict=True) if path > 0}
    # 5 is proposed by both; 6 by the drafter alone; 7 against the drafter; 8 where the drafter said nothing, under 5.
    expected = {1: 1.0, 5: 0.8, 6: 0.4, 7: 0.1, 8: 0.8 * 0.4}
    assert found == pytest.approx(expected)


# Before the root


@pytest.mark.parametrize(
    ("ids", "before", "earlier"),
    [([4], NO_TOKEN, NO_TOKEN), ([3, 4], 3, NO_TOKEN), ([2, 3, 4], 3, 2), ([1, 2, 3, 4], 3, 2)],
)
def test_the_two_tokens_before_the_root_are_known_as_far_as_there_are_any(ids, before, earlier):
    assert before_roots([[9, 8, 7], ids]) == ([8, before], [9, earlier])

"""The door for other engines: texts, drafts and the target's likeliest tokens in; trees, masks and links out; and none
of it needs transformers or our engine."""

import dataclasses
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.spec_decode.acceptance import paths
from graft.spec_decode.cost_model import StepCost, usual_shape
from graft.spec_decode.grafter import Grafter, Text
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers import TargetTopK
from graft.tree.candidates import Level
from graft.tree.tree import DraftTree, TreeLinks
from tree_strategies import path_of, trees

VOCAB = 50
DOOR = ("grafter", "acceptance", "calibration", "budget", "proposers")


def test_grafter_imports_neither_transformers_nor_our_engine_and_the_plugin_no_sglang():
    program = f"""
import sys
sys.modules["transformers"] = sys.modules["sglang"] = None
import {", ".join(f"graft.spec_decode.{name}" for name in DOOR)}, graft.tree.candidates, graft.tree.tree
import graft.model.sampler, graft.model.verified
assert not [name for name in sys.modules if name in ("graft.engine", "graft.request.batch", "graft.model.runner")]
import graft.integrations.sglang.plugin, graft.integrations.sglang.rounds
graft.integrations.sglang.plugin.register()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@given(trees())
@settings(max_examples=60, deadline=None)
def test_mask_depths_and_links_are_those_of_the_tree(tree):
    (tokens, depths, children, siblings), mask = tree.links()
    for row, (parents, valid) in enumerate(zip(tree.parents.tolist(), tree.valid.tolist(), strict=True)):
        nodes = [node for node in range(tree.width) if valid[node]]
        for node in range(tree.width):
            path = path_of(parents, node) if valid[node] else [node]
            assert tokens[row, node] == (tree.tokens[row, node] if valid[node] else 0)
            assert mask[row, node].nonzero().flatten().tolist() == sorted(path)
            assert depths[row, node] == (len(path) - 1 if valid[node] else 0)
            own = [child for child in nodes if child and parents[child] == node] if valid[node] else []
            found, child = [], int(children[row, node])
            while child >= 0:
                found.append(child)
                child = int(siblings[row, child])
            assert found == own


@given(trees(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_greedy_tree_kernel_that_follows_the_links_accepts_what_we_accept(tree, data):
    (tokens, _, children, siblings), mask = tree.links(TreeLinks.empty(len(tree.tokens), tree.width + 3))
    assert mask[:, tree.width :].nonzero()[:, 1:].tolist() == [[n, tree.width + n] for n in range(3)] * len(tree.tokens)
    chosen = torch.tensor([[data.draw(st.integers(0, 3)) for _ in range(tree.width + 3)] for _ in tree.tokens])
    expected = paths(tree, chosen[:, : tree.width])
    for row in range(len(tree.tokens)):
        node, accepted = 0, []
        while True:  # as verify kernels of engines do: down to the first child with the token, else to its sibling
            child = int(children[row, node])
            while child >= 0 and tokens[row, child] != chosen[row, node]:
                child = int(siblings[row, child])
            if child < 0:
                break
            accepted.append(child)
            node = child
        assert accepted == expected.nodes[row]


def test_links_of_places_that_are_not_there_are_refused():
    tree = DraftTree.chain(torch.tensor([[1, 2, 3]]))
    with pytest.raises(IndexError, match="out of range"):
        tree.links(TreeLinks.empty(1, 2))
    with pytest.raises(IndexError, match="out of range"):
        dataclasses.replace(tree, parents=torch.tensor([[0, -1, 1]])).links()


def target(text, period):
    """The next token of a text that repeats itself; at some places another."""
    return (text[-period] + (7 if len(text) % 11 == 0 else 0)) % VOCAB


def drafter(text, period, rng):
    """A level a pass, two tokens of which the first is often right."""
    path, depth = list(text), 0
    while True:
        right = target(path, period) if rng.random() < 0.8 else rng.randrange(VOCAB)
        tokens = torch.tensor([[right, (right + 1) % VOCAB]])
        parent = torch.tensor([[0, 0]]) if depth == 0 else torch.tensor([[2 * depth - 1, 2 * depth - 1]])
        yield [Level(tokens, parent, torch.tensor([[0.7, 0.2]]), torch.tensor([[0.7, 0.2]]) * 0.7**depth)]
        path.append(right)
        depth += 1


def decode(grafter, num_rounds, passes=None):
    """Rounds of one text by the door alone; the text and its rounds."""
    rng, period = random.Random(3), 9
    text = Text([rng.randrange(VOCAB) for _ in range(period)], num_prompt_tokens=period)
    rounds = []
    for _ in range(num_rounds):
        roots = torch.tensor([text.ids[-1]])
        round = grafter.begin(roots, [text], [31], max_depth=16)
        if round is None:
            tree = DraftTree.roots(roots)
        else:
            if passes:
                grafter.draft(round, drafter(text.ids, period, rng), num_beams=1)
            tree = grafter.graft(round)
        columns = [tree.tokens[0].tolist(), tree.parents[0].tolist()]
        chosen = []
        for node in range(tree.width):
            way = [columns[0][step] for step in path_of(columns[1], node)[::-1][1:]] if tree.valid[0, node] else []
            chosen.append(target([*text.ids, *way], period))
        accepted = paths(tree, torch.tensor([chosen]))
        successors = torch.stack([torch.tensor(chosen), (torch.tensor(chosen) + 1) % VOCAB], dim=1)[None].int()
        logits = torch.tensor([3.0, 0.0]).expand(successors.shape).contiguous()
        before = [text.ids[-2]], [text.ids[-3]]
        top_k = TargetTopK(tree.tokens, tree.parents, tree.sources, successors, logits, *before, [0])
        grafter.learn_top_k(top_k)
        grafter.learn(round, tree, accepted, seconds=1.0)
        rounds.append((tree, accepted, round))
        text.ids += accepted.tokens[0]
    grafter.finish(text)
    return text.ids, rounds


def plain_text(count):
    rng, period = random.Random(3), 9
    text = [rng.randrange(VOCAB) for _ in range(period)]
    while len(text) < count:
        text.append(target(text, period))
    return text[:count]


@pytest.mark.parametrize("budget", [None, 12])
@pytest.mark.parametrize("passes", [0, 4])
def test_grafter_alone_gives_the_plain_text_in_fewer_rounds(passes, budget):
    step = StepCost((1, 8, 16, 32), usual_shape("cuda"))
    grafter = Grafter(VOCAB, passes, PolicySettings(budget=budget, pass_cost=0.03), step)
    ids, rounds = decode(grafter, 40, passes)
    assert ids == plain_text(len(ids)) and len(ids) > 9 + 2 * 40
    assert all(tree.width <= 32 for tree, _, _ in rounds)
    if passes:
        assert sum(max(round.passes) for _, _, round in rounds if round is not None) > 10
    if budget:
        assert max(sum(tree.num_nodes) for tree, _, _ in rounds) == budget


def test_a_grafter_restores_what_another_has_learned():
    def fresh():
        step = StepCost((1, 8, 16, 32), usual_shape("cuda"))
        return Grafter(VOCAB, 4, PolicySettings(budget=12, pass_cost=0.03), step)

    first, second = fresh(), fresh()
    decode(first, 40, 4)
    second.restore(first.state())
    restored, known = second.state(), first.state()
    assert known.keys() == restored.keys() and all(torch.equal(known[name], restored[name]) for name in known)
    ids, _ = decode(second, 10, 4)
    cold, _ = decode(fresh(), 10, 4)
    assert len(ids) > len(cold), "it copies from the text that has ended"

"""The grafter alone: texts, drafts and the target's likeliest tokens in, trees out; and none of it needs transformers
or our engine."""

import random
import subprocess
import sys

import pytest
import torch

from graft.spec_decode.grafter import Grafter
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers import TargetTopK
from graft.spec_decode.step_times import StepTimes, usual_shape
from graft.tree.candidates import Level
from graft.tree.tree import DraftTree
from proposers import Text, paths
from tree_strategies import path_of

VOCAB = 50
DOOR = ("grafter", "acceptance", "calibration", "planner", "step_times", "proposers")


def test_grafter_imports_neither_transformers_nor_our_engine_and_the_plugin_no_sglang():
    program = f"""
import importlib.util, sys
sys.modules["transformers"] = sys.modules["sglang"] = None
import {", ".join(f"graft.spec_decode.{name}" for name in DOOR)}, graft.tree.candidates, graft.tree.tree
import graft.model.sampler, graft.model.verified
assert not [name for name in sys.modules if name in ("graft.engine", "graft.request.batch", "graft.model.runner")]
import graft.integrations.sglang.plugin
graft.integrations.sglang.plugin.register()
if importlib.util.find_spec("triton") is not None:
    import graft.integrations.sglang.trees
"""
    subprocess.run([sys.executable, "-c", program], check=True)


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
    """Rounds of one text by the grafter alone; the text and its rounds."""
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
        for retriever in grafter.retrievers:
            retriever.learn(top_k)
        grafter.learn(round, tree, accepted, seconds=1.0)
        rounds.append((tree, accepted, round))
        text.ids += accepted.tokens[0]
    for retriever in grafter.retrievers:
        retriever.finish(text)
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
    steps = StepTimes((1, 8, 16, 32), usual_shape("cuda"))
    grafter = Grafter(VOCAB, passes, PolicySettings(budget=budget, pass_cost=0.03), steps)
    ids, rounds = decode(grafter, 40, passes)
    assert ids == plain_text(len(ids)) and len(ids) > 9 + 2 * 40
    assert all(tree.width <= 32 for tree, _, _ in rounds)
    if passes:
        assert sum(max(round.passes) for _, _, round in rounds if round is not None) > 10
    if budget:
        assert max(sum(tree.num_nodes) for tree, _, _ in rounds) == budget


def test_a_grafter_restores_what_another_has_learned():
    def fresh():
        steps = StepTimes((1, 8, 16, 32), usual_shape("cuda"))
        return Grafter(VOCAB, 4, PolicySettings(budget=12, pass_cost=0.03), steps)

    first, second = fresh(), fresh()
    decode(first, 40, 4)
    second.restore(first.state())
    restored, known = second.state(), first.state()
    assert known.keys() == restored.keys() and all(torch.equal(known[name], restored[name]) for name in known)
    ids, _ = decode(second, 10, 4)
    cold, _ = decode(fresh(), 10, 4)
    assert len(ids) > len(cold), "it copies from the text that has ended"

"""Retrievers, calibration and cost: what is learned, and that it is learned right."""

import random

import pytest
import torch

from graft import Engine
from graft.learn.calibration import Calibration
from graft.learn.cost import VerifyCost
from graft.learn.prospect import Prospect
from graft.retrieve import Adjacency, SuffixLookup
from graft.retrieve.suffix import SuffixIndex
from graft.target import Verified
from proposers import tree_of
from tiny import VOCAB, tiny_model

CPU = torch.device("cpu")


class Words:
    """A history."""

    def __init__(self, ids):
        self.ids = ids


def judged(tokens, following):
    """A judgement in which `following[i]` is by far the likeliest after `tokens[i]`, the next id after that."""
    logits = torch.zeros(1, len(tokens), VOCAB)
    for i, token in enumerate(following):
        logits[0, i, token] = 8.0
        logits[0, i, (token + 1) % VOCAB] = 4.0
    return Verified(torch.tensor([tokens]), logits, ())


def children(tree, row, node):
    return [
        int(tree.tokens[row, n])
        for n in range(1, tree.width)
        if tree.valid[row, n] and int(tree.parents[row, n]) == node
    ]


def test_adjacency_proposes_the_successors_the_target_judged_last():
    matrix = Adjacency(VOCAB, CPU, k=2, beam=1, depth=3)
    matrix.learn(judged([5, 6, 7], [6, 7, 8]))
    tree = matrix.propose([Words([5])], torch.tensor([5]), max_depth=3)
    assert children(tree, 0, 0) == [6, 7]
    assert children(tree, 0, 1) == [7, 8]
    matrix.learn(judged([5], [20]))
    assert children(matrix.propose([Words([5])], torch.tensor([5]), 1), 0, 0) == [20, 21]


def test_a_token_never_judged_proposes_nothing():
    matrix = Adjacency(VOCAB, CPU)
    assert not matrix.propose([Words([9])], torch.tensor([9]), 4).valid[:, 1:].any()


def test_of_a_token_judged_twice_at_once_the_last_judgement_counts():
    matrix = Adjacency(VOCAB, CPU, k=1, depth=1)
    matrix.learn(judged([5, 9, 5], [30, 31, 32]))
    assert children(matrix.propose([Words([5])], torch.tensor([5]), 1), 0, 0) == [32]


def test_suffix_lookup_continues_the_longest_earlier_match():
    history = Words([1, 2, 3, 4, 5, 9, 3, 4, 7, 8, 1, 2, 3, 4])
    tree = SuffixLookup(num_chains=2, depth=3).propose([history], torch.tensor([4]), max_depth=8)
    assert children(tree, 0, 0) == [5, 7], "four tokens match before 5, two before 7"
    assert [int(t) for t in tree.tokens[0, 1:4]] == [5, 9, 3]
    assert tree.evidence[0, 1] > tree.evidence[0, 4], "a longer match is better evidence"


def test_suffix_lookup_without_a_match_proposes_nothing():
    assert SuffixLookup().propose([Words([1, 2, 3, 4])], torch.tensor([4]), 8).width == 1


def test_the_suffix_index_finds_what_a_search_of_the_text_finds():
    rng = random.Random(0)
    tokens = [rng.randrange(3) for _ in range(300)]
    index = SuffixIndex()
    for end in range(3, len(tokens)):
        index.catch_up(tokens[:end])
        text = tokens[:end]
        best = max((n for n in range(2, 33) for e in range(n, end) if text[e - n : e] == text[end - n :]), default=None)
        found = index.continuations(1, 4)
        if best is not None and end < 60:  # later, old occurrences are forgotten by design
            assert found[0][0] == best
        for match, chain in found:
            assert any(
                text[e - match : e] == text[end - match :] and text[e : e + 4] == chain for e in range(match, end)
            )


def test_sequences_of_a_batch_are_looked_up_in_their_own_context():
    tree = SuffixLookup().propose([Words([1, 2, 3, 1, 2]), Words([5, 6, 7])], torch.tensor([2, 7]), 4)
    assert children(tree, 0, 0) == [3] and children(tree, 1, 0) == []


def test_calibration_learns_how_often_a_source_is_right():
    calibration = Calibration([torch.tensor([0.5, 0.5]), torch.tensor([0.9])], CPU)
    rng = random.Random(1)
    for _ in range(400):
        # Source 1 proposes token 7, right three times in four; source 2 proposes 8 below it, never right.
        pool = tree_of([[1, 7, 8]], [[0, 0, 1]], sources=[[0, 1, 2]])
        calibration.observe(pool, [[7, 9] if rng.random() < 0.75 else [5, 8]])
    probability = calibration.probability(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 0]]))[0].tolist()
    assert probability == pytest.approx([1.0, 0.75, 0.0], abs=0.06)
    assert calibration.probability(torch.tensor([[1]]), torch.tensor([[1]])).item() == 0.5, "unseen: the prior"


def test_a_proposal_is_not_judged_where_nobody_knows_what_would_have_come():
    calibration = Calibration([torch.tensor([0.5])], CPU)
    pool = tree_of([[1, 7, 8, 3]], [[0, 0, 1, 2]], sources=[[0, 1, 1, 1]])
    before = calibration._tried.clone()
    calibration.observe(pool, [[7]])  # only one token is known: depth 2 and 3 stay open
    assert (calibration._tried - before).sum() == 1


@pytest.mark.parametrize(
    ("seconds", "gains", "width"),
    [
        ({1: 1.0, 2: 1.9, 4: 2.0, 8: 2.2}, [0.3] * 8, 8),  # 1 + 2.1 tokens for 2.2
        ({1: 1.0, 2: 1.9, 4: 2.0, 8: 2.2}, [0.1] * 8, 1),  # 1.7 tokens for 2.2: leave it
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, [0.1] * 8, 8),  # free: take all
        ({1: 1.0, 2: 1.2, 4: 3.0}, [0.9, 0.1, 0.1], 2),
        ({1: 1.0, 2: 1.2}, [], 1),
    ],
)
def test_the_width_that_pays_best_is_chosen(seconds, gains, width):
    cost = VerifyCost()
    cost._seconds = dict(seconds)
    assert cost.best_plan(torch.tensor(gains)).width == width


def test_costs_follow_what_rounds_take_and_forgive_a_hiccup():
    cost = VerifyCost()
    cost._seconds = {1: 1.0, 2: 1.5}
    cost.observe(2, 100.0)
    assert cost._seconds[2] < 2.0
    for _ in range(100):
        cost.observe(1, 2.0)
    assert cost._seconds[1] == pytest.approx(2.0, abs=0.01)


def test_a_width_measured_too_dear_is_tried_again_in_time():
    cost = VerifyCost()
    cost._seconds = {1: 1.0, 8: 5.0}  # 8 was timed while the machine was busy; in truth it costs 2
    looks = 0
    while cost.best_plan(torch.full((7,), 0.4)).width == 1:
        cost.doubt(used=1)
        looks += 1
        assert looks < 2000
    assert looks > 100, "but not at once"


def test_without_a_budget_the_policy_measures_the_machine_and_still_gives_the_same_text():
    model = tiny_model()
    plain = Engine(model, policy="off").generate([3, 4, 5], max_new_tokens=60).ids
    engine = Engine(model)
    assert engine.generate([3, 4, 5], max_new_tokens=60).ids == plain
    assert engine.policy._cost.measured


def test_an_answer_that_goes_round_in_a_circle_is_accepted_from_both_retrievers():
    """A model that looks at its last token only must come back to a token it has had, and then repeats itself."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    plain = Engine(model, policy="off").generate([3, 4, 5], max_new_tokens=200)
    result = Engine(model, budget=16).generate([3, 4, 5], max_new_tokens=200)
    assert result.ids == plain.ids
    assert result.stats.mean_accepted > 4
    assert set(result.stats.accepted_by_source) == {"suffix", "adjacency"}


def prospect(gain, fading, seconds):
    made = Prospect()
    made._gain, made._fading, made._seconds = gain, fading, seconds
    return made


@pytest.mark.parametrize(
    ("gain", "pass_seconds", "left", "worth"),
    [
        (0.9, 0.05, 5, True),  # five passes bring more than the wider verify costs
        (0.9, 0.05, 1, False),  # one alone does not
        (0.3, 0.05, 5, False),
        (0.9, 2.0, 5, False),
    ],
)
def test_a_draft_pass_is_made_when_it_and_those_behind_it_pay(gain, pass_seconds, left, worth):
    cost = VerifyCost()
    cost._seconds = {1: 1.0, 8: 2.2}
    plan = cost.best_plan(torch.tensor([]))
    assert prospect(gain, 0.8, pass_seconds).is_worth_a_pass(cost, plan, 1, reach=1.0, num_left=left) is worth


def test_what_passes_bring_is_learned():
    made = prospect(0.8, 0.8, 0.01)
    for _ in range(200):
        made.observe(0.02, gain=0.1, reach_before=0.5, reach_after=0.25)
    assert (made._gain, made._fading, made._seconds) == pytest.approx((0.2, 0.5, 0.02), rel=0.05)

"""The controller chooses the step that brings the most tokens for its time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from graft.spec_decode.budget import Budget
from graft.spec_decode.calibration import Calibration, PathCalibration
from graft.spec_decode.controller import Controller, Outcome
from graft.spec_decode.cost_model import StepCost, UnitCost

SIZES = (16, 32, 64, 128, 256, 384, 512)
SECONDS = {16: 4.0, 32: 4.1, 64: 4.2, 128: 5.0, 256: 7.0, 384: 10.0, 512: 12.0}  # in milliseconds
ROWS = 16


def padded(num_tokens):
    return next(size for size in (*SIZES, 1024, 2048) if size >= num_tokens)


def known_steps():
    step = StepCost(SIZES)
    seconds = torch.tensor([SECONDS[size] / 1000 for size in SIZES]).double()
    step.restore({"step_sizes": torch.tensor(SIZES), "step_seconds": seconds})
    return step


def controller_of(budget):
    return Controller(budget, Calibration([torch.full((4,), 0.5)]), PathCalibration(), padded)


def controller(path_probs):
    """A controller that knows these step times, and has seen nodes of these path probabilities in every row."""
    one = controller_of(Budget(known_steps(), 0, 0.0))
    paths = np.tile(np.array(path_probs, dtype=np.float32), (ROWS, 1))
    nothing = np.zeros(one.calibration.acceptance_probs.shape, dtype=np.int32)
    one.learn(
        Outcome(
            num_rows=ROWS,
            is_plain=False,
            tokens=512,
            num_prefill_tokens=0,
            paths=paths,
            num_nodes=np.zeros(ROWS, dtype=np.int32),
            nodes=[[]] * ROWS,
            needs=np.zeros((ROWS, 1), dtype=np.int64),
            reaches=[float(ROWS)],
            num_passes=0,
            kinds=[0] * ROWS,
            tried=nothing,
            fitted=nothing,
            propose_seconds=0.0,
            step_seconds=0.0,
            rest_seconds=0.0,
        )
    )
    return one


def tokens_of(size, path_probs):
    """The target's own tokens, and the expected ones of the likeliest nodes."""
    return ROWS * (1 + sum(path_probs[: (size - ROWS) // ROWS]))


GOOD = [0.9 * 0.93**number for number in range(31)]
POOR = [0.3 * 0.5**number for number in range(31)]
USELESS = [0.01] * 31


@pytest.mark.parametrize("path_probs", [GOOD, POOR, USELESS])
def test_without_prompts_the_round_with_the_most_tokens_per_second_is_chosen(path_probs):
    best = max(SIZES, key=lambda size: tokens_of(size, path_probs) / SECONDS[size])
    plan = controller(path_probs).plan([0] * ROWS, ROWS, SIZES[1:], 0)
    assert plan.tokens == best
    assert best == {id(GOOD): 256, id(POOR): 64, id(USELESS): 16}[id(path_probs)]


@pytest.mark.parametrize("num_prefill", [40, 100, 150, 230, 300])
def test_beside_a_prompt_a_tree_must_bring_more_than_its_time_elsewhere(num_prefill):
    rate = max(tokens_of(size, GOOD) / SECONDS[size] for size in SIZES)
    sizes = [size for size in SIZES if size + num_prefill <= 512]
    net = {size: tokens_of(size, GOOD) - rate * SECONDS[padded(size + num_prefill)] for size in sizes}
    plan = controller(GOOD).plan([0] * ROWS, ROWS, sizes[1:], num_prefill)
    assert net[plan.tokens] > max(net.values()) - 3  # gains are interpolated


def test_trees_that_do_not_pay_are_tried_again_for_one_percent_of_the_time():
    one = controller(USELESS)
    sizes = [one.plan([0] * ROWS, ROWS, SIZES[4:], 0).tokens for _ in range(300)]
    tries = [size for size in sizes if size > ROWS]
    lost = sum(SECONDS[size] - SECONDS[ROWS] * tokens_of(size, USELESS) / ROWS for size in tries)
    assert tries and lost <= 0.011 * SECONDS[ROWS] * len(sizes)


def test_steps_longer_than_the_table_do_not_change_it():
    one = controller(GOOD)
    before = one.step.seconds(512)
    outcome = dict(is_plain=True, num_passes=0, propose_seconds=0.0, step_seconds=0.1, rest_seconds=0.0)
    unused = dict(paths=None, num_nodes=None, nodes=(), needs=None, reaches=(), kinds=(), tried=None, fitted=None)
    one.learn(Outcome(num_rows=ROWS, tokens=ROWS, num_prefill_tokens=2000, **outcome, **unused))
    assert one.step.seconds(512) == before


@pytest.mark.parametrize(("pass_cost", "makes_all"), [(0.01, True), (0.5, False)])
def test_with_a_fixed_number_of_nodes_passes_are_still_made_only_if_they_pay(pass_cost, makes_all):
    """A pass that adds 0.6 tokens at first, and costs so many steps of one token each."""
    one = controller_of(Budget(UnitCost(), 4, pass_cost, fixed=7))
    plan = one.plan([0] * ROWS, ROWS, SIZES[1:], 0)
    assert plan.tokens == ROWS * 8
    reaches = [ROWS * 0.8**number for number in range(plan.max_passes)]
    made = [reach > least for reach, least in zip(reaches, plan.thresholds, strict=False)]
    assert all(made) == makes_all and made[0]


@pytest.mark.parametrize("num_nodes", [None, 7])
def test_a_fixed_number_of_passes_is_planned_and_the_only_one_captured(num_nodes):
    step = known_steps() if num_nodes is None else UnitCost()
    one = controller_of(Budget(step, 6, 5.0, fixed=num_nodes, fixed_passes=4))
    plan = one.plan([0] * ROWS, ROWS, SIZES[1:], 0)
    assert plan.max_passes == 4 and one.pass_limits == [4]
    assert [reach > least for reach in (0.0,) for least in plan.thresholds] == [True] * 4 + [False] * 4


class Row:
    """A row's candidates, likeliest first: estimates, draft passes that each needs, and the accepted ones in order.

    Nine depths are drafted, one a pass: the likeliest node and three beside it. The rest are retrieved. Estimates are
    too high, the more the less likely: a node of estimate p is accepted with probability p ** 1.2.
    """

    def __init__(self, rng):
        steps = rng.choice([0.95, 0.75, 0.4], size=9)
        before = np.concatenate([[1.0], np.cumprod(steps)[:-1]])
        beside = np.outer(before * (1 - steps), [0.3, 0.15, 0.08]).ravel()
        paths = np.concatenate([before * steps, beside, 0.25 * 0.93 ** np.arange(91)])
        needs = np.concatenate([np.arange(1, 10), np.repeat(np.arange(1, 10), 3), np.zeros(91, dtype=np.int64)])
        depth = int((rng.random(9) < steps**1.2).cumprod().sum())
        accepted = list(range(depth))
        chances = paths[9:] ** 1.2
        is_drafted_next = np.arange(9, 127) // 3 - 3 == depth
        others = np.where(is_drafted_next | (needs[9:] == 0) & (depth == 0), chances, 0.0) / max(
            before[min(depth, 8)], 0.1
        )
        at = int(np.searchsorted(others.cumsum(), rng.random()))
        accepted += [9 + at] if at < len(others) else []
        order = np.argsort(-paths, kind="stable")
        place = np.argsort(order)
        self.paths, self.needs = paths[order].astype(np.float32), needs[order]
        self.accepted = [int(place[node]) for node in accepted]
        self.reaches = before

    def verified(self, num_passes, least):
        """Numbers of the candidates that these passes give and whose estimates are at least so high."""
        return np.flatnonzero((self.needs <= num_passes) & (self.paths >= least))


def outcome_of(rows, size, num_passes):
    """What the device reports of a round, and its milliseconds."""
    given = [row.verified(num_passes, 0.0) for row in rows]
    estimates = np.sort(np.concatenate([row.paths[own] for row, own in zip(rows, given, strict=True)]))
    least = estimates[max(len(estimates) + len(rows) - size, 0)]
    trees = [row.verified(num_passes, least) for row in rows]
    counts = np.array([len(tree) for tree in trees])
    paths = np.zeros((len(rows), 127), dtype=np.float32)
    needs = np.zeros((len(rows), 1 + counts.max()), dtype=np.int64)
    nodes = []
    for number, (row, own, tree) in enumerate(zip(rows, given, trees, strict=True)):
        paths[number, : len(own)] = row.paths[own]
        needs[number, 1 : 1 + len(tree)] = row.needs[tree]
        places = {int(node): place for place, node in enumerate(tree, start=1)}
        nodes.append([places[node] for node in itertools.takewhile(places.__contains__, row.accepted)])
    seconds = (0.3 + 0.17 * num_passes, SECONDS[padded(size)], 0.2)
    nothing = np.zeros(1, dtype=np.int32)
    reaches = [sum(float(row.reaches[number]) for row in rows) for number in range(max(num_passes, 1))]
    of_round = (paths, counts, nodes, needs, reaches, num_passes, [0] * len(rows), nothing, nothing)
    return Outcome(len(rows), False, size, 0, *of_round, *(own / 1000 for own in seconds)), sum(seconds)


def rate_of(made):
    tokens = sum(outcome.num_rows + sum(map(len, outcome.nodes)) for outcome, _ in made)
    return tokens / sum(milliseconds for _, milliseconds in made)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_what_is_chosen_is_at_most_3_percent_slower_than_the_best_fixed_size_and_passes(num_rows):
    rng = np.random.default_rng(0)
    rounds = [[Row(rng) for _ in range(num_rows)] for _ in range(500 if num_rows == 1 else 160)]
    sizes = [size for size in SIZES if 2 * num_rows <= size <= 128 * num_rows]
    counted = rounds[len(rounds) // 2 :]  # after it has learned
    fixed = {
        kind: rate_of([outcome_of(rows, *kind) for rows in counted])
        for kind in itertools.product(sizes[:4], (1, 2, 3, 4, 6))
    }
    one = controller_of(Budget(known_steps(), 9, 0.03))
    made = []
    for rows in rounds:
        plan = one.plan([0] * num_rows, num_rows, sizes, 0)
        reaches = [sum(float(row.reaches[number]) for row in rows) for number in range(plan.max_passes)]
        wanted = itertools.takewhile(lambda pair: pair[0] > pair[1], zip(reaches, plan.thresholds, strict=False))
        made.append(outcome_of(rows, plan.tokens, len(list(wanted))))
        one.learn(made[-1][0])
    assert rate_of(made[len(made) // 2 :]) > 0.97 * max(fixed.values())

"""The budget finds what pays: simulated rounds whose costs and acceptance are known; and what it is made of."""

import math
import random
from bisect import bisect_left
from itertools import pairwise

import pytest
import torch

from graft import Engine
from graft.model import TargetRunner
from graft.spec_decode.budget import Budget, PassGains, TreeSize
from graft.spec_decode.cost_model import SecondsByRows, StepCost, UnitCost, usual_shape
from graft.spec_decode.policies import make_policy
from tiny import tiny_model

GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FIXED = (0, 1, 3, 7, 15, 31, 60)  # nodes a row
GOOD, FAIR, POOR, HOPELESS = (0.8, 0.15), (0.5, 0.3), (0.3, 0.2), (0.03, 0.03)  # P(a first choice is accepted), spread


def on_a_line(points, at):
    for (low, start), (high, end) in pairwise(points):
        if at <= high:
            return start + (end - start) * (at - low) / (high - low)
    return points[-1][1] * at / points[-1][0]


def gpu(num_tokens):
    size = GRID[bisect_left(GRID, num_tokens)] if num_tokens <= GRID[-1] else num_tokens
    return 1e-3 * on_a_line([(1, 5.0), (64, 5.0), (256, 7.5), (512, 12.0)], size)


def cpu(num_tokens):
    return 1e-3 * (40 + 8 * num_tokens)


class Simulation:
    """Rounds of a target whose steps take `seconds(num_tokens)`, and of texts whose candidates are accepted as often as
    they say. Times are noisy, and some are hiccups."""

    def __init__(self, seconds, kind, num_rows, sizes=GRID, device="cuda", seed=0):
        self.seconds, self.kind, self.num_rows = seconds, kind, num_rows
        self.budget = Budget(StepCost(sizes, usual_shape(device)), num_passes=0, pass_cost=0.0)
        self.rng = random.Random(seed)
        self.num_tokens, self.took = 0.0, 0.0
        self.num_nodes = []

    def candidates(self):
        """Path probabilities of all rows together, likeliest first: chains with side branches."""
        paths = []
        for _ in range(self.num_rows):
            right, path = self.kind[0] + self.kind[1] * self.rng.uniform(-1, 1), 1.0
            for _ in range(12):
                paths += [path * right, 0.3 * path * right * (1 - right), 0.15 * path * right * (1 - right)]
                path *= right
        return sorted((path for path in paths if path > 1e-5), reverse=True)

    def host(self, looks):
        return 3e-4 + 2e-5 * self.num_rows if looks else 1e-4

    def run(self, num_rounds, fixed=None):
        """Tokens a second of so many rounds, by what was expected, so that luck does not count. fixed: nodes a row."""
        self.num_tokens, self.took, self.num_nodes = 0.0, 0.0, []
        for _ in range(num_rounds):
            if fixed is None:
                self.round()
            else:
                self.book(self.candidates()[: fixed * self.num_rows] if fixed else [], looks=fixed > 0)
        return self.num_tokens / self.took

    def book(self, chosen, looks):
        self.num_nodes.append(len(chosen))
        self.num_tokens += self.num_rows + sum(chosen)
        self.took += self.seconds(self.num_rows + len(chosen)) + self.host(looks)

    def round(self):
        budget, num_rows, plan, chosen = self.budget, self.num_rows, None, []
        looks = budget.may_propose(num_rows)
        if looks:
            paths = self.candidates()[: budget.max_nodes(num_rows)]
            gains = torch.tensor(paths).double().cumsum(0).tolist()
            plan = budget.best(budget.tree_sizes(gains, num_rows))
            chosen = paths[: plan.num_nodes]
        noise = math.exp(self.rng.gauss(0, 0.03)) * (2.5 if self.rng.random() < 0.005 else 1)
        size = num_rows + len(chosen)
        budget.step.observe(size, noise * self.seconds(size), least=num_rows)
        (budget.host if looks else budget.plain_host).observe(
            num_rows, noise * self.host(looks), most=self.seconds(size)
        )
        accepted = sum(self.rng.random() < path for path in chosen)
        budget.observe(num_rows, num_rows + accepted, plan, num_passes=0)
        self.book(chosen, looks)


MACHINES = {"gpu": (gpu, GRID, "cuda"), "cpu": (cpu, (), "cpu")}


def best_fixed(seconds, kind, num_rows):
    return max(Simulation(seconds, kind, num_rows, seed=1).run(100, fixed) for fixed in FIXED)


@pytest.mark.parametrize(
    ("num_rows", "kind"),
    [
        *((num_rows, kind) for num_rows in (1, 16) for kind in (GOOD, FAIR, POOR, HOPELESS)),
        (64, GOOD),
        *(pytest.param(64, kind, marks=pytest.mark.slow) for kind in (FAIR, POOR, HOPELESS)),
        *(pytest.param(4, kind, marks=pytest.mark.slow) for kind in (GOOD, FAIR, POOR, HOPELESS)),
    ],
)
@pytest.mark.parametrize("machine", MACHINES)
def test_no_fixed_budget_is_better_by_more_than_3_percent(machine, num_rows, kind):
    """From nothing known: the first rounds, in which costs are learned, are left out."""
    seconds, sizes, device = MACHINES[machine]
    simulation = Simulation(seconds, kind, num_rows, sizes, device)
    simulation.run(200)
    assert simulation.run(300) >= 0.97 * best_fixed(seconds, kind, num_rows)


@pytest.mark.parametrize("num_rows", [1, 16, 64])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_hopeless_text_costs_at_most_3_percent_of_its_first_400_rounds(machine, num_rows):
    seconds, sizes, device = MACHINES[machine]
    simulation = Simulation(seconds, HOPELESS, num_rows, sizes, device)
    assert simulation.run(400) >= 0.97 * Simulation(seconds, HOPELESS, num_rows).run(10, fixed=0)


class UnevenText(Simulation):
    """Of a small model on a GPU, where a look takes nearly as long as a step: every other round finds nothing."""

    def candidates(self):
        self.kind = (0.85, 0.05) if self.rng.random() < 0.5 else HOPELESS
        return super().candidates()

    def host(self, looks):
        return 9e-4 if looks else 5e-5


def test_empty_rounds_do_not_stop_retrieval_that_usually_pays():
    def seconds(num_tokens):
        return gpu(num_tokens) / 4

    own = [UnevenText(seconds, GOOD, 1, seed=seed).run(300) for seed in range(6)]
    assert sum(own) / len(own) >= 0.97 * UnevenText(seconds, GOOD, 1).run(2000, fixed=31)


@pytest.mark.parametrize(("before", "after"), [(HOPELESS, GOOD), (GOOD, HOPELESS)], ids=["to good", "to hopeless"])
@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_when_texts_change_the_budget_follows_within_100_rounds(num_rows, before, after):
    simulation = Simulation(gpu, before, num_rows)
    simulation.run(300)
    simulation.kind = after
    simulation.run(100)
    assert simulation.run(100) >= 0.95 * best_fixed(gpu, after, num_rows)


def test_a_busy_machine_is_forgotten_within_seconds():
    """All steps took three times as long for a while; soon after, the same nodes are chosen as before."""
    simulation = Simulation(gpu, FAIR, 16)
    simulation.run(200)
    simulation.seconds = lambda num_tokens: 3 * gpu(num_tokens)
    simulation.run(100)
    simulation.seconds = gpu
    simulation.run(200)  # 1.2 seconds
    assert simulation.run(200) >= 0.97 * best_fixed(gpu, FAIR, 16)
    assert simulation.budget.step.seconds(64) == pytest.approx(gpu(64), rel=0.1)


def test_rows_with_better_candidates_get_more_nodes():
    budget = Budget(StepCost(GRID, usual_shape("cuda")), 0, 0.0)
    budget.step.observe(64, 1.0)
    gains = torch.tensor([0.9] * 60 + [0.01] * 300).cumsum(0).tolist()
    assert budget.best(budget.tree_sizes(gains, 64)).num_nodes == 64, "as many as are good, to the next size of step"


def test_places_that_are_padded_anyway_cost_nothing():
    """With 40 tokens of a prompt in the step, 20 rows leave 4 places up to the next size."""
    budget = Budget(StepCost(GRID, lambda size: size**2), 0, 0.0)
    budget.step.observe(20, 1.0)
    gains = torch.tensor([0.01] * 100).cumsum(0).tolist()
    assert budget.best(budget.tree_sizes(gains, 20, num_prefill_tokens=40)).num_nodes == 4
    assert budget.best(budget.tree_sizes(gains, 16, num_prefill_tokens=0)).num_nodes == 0
    assert budget.max_nodes(20, num_prefill_tokens=40) == 512 - 60


def test_node_costs_are_counted_in_tokens_of_the_usual_rate():
    budget = Budget(StepCost(GRID, lambda size: float(size)), 0, 0.0)
    budget.restart(is_calibrated=True)
    budget.step.observe(16, 1.0)
    counts, costs = budget.node_costs(16)
    assert counts[:3] == [8, 16, 32] and max(counts) == 48, "a step of 64 is four times the largest that was timed"
    assert costs[:3] == pytest.approx([8.0, 16.0, 32.0], rel=0.01), "a plain step of 16 tokens brings 16"


# Seconds of steps


def test_before_anything_is_known_steps_have_the_usual_shape_of_their_device():
    fast, slow = StepCost(GRID, usual_shape("cuda")), StepCost((), usual_shape("cpu"))
    assert not fast.is_known and fast.seconds(1) == fast.seconds(64) < fast.seconds(65) == fast.seconds(96)
    assert slow.seconds(2) < slow.seconds(3) < slow.seconds(20)
    fast.observe(4, 0.005)
    assert fast.is_known and fast.seconds(64) == pytest.approx(0.005, rel=0.05)
    assert fast.seconds(1024) == pytest.approx(2 * fast.seconds(512)), "beyond all sizes in proportion"


def test_an_untried_step_size_is_corrected_like_its_neighbours():
    step = StepCost(GRID, lambda size: float(size))
    for _ in range(50):
        for size, factor in ((1, 1.0), (16, 2.0)):
            step.observe(size, factor * size)
    assert step.seconds(1) == pytest.approx(1.0, rel=0.05) and step.seconds(16) == pytest.approx(32.0, rel=0.05)
    undoubted = [seconds / size for seconds, size in zip(step._unbiased, GRID, strict=True)]
    assert undoubted[:5] == sorted(undoubted[:5]) and undoubted[5:] == pytest.approx([undoubted[4]] * 10)


def test_no_step_takes_longer_than_a_larger_one_was_seen_to_take():
    step = StepCost(GRID, usual_shape("cuda"))
    step.observe(1, 3.0)  # the first includes set-up
    for _ in range(20):
        step.observe(32, 1.0)
    assert step.seconds(1) <= step.seconds(32) == pytest.approx(1.0, rel=0.05)


def test_a_size_that_once_was_slow_is_tried_again():
    step = StepCost(GRID, usual_shape("cuda"))
    step.observe(1, 1.0)
    step.observe(64, 9.0)
    dear, rounds = step.seconds(64), 0
    assert dear > 1.5
    while step.seconds(64) > 1.05:
        step.observe(1, 1.0)
        rounds += 1
        assert rounds < 600
    assert rounds > 50, "but not at once"


def test_uncalibrated_retrieval_counts_half_until_some_of_it_was_accepted():
    cold, known, drafting = (Budget(StepCost((), usual_shape("cpu")), passes, 0.0) for passes in (0, 0, 3))
    known.restart(is_calibrated=True)
    for budget in (cold, known, drafting):
        budget.step.observe(1, 1.0)
    hopes = [budget.tree_sizes([1.0], 1)[1].gain for budget in (cold, known, drafting)]
    assert hopes == pytest.approx([0.5, 1.0, 1.0])
    for _ in range(10):  # what it hoped for has come each time
        cold.observe(1, 2, TreeSize(1, 1, cold.tree_sizes([1.0], 1)[1].gain, 1.05), 0)
    assert cold.tree_sizes([1.0], 1)[1].gain > 0.85


def test_a_step_of_a_guessed_size_is_not_far_larger_than_any_that_was_timed():
    budget = Budget(StepCost((), usual_shape("cuda")), 0, 0.0)
    budget.step.observe(2, 1.0)
    gains = [0.5 * n for n in range(1, 300)]
    assert max(plan.num_nodes for plan in budget.tree_sizes(gains, 2)) == 2, "twice"


def test_nodes_and_all_other_tokens_fit_the_largest_step():
    budget = Budget(StepCost((1, 4, 16), usual_shape("cuda")), 0, 0.0)
    assert [budget.max_nodes(*given) for given in ((3,), (3, 5), (3, 13), (10, 9))] == [13, 8, 0, 0]


def test_steps_between_and_beyond_the_known_sizes_cost_in_proportion():
    padded, others = (StepCost(sizes, lambda num_tokens: 1 + num_tokens / 10) for sizes in ((1, 4, 16), ()))
    assert [padded.seconds(count) for count in (1, 3, 5, 32)] == pytest.approx([1.1, 1.4, 2.6, 5.2])
    assert [others.seconds(count) for count in (1, 5, 20, 1024)] == pytest.approx([1.1, 1.5, 3.0, 104.4])


def test_costs_are_kept_and_come_back():
    budget, other = (Budget(StepCost(GRID, usual_shape("cuda")), 3, 0.1) for _ in range(2))
    assert budget.costs() == {}
    budget.step.observe(8, 0.25)
    for seconds in (budget.drafting, budget.host, budget.plain_host):
        seconds.observe(4, 0.125)
    other.restore_costs(budget.costs())
    assert other.step.seconds(100) == pytest.approx(budget.step.seconds(100), rel=0.01), "apart from optimism"
    assert other.pass_seconds(9) == pytest.approx(budget.pass_seconds(9)) and other.plain_seconds(2) > 0.25
    fresh = Budget(StepCost(GRID), 3, 0.1)
    host = budget.costs()["host_by_rows"]
    fresh.restore_costs({"host_by_rows": host, "ahead_by_rows": host})  # the second was kept by earlier versions
    assert not fresh.step.is_known, "what is missing starts anew"
    assert fresh.costs().keys() == {"host_by_rows"}, "and what is not known is ignored"


def test_a_machine_is_measured_once():
    policy = make_policy("graft", TargetRunner(tiny_model()))
    assert not policy.budget.step.is_known
    policy.prepare()
    assert not policy.budget.step.is_known, "a library's first call does not wait for that"
    policy.measure()
    measured = policy.costs()
    policy.measure()
    assert torch.equal(policy.costs()["step_seconds"], measured["step_seconds"]) and policy.budget.may_propose(1)


def test_without_measuring_the_machine_the_first_round_is_plain_and_the_text_the_same():
    model = tiny_model()
    plain = Engine(model, policy="off").generate([3, 4, 5], max_new_tokens=60).ids
    engine = Engine(model)
    assert engine.generate([3, 4, 5], max_new_tokens=60).ids == plain
    assert engine.policy.budget.step.is_known


# Seconds by rows


def test_seconds_by_rows_are_means_of_rounds_with_about_as_many_rows():
    seconds = SecondsByRows()
    assert seconds.at(5) == 0.0 and not seconds.is_known
    for num_rows in (1, 64, 16, 4) * 20:
        seconds.observe(num_rows, 2.0 + 0.5 * num_rows)
    assert [seconds.at(rows) for rows in (1, 4, 13, 16, 64)] == pytest.approx([2.5, 4.0, 10.0, 10.0, 34.0])
    assert seconds.at(500) == pytest.approx(34.0), "the nearest that is known"
    seconds.observe(16, 1000.0)
    assert seconds.at(16) < 1.2 * 10, "a hiccup"


def test_measured_sizes_are_not_tried_for_their_own_sake_until_the_machine_has_changed():
    step = StepCost(GRID, usual_shape("cuda"))
    known = torch.linspace(1.0, 2.0, len(GRID)).double()
    step.restore({"step_sizes": torch.tensor(GRID), "step_seconds": known})
    for _ in range(300):
        step.observe(GRID[2], float(known[2]))
    assert [step.seconds(size) for size in GRID] == pytest.approx(known.tolist(), rel=0.05)
    for _ in range(300):
        step.observe(GRID[2], 2 * float(known[2]))
    assert step.seconds(GRID[-1]) < 0.8 * 2 * known[-1], "now it may have become less slow than others"


def test_guessed_sizes_are_still_guesses_in_a_restored_profile():
    step, restored = (StepCost(GRID, usual_shape("cuda")) for _ in range(2))
    for _ in range(400):  # by now, sizes that were not tried look better than they are
        step.observe(GRID[1], 1.0)
    restored.restore(step.state())
    assert restored.largest == step.largest == GRID[1]
    assert restored.seconds(GRID[-1]) == pytest.approx(usual_shape("cuda")(GRID[-1]), rel=0.01)
    restored.observe(GRID[-1], 4.0)
    assert restored.seconds(GRID[-1]) == pytest.approx(4.0, rel=0.05), "its first time counts as it is"
    assert restored.seconds(GRID[1]) == pytest.approx(1.0, rel=0.05), "and says little about one that is well known"


def test_sizes_that_were_too_slow_to_time_are_guesses(monkeypatch):
    monkeypatch.setattr("graft.spec_decode.cost_model.time_step", lambda target, size: float(size))
    step = StepCost(GRID, usual_shape("cuda"))
    step.measure(None)
    timed = [size for size in GRID if size <= 4 * GRID[0]]
    assert step.largest == GRID[len(timed)], "the first that is too slow ends the measurement"
    assert [step.seconds(size) for size in GRID] == pytest.approx(GRID)


# Draft passes


def known_gains(gains):
    passes = PassGains(len(gains))
    passes.restore({"gain": torch.tensor(gains)})
    return passes


def test_a_pass_must_bring_its_cost_with_the_probability_that_its_beams_are_reached():
    passes = known_gains([0.8, 0.5])
    assert [passes.least_reach(number, cost=0.2) for number in range(3)] == pytest.approx([0.25, 0.4, math.inf])


def test_gains_of_draft_passes_are_learned():
    passes = PassGains(3)
    for _ in range(300):
        passes.observe(reaches=[1.0, 0.5], values=[0.1, 0.8, 0.9])
    assert passes.state()["gain"].tolist() == pytest.approx([0.7, 0.2, 0.6], rel=0.01), "what was not done stays"
    passes = known_gains([0.7, 0.2, 0.1])
    for _ in range(300):
        passes.observe(reaches=[1.0, 0.5], values=[0.1, 0.8, 0.9])
    assert 0.3 < passes.state()["gain"][2] < 0.6, "but it is tried again in time"


def test_passes_given_up_are_tried_again_in_time():
    passes = PassGains(2)
    for _ in range(300):
        passes.observe([1.0, 0.8], [0.5, 0.5001, 0.5002])
    assert max(passes.state()["gain"]) < 0.01
    rounds = 0
    while passes.state()["gain"][1] < 0.3:
        passes.observe([], [0.5])
        rounds += 1
        assert rounds < 2000
    assert rounds > 100, "but not at once"
    passes.observe([1.0, 0.8], [0.5, 0.5001, 0.5002])
    assert passes.state()["gain"][1] < 0.01, "and given up at once if they still bring nothing"


def test_gains_of_draft_passes_are_restored_from_a_state_and_reset():
    passes, other = PassGains(2), PassGains(2)
    passes.observe([1.0, 0.4], [0.0, 0.2, 0.3])
    other.restore(passes.state())
    assert torch.equal(other.state()["gain"], passes.state()["gain"])
    other.restore({})
    assert torch.equal(other.state()["gain"], PassGains(2).state()["gain"])


def test_one_round_does_not_replace_restored_gains_even_of_passes_that_were_not_made_for_long():
    passes = PassGains(1)
    for _ in range(300):
        passes.observe([], [0.5])
    passes.restore({"gain": torch.tensor([0.4])})
    passes.observe([1.0], [0.5, 0.5])
    assert passes.state()["gain"].item() == pytest.approx(0.4 * 0.95)


@pytest.mark.parametrize(("seconds", "pays"), [(0.01, True), (0.7, False)])
def test_a_pass_is_made_if_what_it_brings_all_rows_is_worth_its_time(seconds, pays):
    budget = Budget(StepCost(GRID, usual_shape("cuda")), 1, 0.0)
    budget.step.observe(8, 1.0)
    budget.drafting.observe(8, seconds)
    assert (budget.least_reach(8, 0) < 8.0) == pays, "0.6 tokens a row for its seconds"
    assert budget.least_reach(8, 1) == math.inf, "there is no further one"


def test_a_fixed_number_of_passes_is_made_whatever_they_bring():
    budget = Budget(StepCost(GRID, usual_shape("cuda")), 4, pass_cost=9.0, fixed_passes=2)
    assert [budget.least_reach(1, number) for number in range(3)] == [-1.0, -1.0, math.inf]
    assert Budget(UnitCost(), 4, 9.0, fixed_passes=7).fixed_passes == 4, "no more than the drafter makes"


def test_with_a_fixed_budget_rows_decide_separately_and_the_step_is_the_unit():
    budget = Budget(UnitCost(), 1, 0.5, fixed=20)
    assert budget.may_propose(3) and budget.max_nodes(3) == 60 and budget.pass_seconds(3) == 0.5
    assert 1.5 < budget.least_reach(3, 0) < 3.0
    assert budget.node_costs(3) == ([60], [0.0])
    (plan,) = budget.tree_sizes([0.5, 0.9], 3)
    assert (plan.num_nodes, plan.gain, plan.seconds) == (2, 0.9, 1.0)

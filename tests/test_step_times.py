"""Seconds of steps and of other work, as they are learned from rounds."""

import pytest
import torch

from graft import Engine
from graft.model import TargetRunner
from graft.spec_decode.policies import make_policy
from graft.spec_decode.step_times import RECENT, StepTimes, WorkTimes, usual_shape
from tiny import tiny_model

GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def test_before_anything_is_known_steps_have_the_usual_shape_of_their_device():
    fast, slow = StepTimes(GRID, usual_shape("cuda")), StepTimes((), usual_shape("cpu"))
    assert not fast.is_known and fast.seconds(1) == fast.seconds(64) < fast.seconds(65) == fast.seconds(96)
    assert slow.seconds(2) < slow.seconds(3) < slow.seconds(20)
    fast.observe(4, 0.005)
    assert fast.is_known and fast.seconds(64) == pytest.approx(0.005, rel=0.05)
    assert fast.seconds(1024) == pytest.approx(2 * fast.seconds(512)), "beyond all sizes in proportion"


def test_steps_between_and_beyond_the_known_sizes_cost_in_proportion():
    padded, others = (StepTimes(sizes, lambda num_tokens: 1 + num_tokens / 10) for sizes in ((1, 4, 16), ()))
    assert [padded.seconds(count) for count in (1, 3, 5, 32)] == pytest.approx([1.1, 1.4, 2.6, 5.2])
    assert [others.seconds(count) for count in (1, 5, 20, 1024)] == pytest.approx([1.1, 1.5, 3.0, 104.4])


def test_an_untried_step_size_is_corrected_like_its_neighbours():
    steps = StepTimes(GRID, lambda size: float(size))
    for _ in range(50):
        for size, factor in ((1, 1.0), (16, 2.0)):
            steps.observe(size, factor * size)
    factors = [steps.seconds(size) / size for size in GRID]
    assert factors[0] == pytest.approx(1.0, rel=0.05) and factors[4] == pytest.approx(2.0, rel=0.05)
    assert factors[:5] == sorted(factors[:5]) and factors[5:] == pytest.approx([factors[4]] * 10)


def test_no_step_takes_longer_than_a_larger_one_was_seen_to_take():
    steps = StepTimes(GRID, usual_shape("cuda"))
    steps.observe(1, 3.0)  # the first includes set-up
    for _ in range(20):
        steps.observe(32, 1.0)
    assert steps.seconds(1) <= steps.seconds(32) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("slow", [0, 3, 10])
def test_one_or_two_slow_steps_change_little(slow):
    steps = StepTimes((), usual_shape("cpu"))
    for number in range(20):
        steps.observe(1, 1.0)
        steps.observe(8, 9.0 if number == slow else 1.5)
    assert steps.seconds(8) == pytest.approx(1.5, rel=0.1) and steps.seconds(1) == pytest.approx(1.0, rel=0.1)


def test_a_slow_first_step_of_a_size_does_not_replace_the_guess():
    steps = StepTimes(GRID, usual_shape("cuda"))
    for _ in range(5):
        steps.observe(1, 1.0)
    steps.observe(64, 9.0)
    assert steps.seconds(64) < 1.5
    steps.observe(64, 9.0)
    assert steps.seconds(64) > 5.0, "but two of them do"


def test_a_size_that_is_not_tried_any_more_is_unknown_again():
    steps, rounds = StepTimes(GRID, usual_shape("cuda")), 0
    for size, seconds in ((1, 1.0),) * 9 + ((64, 9.0), (1, 1.0)) * 3:
        steps.observe(size, seconds)
    while steps.seconds(64) > 1.05:
        steps.observe(1, 1.0)
        rounds += 1
        assert rounds < 600
    assert rounds > 100, "but not at once"


def test_a_slower_machine_is_noticed_by_all_sizes():
    steps = StepTimes(GRID, usual_shape("cuda"))
    for factor in (1, 3):
        for _ in range(30):
            for size in (1, 16):
                steps.observe(size, factor * (1.0 if size == 1 else 1.2))
    assert [steps.seconds(size) for size in (1, 16, 64)] == pytest.approx([3.0, 3.6, 3.6], rel=0.1)


def test_times_are_kept_and_come_back_for_other_sizes_too():
    steps, same, other = (StepTimes(sizes, usual_shape("cuda")) for sizes in (GRID, GRID, (1, 64, 512, 1024)))
    assert not len(steps.state()["step_sizes"])
    for _ in range(40):
        for size in (1, 8, 64, 128):
            steps.observe(size, 0.1 + size / 100)
    for restored in (same, other):
        restored.restore(steps.state())
        assert restored.is_known and restored.seconds(64) == pytest.approx(steps.seconds(64))
    assert same.largest == 128, "larger ones are guesses"
    assert same.seconds(512) > same.seconds(128)
    same.restore({})
    assert same.is_known, "a state without times changes nothing"


def test_sizes_that_were_too_slow_to_time_are_guesses(monkeypatch):
    monkeypatch.setattr("graft.spec_decode.step_times.time_step", lambda target, size: float(size))
    steps = StepTimes(GRID, usual_shape("cuda"))
    steps.measure(None)
    assert steps.largest == 8, "the first that is too slow ends the measurement"
    assert [steps.seconds(size) for size in (1, 2, 4, 8)] == pytest.approx([1, 2, 4, 8])
    assert steps.seconds(64) == pytest.approx(8.0) and steps.seconds(512) > 8.0, "then the usual shape goes on"


def work_times():
    """Of a machine whose level is one second: a step of one token."""
    steps = StepTimes((), usual_shape("cpu"))
    for _ in range(RECENT):
        steps.observe(1, 1.0)
    return WorkTimes(steps), steps


def test_times_of_work_are_medians_of_rounds_with_about_as_many_rows():
    times, _ = work_times()
    assert times.at(5) == (0.0, 0.0, 0.0) and times.at(5, guess=0.2) == (0.0, 0.0, 0.2)
    for num_rows in (1, 64, 16, 4) * 20:
        times.observe(num_rows, 0, 2.0 + 0.5 * num_rows)
        times.observe(num_rows, -1, 0.1 * num_rows)
    assert [times.at(rows).start for rows in (1, 4, 13, 16, 64)] == pytest.approx([2.5, 4.0, 10.0, 10.0, 34.0])
    assert [times.at(rows).plain for rows in (1, 13, 64)] == pytest.approx([0.1, 1.6, 6.4])
    assert times.at(500).start == pytest.approx(34.0), "the nearest that is known"
    times.observe(16, 0, 1000.0)
    assert times.at(16).start == pytest.approx(10.0), "a hiccup"


def test_a_fixed_part_and_a_part_for_each_pass_are_told_apart():
    times, steps = work_times()
    times.observe(1, 3, 1.5)
    assert times.at(1, guess=0.1) == (0.0, 0.0, 0.5), "one number of passes: they take all of the time"
    for passes in (0, 2, 5, 3) * 3:
        times.observe(1, passes, 0.3 + 0.4 * passes)
    assert times.at(1) == pytest.approx((0.0, 0.3, 0.4))
    times.observe(1, 8, 90.0)
    assert times.at(1) == pytest.approx((0.0, 0.3, 0.4)), "a single observation may be an outlier"
    other = WorkTimes(steps)
    other.restore(times.state())
    assert other.at(1).each > 0.4 and other.state().shape == times.state().shape


def test_on_a_busy_machine_other_work_is_expected_to_take_as_much_longer_as_steps():
    times, steps = work_times()
    for _ in range(RECENT):
        times.observe(1, 0, 0.5)
    for _ in range(RECENT):
        steps.observe(1, 3.0)
    assert times.at(1).start == pytest.approx(1.5)
    for _ in range(RECENT):
        times.observe(1, 0, 1.5)
        steps.observe(1, 1.0)
    assert times.at(1).start == pytest.approx(0.5, rel=0.1)


def test_a_machine_is_measured_once():
    policy = make_policy("graft", TargetRunner(tiny_model()))
    steps = policy.planner.steps
    assert not steps.is_known
    policy.prepare()
    assert not steps.is_known, "a library's first call does not wait for that"
    policy.measure()
    measured = policy.costs()
    policy.measure()
    assert torch.equal(policy.costs()["step_seconds"], measured["step_seconds"]) and steps.is_known


def test_without_measuring_the_machine_the_first_round_is_plain_and_the_text_the_same():
    model = tiny_model()
    plain = Engine(model, policy="off").generate([3, 4, 5], max_new_tokens=60).ids
    engine = Engine(model)
    assert engine.generate([3, 4, 5], max_new_tokens=60).ids == plain
    assert engine.policy.planner.steps.is_known

"""Pace: whether trees pay for a batch of some size."""

import pytest

from graft.core import pace as paces
from graft.core.pace import Pace


def run(pace, num_rows, rounds, tokens, seconds, plain_every=10):
    """Rounds that bring a row so many tokens in so many plain rounds' time, but for some that are plain."""
    for number in range(rounds):
        is_plain = number % plain_every == 0
        taken, brought = (1.0, 1.0) if is_plain else (seconds, tokens)
        pace.observe(num_rows, taken, brought * num_rows, is_plain)


@pytest.mark.parametrize(("tokens", "seconds", "pays"), [(3.0, 2.0, True), (1.9, 1.85, False), (1.2, 2.0, False)])
def test_trees_pay_where_they_bring_clearly_more_than_plain_rounds(tokens, seconds, pays):
    pace = Pace()
    run(pace, 16, 200, tokens, seconds)
    assert pace.pays(16) == pace.pays(9) == pays
    assert pace.pays(8) and pace.pays(32), "of other sizes nothing is known"


def test_rounds_that_are_all_plain_do_not_pay_but_there_is_time_to_try_a_tree():
    pace = Pace()
    run(pace, 4, 100, 1.0, 1.0, plain_every=1)
    assert pace.pays(4)
    run(pace, 4, 100, 1.0, 1.0, plain_every=1)
    assert not pace.pays(4)


def test_nothing_is_decided_before_the_trial_is_over():
    pace = Pace()
    for _ in range(paces._TRIAL):
        assert pace.pays(8)
        pace.observe(8, 2.0, 8, is_plain=False)
        pace.observe(4, 2.0, 4, is_plain=False)
    pace.observe(8, 1.0, 8, is_plain=True)
    assert not pace.pays(8)


def test_a_row_alone_never_rests():
    pace = Pace()
    run(pace, 1, 200, 1.0, 5.0)
    assert pace.pays(1) and pace.pays(0)


def test_after_long_there_is_another_trial(monkeypatch):
    monkeypatch.setattr(paces, "_REST", 100)
    pace = Pace()
    run(pace, 8, 200, 1.0, 2.0)
    for _ in range(99):
        pace.rested(8)
    assert not pace.pays(8)
    pace.rested(8)
    assert pace.pays(8)
    run(pace, 8, 200, 3.0, 2.0)
    assert pace.pays(8)


def test_one_hiccup_does_not_decide():
    pace = Pace()
    run(pace, 8, 200, 3.0, 2.0)
    pace.observe(8, 500.0, 8, is_plain=False)
    assert pace.pays(8)


def test_a_hard_stretch_does_not_decide_for_long():
    pace = Pace()
    run(pace, 2, 200, 3.0, 2.0)
    run(pace, 2, 48, 2.0, 2.0)
    assert pace.pays(2)
    run(pace, 2, 1000, 2.0, 2.0)
    assert not pace.pays(2)

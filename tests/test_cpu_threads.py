"""The choice between all threads and one: by time, with few trials of the slower way."""

from types import SimpleNamespace

import pytest

from graft.model import cpu_threads
from graft.model.cpu_threads import ThreadChoice


@pytest.fixture
def machine(monkeypatch):
    """Calls take `all` or `one` seconds on it."""
    machine = SimpleNamespace(now=0.0, all=1.0, one=1.7, singles=[])

    def call(functions):
        machine.singles.append(functions is None)
        machine.now += machine.one if functions is None else machine.all
        return "result"

    monkeypatch.setattr(cpu_threads, "threads", lambda: "threads")
    monkeypatch.setattr(cpu_threads, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    choice = ThreadChoice()

    def run(count):
        machine.singles.clear()
        assert all(choice.run(call, 1.0) == "result" for _ in range(count))
        return sum(machine.singles)

    machine.run, machine.choice = run, choice
    return machine


def test_quiet_cores_use_all_threads_but_for_rare_trials(machine):
    assert machine.run(2) == 1, "the second call tries one thread"
    assert machine.run(2000) <= 7 and not machine.choice.is_single


def test_busy_cores_use_one_thread(machine):
    machine.all = 20.0
    assert machine.run(1000) >= 990 and machine.choice.is_single


def test_cores_that_become_busy_and_quiet_again(machine):
    machine.run(100)
    machine.all, machine.one = 20.0, 3.0
    assert machine.run(100) >= 95, "two slow calls are enough"
    machine.all, machine.one = 1.0, 1.7
    machine.run(600)
    assert machine.run(100) <= 2 and not machine.choice.is_single


def test_a_single_slow_call_tries_nothing(machine):
    machine.run(70)
    machine.all = 9.0
    machine.run(1)
    machine.all = 1.0
    assert machine.run(20) == 0

"""The list of planted faults: each can be planted in today's tree, and names tests that are there."""

import pytest

import mutants
from planted_faults import FAULTS, Fault


def test_every_fault_can_be_planted_in_todays_tree():
    assert mutants.problems(FAULTS) == []
    assert len(FAULTS) >= 60


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"old": "no such text"}, "occurs 0 times"),
        ({"old": "import"}, "not once"),
        ({"new": "def push(self, token: int"}, "changes nothing"),
        ({"file": "src/graft/gone.py"}, "occurs 0 times"),
        ({"test": "test_text_stream.py::test_gone"}, "there is no test"),
        ({"test": ""}, "there is no test"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_named(changes, problem):
    usual = {
        "file": "src/graft/request/detokenizer.py",
        "old": "def push(self, token: int",
        "new": "",
        "test": "test_mutants.py::test_every_fault_can_be_planted_in_todays_tree",
    }
    assert mutants.problems([Fault("one", **usual)]) == []
    (found,) = mutants.problems([Fault("one", **usual | changes)])
    assert problem in found and found.startswith("one: ")


def test_a_fault_is_planted_in_the_copy_and_taken_out_again(tmp_path):
    source = mutants.ROOT / "src/graft/request/detokenizer.py"
    copy = tmp_path / "src/graft/request/detokenizer.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(before := source.read_bytes())
    fault = next(fault for fault in FAULTS if fault.file == "src/graft/request/detokenizer.py")
    with mutants.planted(fault, tmp_path):
        assert copy.read_text() == before.decode().replace(fault.old, fault.new) != before.decode()
    assert copy.read_bytes() == before == source.read_bytes()

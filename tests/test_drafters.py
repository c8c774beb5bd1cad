"""What drafters brought when they were measured, and which one `--draft auto` takes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import graft
from graft import load
from graft.drafters.eagle3 import save_head
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.hub.draft_names import NONE, description
from graft.hub.drafters import NAMED
from graft.tuning import learned
from graft.tuning.drafters import Measured, best_draft, known_results, remember, split_prompts
from graft.tuning.profile import About, Profile
from heads import make_head
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

ABOUT = About("abc", None, "a machine", "float32")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=BYTE_VOCAB)


def result(draft, speed):
    return Measured(draft, speed, 10 * speed, 2.5, 3.0, 4, "2026-01-31")


def test_results_are_kept_by_model_and_machine_the_fastest_first(tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    for one in (result(NONE, 1.2), result(str(folder), 2.0), result("owner/name", 1.1), result(NONE, 1.3)):
        remember(ABOUT, one)
    assert [(each.draft, each.speed) for each in known_results(ABOUT)] == [
        (str(folder), 2.0),
        (NONE, 1.3),
        ("owner/name", 1.1),
    ]
    assert best_draft(ABOUT) == str(folder)
    folder.rmdir()
    assert best_draft(ABOUT) == NONE, "what is gone is passed over"
    other = About("abc", "a head", "another machine", "float32")
    assert known_results(other) == [] and best_draft(other) is None


@pytest.mark.parametrize("facts", [1, {"draft": NONE}, {"draft": 3}])
def test_damaged_speeds_are_passed_over_with_a_warning(facts):
    Profile(ABOUT, {}, speeds={NONE: facts}).save(learned.path_of(ABOUT))
    with pytest.warns(UserWarning, match="it is ignored"):
        assert best_draft(ABOUT) is None
    learned.path_of(ABOUT).write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="it is ignored"):
        assert best_draft(ABOUT) is None
    with pytest.warns(UserWarning, match="is ignored"):
        remember(ABOUT, result(NONE, 1.4))
    assert best_draft(ABOUT) == NONE


def test_of_two_heads_of_one_name_the_later_measured_counts():
    """A head that is trained again has another file."""
    for head, date, speed in (("a", "2026-02-01T10:00:00", 1.2), ("b", "2026-02-01T09:00:00", 1.9)):
        remember(replace(ABOUT, head=head), replace(result("owner/name", speed), date=date))
    assert [each.speed for each in known_results(ABOUT)] == [1.2]


def test_a_fifth_of_the_prompts_is_measured():
    prompts = [[number] for number in range(11)]
    lessons, trials = split_prompts(prompts)
    assert trials == [[4], [9]] and sorted(lessons + trials) == prompts
    assert split_prompts(prompts[:4]) == (prompts[:4], [])


def test_auto_takes_the_fastest_that_was_measured(model, tmp_path):
    head = make_head(model)
    save_head(head, tmp_path / "head")
    assert load(model).drafter is None, "nothing was measured, and it has no packaged head"
    about = About.of_model(model)
    remember(about, result(NONE, 1.1))
    assert load(model).drafter is None
    remember(about, result(str(tmp_path / "head"), 1.5))
    drafter = load(model).drafter
    assert isinstance(drafter, Eagle3Drafter) and torch.equal(drafter.head.fc.weight, head.fc.weight.to(model.dtype))
    assert load(model, draft=None).drafter is None and load(model, policy="off").drafter is None
    remember(about, result(NONE, 1.9))
    assert load(model).drafter is None


def test_tune_measures_and_drafters_lists(model, tmp_path, graft):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"abc {number} abc"}) + "\n" for number in range(5)))
    listed = graft("drafters", str(folder)).out
    assert "retrieval only" in listed and "--draft auto uses none." in listed and not re.search(r"\d\.\d\d ", listed)
    assert "Nothing has been measured on this machine yet: run graft tune --draft NAME --prompts FILE" in listed
    assert "packaged head" not in listed, "a folder has none"
    assert "a small model" not in listed, "all packaged ones are larger"
    tuned = graft("tune", "--model", str(folder), "--prompts", str(prompts), "--max-new-tokens", "6")
    assert re.search(r"Drafter none: \d+\.\d\d times plain decoding, mean accepted length \d\.\d\d", tuned.err)
    listed = graft("drafters", str(folder)).out
    assert re.search(r"\d\.\d\d .* 0\.00 .* none .* retrieval only", listed)
    assert "Nothing has been measured" not in listed


@pytest.mark.parametrize(("count", "warns"), [(6, True), (30, False)])
def test_tune_on_few_prompts_says_that_it_says_little(tmp_path, graft_tiny, monkeypatch, count, warns):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number}"}) + "\n" for number in range(count)))
    tuned = graft_tiny("tune", "--prompts", str(prompts), "--max-new-tokens", "2")
    assert tuned.status == 0, tuned.err
    words = "this says little, learned from 5 prompts and measured on 1: give 30 or more, 6 of them to measure with"
    assert (words in tuned.err) == warns and ("says little" in tuned.err) == warns


def test_tune_refuses_too_few_prompts_before_it_loads_the_model(tmp_path, graft):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b", "c", "c", "b")))
    few = graft("tune", "--model", "no-such-model", "--prompts", str(prompts))
    words = "graft tune needs at least 5 different prompts, a fifth of them to measure with, not 3: give more"
    assert few.status == 2 and few.err.startswith(f"error: {words}")
    portable = graft("tune", "--model", "no-such-model", "--prompts", str(prompts), "--portable")
    assert portable.status == 2 and "a portable profile is a file to pass on: name one with --out" in portable.err


def test_prompts_that_repeat_are_not_measured_because_their_answers_would_be_recalled():
    prompts = [[number] for number in range(1, 6)]
    lessons, trials = split_prompts([*prompts, *prompts])
    assert sorted(lessons + trials) == prompts and len(trials) == 1


def test_every_drafter_that_is_made_from_the_target_is_described():
    assert {description(name, "x") for name in NAMED}.isdisjoint({"a head or a model", "no longer there"})


def test_the_core_knows_no_kind_of_drafter_by_name():
    """All kinds are in `hub.drafters`: a new one is a new folder and a line there."""
    root = Path(graft.__file__).parent
    drafters = root / "drafters"
    shared = {"base", "drafter", "factory"}
    kinds = {path.stem for path in drafters.iterdir()} - shared
    assert {"block", "eagle3", "early_exit", "mtp", "other_tokenizer", "small_model"} <= kinds
    rooms = ("engine", "request", "tree", "tuning", "model", "spec_decode/policies")
    core = [root / "loading.py", *(root / "spec_decode").glob("*.py")]
    core += [path for room in rooms for path in (root / room).rglob("*.py")]
    named = re.compile(rf"graft\.drafters(\.| import .*\b)({'|'.join(sorted(kinds))})\b")
    assert not [(path.name, line) for path in core for line in path.read_text().splitlines() if named.search(line)]

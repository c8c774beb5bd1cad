"""Profiles: what tuning learned is loaded with the same model, head and machine, and with no other."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import graft as library
from graft import Engine, GraftError
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.loading import load
from graft.tuning import learned
from graft.tuning.learned import equip, path_of
from graft.tuning.profile import About, Profile, head_fingerprint, model_fingerprint
from graft.tuning.tuning import tune
from heads import SMALL_TREE, make_head
from tiny import tiny_model

PROMPTS = [[5, 9, 5, 9, 5, 9, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of its own, and no packaged profiles."""
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(learned, "HEADS", tmp_path / "heads")
    return tmp_path / "home"


def engine_for(seed=0, head=None, policy="graft"):
    model = tiny_model(seed=seed, num_hidden_layers=6)
    drafter = Eagle3Drafter(make_head(model, head), SMALL_TREE) if head is not None else None
    return Engine(model, policy=policy, drafter=drafter)


@pytest.fixture(scope="module")
def tuned():
    return tune(engine_for(head=0), PROMPTS, max_new_tokens=24)


def same(left, right):
    return set(left) == set(right) and all(torch.equal(left[key].cpu(), right[key].cpu()) for key in left)


# What is learned


def test_profile_gives_a_new_engine_what_the_tuned_one_had_learned(tuned):
    engine = engine_for(head=0)
    assert not same(engine.policy.state(), {key: tuned.state[key] for key in engine.policy.state()})
    tuned.save(path_of(tuned.about))
    equip(engine, "auto")
    assert same(engine.policy.state(), {key: tuned.state[key] for key in engine.policy.state()})


def test_an_engine_whose_texts_are_isolated_takes_all_of_a_profile_but_texts(tuned):
    engine = Engine(engine_for().target.model, isolated=True, drafter=engine_for(head=0).drafter)
    empty = engine.policy.state()
    tuned.save(path_of(tuned.about))
    equip(engine, "auto")
    tables = ("adjacency/", "bigram/", "trigram/", "past/")
    for key, value in engine.policy.state().items():
        assert torch.equal(value, (empty if key.startswith(tables) else tuned.state)[key]), key


def test_costs_come_back_on_the_same_machine_only_and_are_then_not_measured_again(tuned, tmp_path):
    here, elsewhere = tmp_path / "here.safetensors", tmp_path / "elsewhere.safetensors"
    tuned.save(here)
    other = About(tuned.about.model, tuned.about.head, "another machine", tuned.about.dtype)
    Profile(other, tuned.state, tuned.costs).save(elsewhere)
    for path, known in ((here, True), (elsewhere, False)):
        engine = engine_for(head=0)
        equip(engine, path)
        assert same(engine.policy.costs(), tuned.costs) == known
        engine.policy.measure()
        assert same(engine.policy.costs(), tuned.costs) == known


def test_costs_do_not_overrule_a_budget(tuned, tmp_path):
    tuned.save(tmp_path / "p.safetensors")
    engine = Engine(tiny_model(num_hidden_layers=6), drafter=engine_for(head=0).drafter, budget=5)
    equip(engine, tmp_path / "p.safetensors")
    assert engine.policy.costs() == {} and engine.policy.planner.plain_seconds(1) == 1.0


@cache
def plain_answers():
    engine = engine_for(policy="off")
    return [engine.generate(prompt, max_new_tokens=16).ids for prompt in PROMPTS]


@pytest.mark.parametrize("policy", ["graft", "paper", "off"])
def test_text_with_a_profile_is_that_of_plain_decoding(policy, tuned, tmp_path):
    tuned.save(tmp_path / "p.safetensors")
    engine = engine_for(head=0, policy=policy)
    equip(engine, tmp_path / "p.safetensors")
    for prompt, plain in zip(PROMPTS, plain_answers(), strict=True):
        assert engine.generate(prompt, max_new_tokens=16).ids == plain


def test_parts_of_a_profile_that_the_policy_does_not_know_are_ignored(tuned, tmp_path):
    """Profiles of earlier versions, the packaged ones among them, hold thresholds of a method of the benchmark."""
    gates = {"gates/thresholds": torch.tensor([0.1, 0.2, 0.3])}
    Profile(tuned.about, tuned.state | gates, tuned.costs).save(tmp_path / "p.safetensors")
    engine = engine_for(head=0)
    equip(engine, tmp_path / "p.safetensors")
    assert same(engine.policy.state(), tuned.state)


def test_portable_profile_is_small_of_no_machine_and_holds_no_texts():
    profile = tune(engine_for(head=0), PROMPTS, max_new_tokens=24, portable=True)
    assert (profile.about.device, profile.about.dtype, profile.costs) == (None, None, {})
    assert {key.split("/")[0] for key in profile.state} == {"calibration", "adjacency"}
    profile.save(learned.HEADS / "some-model" / "profile.safetensors")
    engine = engine_for(head=0)
    equip(engine, "auto")
    assert torch.equal(engine.policy.state()["adjacency/rows"], profile.state["adjacency/rows"])


def test_a_profile_knows_rows_of_the_temperatures_that_it_was_tuned_at():
    known = []
    for temperatures in ([0.0], [0.0, 1.0], [0.4, 0.7]):
        profile = tune(engine_for(head=0), PROMPTS[:1], max_new_tokens=12, portable=True, temperatures=temperatures)
        counts = profile.state["calibration/drafted"][0].view(4, -1)  # observations, by kind of row
        known.append((counts != 16.0).any(dim=1).tolist())  # 16 is the weight of the prior
    assert known == [[True, False, False, False], [True, False, False, True], [False, True, True, False]]


# Whose it is


def test_fingerprints_tell_models_and_heads_apart_and_do_not_mind_the_precision():
    model, finetuned = tiny_model(num_hidden_layers=6), tiny_model(num_hidden_layers=6, seed=1)
    assert model_fingerprint(model) == model_fingerprint(tiny_model(num_hidden_layers=6))
    assert len({model_fingerprint(m) for m in (model, finetuned, tiny_model(num_hidden_layers=5))}) == 3
    heads = [head_fingerprint(Eagle3Drafter(make_head(model, seed), SMALL_TREE)) for seed in (0, 0, 1)]
    assert heads[0] == heads[1] != heads[2]
    assert head_fingerprint(None) is None
    fingerprint = model_fingerprint(model)
    assert model_fingerprint(model.to(torch.bfloat16)) == fingerprint


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"seed": 1, "head": 0}, "is the profile of another model: make one with graft tune"),
        ({"head": 1}, "was made with another head, and the engine has this one"),
        ({"head": None}, "was made with another head, and the engine has no head"),
    ],
)
def test_profile_of_another_is_refused_when_named_and_passed_over_when_found(engine, message, tuned, tmp_path, recwarn):
    other = engine_for(**engine)
    before = other.policy.state()
    tuned.save(tmp_path / "p.safetensors")
    with pytest.raises(GraftError, match=message):
        equip(other, tmp_path / "p.safetensors")
    tuned.save(path_of(tuned.about))
    equip(other, "auto")
    assert same(other.policy.state(), before)
    assert not recwarn.list


def test_profile_of_another_machine_is_passed_over_for_the_packaged_one(tuned):
    other = About(tuned.about.model, tuned.about.head, "another machine", tuned.about.dtype)
    Profile(other, tuned.state, tuned.costs).save(path_of(other))
    packaged = tune(engine_for(head=0), PROMPTS[:1], max_new_tokens=8, portable=True)
    packaged.save(learned.HEADS / "some-model" / "profile.safetensors")
    engine = engine_for(head=0)
    equip(engine, "auto")
    assert torch.equal(engine.policy.state()["adjacency/entries"], packaged.state["adjacency/entries"])
    assert not torch.equal(packaged.state["adjacency/entries"], tuned.state["adjacency/entries"])


def rewritten(path, about):
    save_file(load_file(path), path, metadata={"about": json.dumps(about)})


def test_profile_of_another_version_is_refused_when_named_and_passed_over_when_found(tuned, recwarn):
    path = path_of(tuned.about)
    tuned.save(path)
    rewritten(path, {"format": "graft-profile-0"})
    engine = engine_for(head=0)
    with pytest.raises(GraftError, match="is not a profile of this version of Graft"):
        equip(engine, path)
    equip(engine, "auto")
    assert not recwarn.list


@pytest.mark.parametrize(
    "part", ["trigram/tags", "trigram/rows", "adjacency/rows", "trigram/entries", "paths/hoped", "paths/came"]
)
def test_tables_whose_parts_do_not_belong_together_are_refused_before_anything_is_read(tuned, part):
    state = tuned.state | {part: tuned.state[part][:1]}
    state = state | {part: state[part][0]} if part.endswith("entries") else state
    path = path_of(tuned.about)
    Profile(tuned.about, state, tuned.costs).save(path)
    engine = engine_for(head=0)
    new = engine.policy.state()
    with pytest.raises(GraftError, match="is an incomplete profile"):
        equip(engine, path)
    assert same(engine.policy.state(), new)


@pytest.mark.parametrize("damage", ["cut off", "nonsense", "parts are missing"])
def test_damaged_profile_is_an_error_when_named_and_one_warning_when_found(damage, tuned):
    path = path_of(tuned.about)
    tuned.save(path)
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "nonsense":
        path.write_bytes(b"nonsense")
    else:
        Profile(tuned.about, {k: v for k, v in tuned.state.items() if "entries" not in k}, {}).save(path)
    engine = engine_for(head=0)
    before = engine.policy.state()
    with pytest.raises(GraftError, match="profile"):
        equip(engine, path)
    with pytest.warns(UserWarning, match="ignored") as caught:
        equip(engine, "auto")
    assert len(caught) == 1
    assert same(engine.policy.state(), before)


PACKAGED = sorted((Path(library.__file__).parent / "heads").glob("*/profile*.safetensors"))


@pytest.mark.parametrize("path", PACKAGED, ids=[path.stem for path in PACKAGED])
def test_packaged_profile_is_small_and_of_no_machine(path):
    profile = Profile.read(path)
    assert path.stat().st_size < 1_000_000
    assert (profile.about.device, profile.about.dtype, profile.costs) == (None, None, {})
    assert (profile.about.head is None) == ("without-head" in path.stem)


# Loading and the command


def test_load_takes_a_profile_unless_told_otherwise(tuned):
    model = tiny_model(num_hidden_layers=6)
    profile = tune(load(model), PROMPTS, max_new_tokens=8)
    profile.save(path_of(profile.about))
    assert len(library.load(model).policy.state()["adjacency/rows"]) > 0
    assert len(library.load(model, profile=None).policy.state()["adjacency/rows"]) == 0
    assert library.load(model, policy="off", profile="missing").policy.state() == {}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = ("one two one two", "three", "four", "five", "six")
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def test_tune_saves_a_profile_that_generate_picks_up(graft_tiny, prompts, home):
    result = graft_tiny("tune", "--prompts", prompts)
    assert result.status == 0, result.err
    (path,) = home.glob("learned-*/*.safetensors")
    assert str(path) in result.err.replace("\n", "")
    texts = {
        words: graft_tiny("generate", "one two", *words)
        for words in ((), ("--profile", "none"), ("--profile", str(path)))
    }
    assert {result.status for result in texts.values()} == {0}
    assert len({result.out for result in texts.values()}) == 1

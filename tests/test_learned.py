"""What is learned is kept between processes: bounded, for the user alone, and nothing depends on it but speed."""

import gc
import os
import stat
from dataclasses import replace

import pytest
import torch

from graft import GraftError, load
from graft.tuning import learned
from graft.tuning.learned import MAX_TEXT_TOKENS
from graft.tuning.profile import About, Profile
from tiny import tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5]


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    monkeypatch.delenv("GRAFT_KEEP_LEARNED")
    return tmp_path


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def answered(model, prompt=PROMPT, **options):
    """An answer by an engine that is gone afterwards, as at the end of a process."""
    return load(model, **{"budget": 16, **options}).generate(prompt, max_new_tokens=40)


def files(home):
    return sorted(home.glob("learned-*/*.safetensors"))


def test_the_next_process_knows_what_one_has_learned(home, model):
    first, second = answered(model), answered(model)
    assert first.ids == second.ids == answered(model, policy="off").ids
    assert second.stats.rounds < first.stats.rounds
    (path,) = files(home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not list(path.parent.glob("*.partial"))


@pytest.mark.parametrize("options", [{"keep_learned": False}, {"isolated": True}, {"profile": None}, {"policy": "off"}])
def test_nothing_is_kept_or_read_where_that_is_not_wanted(home, model, options):
    answered(model, **options)
    assert not files(home)
    first = answered(model)
    (path,) = files(home)
    before = path.read_bytes()
    assert answered(model, **options).stats.rounds >= first.stats.rounds
    assert path.read_bytes() == before


def test_the_environment_turns_it_off(home, model, monkeypatch):
    monkeypatch.setenv("GRAFT_KEEP_LEARNED", "0")
    answered(model)
    assert not files(home)
    monkeypatch.setenv("GRAFT_KEEP_LEARNED", "no")
    with pytest.raises(GraftError, match="GRAFT_KEEP_LEARNED must be 0 or 1, not 'no'"):
        load(model)


def state_of(**parts):
    """A state with a table of one row and a text, and an acceptance count."""
    row, text, count = parts["row"], parts["text"], parts["count"]
    return {
        "adjacency/rows": torch.tensor([row], dtype=torch.int32),
        "adjacency/entries": torch.full((1, 8), row, dtype=torch.int32),
        "past/tokens": torch.tensor(text, dtype=torch.int32),
        "past/lengths": torch.tensor([len(text)]),
        "paths/came": torch.full((48,), count).double(),
    }


def held(state):
    """Rows, texts and count of a state."""
    rows, lengths = sorted(state["adjacency/rows"].tolist()), state["past/lengths"].tolist()
    return rows, [tuple(part.tolist()) for part in state["past/tokens"].split(lengths)], float(state["paths/came"][0])


TUNED, USED = state_of(row=1, text=[1, 2], count=1.0), state_of(row=2, text=[3, 4, 5], count=2.0)
COSTS, SPEEDS = {"step": torch.ones(3)}, {"none": {"speed": 1.5}}


def test_one_file_holds_what_tuning_and_use_taught_and_what_was_measured(home):
    about = About("model", "head", "machine", "float32")
    for part in (Profile(about, TUNED, COSTS), Profile(about, {}, used=USED), Profile(about, {}, speeds=SPEEDS)):
        learned.add(part)
    assert files(home) == [learned.path_of(about)]
    known = learned.read(about)
    assert held(known.state) == ([1], [(1, 2)], 1.0), "texts of use are no part of the tuning"
    assert held(known.used) == ([1, 2], [(1, 2), (3, 4, 5)], 2.0), "use may have begun before the tuning"
    assert known.costs.keys() == COSTS.keys() and known.speeds == SPEEDS


def test_a_new_tuning_wins_over_what_use_taught_before_and_forgets_no_text(home):
    about = About("model", "head", "machine", "float32")
    learned.add(Profile(about, {}, used=USED))
    learned.add(Profile(about, TUNED))
    assert held(learned.read(about).used) == ([1, 2], [(3, 4, 5), (1, 2)], 1.0)


def test_models_heads_and_machines_have_files_of_their_own(home):
    about = About("model", None, "machine", "float32")
    others = [{"model": "other"}, {"head": "head"}, {"device": "other"}, {"dtype": "bfloat16"}]
    each = [about, *(replace(about, **other) for other in others)]
    for number, one in enumerate(each):
        learned.add(Profile(one, TUNED, speeds={"none": number}))
    assert [learned.read(one).speeds["none"] for one in each] == list(range(5))


@pytest.mark.parametrize("options", [{"keep_learned": False}, {"isolated": True}])
def test_an_engine_that_keeps_nothing_starts_from_the_tuning_and_not_from_what_use_taught(home, model, options):
    answered(model)
    about = About.of(load(model, keep_learned=False))
    tuned = state_of(row=5, text=[40, 41], count=3.0)
    used = learned.read(about).used
    learned.path_of(about).unlink()
    Profile(about, tuned, used=used).save(learned.path_of(about))
    kept, other = load(model).policy.state(), load(model, **options).policy.state()
    assert len(kept["past/tokens"]) > len(PROMPT) and len(kept["adjacency/rows"]) > 1
    assert torch.equal(other["paths/came"], tuned["paths/came"])
    isolated = options.get("isolated", False)
    assert other["past/tokens"].tolist() == ([] if isolated else [40, 41])
    assert other["adjacency/rows"].tolist() == ([] if isolated else [5])


@pytest.mark.parametrize(
    "name", ["profiles", "drafters", "learned-{}/0123-no-head.safetensors", "learned-{}/01-23.safetensors"]
)
def test_files_of_an_earlier_version_are_named_in_one_line(home, model, name):
    path = home / name.format(os.geteuid())
    path.mkdir(parents=True)
    with pytest.warns(UserWarning, match=f"not read: run graft tune again, and delete {path}$") as seen:
        load(model)
    assert len(seen) == 1


def test_isolated_texts_are_never_kept(home, model):
    with pytest.raises(GraftError, match="isolated texts"):
        load(model, isolated=True, keep_learned=True)


@pytest.mark.parametrize("damage", [b"", b"nonsense", None], ids=["empty", "nonsense", "cut"])
def test_a_damaged_file_is_passed_over_with_a_line_and_written_anew(home, model, damage):
    first = answered(model)
    (path,) = files(home)
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    with pytest.warns(UserWarning, match="it is ignored") as seen:
        again = answered(model)
    assert again.ids == first.ids and "\n" not in str(seen[0].message)
    assert answered(model).stats.rounds < first.stats.rounds


def test_a_file_whose_parts_do_not_fit_together_is_written_anew(home, model):
    first = answered(model)
    (path,) = files(home)
    known = Profile.read(path)
    used = {**known.used, "trigram/tags": known.used["trigram/tags"][:1]}
    Profile(known.about, {}, used=used).save(path)
    with pytest.warns(UserWarning, match="is an incomplete profile"):
        assert answered(model).ids == first.ids
    state = Profile.read(path).used
    assert len(state["trigram/tags"]) == len(state["trigram/rows"]) > 1


def test_two_processes_that_end_together_both_keep_what_they_learned(home, model):
    one, other = load(model), load(model)
    texts = [PROMPT, [40, 41, 7, 7, 11]]
    answers = [engine.generate(text, max_new_tokens=20) for engine, text in zip((one, other), texts, strict=True)]
    del one, other
    state = load(model).policy.state()
    lengths = state["past/lengths"].tolist()
    assert sorted(lengths) == sorted(len(text) + len(answer.ids) for text, answer in zip(texts, answers, strict=True))


def test_merging_keeps_the_latest_texts_and_the_new_table_rows():
    long, short = [1] * (MAX_TEXT_TOKENS - 2), [2, 3, 4]
    states = [
        {
            "past/tokens": torch.tensor(text, dtype=torch.int32),
            "past/lengths": torch.tensor([len(text)]),
            "bigram/rows": torch.tensor(rows, dtype=torch.int32),
            "bigram/entries": torch.full((2, 8), value, dtype=torch.int32),
            "bigram/tags": torch.full((2,), value),
        }
        for text, rows, value in ((long, [4, 9], 1), (short, [9, 12], 2))
    ]
    both = learned.united(*states)
    assert both["past/tokens"].tolist() == short and both["past/lengths"].tolist() == [3]
    rows = dict(zip(both["bigram/rows"].tolist(), both["bigram/tags"].tolist(), strict=True))
    assert rows == {4: 1, 9: 2, 12: 2} and len(both["bigram/entries"]) == 3


def test_another_users_file_is_not_read(home, model, monkeypatch):
    first = answered(model)
    (path,) = files(home)
    monkeypatch.setattr(learned, "path_of", lambda about: path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(UserWarning, match="another user"):
        engine = load(model, budget=16)
    assert engine.generate(PROMPT, max_new_tokens=40).stats.rounds == first.stats.rounds
    engine.policy.num_texts = 0  # which leaves the file alone


def test_a_command_keeps_what_it_has_learned_unless_told_not_to(home, graft, model_folder):
    words = ("generate", "abcabcabc", "--model", model_folder, "--max-new-tokens", "30")
    first = graft(*words, "--no-keep-learned")
    gc.collect()  # what the command line has held
    assert first.status == 0 and not files(home)
    assert graft(*words).out == first.out
    gc.collect()  # what the command line has held
    assert len(files(home)) == 1

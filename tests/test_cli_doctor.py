"""`graft doctor`: what it says of a model, and when it exits with 1."""

import json

import pytest

from graft.request.stats import Stats
from graft.tuning import turns
from graft.tuning.turns import Speed, Turn, speed_of


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc abc", "xyz")))
    return str(path)


def run(graft, model_folder, data, *words):
    return graft("doctor", "--model", model_folder, "--prompts", data, "--max-new-tokens", "12", *words)


@pytest.mark.parametrize(("speed", "status", "verdict"), [(0.8, 1, "slower"), (1.4, 0, "faster"), (1.0, 0, "as fast")])
def test_it_describes_the_model_and_exits_with_1_if_graft_is_slower(
    graft, model_folder, data, monkeypatch, speed, status, verdict
):
    monkeypatch.setattr(turns, "speed_of", lambda turns: Speed(speed, 0.03, 2.0, 2.1, 1.5))
    result = run(graft, model_folder, data)
    assert result.status == status, result.err
    said = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert list(said) == [
        *("supported", "drafters", "weights", "steps", "kernels", "set-up", "accepted", "measured", "noise", "verdict")
    ]
    assert said["supported"] == "yes: LlamaForCausalLM on cpu" and said["weights"] == "float32"
    assert said["verdict"].startswith(verdict)
    assert f"{speed:.2f} times" in said["measured"]


def test_a_limit_counts_built_in_prompts_in_all(graft, model_folder):
    result = graft("doctor", "--model", model_folder, "--limit", "2", "--max-new-tokens", "4")
    assert "measuring 1/2: prompts" in result.err


def test_a_model_that_cannot_be_had_is_not_supported_and_says_why(graft, data):
    result = graft("doctor", "--model", "no-such-model", "--prompts", data)
    assert result.status == 1 and result.out.startswith("supported  no: ") and len(result.out.splitlines()) == 1


def test_without_a_quiet_machine_there_is_no_verdict(graft, model_folder, data, monkeypatch):
    monkeypatch.setattr(turns, "speed_of", lambda turns: Speed(0.5, 0.3, 2.0, 4.0, 1.5))
    result = run(graft, model_folder, data)
    assert result.status == 0, "it does not say that Graft is slower"
    assert "give or take 0.30: plain runs before and after Graft (2.0 s and 4.0 s) differ that much" in result.out
    assert result.out.splitlines()[-1].startswith("verdict    none: plain decoding took 2.0 s before Graft and 4.0 s")


def turn(before, ours, after, rounds=10, accepted=5):
    return Turn(before, ours, after, Stats(rounds=rounds, accepted=accepted))


def test_speed_is_that_of_all_prompts_and_differences_of_plain_runs_are_noise():
    speed = speed_of([turn(1.0, 0.5, 1.0), turn(3.0, 2.5, 3.4)])
    assert speed.ratio == pytest.approx(4.2 / 3.0) and speed.noise == pytest.approx(0.4 / 8.4)
    assert speed.mean_accepted == 1.5 and speed.doubt is None
    quiet = speed_of([turn(1.0, 1.0, 1.0)])
    assert (quiet.ratio, quiet.noise) == (1.0, 0.03)


def test_prompts_that_were_slow_before_and_others_after_do_not_cancel_out():
    speed = speed_of([turn(1.0, 1.0, 2.0), turn(2.0, 1.0, 1.0)])
    assert speed.noise == pytest.approx(2**0.5 / 6)
    assert speed.doubt is not None and "too busy to compare speeds" in speed.doubt


def test_a_speed_beyond_the_tokens_of_a_round_is_no_verdict():
    speed = speed_of([turn(1.99, 1.0, 1.99, rounds=100, accepted=3)])
    assert speed.doubt is not None and "1.99 times the speed cannot come from 1.03 tokens a round" in speed.doubt
    assert speed_of([turn(1.99, 1.0, 1.99, rounds=100, accepted=99)]).doubt is None

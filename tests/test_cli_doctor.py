"""`graft doctor`: what it says of a model, and when it exits with 1."""

import json
import sys

import pytest

from graft.cli.doctor import Turn, speed_of


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc abc", "xyz")))
    return str(path)


def run(graft, model_folder, data, *words):
    return graft("doctor", "--model", model_folder, "--data", data, "--max-new-tokens", "12", *words)


@pytest.mark.parametrize(("speed", "status", "verdict"), [(0.8, 1, "slower"), (1.4, 0, "faster"), (1.0, 0, "as fast")])
def test_it_describes_the_model_and_exits_with_1_if_graft_is_slower(
    graft, model_folder, data, monkeypatch, speed, status, verdict
):
    monkeypatch.setattr(sys.modules[Turn.__module__], "speed_of", lambda turns: (speed, 0.03))
    result = run(graft, model_folder, data)
    assert result.status == status, result.err
    said = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert list(said) == ["supported", "kernels", "drafters", "set-up", "expected", "measured", "verdict"]
    assert said["supported"].startswith("yes: LlamaForCausalLM on cpu") and said["verdict"].startswith(verdict)
    assert f"{speed:.2f} times" in said["measured"]


def test_a_model_that_cannot_be_had_is_not_supported_and_says_why(graft, data):
    result = graft("doctor", "--model", "no-such-model", "--data", data)
    assert result.status == 1 and result.out.startswith("supported  no: ") and len(result.out.splitlines()) == 1


def test_speed_is_that_of_all_prompts_and_differences_of_plain_runs_are_noise():
    turns = [Turn(1.0, 0.5, 1.0, None), Turn(3.0, 2.5, 3.4, None)]
    speed, noise = speed_of(turns)
    assert speed == pytest.approx(4.2 / 3.0) and noise == pytest.approx(0.4 / 8.4)
    assert speed_of([Turn(1.0, 1.0, 1.0, None)]) == (1.0, 0.03)

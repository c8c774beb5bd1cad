"""Graft inside vLLM 0.32 on a CPU, with the packaged model and head: `make test-engines`.

vLLM lives in an environment of its own, whose Python VLLM_PYTHON names. VLLM_DATA: a file of prompts, where the
packaged ones are not meant.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from graft.hub.home import model_folder

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("VLLM_PYTHON")
DATA = Path(os.environ.get("VLLM_DATA", ROOT / "src/graft/bench/prompts/edit.jsonl"))
MODEL = model_folder("smollm2-135m")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no Python with vLLM: make test-engines"),
    pytest.mark.skipif(not DATA.exists(), reason=f"VLLM_DATA: there is no {DATA}"),
    pytest.mark.skipif(not MODEL.exists(), reason="the default model is not there: graft pull"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Decodes the prompts by vLLM in a process of its own, and gives its report."""
    folder = tmp_path_factory.mktemp("vllm")
    head = folder / "head"
    head.mkdir()
    for name in ("config.json", "model.safetensors"):  # vLLM would take the profile beside them for weights
        shutil.copy(ROOT / "src/graft/heads/smollm2-135m" / name, head)

    def decode(name, method, **environment):
        out = folder / f"{name}.json"
        command = [PYTHON, ROOT / "bench/vllm_witness.py", "--engine", "vllm", "--method", method]
        command += ["--model", MODEL, "--head", head, "--data", DATA, "--out", out]
        command += ["--limit", "2", "--max-new-tokens", "48", "--drafts", "6", "--threads", "1"]
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(
            [*map(str, command)], env=os.environ | offline | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(out.read_text()), done.stdout + done.stderr

    return decode


@pytest.fixture(scope="module")
def plain(run):
    return run("plain", "off")[0]


def answers(report):
    return [[token for round in answer["rounds"] for token in round["new"]] for answer in report["answers"]]


@pytest.mark.parametrize(("method", "switch"), [("eagle3", "1"), ("retrieval", "0")])
def test_vllm_gives_the_same_text_with_graft_in_fewer_steps(run, plain, method, switch):
    report, log = run(method, method, GRAFT_VLLM=switch)
    assert ("Graft: chains of 6 tokens" in log) == (method == "eagle3"), "whether the plugin ran"
    assert answers(report) == answers(plain)
    assert report["counters"]["accepted"] > 0
    assert sum(len(x["rounds"]) for x in report["answers"]) < sum(len(x["rounds"]) for x in plain["answers"])


def test_a_misspelt_setting_stops_vllm_with_a_line_that_names_it():
    program = "from vllm.plugins import load_general_plugins; load_general_plugins()"
    wrong = {"GRAFT_VLLM": "1", "GRAFT_VLLM_PASES": "2"}
    done = subprocess.run([PYTHON, "-c", program], env=os.environ | wrong, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].endswith("did you mean 'GRAFT_VLLM_PASSES'?")


def test_the_guard_makes_sampling_on_a_cpu_right():
    program = [PYTHON, str(ROOT / "bench/vllm_cpu_sampling.py"), "--guarded"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

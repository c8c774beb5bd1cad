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


# Five requests, of which three are decoded at a time; the second is drawn at a temperature.
TOGETHER = """
import json, sys
from vllm import LLM, SamplingParams
model, head, data, out = sys.argv[1:]
drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 4} if head != "none" else None
llm = LLM(model=model, dtype="float32", speculative_config=drafts, max_model_len=1024, max_num_seqs=3,
          enable_prefix_caching=False, enforce_eager=True)
rows = [json.loads(line) for line in open(data)][:5]
prompts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
settings = [SamplingParams(temperature=0.8 if at == 1 else 0.0, seed=7, max_tokens=16 + 8 * at) for at in range(5)]
answers = llm.generate(prompts, settings)
json.dump([list(answer.outputs[0].token_ids) for answer in answers], open(out, "w"))
"""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """The packaged head without its profile, which vLLM would take for weights."""
    folder = tmp_path_factory.mktemp("head")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ROOT / "src/graft/heads/smollm2-135m" / name, folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, head):
    """Decodes the prompts by vLLM in a process of its own, and gives its report."""
    folder = tmp_path_factory.mktemp("vllm")

    def decode(name, method, **environment):
        out = folder / f"{name}.json"
        command = [PYTHON, ROOT / "bench/vllm_witness.py", "--engine", "vllm", "--method", method]
        command += ["--model", MODEL, "--head", head, "--data", DATA, "--out", out]
        command += ["--limit", "2", "--max-new-tokens", "48", "--drafts", "6", "--threads", "1"]
        return finished(command, out, **environment)

    return decode


def finished(command, out, **environment):
    """What a program wrote to `out`, and its log."""
    command, environment = [*map(str, command)], os.environ | OFFLINE | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout + done.stderr


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


def test_requests_that_come_and_go_keep_their_texts(head, tmp_path):
    plain, _ = finished([PYTHON, "-c", TOGETHER, MODEL, "none", DATA, tmp_path / "a"], tmp_path / "a")
    grafted, log = finished(
        [PYTHON, "-c", TOGETHER, MODEL, head, DATA, tmp_path / "b"], tmp_path / "b", GRAFT_VLLM="1", GRAFT_VLLM_LOG="5"
    )
    assert "draft passes" in log
    greedy = [0, 2, 3, 4]
    assert [grafted[at] for at in greedy] == [plain[at] for at in greedy]
    assert all(len(set(answer)) > 1 for answer in grafted)


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

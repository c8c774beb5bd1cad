"""The scripts in bench/ keep up with the package: whatever they import from it is there."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "bench"


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


def test_tree_building_finds_every_phase_that_it_times():
    command = [sys.executable, str(SCRIPTS / "tree_building.py"), "--texts", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "- candidates" in result.stdout


def test_host_time_plays_rounds_with_trees():
    pytest.importorskip("triton", reason="Triton is not installed, and without it there are no captured runners")
    code = "import host_time, tiny; host_time.model_folder = str; "
    code += "host_time.AutoTokenizer.from_pretrained = lambda _: tiny.byte_tokenizer(); host_time.main()"
    command = [sys.executable, "-c", code, "--rows", "2", "--rounds", "4", "--warm-up", "2", "--answer", "100"]
    paths = os.pathsep.join([str(SCRIPTS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert result.returncode == 0, result.stderr
    assert "   2 rows" in result.stdout and "5.0 passes" in result.stdout

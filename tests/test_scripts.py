"""The scripts in bench/ keep up with the package: whatever they import from it is there."""

from __future__ import annotations

import ast
import importlib
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

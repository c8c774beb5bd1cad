"""`make sanitize`: a fault in native code ends it, and its report is seen."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sanitize

SCRIPT = Path(sanitize.__file__)


def test_a_compiler_without_sanitizers_gets_one_line(monkeypatch, tmp_path, capfd):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\necho "${1#-print-file-name=}"\n')  # as a compiler answers that lacks the library
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert sanitize.main([]) == 2
    written = capfd.readouterr().err
    assert written.startswith(f"error: {compiler} has no address sanitizer") and written.count("\n") == 1


def test_no_compiler_gets_one_line(monkeypatch, capfd):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert sanitize.main([]) == 2
    written = capfd.readouterr().err
    assert written.startswith("error: there is no C compiler") and written.count("\n") == 1


FAULTS = {
    "heap-buffer-overflow": "graft_flatten_trees(1, 1, *[at] * 3, 1, *[at] * 5)",
    "null pointer": "graft_flatten_trees(1, 1, at, None, at, 1, *[at] * 5)",
}


@pytest.mark.slow  # imports torch under the sanitizer
@pytest.mark.parametrize("report", FAULTS)
def test_a_fault_is_reported_and_ends_the_run(tmp_path, report):
    if not shutil.which("gcc") or sanitize._library(["gcc"], "libasan.so") is None:
        pytest.skip("there is no GCC with sanitizers")
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(
        "from array import array\nfrom graft.tree.device import c_kernels\n\n\n"
        "def test_wrong():\n    short = array('q', [0])\n    at = short.buffer_info()[0]\n"
        f"    c_kernels._library().{FAULTS[report]}\n"
    )
    found = subprocess.run([sys.executable, str(SCRIPT), str(wrong)], capture_output=True, text=True, timeout=600)
    assert found.returncode != 0
    assert report in found.stderr and "trees.c:" in found.stderr

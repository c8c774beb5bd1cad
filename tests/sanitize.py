"""`make sanitize`: the tests that call native code, under the address and undefined behaviour sanitizers.

The libraries are built into a temporary copy of the package, which the tests import instead of the installed one. The
first fault ends the run; its report is printed last, and the exit status is then not 0. Arguments go to pytest.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Those whose code calls a library directly, and one decoder of each kind around it.
TESTS = [
    "test_round.py",
    "test_tree.py",
    "test_cpu_linear.py",
    "test_cpu_layers.py",
    "test_cpu_families.py",
    "test_cpu_head.py",
    "test_block_drafter.py",
    "test_device_tree.py",
    "test_planner.py",
    "test_policies.py",
    "test_learned.py",
    "test_sglang.py",
]
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1 -fPIC -shared"
EXACT = "-std=c99 -ffp-contract=off"
LIBRARIES = [
    ("tree/round.c", "tree/_round", EXACT),
    ("model/cpu_linear.c", "model/_cpu_linear", "-ffp-contract=fast"),
]
if platform.machine().lower() in ("x86_64", "amd64"):
    for name, flags in (("avx2", "-mavx2 -mfma"), ("avx512", "-mavx512f -mfma")):
        LIBRARIES.append(("model/cpu_linear.c", f"model/_cpu_linear_{name}", f"-ffp-contract=fast {flags}"))


def main(arguments: list[str]) -> int:
    compiler = shlex.split(os.environ.get("CC") or shutil.which("gcc") or "cc")
    if not shutil.which(compiler[0]):
        return _refuse("there is no C compiler: install GCC, or name one by CC=")
    runtime = [_library(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    if runtime[0] is None:
        return _refuse(f"{compiler[0]} has no address sanitizer (libasan.so): install GCC's, or name a GCC by CC=")
    with tempfile.TemporaryDirectory(prefix="graft-sanitize-") as folder:
        package, reports = Path(folder) / "graft", Path(folder) / "report"
        shutil.copytree(ROOT / "src/graft", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        for source, library, flags in LIBRARIES:
            output = ["-o", f"{package / library}.abi3.so", "-lm"]
            command = [*compiler, *SANITIZED.split(), *flags.split(), str(package / source), *output]
            if subprocess.run(command).returncode:
                return _refuse(f"{compiler[0]} could not build {source} with the sanitizers; see above")
        environment = _environment(folder, [path for path in runtime if path], reports)
        if not _imports_from(package, environment):
            return _refuse("the tests would import another copy of the package than the one with the sanitizers")
        tests = [str(ROOT / "tests" / name) for name in TESTS]
        # One process, whose files pytest leaves alone: UBSan writes to the terminal and ends the process.
        options = ["-n", "0", "--capture", "sys", "--timeout", "900"]
        failed = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *(arguments or tests)], cwd=ROOT, env=environment
        ).returncode
        found = sorted(Path(folder).glob("report*"))
        for report in found:
            print(report.read_text(), file=sys.stderr)
    if not failed and not found:
        print("no report from the sanitizers")
    return failed or bool(found)


def _refuse(words: str) -> int:
    print(f"error: {words}", file=sys.stderr)
    return 2


def _library(compiler: list[str], name: str) -> str | None:
    """The path of a library that comes with the compiler; a compiler without it answers with the bare name."""
    asked = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True)
    path = asked.stdout.strip()
    return path if os.path.isabs(path) and os.path.exists(path) else None


def _environment(folder: str, runtime: list[str], reports: Path) -> dict[str, str]:
    return {
        **os.environ,
        # The sanitizer must be loaded before all else. It looks for the C++ library's functions when it starts.
        "LD_PRELOAD": ":".join(runtime),
        "PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONMALLOC": "malloc",  # Python's own allocator would hide where an array ends
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Python frees little when it ends, so leaks say nothing. A test may keep what its own child processes write, so
        # ASan's reports go to files. UBSan has no such option here.
        "ASAN_OPTIONS": f"detect_leaks=0:malloc_context_size=3:log_path={reports}",
    }


def _imports_from(package: Path, environment: dict[str, str]) -> bool:
    command = [sys.executable, "-c", "import graft; print(graft.__file__)"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return found.stdout.strip() == str(package / "__init__.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

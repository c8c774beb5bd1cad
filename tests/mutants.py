"""Mutation check: plants the faults of `planted_faults.py`, one at a time, and runs the tests that should notice each.

The faults are planted in temporary copies of the tree, never in the tree itself. Not part of `make test`: it takes
minutes. `test_mutants.py` checks that every fault can still be planted.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planted_faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 240  # seconds of a fault's tests; a run that takes longer counts as noticed, since some faults loop for ever
_WRONG_TREE = 99  # exit status of a run that tested another tree than its copy
# What tests import and no fault changes: a server process imports it once, and every run of tests is forked from it.
PRELOADED = (
    *("pytest", "hypothesis", "numpy", "scipy.stats", "torch", "triton", "tokenizers", "transformers"),
    *("transformers.generation.utils", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama"),
    *("transformers.models.qwen3.modeling_qwen3", "fastapi", "fastapi.testclient", "uvicorn", "httpx", "openai"),
    *("llguidance.hf", "prometheus_client", "yaml", "typer", "rich.console"),
)
# By folder: the C library, the source that it is built of, which includes all others, and the flags of setup.py. Of
# libraries for several processors, that for all of them: tests of its faults run it too.
LIBRARIES = {
    "src/graft/tree/": ("src/graft/tree/_round.abi3.so", "src/graft/tree/round.c", ("-std=c99", "-ffp-contract=off")),
    "src/graft/model/": (
        *("src/graft/model/_cpu_linear.abi3.so", "src/graft/model/cpu_linear.c"),
        ("-ffp-contract=fast", "-fno-schedule-insns"),
    ),
}
HELP = """\
Plants faults in a temporary copy of the tree, one at a time, and runs for each only the tests that should notice.
A fault that no test notices survives: write the test that kills it. The faults are in tests/planted_faults.py.

examples:
  python tests/mutants.py                    all faults, one at a time
  python tests/mutants.py --jobs 2           two at a time
  python tests/mutants.py --only sampler     faults whose name or file holds this text; repeatable
  python tests/mutants.py --list             the faults and their tests; plants nothing

to add a fault:
  1. Add it to tests/planted_faults.py. Its old text must occur exactly once in its file.
  2. Name the quickest test that should fail.
  3. Run it with --only. If it survives, write the test that kills it.

exit status: 0 if every fault is noticed; 1 if some survive; 2 if a fault cannot be planted or its test cannot run.
"""


class CannotRun(Exception):
    """The check cannot be made."""


@dataclass(frozen=True)
class Result:
    fault: Fault
    verdict: str  # "killed", "survived", or why there is none
    seconds: float
    output: str  # of the tests

    @property
    def is_broken(self) -> bool:
        return self.verdict not in ("killed", "survived")


def problems(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """Why faults cannot be planted, a line each."""
    found = []
    for fault in faults:
        path = root / fault.file
        count = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        if count != 1:
            found.append(f"{fault.name}: its old text occurs {count} times in {fault.file}, not once: {fault.old!r}")
        if fault.old == fault.new:
            found.append(f"{fault.name}: it changes nothing")
        file, _, name = fault.test.partition("::")
        path = root / "tests" / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if f"def {name.partition('[')[0]}(" not in text:
            found.append(f"{fault.name}: there is no test {fault.test!r}")
    names = [fault.name for fault in faults]
    return found + [f"{name}: two faults have this name" for name in sorted({n for n in names if names.count(n) > 1})]


def copy_tree(target: Path) -> None:
    """Copies all files that are tracked or new, and the libraries that were built."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.so")]
    for name in (*filter(None, listed), *built):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """The copy with the fault in it, and its library built anew if the fault is in C."""
    changed = [copy / fault.file]
    library = next((each for folder, each in LIBRARIES.items() if fault.file.startswith(folder)), None)
    library = library if fault.file.endswith(".c") else None
    if library is not None:
        changed.append(copy / library[0])
    before = {path: path.read_bytes() for path in changed}
    text = before[changed[0]].decode()
    _write(changed[0], text.replace(fault.old, fault.new).encode())
    try:
        if library is not None:
            _build(copy, *library)
        yield
    finally:
        for path, content in before.items():
            _write(path, content)


def _write(path: Path, content: bytes) -> None:
    path.unlink()  # a process may still have the old file loaded
    path.write_bytes(content)
    if path.suffix == ".py":  # bytecode of a file of the same size and second would pass for that of this one
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _build(copy: Path, library: str, source: str, flags: Sequence[str]) -> None:
    (copy / library).unlink()
    kind = ("-O2", "-fPIC", "-shared", *flags)
    command = [*shlex.split(os.environ.get("CC", "cc")), *kind, source, "-o", library, "-lm"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True)


def run_tests(
    copy: Path, tests: Sequence[str], output: Path, *options: str, limit: float = LIMIT
) -> tuple[int | None, float]:
    """pytest's exit status, None if it took too long, and how many seconds it took."""
    start = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_pytest, args=(str(copy), list(tests), str(output), options))
    process.start()
    process.join(limit)
    is_late = process.is_alive()
    if is_late:
        process.kill()
        process.join()
    return None if is_late else process.exitcode, time.perf_counter() - start


def _pytest(copy: str, tests: list[str], output: str, more: Sequence[str]) -> None:
    """In a process of its own: runs the copy's tests on the copy's package."""
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = os.path.join(copy, "src")  # for commands that tests start
    own = {str(ROOT / "src"), str(ROOT / "tests")}
    sys.path[:] = [os.path.join(copy, "src"), *(path for path in sys.path if path not in own)]
    import pytest

    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-o", f"timeout={LIMIT // 2}"]
    status = int(pytest.main([*options, *more, *(f"tests/{test}" for test in tests)]))
    package = sys.modules.get("graft")
    if status in (0, 1) and not str(getattr(package, "__file__", "")).startswith(copy):
        status = _WRONG_TREE
    sys.stdout.flush()
    os._exit(status)  # whatever a fault has left running


def check(fault: Fault, copy: Path) -> Result:
    """Plants a fault in the copy, and says whether its tests notice."""
    output = copy / "output.txt"
    try:
        with planted(fault, copy):
            status, seconds = run_tests(copy, [fault.test], output, "-x")
    except subprocess.CalledProcessError as error:
        return Result(fault, "it does not compile", 0.0, error.stderr)
    except FileNotFoundError as error:
        return Result(fault, "a fault in C needs a C compiler, by the name of CC or cc", 0.0, str(error))
    verdicts = {0: "survived", 1: "killed", None: "killed"}
    return Result(fault, verdicts.get(status, f"its tests cannot run: status {status}"), seconds, output.read_text())


def chosen(only: Sequence[str]) -> list[Fault]:
    found = [fault for fault in FAULTS if not only or any(word in f"{fault.name} {fault.file}" for word in only)]
    if not found:
        raise CannotRun(f"no fault is called {' or '.join(only)}: --list shows them")
    return found


def show_list(faults: Sequence[Fault]) -> None:
    for fault in faults:
        print(f"{fault.name}\n    {fault.file}\n    {fault.test}")


def check_all(faults: Sequence[Fault], jobs: int) -> list[Result]:
    """The results of all faults, in their order; tells of each as it comes."""
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory(prefix="graft-mutants-") as folder:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copy = Path(folder).resolve() / str(number)
            copy_tree(copy)
            copies.put(copy)
        first = copies.get()
        tests = list(dict.fromkeys(fault.test for fault in faults))
        print(f"{len(tests)} tests without a fault", flush=True)
        status, seconds = run_tests(first, tests, first / "output.txt", "--durations=10", limit=LIMIT * len(tests))
        if status != 0:
            print((first / "output.txt").read_text()[-4000:])
            raise CannotRun("these tests must pass before faults are planted")
        print(f"they pass in {seconds:.0f} s", flush=True)
        copies.put(first)
        num_done = 0

        def with_a_copy(fault: Fault) -> Result:
            nonlocal num_done
            copy = copies.get()
            try:
                result = check(fault, copy)
            finally:
                copies.put(copy)
            num_done += 1
            print(f"[{num_done}/{len(faults)}] {result.verdict:8} {result.seconds:5.1f} s  {fault.name}", flush=True)
            return result

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(with_a_copy, faults))


def report(results: Sequence[Result]) -> int:
    """Prints the table and the survivors; the exit status."""
    width = max(len(result.fault.name) for result in results)
    print(f"\n{'fault':{width}}  {'result':8}  test")
    for result in results:
        print(f"{result.fault.name:{width}}  {result.verdict:8}  {result.fault.test}")
    broken = [result for result in results if result.is_broken]
    survivors = [result for result in results if result.verdict == "survived"]
    num_killed = len(results) - len(broken) - len(survivors)
    print(f"\n{len(results)} faults: {num_killed} killed, {len(survivors)} survived")
    for result in survivors:
        print(f"survived: {result.fault.name}: no test notices it")
    for result in broken:
        print(f"error: {result.fault.name}: {result.verdict}\n{result.output[-2000:]}")
    return 2 if broken else 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="faults with this in name or file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time (1)")
    parser.add_argument("--list", action="store_true", help="show the faults and plant nothing")
    given = parser.parse_args()
    if given.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {given.jobs}")
    faults = chosen(given.only)
    if given.list:
        show_list(faults)
        return 0
    for problem in (found := problems(FAULTS)):
        print(f"error: {problem}", file=sys.stderr)
    if found:
        return 2
    start = time.perf_counter()
    status = report(check_all(faults, given.jobs))
    print(f"{time.perf_counter() - start:.0f} s")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CannotRun as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

"""Memory and cores that this process may use: the machine's, or fewer if a Linux control group (cgroup) limits them.

A container has a control group of its own. The kernel shows its limits in files, in version 1 or 2 of its interface.
Also: whether other processes want the same cores, and what this one's threads do then.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # of the kernel's files
WAITING = "OMP_WAIT_POLICY"  # what OpenMP's threads do while they wait for each other
_WAITING_TOO = (WAITING, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_LOOKS, _PAUSE = 5, 0.003  # at the processes that run: one that is busy is there each time


def total_memory() -> int:
    """Bytes of memory that this process and others may use in all."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _memory_limits())])


def free_memory() -> int | None:
    """Bytes of memory that can still be allocated; None if unknown."""
    kilobytes = _fields(ROOT / "proc/meminfo").get("MemAvailable:")
    if kilobytes is None:
        return None
    return max(min([1024 * kilobytes, *(limit - used for limit, used in _memory_limits())]), 0)


def num_cores() -> int:
    """Cores that this process may run on, or fewer if its share of CPU time is smaller."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([own, *_core_limits()]), 1)


def are_cores_shared() -> bool:
    """Whether this process's threads, one a core, and those of others that run now are more than the machine's cores.

    False where the kernel does not say. To be asked before torch starts threads, which would count as others.
    """
    own = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(own) if own.isdigit() else num_cores()
    return _others_running() + threads > (os.cpu_count() or 1)


def let_waiting_threads_sleep() -> None:
    """If the cores are shared, let OpenMP's threads sleep while they wait, unless the user has decided.

    They would spin, and keep a core from the thread that they wait for: all decoding is then many times slower. On
    cores of one's own, sleeping is a little slower. OpenMP reads the variable when torch is imported.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING_TOO) and are_cores_shared():
        os.environ[WAITING] = "passive"


def _others_running() -> int:
    """Threads of other processes that run or wait for a core, in the median of a few looks; 0 if unknown."""
    counts = []
    for look in range(_LOOKS):
        time.sleep(_PAUSE if look else 0)
        counts.append(_fields(ROOT / "proc/stat").get("procs_running", 1) - 1)  # this thread is one of them
    return max(int(statistics.median(counts)), 0)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Each group's limit and its use, in bytes, without cached files, which the kernel drops when it needs memory."""
    for folder in _groups("memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is None:
            continue
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
        counts = _fields(folder / "memory.stat")
        idle = counts.get("total_inactive_file", counts.get("inactive_file", 0))  # version 1: with subgroups
        yield limit, used - idle


def _core_limits() -> Iterator[int]:
    """Each group's share of CPU time, in cores, rounded up."""
    for folder in _groups("cpu"):
        words = (_text(folder / "cpu.max") or "").split()  # version 2: quota and period
        words = words or [_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(words) == 2 and all(map(str.isdigit, words)) and int(words[1]):  # otherwise `max` or -1: no limit
            yield -(-int(words[0]) // int(words[1]))


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of the groups above it, whose limits apply too.

    In a container the path may be the host's, of which only the top is visible.
    """
    for line in (_text(ROOT / "proc/self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = ROOT / "sys/fs/cgroup" / (controller if controllers else "")  # version 2 lists no controllers
        own = Path(path.lstrip("/"))
        yield from (top / folder for folder in (own, *own.parents))


def _number(*files: Path) -> int | None:
    """The number in the first file that exists; None for a word such as `max`."""
    text = next((text for text in map(_text, files) if text is not None), "")
    return int(text) if text.isdigit() else None


def _fields(file: Path) -> dict[str, int]:
    """A file's numbers by name; each line has a name, a number and perhaps a unit."""
    lines = (line.split() for line in (_text(file) or "").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None

"""Memory and cores that a process may use, in folders that stand for the kernel's."""

import os

import pytest

from conftest import pytest_xdist_auto_num_workers
from graft import machine

MIB = 1 << 20
NO_LIMIT = {1: 9223372036854771712, 2: "max"}  # as each version writes it
MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
TOP = {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The root of a machine with 8 cores and 1,024 MiB, of which 900 are free."""
    facts = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1024 * MIB // 4096}
    monkeypatch.setattr(os, "sysconf", facts.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    write(tmp_path / "proc/meminfo", f"MemTotal: {1024 * 1024} kB\nMemAvailable: {900 * 1024} kB\n")
    return tmp_path


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def belong(kernel, version, path):
    """The process is in the control group of that path."""
    lines = f"12:cpu,cpuacct:{path}\n4:memory:{path}\n1:name=systemd:/\n0::/" if version == 1 else f"0::{path}"
    write(kernel / "proc/self/cgroup", lines)


def limit_memory(kernel, version, path, limit, used=0, idle=0):
    folder = kernel / TOP[version] / path
    limit_file, used_file = MEMORY_FILES[version]
    write(folder / limit_file, limit)
    write(folder / used_file, used)
    write(folder / "memory.stat", f"anon {used - idle}\n{'total_' if version == 1 else ''}inactive_file {idle}")


def limit_cores(kernel, version, path, quota):
    """Microseconds of every 100,000."""
    if version == 2:
        write(kernel / TOP[2] / path / "cpu.max", f"{'max' if quota is None else quota} 100000")
    else:
        write(kernel / "sys/fs/cgroup/cpu" / path / "cpu.cfs_quota_us", -1 if quota is None else quota)
        write(kernel / "sys/fs/cgroup/cpu" / path / "cpu.cfs_period_us", 100000)


def test_without_control_groups_memory_and_cores_are_the_machines(kernel):
    assert machine.total_memory() == 1024 * MIB
    assert machine.free_memory() == 900 * MIB
    assert machine.num_cores() == 8


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_no_more_than_the_control_group_allows(kernel, version):
    belong(kernel, version, "/user/job")
    limit_memory(kernel, version, "user/job", 256 * MIB, used=100 * MIB, idle=40 * MIB)
    assert machine.total_memory() == 256 * MIB
    assert machine.free_memory() == (256 - 100 + 40) * MIB, "files in memory that nobody uses make room"
    limit_memory(kernel, version, "user/job", 4096 * MIB)
    assert (machine.total_memory(), machine.free_memory()) == (1024 * MIB, 900 * MIB), "more than the machine has"


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_a_group_above_holds_as_well(kernel, version):
    belong(kernel, version, "/user/job")
    limit_memory(kernel, version, "user/job", NO_LIMIT[version])
    limit_memory(kernel, version, "user", 128 * MIB, used=130 * MIB)
    assert machine.total_memory() == 128 * MIB
    assert machine.free_memory() == 0
    limit_cores(kernel, version, "user/job", None)
    limit_cores(kernel, version, "user", 300_000)
    assert machine.num_cores() == 3


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_sees_only_its_own_group_finds_the_limit_at_the_top(kernel, version):
    belong(kernel, version, "/docker/0123abcd")
    limit_memory(kernel, version, "", 512 * MIB)
    limit_cores(kernel, version, "", 200_000)
    assert machine.total_memory() == 512 * MIB
    assert machine.num_cores() == 2


@pytest.mark.parametrize("version", [1, 2])
def test_cores_are_no_more_than_the_control_groups_share_of_time(kernel, version):
    belong(kernel, version, "/job")
    for quota, cores in ((150_000, 2), (20_000, 1), (None, 8), (6_400_000, 8)):
        limit_cores(kernel, version, "job", quota)
        assert machine.num_cores() == cores


def test_files_that_say_something_else_are_passed_over(kernel):
    write(kernel / "proc/self/cgroup", "nonsense\n0::/job")
    for name in ("memory.max", "memory.current", "memory.stat", "cpu.max"):
        write(kernel / "sys/fs/cgroup/job" / name, "what is this")
    write(kernel / "proc/meminfo", "what is this")
    assert (machine.total_memory(), machine.free_memory(), machine.num_cores()) == (1024 * MIB, None, 8)


@pytest.mark.parametrize(("memory", "cores", "workers"), [(64, 8, 8), (6, 8, 3), (64, 1, 1), (1, 8, 1)])
def test_pytest_takes_as_many_processes_as_there_are_cores_and_memory_for(kernel, monkeypatch, memory, cores, workers):
    belong(kernel, 2, "/job")
    limit_memory(kernel, 2, "job", memory << 30)
    limit_cores(kernel, 2, "job", cores * 100_000)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (128 << 30) // 4096}.__getitem__)
    assert pytest_xdist_auto_num_workers() == workers

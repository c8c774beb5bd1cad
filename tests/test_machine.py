"""Memory and cores that a process may use, in folders that stand for the kernel's."""

import os
import sys

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


@pytest.fixture
def fresh(kernel, monkeypatch):
    """A process on that machine that has not imported torch and has no settings of threads."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delitem(sys.modules, "torch")
    for name in (machine.WAITING, "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that the test's end restores it
        monkeypatch.delenv(name)
    return kernel


def run_others(kernel, number):
    write(kernel / "proc/stat", f"cpu 1 2 3\nprocs_running {1 + number}")


def test_cores_are_shared_when_more_threads_run_than_there_are_cores(fresh, monkeypatch):
    run_others(fresh, 0)
    assert not machine.are_cores_shared()
    run_others(fresh, 1)
    assert machine.are_cores_shared(), "this process would have a thread on each of the 8 cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not machine.are_cores_shared()
    run_others(fresh, 2)
    assert machine.are_cores_shared()


@pytest.mark.parametrize("text", [None, "nonsense", "procs_running 0"])
def test_a_kernel_that_does_not_say_what_runs_shares_no_cores(fresh, text):
    if text is not None:
        write(fresh / "proc/stat", text)
    assert not machine.are_cores_shared()


def test_the_command_lets_waiting_threads_sleep_where_cores_are_shared(fresh, graft):
    run_others(fresh, 0)
    graft("--version")
    assert machine.WAITING not in os.environ
    run_others(fresh, 2)
    graft("--version")
    assert os.environ[machine.WAITING] == "passive"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_says_of_waiting_threads_stays(fresh, monkeypatch, name):
    run_others(fresh, 2)
    monkeypatch.setenv(name, "1")
    machine.let_waiting_threads_sleep()
    assert os.environ[name] == "1" and (name == machine.WAITING or machine.WAITING not in os.environ)


def test_threads_that_torch_has_started_are_left_alone(fresh, monkeypatch):
    run_others(fresh, 2)
    monkeypatch.setitem(sys.modules, "torch", object())
    machine.let_waiting_threads_sleep()
    assert machine.WAITING not in os.environ

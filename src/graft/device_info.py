"""Devices: which one a name means, their own names, which are the keys of measured times, and their free memory."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from graft import machine
from graft.errors import GraftError
from graft.load_options import AUTO, check_device


def pick_device(name: str | torch.device) -> torch.device:
    """The device of that name, which can be used here; auto is a GPU if there is one."""
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(str(name))
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise GraftError(f"device {str(name)!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the CPU with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{cpu_name()}, {torch.get_num_threads()} threads"
    return device.type


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def free_memory(device: torch.device) -> int | None:
    """Free bytes on the device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine.free_memory()

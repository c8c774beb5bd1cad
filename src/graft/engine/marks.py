"""Time marks on the device (CUDA events), which measure its work without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class _Instant:
    """A time mark without a GPU."""

    def record(self) -> None:
        self.at = time.perf_counter()


def new_mark(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _Instant()


def seconds_between(first: Any, second: Any) -> float:
    """Seconds between two marks."""
    if isinstance(first, _Instant):
        return float(second.at - first.at)
    return float(first.elapsed_time(second)) / 1000

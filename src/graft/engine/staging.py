"""Staging: pinned memory through which numbers are sent to the device without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.model.captures import Event, pinned_zeros

_STAGED = 1 << 18  # numbers that may be on their way to the device, twice


class Staging:
    """Pinned memory that is used in turns, half by half.

    Memory pinned for each transfer could not be used again before the device has
    done all that was launched before, and new memory is slow to get meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._here = [pinned_zeros((_STAGED,), torch.int32, device) for _ in range(2)]
        self._left = [Event(device) for _ in range(2)]
        self._half = self._end = 0

    def send(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        """Numbers on the device."""
        flat = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
        numbers = flat.to(dtype).view(torch.int32)
        size = len(numbers)
        if size > _STAGED:
            return flat.to(dtype).to(self._device)
        if self._end + size > _STAGED:
            self._left[self._half].record()
            self._half, self._end = 1 - self._half, 0
            self._left[self._half].wait()
        here = self._here[self._half][self._end : self._end + size]
        here.copy_(numbers)
        self._end += -(-size // 4) * 4
        there = torch.empty(size, dtype=torch.int32, device=self._device)
        there.copy_(here, non_blocking=True)
        return there.view(dtype)

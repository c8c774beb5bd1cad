"""Staging: a pinned buffer for asynchronous copies of numbers to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.model.captures import Event, pinned_zeros

_STAGED = 1 << 18  # int32 numbers in each half of the buffer


class Staging:
    """Pinned memory in two halves, used in turns.

    Pinning memory for each copy would be slow: it cannot be reused until the device has done all earlier work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._here = [pinned_zeros((_STAGED,), torch.int32, device) for _ in range(2)]
        self._left = [Event(device) for _ in range(2)]
        self._half = self._end = 0

    def send(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        """Copy numbers to the device, without waiting unless both halves are full."""
        flat = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
        numbers = flat.to(dtype).view(torch.int32)
        size = len(numbers)
        if size > _STAGED:
            return torch.cat([self.send(part.numpy()) for part in numbers.split(_STAGED)]).view(dtype)
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

"""Pinned buffers for asynchronous copies of numbers to the device (`Staging`) and back (`Landing`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.model.captures import Event, pinned_zeros

_STAGED = 1 << 18  # int32 numbers in each half of the buffer
_TURNS = 3  # copies to the host that are kept


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


class Landing:
    """Pinned memory for copies to the host, in turns: a copy stays until three later ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._here: list[Tensor] = []

    def fetch(self, numbers: Tensor) -> np.ndarray:
        """Start the copy of int32 numbers. It is there once an event after this call has happened."""
        here = self._here.pop(0) if len(self._here) == _TURNS else None
        if here is None or len(here) < numbers.numel():
            here = pinned_zeros((numbers.numel(),), torch.int32, self._device)
        self._here.append(here)
        here = here[: numbers.numel()]
        here.copy_(numbers.flatten(), non_blocking=True)
        return here.numpy().reshape(numbers.shape)

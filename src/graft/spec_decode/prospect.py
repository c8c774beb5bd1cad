"""Prospect: what another draft pass should bring, learned from what passes have brought.

A pass is worth more the likelier its beams are reached, and less the more retrieval finds in its place; both are
in what it added, pass by pass, to the expected tokens of finished pools.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graft.model import TargetRunner
from graft.spec_decode.proposers.drafter import Drafter

_BLEND = 0.1  # weight of a new observation
_GAIN, _FADING = 0.6, 0.8  # before anything was observed
_HOPE = 1.003  # by which the prospect of passes grows, round by round, while none is tried


class Prospect:
    """Running means by pass: expected tokens it adds per chance that its beams are reached, and how reach fades."""

    def __init__(self, num_passes: int) -> None:
        self.seconds = 0.0  # of a pass; nothing until it is known
        self._gain = [_GAIN] * num_passes
        self._fading = [_FADING] * num_passes

    def measure(self, drafter: Drafter, target: TargetRunner) -> None:
        """Times a few passes on a scratch state; the best counts, as the first ones pay for set-up."""
        state = drafter.open(target.open(1, num_slots=8))
        self.seconds = math.inf
        for _ in range(3):
            state = state.keeping([0])  # what is drafted already is forgotten, and drafted again
            passes = drafter.levels(state, torch.zeros(1, dtype=torch.int64), stops=(0, 1))  # none is made ahead
            float(next(passes).probabilities[0, 0])  # waits for the device; the first runs no beams yet
            start = time.perf_counter()
            float(next(passes).probabilities[0, 0])
            self.seconds = min(self.seconds, time.perf_counter() - start)

    def gains(self, num_done: int, reach: float) -> list[float]:
        """Expected tokens that one, two, three ... more passes add, when the beams so far are reached with `reach`."""
        total, totals = 0.0, []
        for gain, fading in zip(self._gain[num_done:], self._fading[num_done:], strict=True):
            total += gain * reach
            totals.append(total)
            reach *= fading
        return totals

    def observe(self, reaches: Sequence[float], values: Sequence[float]) -> None:
        """Takes in a row's round: the reach before each pass, and the pool's worth with 0, 1, 2 ... of them."""
        for number, reach in enumerate(reaches[: len(values) - 1]):
            if reach > 1e-3:
                gain = (values[number + 1] - values[number]) / reach
                self._gain[number] += _BLEND * (gain - self._gain[number])
            if number and reaches[number - 1] > 1e-3:
                self._fading[number - 1] += _BLEND * (reach / reaches[number - 1] - self._fading[number - 1])

    def hope(self) -> None:
        """A round went by without a pass: what is not tried should not be given up for ever."""
        self._gain = [min(gain * _HOPE, 1.0) for gain in self._gain]

    def state(self) -> dict[str, Tensor]:
        return {"gain": torch.tensor(self._gain), "fading": torch.tensor(self._fading)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes on what `state` once gave, perhaps for trees of another depth; what is missing starts anew."""
        self._gain = _filled(state.get("gain"), len(self._gain), _GAIN)
        self._fading = _filled(state.get("fading"), len(self._fading), _FADING)


def _filled(values: Tensor | None, count: int, missing: float) -> list[float]:
    known = values.tolist() if values is not None else []
    return (known + [missing] * count)[:count]

"""Whether another draft pass pays: what passes have brought so far, against what they cost."""

from __future__ import annotations

import math
import time

import torch

from graft.draft.base import Drafter
from graft.learn.cost import Plan, VerifyCost

_BLEND = 0.05  # weight of a new observation


class Prospect:
    """Running means of a draft pass: its time, what it adds per chance of being reached, and how reach fades."""

    def __init__(self) -> None:
        self._seconds = 0.0  # a pass costs nothing until it is known what it costs
        self._gain = 0.8  # expected tokens that a pass adds, per probability that its beams are reached
        self._fading = 0.8  # of that probability, from one pass to the next

    def measure(self, drafter: Drafter) -> None:
        """Times a few passes on a scratch state; the best counts, as the first ones pay for set-up."""
        state = drafter.open(1, num_slots=8)
        self._seconds = math.inf
        for _ in range(3):
            passes = drafter.levels(state, torch.zeros(1, dtype=torch.int64, device=drafter.device))
            float(next(passes).probabilities[0, 0])  # waits for the device; the first runs no beams yet
            start = time.perf_counter()
            float(next(passes).probabilities[0, 0])
            self._seconds = min(self._seconds, time.perf_counter() - start)

    def observe(self, seconds: float, gain: float, reach_before: float, reach_after: float) -> None:
        """Takes in a pass: its time, the expected tokens it added to a row, and the reach before and after it."""
        self._seconds += _BLEND * (min(seconds, 2 * self._seconds) - self._seconds)
        self._gain += _BLEND * (gain / max(reach_before, 1e-3) - self._gain)
        self._fading += _BLEND * (reach_after / max(reach_before, 1e-3) - self._fading)

    def is_worth_a_pass(self, cost: VerifyCost, plan: Plan, num_rows: int, reach: float, num_left: int) -> bool:
        """Looks up to `num_left` passes ahead: the first alone may not pay where three together do."""
        gain, seconds = 0.0, 0.0
        for _ in range(num_left):
            gain += num_rows * self._gain * reach
            seconds += self._seconds
            reach *= self._fading
            for wider in cost.widened(plan, num_rows):
                tokens = min(wider.tokens + gain, num_rows * wider.width)
                if Plan(wider.width, tokens, wider.seconds + seconds).rate > plan.rate:
                    return True
        return False

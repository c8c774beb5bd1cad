"""The budget: how many nodes a round verifies, in all rows together, and whether another draft pass is worth its time.

All proposals have one currency, the probability that the target accepts them, and all time another, the tokens that it
usually brings. A round takes the number of nodes that brings most beyond what its time is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graft.spec_decode.cost_model import BLEND, CLIP, DOUBT, ByRows, StepCost, row_class

_SHARE = 0.01  # of the time that may be lost by looking for trees where none pays
_GAIN, _FADING = 0.6, 0.8  # of a pass, before any was observed
_FIRST_HOPED, _FIRST_CAME = 3.0, 1.5  # accepted tokens of chosen nodes, before any was chosen
_STEADY = round(1 / BLEND) - 1  # observations of a running mean after which each new one counts alike


class Plan(NamedTuple):
    """How many nodes a round verifies, and what is expected of it, all rows together."""

    num_nodes: int
    num_rows: int
    gain: float  # accepted tokens, beside one of the target's own a row
    seconds: float  # of the step

    def worth(self, rate: float) -> float:
        """Tokens beyond those that the same time brings at the usual `rate`, in tokens per second."""
        return self.num_rows + self.gain - rate * self.seconds


class PassGains:
    """What draft passes bring: expected tokens that each adds, less what it costs to verify them, per chance that its
    beams are reached, and how reach fades from pass to pass; running means."""

    def __init__(self, num_passes: int) -> None:
        self._gain = [_GAIN] * num_passes
        self._fading = [_FADING] * num_passes
        self._counts = [_STEADY] * num_passes  # observations so far, as far as they matter

    def for_others(self) -> PassGains:
        """What is to be expected for another number of rows, until the first observations."""
        there = PassGains(len(self._gain))
        there._gain, there._fading = list(self._gain), list(self._fading)
        there._counts = [0] * len(self._gain)
        return there

    def of_further(self, num_done: int, reach: float) -> list[float]:
        """Expected tokens that one, two, three ... more passes add, when the beams so far are reached with `reach`."""
        total, totals = 0.0, []
        for gain, fading in zip(self._gain[num_done:], self._fading[num_done:], strict=True):
            total += gain * reach
            totals.append(total)
            reach *= fading
        return totals

    def observe(self, reaches: Sequence[float], values: Sequence[float]) -> None:
        """Takes in a round: the reach before each pass, all rows that made it together, and what the candidates were
        worth with 0, 1, 2 ... of them."""
        for number, reach in enumerate(reaches[: len(values) - 1]):
            weight = 1 / (1 + self._counts[number])
            self._counts[number] = min(self._counts[number] + 1, _STEADY)
            if reach > 1e-3:
                gain = (values[number + 1] - values[number]) / reach
                self._gain[number] += weight * (gain - self._gain[number])
            if number and reaches[number - 1] > 1e-3:
                self._fading[number - 1] += weight * (reach / reaches[number - 1] - self._fading[number - 1])

    def doubt(self) -> None:
        """A look went by without a pass."""
        self._gain = [gain + DOUBT * max(_GAIN - gain, 0.0) for gain in self._gain]

    def state(self) -> dict[str, Tensor]:
        return {"gain": torch.tensor(self._gain), "fading": torch.tensor(self._fading)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes on what `state` once gave, perhaps for trees of another depth; what is missing starts anew."""
        self._gain = _filled(state.get("gain"), len(self._gain), _GAIN)
        self._fading = _filled(state.get("fading"), len(self._fading), _FADING)


def _filled(values: Tensor | None, count: int, missing: float) -> list[float]:
    known = values.tolist() if values is not None else []
    return (known + [missing] * count)[:count]


class Budget:
    """Chooses the number of nodes of each round, and says when there is to be a round without a look for any.

    A look takes time, and may find nothing that pays. What looks have usually cost of late beyond what they brought is
    booked as a debt, in plain rounds, of which every round pays off a small share; no look is made in debt. It is the
    usual look that counts, not each: rounds differ, and one that finds nothing says little of the next.
    """

    def __init__(self, step: StepCost, num_passes: int, pass_cost: float | None, fixed: int | None = None) -> None:
        """pass_cost: of a draft pass before any was timed, in plain steps; None: not known. fixed: nodes that every row
        gets in every round; then all that is to be decided is how far to draft."""
        self.step = step
        self.drafting = ByRows()  # seconds of a draft pass
        self.ahead = ByRows()  # seconds that a round waits for the passes that were made ahead of it, if any were
        self.num_ahead = 1  # how many these are, as of late
        self.host, self.plain_host = ByRows(), ByRows()  # of the host's part of a round, with a look and without
        self.max_passes = num_passes
        self.passes = PassGains(num_passes)  # of one row
        self.fixed, self.pass_cost = fixed, pass_cost
        self.restart()

    def restart(self, is_calibrated: bool = False) -> None:
        """Forgets how rounds have gone, but not what anything costs. is_calibrated: acceptance was learned before."""
        self._passes = {0: self.passes}  # by `row_class`
        self._tokens = self._time = 1.0  # of a row's round, in tokens and in plain rounds: running means
        # Accepted tokens of chosen nodes: fading sums. Retrieval alone, of which nothing is known, is doubted at first.
        is_doubted = not (is_calibrated or self.max_passes)
        self._hoped, self._came = (_FIRST_HOPED, _FIRST_CAME) if is_doubted else (1 / BLEND, 1 / BLEND)
        self._worth = 0.0  # of a look, in plain rounds beyond what it costs: a running mean
        self._balance, self._num_rows = 0.0, 1  # the account, and the rows of the last look

    # What things cost

    def plain_seconds(self, num_rows: int) -> float:
        """Expected seconds of a round that does not look."""
        if self.fixed is not None:
            return self.step.seconds(num_rows * (1 + self.fixed))
        return self.step.seconds(num_rows) + self.plain_host.at(num_rows)

    def pass_seconds(self, num_rows: int) -> float:
        """Expected seconds of a draft pass for so many rows."""
        if self.drafting.is_known:
            return self.drafting.at(num_rows)
        return (self.pass_cost or 0.0) * self.step.seconds(num_rows)

    def look_seconds(self, num_rows: int, num_passes: int, has_ahead: bool = False) -> float:
        """Expected seconds that a look adds to a round, beside the nodes that it verifies. has_ahead: with passes made
        ahead, beside the `num_passes` that it waits for from their start."""
        more = max(self.host.at(num_rows) - self.plain_host.at(num_rows), 0.0) if self.fixed is None else 0.0
        more += self.ahead.at(num_rows) if has_ahead else 0.0
        return more + num_passes * self.pass_seconds(num_rows)

    def rate(self, num_rows: int) -> float:
        """Tokens per second of the usual round of so many rows; at least those of plain decoding."""
        return num_rows * max(self._tokens / self._time, 1.0) / self.plain_seconds(num_rows)

    def passes_of(self, num_rows: int) -> PassGains:
        """What passes bring for so many rows: the more there are, the fewer beams and nodes each of them gets."""
        own = row_class(num_rows)
        if own not in self._passes:
            nearest = min(self._passes, key=lambda other: abs(other - own))
            self._passes[own] = self._passes[nearest].for_others()
        return self._passes[own]

    # What a round should do

    def may_look(self, num_rows: int) -> bool:
        """Whether a round may look for nodes: not in debt, and not before plain steps were timed."""
        if self.fixed is not None:
            return True
        return self.step.is_sure and (self._balance >= 0 or self._is_other(num_rows))

    def max_nodes(self, num_rows: int, num_others: int = 0) -> int:
        """The most nodes that a round may verify. num_others: tokens of the step that are no rows'."""
        if self.fixed is not None:
            return self.fixed * num_rows
        return max(self.step.sizes[-1] - num_rows - num_others, 0)

    def plans(self, gains: Sequence[float], num_rows: int, num_others: int = 0) -> list[Plan]:
        """What a round might verify: nothing, or as many nodes as fit a size of step. gains: expected accepted tokens
        of the 1, 2, 3 ... likeliest nodes."""
        most = len(gains)
        if self.fixed is not None:
            return [Plan(most, num_rows, gains[-1] if most else 0.0, self.plain_seconds(num_rows))]
        base = num_rows + num_others
        counts = dict.fromkeys(min(count, most) for count in self._counts(base) if most)
        return [Plan(0, num_rows, 0.0, self.step.seconds(base))] + [
            Plan(count, num_rows, self._truth * gains[count - 1], self.step.seconds(base + count)) for count in counts
        ]

    def _counts(self, base: int) -> list[int]:
        """Nodes that fill a step beside `base` other tokens, by its sizes. None is far larger than any that was timed:
        what it costs is a guess, and where steps are not padded the first tree is to be a small one: it may not pay."""
        most = int((CLIP * CLIP if self.step.is_padded else CLIP) * max(self.step.largest, base)) - base
        return list(dict.fromkeys(min(size - base, most) for size in self.step.sizes if size > base and most > 0))

    def prices(self, num_rows: int, num_others: int = 0) -> tuple[list[int], list[float]]:
        """Numbers of nodes that a round might verify, and what each costs in expected tokens."""
        if self.fixed is not None:
            return [self.max_nodes(num_rows)], [0.0]
        base = num_rows + num_others
        counts, plain, price = self._counts(base), self.step.seconds(base), self.rate(num_rows) / self._truth
        return counts, [price * (self.step.seconds(base + count) - plain) for count in counts]

    def best(self, plans: Sequence[Plan]) -> Plan:
        """The plan that brings most beyond what its time is worth."""
        rate = self.rate(plans[0].num_rows)
        return max(plans, key=lambda plan: plan.worth(rate))

    def num_passes(self, num_rows: int, num_done: int, reach: float) -> int:
        """The number of further draft passes that bring most beyond what their time is worth; 0 if none brings any.

        num_done: passes so far. reach: P(one of a row's beams is accepted), summed over the rows.
        """
        rate, own, best, most = self.rate(num_rows), self.pass_seconds(num_rows), 0, 0.0
        gains = self.passes_of(num_rows).of_further(num_done, reach)
        # Who drafts in every round has the first passes made ahead, where that is possible: all or none of them.
        ahead = self.num_ahead if num_done == 0 and self.ahead.is_known else 0
        start = self.ahead.at(num_rows) if ahead else 0.0
        for count, gain in enumerate(gains, start=1):
            worth = self._truth * gain - rate * (start + max(count - ahead, 0) * own)
            if worth > most and count >= min(ahead, len(gains)):
                best, most = count, worth
        return best

    # What came of it

    def doubt_passes(self, num_rows: int) -> None:
        """A look went by without a pass: what is not tried should not be given up for ever."""
        self.passes_of(num_rows).doubt()
        self.ahead.doubt(num_rows)

    def observe(
        self,
        num_rows: int,
        num_tokens: int,
        plan: Plan | None,
        num_passes: int,
        num_others: int = 0,
        has_ahead: bool = False,
    ) -> None:
        """Takes in a round. num_tokens: what it brought, all rows together; plan: what it verified, None if it did not
        look; num_passes, has_ahead: see `look_seconds`."""
        time, gain = 1.0, 0.0
        if plan is not None:
            plain, look, more = self.plain_seconds(num_rows), self.look_seconds(num_rows, num_passes, has_ahead), 0.0
            if self.fixed is None:  # as is known now, with the round itself
                base = num_rows + num_others
                more = self.step.seconds(base + plan.num_nodes) - self.step.seconds(base)
            time += (look + more) / plain
            # What the next look may bring: nodes that have turned out too dear will not be chosen again.
            found = max(plan.gain / num_rows - more / plain, 0.0) - look / plain
            self._judge(plan, num_tokens - num_rows)
            if self._is_other(num_rows):
                self._balance, self._worth = 0.0, 0.0
            self._num_rows = num_rows
            self._worth += BLEND * (found - self._worth)
            gain = self._worth
        self._balance = min(self._balance + _SHARE + gain, 1.0)  # what trees have saved is not kept for long
        self._tokens += BLEND * (num_tokens / num_rows - self._tokens)
        self._time += BLEND * (time - self._time)

    def _judge(self, plan: Plan, num_accepted: int) -> None:
        """Takes in how many of the chosen nodes were accepted."""
        if plan.num_nodes:
            hoped = plan.gain / self._truth
            self._hoped += hoped - BLEND * self._hoped
            self._came += num_accepted - BLEND * self._came
            self._came = max(self._came, self._hoped / (CLIP * CLIP))
        else:  # what is not tried should not be given up for ever
            self._came += DOUBT * max(self._hoped - self._came, 0.0)

    @property
    def _truth(self) -> float:
        """What part of the tokens that are expected comes true, as of late."""
        return self._came / self._hoped if self.fixed is None else 1.0

    def _is_other(self, num_rows: int) -> bool:
        """Whether there are so many more or fewer rows than at the last look that it tells little."""
        return not self._num_rows / CLIP < num_rows < self._num_rows * CLIP

    # Kept in a profile

    def costs(self) -> dict[str, Tensor]:
        return self.step.state() | {
            name: seconds.state() for name, seconds in self._by_rows.items() if seconds.is_known
        }

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        """Takes on what `costs` once gave; what is missing starts anew."""
        self.step.restore(costs)
        for name, seconds in self._by_rows.items():
            if name in costs:
                seconds.restore(costs[name])

    @property
    def _by_rows(self) -> dict[str, ByRows]:
        return {
            "pass_by_rows": self.drafting,
            "ahead_by_rows": self.ahead,
            "host_by_rows": self.host,
            "plain_host_by_rows": self.plain_host,
        }

"""Budget: how many nodes a round verifies, all rows together, and whether another draft pass pays.

One rule decides both: maximise accepted tokens - seconds x tokens per second. Accepted tokens are expected from
acceptance probabilities, the seconds of a step come from a table of step times (`cost_model.StepCost`), and tokens per
second is the recent throughput. So nodes and passes pay if they bring more tokens than their time usually does.

Device rounds use the same `Budget.least_reach` for passes. Their number of nodes is chosen in `controller`, from
running means, because the host does not see their candidates. Here it is chosen from this round's candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graft.model.noise import NOT_SAMPLED, NUM_KINDS
from graft.spec_decode.cost_model import CLIP, OPTIMISM, WEIGHT, SecondsByRows, StepCost, row_class

WASTE = 0.01  # share of the time that proposing in vain may cost
_GAIN = 0.6  # initial gain of a draft pass
_FIRST_EXPECTED, _FIRST_ACCEPTED = 3.0, 1.5  # initial expected and accepted tokens, which make a cautious ratio
_STEADY = round(1 / WEIGHT) - 1  # observations after which each new one has the constant weight WEIGHT


class TreeSize(NamedTuple):
    """A number of nodes that a round might verify, with its expected gain and time, all rows together."""

    num_nodes: int
    num_rows: int
    gain: float  # expected accepted tokens, without the target's own one per row
    seconds: float  # of the step

    def net_tokens(self, rate: float) -> float:
        """Tokens beyond those that the same time usually brings. rate: tokens per second."""
        return self.num_rows + self.gain - rate * self.seconds


class PassGains:
    """Running means of what each draft pass of a round brings.

    A pass's gain is the expected tokens that it adds, minus the cost of verifying them, divided by the probability that
    its beams are reached (`reach`).
    """

    def __init__(self, num_passes: int) -> None:
        self._gain = [_GAIN] * num_passes
        self._counts = [float(_STEADY)] * num_passes  # observations so far, at most _STEADY

    def as_prior(self) -> PassGains:
        """A copy for another number of rows, replaced by the first observations there."""
        copy = PassGains(len(self._gain))
        copy._gain, copy._counts = list(self._gain), [0.0] * len(self._gain)
        return copy

    def least_reach(self, num_done: int, cost: float) -> float:
        """The reach above which the next pass pays. cost: of the pass, in tokens."""
        gain = self._gain[num_done] if num_done < len(self._gain) else 0.0
        return cost / gain if gain > 0 else math.inf

    def observe(self, reaches: Sequence[float], values: Sequence[float]) -> None:
        """Learn from a round.

        reaches: before each pass, summed over the rows that made it. values: of the candidates with 0, 1, 2 ... passes.
        The gains of passes that were not made rise slowly, so that these are tried again some day. Their observations
        lose weight, so that a pass that still does not pay is soon given up again.
        """
        num_made = len(values) - 1
        for number in range(num_made, len(self._gain)):
            self._counts[number] *= 1 - WEIGHT
            self._gain[number] += OPTIMISM / (1 + self._counts[number]) * max(_GAIN - self._gain[number], 0.0)
        for number, reach in enumerate(reaches[:num_made]):
            weight = 1 / (1 + self._counts[number])
            self._counts[number] = min(self._counts[number] + 1, _STEADY)
            if reach > 1e-3:
                gain = (values[number + 1] - values[number]) / reach
                self._gain[number] += weight * (gain - self._gain[number])

    def state(self) -> dict[str, Tensor]:
        return {"gain": torch.tensor(self._gain)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `state`, which may be of trees of another depth; missing values start anew."""
        known = state["gain"].tolist() if "gain" in state else []
        count = len(self._gain)
        self._gain, self._counts = (known + [_GAIN] * count)[:count], [float(_STEADY)] * count


class PassGainsByKind:
    """Gains of draft passes by kind of row (`RowDraws.kind`) and number of rows.

    Drafts of sampled rows are accepted less often than those of greedy rows, and with more rows each gets fewer beams
    and nodes. A round with rows of several kinds counts for its commonest kind.
    """

    def __init__(self, num_passes: int) -> None:
        self._of_one_row = [PassGains(num_passes) for _ in range(NUM_KINDS)]
        self.restart()

    def restart(self) -> None:
        """Forget the gains of rounds with several rows."""
        self._known = {(kind, 0): gains for kind, gains in enumerate(self._of_one_row)}  # by kind and `row_class`

    def of(self, num_rows: int, kinds: Sequence[int] | None = None) -> PassGains:
        """The gains of a round. kinds: by row; None: all are greedy."""
        kind, rows = commonest(kinds), row_class(num_rows)
        if (kind, rows) not in self._known:
            nearest = min((other for its, other in self._known if its == kind), key=lambda other: abs(other - rows))
            self._known[kind, rows] = self._known[kind, nearest].as_prior()
        return self._known[kind, rows]

    def state(self) -> dict[str, Tensor]:
        """Gains of one row, [kinds, passes]."""
        states = [gains.state() for gains in self._of_one_row]
        return {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `state`. A state without kinds is of greedy rows, and serves as a guess for all kinds."""
        for kind, gains in enumerate(self._of_one_row):
            own = {name: value if value.dim() == 1 else value[kind] for name, value in state.items()}
            gains.restore(own)
        self.restart()


def commonest(kinds: Sequence[int] | None) -> int:
    """The kind of most rows; among equals, the lowest. None: all rows are greedy."""
    return max(range(NUM_KINDS), key=lambda kind: kinds.count(kind)) if kinds else NOT_SAMPLED


class Budget:
    """Chooses the number of nodes of each round, and which rounds propose nothing.

    Proposing (retrieval and drafting) takes time and may find nothing that pays. An account, in units of plain rounds,
    adds up the running mean of its profit and a small allowance for every round. While the account is in debt, rounds
    are plain. It takes the mean because one round that finds nothing says little about the next.
    """

    def __init__(
        self,
        step: StepCost,
        num_passes: int,
        pass_cost: float | None,
        fixed: int | None = None,
        fixed_passes: int | None = None,
    ) -> None:
        """pass_cost: initial cost of a draft pass, in plain steps; None: unknown.

        fixed: nodes of every row in every round. fixed_passes: draft passes of every round. None: what pays.
        """
        self.step = step
        self.drafting = SecondsByRows()  # of a draft pass
        self.host, self.plain_host = SecondsByRows(), SecondsByRows()  # of the host, in rounds with proposals and plain
        self.max_passes = num_passes
        self.passes = PassGainsByKind(num_passes)
        self.fixed, self.pass_cost = fixed, pass_cost
        self.fixed_passes = min(fixed_passes, num_passes) if fixed_passes is not None else None
        self.restart()

    def restart(self, is_calibrated: bool = False) -> None:
        """Forget how rounds went, but keep costs. is_calibrated: whether acceptance was learned before."""
        self.passes.restart()
        self._tokens = self._time = 1.0  # running means of a row's round: its tokens, and its time in plain rounds
        # Fading sums over verified nodes. Without a drafter and without calibration, estimates are too high at first.
        is_unknown = not (is_calibrated or self.max_passes)
        first = (_FIRST_EXPECTED, _FIRST_ACCEPTED) if is_unknown else (1 / WEIGHT, 1 / WEIGHT)
        self._expected, self._accepted = first
        self._profit = 0.0  # running mean of a proposal's gain minus its cost, in plain rounds
        self._balance = 0.0  # of the account, in plain rounds
        self._num_rows = 1  # of the last round that proposed

    # What things cost

    def plain_seconds(self, num_rows: int) -> float:
        """Expected seconds of a plain round; with a fixed budget, of any round."""
        if self.fixed is not None:
            return self.step.seconds(num_rows * (1 + self.fixed))
        return self.step.seconds(num_rows) + self.plain_host.at(num_rows)

    def pass_seconds(self, num_rows: int) -> float:
        """Expected seconds of a draft pass."""
        if self.drafting.is_known:
            return self.drafting.at(num_rows)
        return (self.pass_cost or 0.0) * self.step.seconds(num_rows)

    def proposal_seconds(self, num_rows: int, num_passes: int) -> float:
        """Expected seconds that proposing with `num_passes` draft passes adds to a round, without the verify."""
        more = max(self.host.at(num_rows) - self.plain_host.at(num_rows), 0.0) if self.fixed is None else 0.0
        return more + num_passes * self.pass_seconds(num_rows)

    def rate(self, num_rows: int) -> float:
        """Recent tokens per second; at least those of plain decoding."""
        return num_rows * max(self._tokens / self._time, 1.0) / self.plain_seconds(num_rows)

    # What a round should do

    def may_propose(self, num_rows: int) -> bool:
        """Whether a round may propose nodes: the account is not in debt, and plain steps were timed."""
        if self.fixed is not None:
            return True
        return self.step.is_sure and (self._balance >= 0 or self._is_other(num_rows))

    def max_nodes(self, num_rows: int, num_prefill_tokens: int = 0) -> int:
        """The most nodes that a round may verify beside the prompt tokens in its step."""
        if self.fixed is not None:
            return self.fixed * num_rows
        return max(self.step.sizes[-1] - num_rows - num_prefill_tokens, 0)

    def tree_sizes(self, gains: Sequence[float], num_rows: int, num_prefill_tokens: int = 0) -> list[TreeSize]:
        """Tree sizes to choose from: no nodes, or as many as fill a step size.

        gains: expected accepted tokens of the 1, 2, 3 ... likeliest nodes.
        """
        most = len(gains)
        if self.fixed is not None:
            return [TreeSize(most, num_rows, gains[-1] if most else 0.0, self.plain_seconds(num_rows))]
        base = num_rows + num_prefill_tokens
        counts = dict.fromkeys(min(count, most) for count in self._node_counts(base) if most)
        return [TreeSize(0, num_rows, 0.0, self.step.seconds(base))] + [
            TreeSize(count, num_rows, self.acceptance_ratio * gains[count - 1], self.step.seconds(base + count))
            for count in counts
        ]

    def _node_counts(self, base: int) -> list[int]:
        """Numbers of nodes that fill steps of each size beside `base` other tokens.

        Sizes far above the largest timed one are left out, because their times are guesses. Where steps are not padded,
        the limit is lower, because the first tree may not pay and so should be small.
        """
        most = int((CLIP * CLIP if self.step.is_padded else CLIP) * max(self.step.largest, base)) - base
        return list(dict.fromkeys(min(size - base, most) for size in self.step.sizes if size > base and most > 0))

    def node_costs(self, num_rows: int, num_prefill_tokens: int = 0) -> tuple[list[int], list[float]]:
        """Numbers of nodes that a round might verify, and the cost of each in expected tokens."""
        if self.fixed is not None:
            return [self.max_nodes(num_rows)], [0.0]
        base = num_rows + num_prefill_tokens
        counts, plain = self._node_counts(base), self.step.seconds(base)
        price = self.rate(num_rows) / self.acceptance_ratio
        return counts, [price * (self.step.seconds(base + count) - plain) for count in counts]

    def best(self, sizes: Sequence[TreeSize]) -> TreeSize:
        """The size with the most accepted tokens minus time x tokens per second."""
        rate = self.rate(sizes[0].num_rows)
        return max(sizes, key=lambda size: size.net_tokens(rate))

    def least_reach(
        self,
        num_rows: int,
        num_done: int,
        kinds: Sequence[int] | None = None,
        pass_tokens: float | None = None,
    ) -> float:
        """The threshold of the reach: P(one of a row's beams is accepted), summed over the rows.

        Another draft pass pays if the reach is above it. num_done: passes so far. kinds: by row; None: all are greedy.
        pass_tokens: tokens that could be decoded in the time of a pass; None: by the recent throughput.
        """
        if self.fixed_passes is not None:
            return -1.0 if num_done < self.fixed_passes else math.inf
        if pass_tokens is None:
            pass_tokens = self.rate(num_rows) * self.pass_seconds(num_rows)
        return self.passes.of(num_rows, kinds).least_reach(num_done, pass_tokens / self.acceptance_ratio)

    # Learning from rounds

    def observe(
        self,
        num_rows: int,
        num_tokens: int,
        size: TreeSize | None,
        num_passes: int,
        num_prefill_tokens: int = 0,
    ) -> None:
        """Learn from a round.

        num_tokens: new tokens, all rows together. size: None if the round was plain.
        """
        time, profit = 1.0, 0.0
        if size is not None:
            plain, verifying = self.plain_seconds(num_rows), 0.0
            proposing = self.proposal_seconds(num_rows, num_passes)
            if self.fixed is None:  # recompute, since this round's time is known now
                base = num_rows + num_prefill_tokens
                verifying = self.step.seconds(base + size.num_nodes) - self.step.seconds(base)
            time += (proposing + verifying) / plain
            # Verifying counts as no worse than zero: nodes that turned out too expensive will not be chosen again.
            own = max(size.gain / num_rows - verifying / plain, 0.0) - proposing / plain
            if size.num_nodes:
                self.observe_acceptance(size.gain / self.acceptance_ratio, num_tokens - num_rows)
            else:  # so that nodes are tried again some day
                self._accepted += OPTIMISM * max(self._expected - self._accepted, 0.0)
            if self._is_other(num_rows):
                self._balance, self._profit = 0.0, 0.0
            self._num_rows = num_rows
            self._profit += WEIGHT * (own - self._profit)
            profit = self._profit
        self._balance = min(self._balance + WASTE + profit, 1.0)  # capped, so that old profits do not pay for long
        self._tokens += WEIGHT * (num_tokens / num_rows - self._tokens)
        self._time += WEIGHT * (time - self._time)

    def observe_acceptance(self, expected: float, num_accepted: int) -> None:
        """Learn how many verified nodes were accepted, and how many were expected to be."""
        self._expected += expected - WEIGHT * self._expected
        self._accepted += num_accepted - WEIGHT * self._accepted
        self._accepted = max(self._accepted, self._expected / (CLIP * CLIP))

    @property
    def acceptance_ratio(self) -> float:
        """Recent accepted tokens / expected tokens."""
        return self._accepted / self._expected if self.fixed is None else 1.0

    def _is_other(self, num_rows: int) -> bool:
        """Whether the last proposal had such a different number of rows that its result says little."""
        return not self._num_rows / CLIP < num_rows < self._num_rows * CLIP

    # Kept in a profile

    def costs(self) -> dict[str, Tensor]:
        return self.step.state() | {
            name: seconds.state() for name, seconds in self._by_rows.items() if seconds.is_known
        }

    def restore_costs(self, costs: Mapping[str, Tensor]) -> None:
        """Restore from `costs`; missing values start anew."""
        self.step.restore(costs)
        for name, seconds in self._by_rows.items():
            if name in costs:
                seconds.restore(costs[name])

    @property
    def _by_rows(self) -> dict[str, SecondsByRows]:
        return {
            "pass_by_rows": self.drafting,
            "host_by_rows": self.host,
            "plain_host_by_rows": self.plain_host,
        }

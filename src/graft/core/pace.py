"""Pace: whether trees pay for as many rows as there are, by what whole rounds have brought.

A batch's tokens a second, with all that the host does, are set against those of its rounds in which nothing was looked
for, by the size of the batch. Where that is not clearly more, the rows are better off with plain decoding, which keeps
nothing up to date for trees. After long, when texts may be others, trees get another trial.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from graft.spec_decode.cost_model import size_of

_TRIAL = 48  # rounds that a size is tried for
_TREES = 8  # of them with trees at least; where there are fewer
_LONG_TRIAL = 200  # it takes as many rounds as this
_LEAST = 1.1  # times plain: prompts cost more where a drafter reads them too
_REST = 20_000  # plain rounds until the next trial
_BLEND = 0.005  # weight of a round at least: what is decided stays for long, so a hard stretch must not decide it
_PLAIN_BLEND = 0.05  # likewise of a plain round, of which there are far fewer
_HICCUP = 3.0  # times the mean: the most that a round counts for


@dataclass
class _Mean:
    """A running mean: of all that was seen at first, then of the latest."""

    blend: float = _BLEND
    value: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, self.blend)


@dataclass
class _Tally:
    """Of one size, in its trial and since."""

    tokens: _Mean = field(default_factory=_Mean)  # of a row's round
    seconds: _Mean = field(default_factory=_Mean)  # of a round
    plain_seconds: _Mean = field(default_factory=lambda: _Mean(_PLAIN_BLEND))  # of a round without a look
    num_rested: int = 0

    @property
    def is_tried(self) -> bool:
        """Whether enough was seen to judge by."""
        num_rounds, num_plain = self.seconds.count, self.plain_seconds.count
        return num_plain > 0 and num_rounds >= (_TRIAL if num_rounds - num_plain >= _TREES else _LONG_TRIAL)


class Pace:
    """Of batches of two rows and more; a row alone never rests."""

    def __init__(self) -> None:
        self._tallies = defaultdict[int, _Tally](_Tally)

    def pays(self, num_rows: int) -> bool:
        """Whether so many rows should go on with trees; so they do while it is not known."""
        tally = self._tallies[size_of(num_rows)]
        if num_rows <= 1 or not tally.is_tried:
            return True
        return tally.tokens.value * tally.plain_seconds.value / tally.seconds.value >= _LEAST

    def observe(self, num_rows: int, seconds: float, num_tokens: int, is_plain: bool) -> None:
        """Takes in a round. num_tokens: of all rows together; is_plain: whether nothing was looked for in it."""
        tally = self._tallies[size_of(num_rows)]
        tally.tokens.observe(num_tokens / num_rows)
        for mean in (tally.seconds, tally.plain_seconds) if is_plain else (tally.seconds,):
            mean.observe(min(seconds, _HICCUP * mean.value) if mean.count else seconds)

    def rested(self, num_rows: int) -> None:
        """A round has gone by of rows that were left to plain decoding."""
        tally = self._tallies[size_of(num_rows)]
        tally.num_rested += 1
        if tally.num_rested >= _REST:
            self.restart(num_rows)

    def restart(self, num_rows: int) -> None:
        """Forgets what is known of so many rows: they get another trial."""
        self._tallies.pop(size_of(num_rows), None)

"""Credit: what looking for a better round may cost, however often nothing comes of it.

A look takes time, and what it finds may bring less than plain decoding would have brought meanwhile. Both are paid from
an account, in plain rounds, one for every size of the batch: each round pays in a small share, what trees save comes
on top, and no look is made in debt. So decoding is never much slower than plain, from the first round on. What a plain
round takes must be known for that: a batch starts with one, and makes another now and then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

from graft.spec_decode.cost_model import size_of

_SHARE = 0.01  # of the time that may be lost
_START = 0.5  # rounds that a size may lose at first, if all goes well
_MOST = 2.0  # rounds that are kept of what trees have saved: a hard text after an easy one is noticed soon
_BLEND = 0.05  # weight of a look in what is usual
_HOPE, _NUM_PASSES = 0.6, 2.0  # before any look: accepted tokens for each doubling of the width, and draft passes
_PRIOR = 10.0  # tokens that are taken to have come true as expected before any was tried


class _Due(Enum):
    """When the next plain round is to be."""

    NO, NEXT, NOW = range(3)


class Credit:
    """Accounts by the size of the batch, in plain rounds of it."""

    def __init__(self) -> None:
        self._balances: dict[int, float] = {}
        self._unproven: dict[int, float] = {}  # a small share of the time since the last plain round
        self._due: dict[int, _Due] = {}

    def knows(self, num_rows: int) -> bool:
        return size_of(num_rows) in self._balances

    def open(self, num_rows: int, prospect: float = _START) -> None:
        """Starts the account of a size. prospect: the rounds that one look should bring there, or cost if negative."""
        size = size_of(num_rows)
        self._balances[size], self._unproven[size] = min(prospect, _START), 0.0
        self._due[size] = _Due.NOW if num_rows > 1 else _Due.NO  # what a row alone takes was measured

    def close(self, num_rows: int) -> None:
        """Forgives the debts of a size, to be opened anew."""
        self._balances.pop(size_of(num_rows), None)

    def allows(self, num_rows: int) -> bool:
        """Whether there may be a look."""
        size = size_of(num_rows)
        return self._balances[size] >= 0 and self._due[size] is not _Due.NOW

    def is_plain_next(self, num_rows: int) -> bool:
        """Whether the round after this one is to be plain, whatever comes of this one: nothing is to be done for it
        beforehand, or it takes longer than a plain one."""
        return self._due.get(size_of(num_rows)) is _Due.NEXT

    def book(self, num_rows: int, gain: float, is_plain: bool) -> None:
        """A round has gone by. gain: the plain rounds that it has saved, or lost if negative; is_plain: whether its
        verify was that of a plain round, look or not."""
        size = size_of(num_rows)
        self._balances[size] = min(self._balances[size] + _SHARE + gain, _MOST)
        # A plain round costs what a tree would have saved: that too is to be a small share.
        self._unproven[size] = 0.0 if is_plain else self._unproven[size] + _SHARE * (1 + gain)
        if is_plain:
            self._due[size] = _Due.NO
        elif self._due[size] is _Due.NEXT:
            self._due[size] = _Due.NOW
        elif num_rows > 1 and self._unproven[size] >= gain:
            self._due[size] = _Due.NEXT


class Hopes:
    """What looks expect a row to accept, by width, and how much of that comes true: running means of all sizes."""

    def __init__(self) -> None:
        self.num_passes = _NUM_PASSES  # of a look
        self._expected: dict[int, float] = {}
        self._hoped = self._came = _PRIOR

    def accepted(self, width: int) -> float:
        """Tokens that a row may hope to accept of a tree so wide, the root included in its width."""
        return self.true_of(self._expected.get(width, _HOPE * math.log2(width)))

    def true_of(self, expected: float) -> float:
        """What so many expected tokens have turned out to be."""
        return expected * self._came / self._hoped

    def observe(self, expected: Mapping[int, float], num_passes: int) -> None:
        """Takes in a look: by width what was expected of a row, and how many draft passes were made."""
        self.num_passes += _BLEND * (num_passes - self.num_passes)
        for width, new in expected.items():
            old = self._expected.get(width, new)
            self._expected[width] = old + _BLEND * (new - old)

    def judge(self, expected: float, accepted: float) -> None:
        """Takes in what became of a round's trees, all rows together."""
        self._hoped += expected - _BLEND * self._hoped
        self._came += accepted - _BLEND * self._came

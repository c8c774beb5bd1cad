"""The drafter contract: a tree drafted pass by pass, each of one level or many; and the beam search of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from graft.model import KVCache, Row, TargetRunner, VerifyOutput
from graft.settings import Settings, require
from graft.tree.candidates import Level


@dataclass(frozen=True)
class TreeSettings(Settings):
    """The shape of the drafted tree, by the names EAGLE's users know."""

    depth: int = 8  # draft passes behind the first
    topk: int = 10  # nodes expanded at each depth, and children of each
    total_token: int = 60  # nodes of the whole tree that are verified

    def __post_init__(self) -> None:
        for name in ("depth", "topk", "total_token"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value >= 1, f"{name} must be a whole number of at least 1, not {value!r}"
            )


class DraftState(Protocol):
    """A drafter's state for the rows of one batch."""

    @property
    def lengths(self) -> list[int]:
        """By row, the tokens whose pages hold all that they are to: the target's, and those of a drafter in them."""
        ...

    def keeping(self, rows: Sequence[int]) -> Self:
        """The state of these rows alone, in this order."""
        ...

    def copy_row(self, source: int, target: int, row: Row) -> None:
        """Makes row `target` a copy of row `source`, with the pages of `row`, which go on from those of the source."""
        ...

    def joining(self, other: Any) -> Self:
        """A state of its own rows and, behind them, those of another of the same drafter; both stay as they were."""
        ...


class Drafter(Protocol):
    """A draft model that proposes trees pass by pass. `state` is what its own `open` gave."""

    hidden_layers: tuple[int, ...]  # target layers whose inputs (hidden states) it reads; none if tokens are enough

    @property
    def max_passes(self) -> int:
        """Draft passes of a round at most."""
        ...

    @property
    def max_depth(self) -> int:
        """Levels that all passes bring together."""
        ...

    @property
    def num_beams(self) -> int:
        """Nodes of a pass's last level, the likeliest, that the next pass expands."""
        ...

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree that are worth verifying, where nobody gives a budget."""
        ...

    @property
    def num_slots(self) -> int:
        """Slots that a round's drafting may write behind a row's text in its own KV store."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in its own KV store."""
        ...

    @property
    def num_setups(self) -> int:
        """One-time set-ups done so far; see `num_setups_of`."""
        ...

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> DraftState:
        """The state of a cache's rows, whose pages it may share: its own keys and values are in a store of its own.

        texts: by row, what it begins with; needed where others have read a part of it, so that nobody calls `read`.
        """
        ...

    def warm_up(self, target: TargetRunner, max_rows: int, keep: int | None) -> None:
        """Does, before there is anything to draft, what rounds of up to so many rows would else wait for.

        keep: what will be asked of `passes`.
        """
        ...

    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        """Prefills a chunk of one row's prompt. following: the tokens after each of its tokens."""
        ...

    def passes(
        self, state: Any, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Sequence[Level]]:
        """Levels of the trees below `roots` [B], on the host; each `next` is one draft pass and its levels, each one
        depth further down.

        keep: only so many nodes of each level, the likeliest first (at least the beams, which then are no more than
        that); all of them in any order if None. 1 is a chain: each node the likeliest child of the one before.
        stops: the passes after which the caller may stop, so that the device can run on to the next of them by itself;
        any if None.
        """
        ...

    def num_prefetched(self, state: Any) -> int:
        """Passes of the coming round that the device is making already: not to use them would save nothing."""
        ...

    def draft_ahead(self, state: Any, verified: VerifyOutput, chosen: Tensor) -> None:
        """Begins the next round's drafting on the device, before the host knows what this round accepted.

        The device has the verified step and the tokens `chosen` [T] after each node; `learn` follows.
        """
        ...

    def gather_ahead(self, state: Any, verified: VerifyOutput) -> None:
        """Where nothing is to be drafted ahead: does on the device what `learn` need then no longer wait for."""
        ...

    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Extends the state by a finished round: the accepted nodes and the new tokens of each row."""
        ...


class LevelByLevel(ABC):
    """What drafters share whose passes each bring one level, the children of the beams of the level before."""

    settings: TreeSettings

    @property
    def max_passes(self) -> int:
        return self.settings.depth + 1

    @property
    def max_depth(self) -> int:
        return self.settings.depth + 1

    @property
    def num_beams(self) -> int:
        return self.settings.topk

    @property
    def num_nodes(self) -> int:
        return self.settings.total_token

    @property
    def num_slots(self) -> int:
        return self.settings.depth * self.settings.topk

    @abstractmethod
    def levels(
        self, state: Any, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Level]:
        """The levels of `Drafter.passes`."""

    def passes(
        self, state: Any, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Sequence[Level]]:
        return ((level,) for level in self.levels(state, roots, keep, stops))


class BeamSearch:
    """The levels of trees whose likeliest nodes at each depth, the beams, are expanded by the next pass."""

    def __init__(self, num_rows: int, topk: int, keep: int | None, device: torch.device) -> None:
        """topk: beams, and children of each. keep: see `Drafter.passes`."""
        self._topk, self._keep = topk, keep
        self._parents = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)  # [B, F] the beams' node numbers
        self._path = torch.ones(num_rows, 1, device=device)  # [B, F] their path probabilities
        self._width = 1  # nodes of the trees so far

    def level(self, tokens: Tensor, probabilities: Tensor) -> Level:
        """The next level: of the beams' likeliest tokens [B, F, topk] and their q, all or the best `keep`."""
        level = Level(
            tokens=tokens.flatten(1),
            parents=self._parents.repeat_interleave(self._topk, dim=1),
            probabilities=probabilities.flatten(1),
            path_probabilities=(self._path[:, :, None] * probabilities).flatten(1),
        )
        count = max(self._topk, min(self._keep or 0, level.tokens.shape[1]))
        self._all, self._best = level, level.path_probabilities.topk(count, dim=1)
        self._kept = level.at(self._best.indices) if self._keep is not None else level
        return self._kept

    def expand(self) -> tuple[Tensor, Tensor]:
        """The best of the level's nodes become the beams: their tokens [B, topk], and which beam each came from."""
        self._path, best = (part[:, : self._topk] for part in self._best)
        order = torch.arange(self._topk, device=best.device).expand_as(best)  # kept nodes stand the best first
        self._parents = self._width + (best if self._keep is None else order)
        self._width += self._kept.tokens.shape[1]
        return self._all.tokens.gather(1, best), best // self._topk


def num_setups_of(target: TargetRunner, drafter: Drafter | None) -> int:
    """One-time set-ups, such as graph captures, that a target and its drafter have done so far.

    The time of a round with one tells nothing about other rounds.
    """
    return target.num_setups + (drafter.num_setups if drafter is not None else 0)

"""The drafter contract: levels of a tree, one forward each, and features refreshed from what the target judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor

from graft.model import TargetRunner, TreeCache, VerifyOutput
from graft.settings import Settings, require
from graft.spec_decode.candidates import Level


@dataclass(frozen=True)
class TreeSettings(Settings):
    """The drafted tree, by the names EAGLE's users know."""

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
    """What a drafter keeps for the rows of one batch."""

    cache: TreeCache  # an entry a token; a row's may be behind the target's

    def keeping(self, rows: Sequence[int]) -> Self:
        """These rows alone, in this order; see `TreeCache.keeping`."""
        ...

    def copy_row(self, source: int, target: int) -> None:
        """Makes one row what another is."""
        ...

    def reserving(self, num_rows: int) -> Self:
        """With room for so many rows that may join."""
        ...

    def joining(self, other: Any) -> Self:
        """With the rows of another state of the same drafter behind its own, which itself stays as it was."""
        ...


class Drafter(Protocol):
    """Proposes trees level by level. `state` is what its own `open` gave."""

    hidden_layers: tuple[int, ...]  # target layers whose inputs it reads
    settings: TreeSettings

    @property
    def num_setups(self) -> int:
        """As a target's; see `num_setups_of`."""
        ...

    def open(self, num_rows: int, num_slots: int) -> DraftState: ...

    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        """Takes in a judged chunk of one row's prompt and the tokens that follow each of its tokens."""
        ...

    def levels(
        self, state: Any, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Level]:
        """Each `next` is one draft pass and gives the nodes one depth further down, on the host; stop when enough.

        keep: only so many of each level, the likeliest first; all of them in any order if None.
        stops: the passes after which the caller may stop, so that a device can go on to the next of them without being
        asked; any if None.
        """
        ...

    def num_prefetched(self, state: Any) -> int:
        """Levels of the coming round that a device is at work on: to do without them would save nothing."""
        ...

    def draft_ahead(self, state: Any, verified: VerifyOutput, chosen: Tensor) -> None:
        """Starts on the next round on the device, where a step is judged and tokens `chosen` [B, N] after each node.

        The host knows neither yet; `learn` follows.
        """
        ...

    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Takes in a finished round: the accepted nodes and the new tokens of each row."""
        ...


def num_setups_of(target: TargetRunner, drafter: Drafter | None) -> int:
    """Things that a target and its drafter have done that are done once, such as captures: a round that did one is no
    measure of others."""
    return target.num_setups + (drafter.num_setups if drafter is not None else 0)

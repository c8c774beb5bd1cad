"""The drafter contract: what a draft model tells its rounds, and what they ask of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from graft.model.captures import Captures
from graft.model.kv_cache import PAGE, PagePool, Row
from graft.model.noise import ComingDraws
from graft.settings import Settings, check_size
from graft.tree.device.round import MAX_TOKENS, AddLevel

if TYPE_CHECKING:
    from graft.model import KVCache, TargetRunner, VerifyOutput

KEPT_OF_A_LEVEL = 24  # the likeliest drafted nodes of a depth, which become candidates; others are never verified


@dataclass(frozen=True)
class TreeSettings(Settings):
    """The shape of the drafted tree, in EAGLE's names."""

    depth: int = 8  # draft passes after the first
    topk: int = 10  # nodes expanded at each depth, and children of each of them
    total_token: int = 60  # nodes to verify
    eight_bits: bool = True  # EAGLE-3 heads: weights in 8 bits, on GPUs where that is faster

    def __post_init__(self) -> None:
        for name in ("depth", "topk", "total_token"):
            check_size(name, getattr(self, name))


R = TypeVar("R")


@dataclass(eq=False)
class DraftState(Generic[R]):
    """A drafter's state for the rows of one batch. Each row has a `length`: see `lengths`."""

    drafter: Any
    pool: PagePool  # of its keys and values
    rows: list[R]

    @property
    def lengths(self) -> list[int]:
        """By row, how many tokens have the keys and values of both the target and the drafter in the pages."""
        return [row.length for row in self.rows]  # type: ignore[attr-defined]

    def select(self, rows: Sequence[int]) -> Self:
        """The state of these rows, in this order."""
        return replace(self, rows=[self.rows[row] for row in rows])

    def concat(self, other: Self) -> Self:
        """These rows, then those of another state of the same drafter."""
        return replace(self, rows=self.rows + other.rows)

    def copy_row(self, source: int, target: int, row: Row) -> None:
        """Copy row `source` to row `target`, whose pages are those of `row` and continue those of the source."""
        self.rows[target] = self.drafter.copied(self, self.rows[source], row)


@dataclass(frozen=True)
class Passes:
    """The draft passes of a round, of R rows including padding."""

    pool: PagePool
    num_passes: int  # the most passes
    table_rows: Tensor  # [R] rows of the block tables
    text_lengths: Tensor  # by row of the block tables: tokens of the text, with the root
    roots: Tensor  # [>= R] the last tokens of the texts
    context: int  # no text is longer; sizes launches
    made: Tensor  # [> passes] int32: whether each pass is made
    draws: ComingDraws | tuple[Tensor, Tensor] | None  # of coming draws, if drafts use them: or seeds and temperatures
    keep: int = KEPT_OF_A_LEVEL  # nodes of each level, likeliest first. 1: a chain of likeliest tokens
    state: Any = None  # the rows' draft state; None in a graph
    max_depth: int = MAX_TOKENS  # of nodes

    @classmethod
    def scratch(cls, pool: PagePool, state: Any, rows: Sequence[Row], num_passes: int) -> Self:
        """All passes below roots that are token 0, of rows without text."""
        table_rows = torch.tensor([row.block_table_row for row in rows], dtype=torch.int32, device=pool.device)
        zeros = torch.zeros(pool.num_table_rows, dtype=torch.int32, device=pool.device)
        made = torch.ones(num_passes + 1, dtype=torch.int32, device=pool.device)
        return cls(pool, num_passes, table_rows, zeros, zeros, PAGE, made, None, state=state)

    @property
    def num_rows(self) -> int:
        return len(self.table_rows)

    @property
    def lengths(self) -> Tensor:
        """[R] entries of each row in the KV store of a head."""
        return (self.text_lengths.index_select(0, self.table_rows) - 1).clamp(min=0)

    def flat(self, part: Tensor) -> Tensor:
        """Values [B, n] of the rows without padding as `AddLevel` takes them: [R * n], zero in rows of padding."""
        if len(part) < self.num_rows:
            part = torch.cat([part, part.new_zeros(self.num_rows - len(part), part.shape[1])])
        return part.flatten().to(self.made.device)


class Drafter(Protocol):
    """A draft model that proposes trees pass by pass. `state` arguments come from its own `open`."""

    hidden_layers: tuple[int, ...]  # target layers whose inputs (hidden states) it reads; empty if it reads tokens only

    @property
    def is_captured(self) -> bool:
        """Whether its passes and new entries may be part of a device round's graphs: see `HeadDrafter`."""

    @property
    def max_passes(self) -> int:
        """The most draft passes of a round."""

    @property
    def max_depth(self) -> int:
        """The most levels of a tree, over all passes."""

    @property
    def num_nodes(self) -> int:
        """Nodes to verify where no budget is given."""

    @property
    def num_slots(self) -> int:
        """KV slots that drafting may write after a row's text in one round."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the drafter's own KV store."""

    @property
    def num_setups(self) -> int:
        """One-time set-ups so far; see `num_setups_of`."""

    def knows(self, draws: ComingDraws) -> bool:
        """Whether its passes can use these draws."""

    def level_sizes(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> tuple[int, ...]:
        """By pass: the most nodes that it gives each row, if `keep` of each level are kept."""

    def beams_of(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> int:
        """How many of a pass's likeliest last nodes the next pass expands; 0 if there is only one pass."""

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> DraftState[Any]:
        """Open the draft state of a cache's rows. It may use their pages, with a KV store of its own.

        texts: the rows' tokens. A part that comes from the prefix cache is not passed to `read`.
        """

    def copied(self, state: Any, known: Any, row: Row) -> Any:
        """A copy of a row of the state, for a row whose pages continue those of the known one."""

    def warm_up(self, target: TargetRunner, max_rows: int) -> None:
        """Do one-time work now, such as graph captures, so that the first requests need not wait for it.

        max_rows: of the largest batch.
        """

    def read(self, chunks: Sequence[tuple[Any, int, VerifyOutput, Sequence[int]]]) -> None:
        """Prefill the chunks of one step: each a state, a row of it, and the token after each of the chunk's tokens."""

    def run_passes(self, asked: Passes, add_level: AddLevel) -> None:
        """Run the draft passes below the roots, each only if its flag in `asked.made` is set.

        add_level: takes a pass's number, and the tokens, parents and q of its nodes, depth by depth, likeliest first.
        Parents are numbers of the tree's nodes in this order; the root is 0. It sets the flag of the next pass. With
        known draws, q is the probability that a token is drawn, given its noise.
        """

    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Extend the state by a finished round: accepted nodes and new tokens by row."""


def time_pass(drafter: Drafter, target: TargetRunner) -> float:
    """Seconds of a draft pass for one row, on a scratch state: the best of three rounds, the first of which sets up."""
    cache, best, num_passes = target.open(1, num_slots=8), math.inf, drafter.max_passes
    try:
        asked = Passes.scratch(target.pool, drafter.open(cache), cache.rows, num_passes)
        run = partial(drafter.run_passes, asked, _ignore)
        if drafter.is_captured:  # as in rounds
            head: Any = drafter
            head.prepare_pool(target.pool)
            in_graph = partial(drafter.run_passes, replace(asked, state=None), _ignore)
            run = Captures(target.device).capture(in_graph)  # type: ignore[assignment]
        for _ in range(3):
            start = time.perf_counter()
            run()
            target.synchronize()
            best = min(best, time.perf_counter() - start)
    finally:
        cache.release()
    return best / num_passes


def _ignore(*level: Any) -> None:
    """Take a level's nodes, and do nothing with them."""


def num_setups_of(target: TargetRunner, drafter: Drafter | None) -> int:
    """Number of one-time set-ups so far, such as graph captures. Rounds that include one are not timed."""
    return target.num_setups + (drafter.num_setups if drafter is not None else 0)

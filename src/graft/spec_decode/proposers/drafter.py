"""The drafter contract, and the beam search that several drafters share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from graft.model.noise import ComingDraws
from graft.model.verified import top_probabilities
from graft.settings import Settings, check_size
from graft.tree.device.buffers import Level

if TYPE_CHECKING:
    from graft.model import KVCache, PagePool, Row, TargetRunner, VerifyOutput
    from graft.tree.device.buffers import Entries

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


class DraftState(Protocol):
    """A drafter's state for the rows of one batch."""

    @property
    def lengths(self) -> list[int]:
        """By row, how many tokens have the keys and values of both the target and the drafter in the pages."""

    def select(self, rows: Sequence[int]) -> Self:
        """The state of these rows, in this order."""

    def copy_row(self, source: int, target: int, row: Row) -> None:
        """Copy row `source` to row `target`, whose pages are those of `row` and continue those of the source."""

    def concat(self, other: Any) -> Self:
        """A new state: these rows, then those of another state of the same drafter."""


class Drafter(Protocol):
    """A draft model that proposes trees pass by pass. `state` arguments come from its own `open`."""

    hidden_layers: tuple[int, ...]  # target layers whose inputs (hidden states) it reads; empty if it reads tokens only

    @property
    def max_passes(self) -> int:
        """The most draft passes of a round."""

    @property
    def max_depth(self) -> int:
        """The most levels of a tree, over all passes."""

    @property
    def num_beams(self) -> int:
        """How many of a pass's likeliest last nodes the next pass expands."""

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
        """Whether its `passes` can use these draws."""

    def level_sizes(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> tuple[int, ...]:
        """By pass: the most nodes that it gives each row, if `keep` of each level are kept."""

    def beams_of(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> int:
        """Nodes of a level that the next pass expands."""

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> DraftState:
        """Open the draft state of a cache's rows. It may use their pages, with a KV store of its own.

        texts: the rows' tokens. A part that comes from the prefix cache is not passed to `read`.
        """

    def warm_up(self, target: TargetRunner, max_rows: int) -> None:
        """Do one-time work now, such as graph captures, so that the first requests need not wait for it.

        max_rows: of the largest batch.
        """

    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        """Prefill a chunk of one row's prompt. following: the token after each of its tokens."""

    def passes(
        self,
        state: Any,
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Sequence[Level]]:
        """Yield the levels of the trees below `roots` [B], on the host. Each `next` is one draft pass.

        keep: number of nodes to yield per level, likeliest first, which also limits the beams; None: all nodes, in any
        order. With 1 the tree is a chain: each node is the likeliest child of the previous one.
        draws: what is known of the coming draws. With it, q is the probability that a token is drawn, given its noise.
        """

    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Extend the state by a finished round: accepted nodes and new tokens by row."""


@dataclass(frozen=True)
class PassesOnDevice:
    """The draft passes of a device round, of R rows including padding."""

    pool: PagePool
    num_passes: int  # the most passes
    table_rows: Tensor  # [R] rows of the block tables
    lengths: Tensor  # [R] entries of each row in the head's KV store
    roots: Tensor  # [>= R] the last tokens of the texts
    context: int  # the longest text that the graph is for
    made: Tensor  # [> passes] int32: whether each pass is made
    draws: tuple[Tensor, Tensor] | None  # [>= R] seeds and temperatures of coming draws, if drafts use them
    keep: int = KEPT_OF_A_LEVEL  # nodes of each level, see `Drafter.passes`

    @property
    def num_rows(self) -> int:
        return len(self.table_rows)


class DrafterOnDevice(Drafter, Protocol):
    """A drafter whose passes can be part of device rounds."""

    def is_captured(self, state: Any) -> bool:
        """Whether the passes of this state can be captured. If so, each of its `rows` has a `length`."""

    def prepare_pool(self, pool: PagePool) -> int:
        """Make the buffers over a pool before graphs use them. Returns a number that changes if the buffers change."""

    def run_passes(self, asked: PassesOnDevice, add_level: Callable[[int, Tensor, Tensor, Tensor], None]) -> None:
        """Run the passes within a graph, each only if its flag in `asked.made` is set when it runs.

        The first may run unconditionally, since the host knows its flag. add_level: takes a pass's number, and the
        tokens, parents and probabilities of its nodes, depth by depth. It sets the flag of the next pass.
        """

    def run_entries(self, pool: PagePool, entries: Entries, hidden: Tensor, context: int) -> None:
        """Run the head on the new tokens of a round, within a graph. hidden: [T, F] of the step's tokens."""

    def read_chunks(self, chunks: Sequence[tuple[Any, int, VerifyOutput, Sequence[int]]]) -> None:
        """Prefill the chunks of one step together; each is a tuple of `read`'s arguments."""


class LevelByLevel(ABC):
    """Base of drafters whose passes give one level each: the children of the previous level's beams."""

    settings: TreeSettings

    def knows(self, draws: ComingDraws) -> bool:
        return True

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

    def level_sizes(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> tuple[int, ...]:
        topk = min(self.settings.topk, keep)
        return (topk, *[min(keep, topk * topk)] * self.settings.depth)

    def beams_of(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> int:
        return min(self.num_beams, keep)

    @abstractmethod
    def levels(
        self,
        state: Any,
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Level]:
        """`Drafter.passes`, as the single level of each pass."""

    def passes(
        self,
        state: Any,
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Sequence[Level]]:
        return ((level,) for level in self.levels(state, roots, keep, draws))


def likeliest(
    logits: Tensor,
    topk: int,
    draws: ComingDraws | None,
    depth: int,
    tokens: Tensor | None = None,
    sharpness: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The places of the `topk` likeliest tokens in a drafter's logits [B, F, V] of one depth, and their q.

    draws: what is known of the coming draws. tokens: [V] the target ids of the logits; None: equal to their places.
    sharpness: see `ComingDraws.perturbed`.
    """
    if draws is not None:
        ids = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
        logits = draws.perturbed(logits, ids, depth, sharpness)
    return top_probabilities(logits, topk)


class BeamSearch:
    """Beam search: each pass expands the beams, the likeliest nodes of the previous level."""

    def __init__(self, num_rows: int, topk: int, keep: int | None, device: torch.device) -> None:
        """topk: number of beams, and children of each. keep: see `Drafter.passes`."""
        self._topk, self._keep = topk, keep
        self._parents = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)  # [B, F] the beams' node numbers
        self._path = torch.ones(num_rows, 1, device=device)  # [B, F] their path probabilities
        self._width = 1  # nodes of the trees so far

    def level(self, tokens: Tensor, probabilities: Tensor) -> Level:
        """The next level, from the beams' likeliest tokens [B, F, topk] and their q."""
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
        """Make the best nodes of the level the beams: their tokens [B, topk], and the beam each came from."""
        self._path, best = (part[:, : self._topk] for part in self._best)
        order = torch.arange(self._topk, device=best.device).expand_as(best)  # kept nodes are sorted, best first
        self._parents = self._width + (best if self._keep is None else order)
        self._width += self._kept.tokens.shape[1]
        return self._all.tokens.gather(1, best), best // self._topk


def num_setups_of(target: TargetRunner, drafter: Drafter | None) -> int:
    """Number of one-time set-ups so far, such as graph captures. Rounds that include one are not timed."""
    return target.num_setups + (drafter.num_setups if drafter is not None else 0)

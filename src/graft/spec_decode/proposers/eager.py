"""Base of the drafters that run a head eagerly: rows, pending features, a KV store in the target's pages.

The head's KV store holds one entry for each token of the text, made from the target's features of it. Drafts are
written after these entries, and the next round overwrites them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from graft.model import KVCache, PagePool, Row, TargetRunner, VerifyOutput
from graft.model.kv_cache import KVStore
from graft.model.noise import ComingDraws

_MAX_PENDING = 256  # entries of a row that may wait for the next draft pass


@dataclass(eq=False)
class DraftRow:
    """One row's draft state."""

    row: Row
    length: int = 0  # entries in the head's KV store
    pending: list[Tensor] = field(default_factory=list)  # features [n, taps * H] that the head has not run yet
    following: list[int] = field(default_factory=list)  # the token after each of these


R = TypeVar("R", bound=DraftRow)


@dataclass
class EagerState(Generic[R]):
    """Draft state of one batch."""

    pool: PagePool
    rows: list[R]

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def select(self, rows: Sequence[int]) -> EagerState[R]:
        return EagerState(self.pool, [self.rows[row] for row in rows])

    def copy_row(self, source: int, target: int, row: Row) -> None:
        own = self.rows[source]
        self.rows[target] = replace(own, row=row, pending=list(own.pending), following=list(own.following))

    def concat(self, other: EagerState[R]) -> EagerState[R]:
        return EagerState(self.pool, self.rows + other.rows)


class EagerDrafter(ABC, Generic[R]):
    """Base of the drafters of heads, for a CPU or where CUDA graphs cannot be used."""

    # Factor on the logits when draws are guessed, for a head that is less certain than its target.
    sharpness = 1.0

    def knows(self, draws: ComingDraws) -> bool:
        return True

    def __init__(
        self,
        hidden_layers: tuple[int, ...],
        weight: Tensor,
        num_layers: int,
        key_heads: tuple[int, int],
        value_heads: tuple[int, int] | None = None,
    ) -> None:
        """weight: a weight [H, any] of the head, for its dtype, device and width.

        num_layers, key_heads, value_heads: of the head's KV store, heads as (heads, head_dim).
        """
        self.hidden_layers = hidden_layers
        self._weight, self._num_layers = weight, num_layers
        self._key_heads, self._value_heads = key_heads, value_heads or key_heads
        self._stores: weakref.WeakKeyDictionary[PagePool, KVStore] = weakref.WeakKeyDictionary()

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """See `Drafter.num_slots`."""

    @abstractmethod
    def _new_row(self, row: Row) -> R:
        """The state of a row whose committed tokens all have entries."""

    @abstractmethod
    def _refresh(self, pool: PagePool, rows: Sequence[R]) -> None:
        """Run the head on the pending entries of these rows."""

    @property
    def num_setups(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def bytes_per_token(self) -> int:
        sizes = (heads * head_dim for heads, head_dim in (self._key_heads, self._value_heads))
        return self._num_layers * sum(sizes) * self._weight.element_size()

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> Any:
        self.store_for(cache.pool)
        # If a prefix comes from the prefix cache, its entries are in the shared pages.
        return EagerState(cache.pool, [self._new_row(row) for row in cache.rows])

    def store_for(self, pool: PagePool) -> KVStore:
        """The head's KV store over a pool's pages."""
        store = self._stores.get(pool)
        if store is None:
            store = KVStore(self._num_layers)
            pool.add_store(store)
            store.shape(self._weight, self._key_heads, self._value_heads)
            self._stores[pool] = store  # last, so that a failed call can be repeated
        return store

    def cache_writing_at(self, pool: PagePool, places: Sequence[tuple[DraftRow, int]]) -> KVCache:
        """The head's KV cache, whose `update` writes at these positions of rows. Allocates their pages."""
        for row, position in places:
            pool.ensure(row.row, position + 1)
        cache = KVCache(pool, self.store_for(pool), [])
        cache.write_at(cache.slots_of([(row.row, position) for row, position in places]))
        return cache

    @torch.no_grad()
    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        own = state.rows[row]
        own.pending.append(verified.hidden[verified.index[0].to(verified.hidden.device)].clone())
        own.following += following
        self._refresh(state.pool, [own])

    @torch.no_grad()
    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        for number, (row, path, new) in enumerate(zip(state.rows, nodes, tokens, strict=True)):
            places = verified.index[number, [0, *path]][: len(new)].to(verified.hidden.device)
            row.pending.append(verified.hidden[places].clone())
            row.following += new
        if max(len(row.following) for row in state.rows) > _MAX_PENDING:
            self._refresh(state.pool, state.rows)

    def warm_up(self, target: TargetRunner, max_rows: int) -> None:
        """Nothing to do: nothing is captured."""


class PendingEntries(Generic[R]):
    """The pending entries of some rows, T in all, side by side."""

    def __init__(self, rows: Sequence[R]) -> None:
        self.rows = [row for row in rows if row.following]  # a row that has just joined has none
        self.counts = [len(row.following) for row in self.rows]
        self.places = [
            (row, row.length + place)
            for row, count in zip(self.rows, self.counts, strict=True)
            for place in range(count)
        ]

    def features(self) -> Tensor:
        """[1, T, taps * H]"""
        return torch.cat([part for row in self.rows for part in row.pending])[None]

    def tokens(self, device: torch.device) -> Tensor:
        """[1, T] the token after each"""
        return torch.tensor([[token for row in self.rows for token in row.following]], device=device)

    def positions(self, device: torch.device) -> Tensor:
        """[1, T]"""
        return torch.tensor([[position for _, position in self.places]], device=device)

    def finish(self) -> None:
        """Mark them as run: they are in the head's KV store."""
        for row, count in zip(self.rows, self.counts, strict=True):
            row.length += count
            row.pending, row.following = [], []

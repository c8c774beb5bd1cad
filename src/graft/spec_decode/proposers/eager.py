"""What drafters share that run eagerly: their rows, the features that wait, a KV store in the target's pages.

The head's KV store holds one entry per token of the text, made from the target's features of it. What a round's
drafting writes comes behind them, and is dropped at the end of the round.
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

_MAX_WAITING = 256  # entries of a row that wait for a draft; then they are run without one


@dataclass(eq=False)
class DraftRow:
    """What a drafter keeps of one row: how much of its text the head has run, and what it has not run yet."""

    row: Row
    length: int = 0  # entries in the head's KV store
    waiting: list[Tensor] = field(default_factory=list)  # [n, taps * H] features that came in with the last rounds
    following: list[int] = field(default_factory=list)  # the token after each of them


R = TypeVar("R", bound=DraftRow)


@dataclass
class EagerState(Generic[R]):
    """Draft state of one batch."""

    pool: PagePool
    rows: list[R]

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def keeping(self, rows: Sequence[int]) -> EagerState[R]:
        return EagerState(self.pool, [self.rows[row] for row in rows])

    def copy_row(self, source: int, target: int, row: Row) -> None:
        own = self.rows[source]
        self.rows[target] = replace(own, row=row, waiting=list(own.waiting), following=list(own.following))

    def joining(self, other: EagerState[R]) -> EagerState[R]:
        return EagerState(self.pool, self.rows + other.rows)


class EagerDrafter(ABC, Generic[R]):
    """Base of the drafters that make passes one by one, on demand: on a CPU, or where CUDA graphs cannot be used."""

    def __init__(
        self,
        hidden_layers: tuple[int, ...],
        weight: Tensor,
        num_layers: int,
        key_heads: tuple[int, int],
        value_heads: tuple[int, int] | None = None,
    ) -> None:
        """weight: one of the head's, with its dtype and device, and as many rows as its hidden states are wide.
        num_layers, and (heads, head_dim) of keys and of values, if other than the keys': of the head's KV store."""
        self.hidden_layers = hidden_layers
        self._weight, self._num_layers = weight, num_layers
        self._key_heads, self._value_heads = key_heads, value_heads or key_heads
        self._stores: weakref.WeakKeyDictionary[PagePool, KVStore] = weakref.WeakKeyDictionary()

    @abstractmethod
    def _new_row(self, row: Row) -> R:
        """What is kept of a row whose committed tokens have their entries."""

    @abstractmethod
    def _refresh(self, pool: PagePool, rows: Sequence[R]) -> None:
        """Runs the head on the entries of these rows that wait."""

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
        self.share(cache.pool)
        # A row whose beginning was known to others has their entries.
        return EagerState(cache.pool, [self._new_row(row) for row in cache.rows])

    def share(self, pool: PagePool) -> KVStore:
        """The head's KV store over a pool's pages."""
        store = self._stores.get(pool)
        if store is None:
            store = KVStore(self._num_layers)
            pool.add_store(store)
            store.shape(self._weight, self._key_heads, self._value_heads)
            self._stores[pool] = store  # last: what has failed is made again
        return store

    def writing_at(self, pool: PagePool, places: Sequence[tuple[DraftRow, int]]) -> KVCache:
        """The head's KV cache, whose `update` writes at these positions of rows; they get the pages for it."""
        for row, position in places:
            pool.ensure(row.row, position + 1)
        cache = KVCache(pool, self.share(pool), [])
        cache.write_at(cache.slots_of([(row.row, position) for row, position in places]))
        return cache

    @torch.no_grad()
    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        own = state.rows[row]
        own.waiting.append(verified.hidden[verified.index[0].to(verified.hidden.device)].clone())
        own.following += following
        self._refresh(state.pool, [own])

    @torch.no_grad()
    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        for number, (row, path, new) in enumerate(zip(state.rows, nodes, tokens, strict=True)):
            places = verified.index[number, [0, *path]][: len(new)].to(verified.hidden.device)
            row.waiting.append(verified.hidden[places].clone())
            row.following += new
        if max(len(row.following) for row in state.rows) > _MAX_WAITING:
            self._refresh(state.pool, state.rows)

    def num_prefetched(self, state: Any) -> int:
        return 0

    def draft_ahead(self, state: Any, verified: VerifyOutput, chosen: Tensor) -> None:
        """Does nothing: passes run one by one, on demand."""

    def warm_up(self, target: TargetRunner, max_rows: int, keep: int | None) -> None:
        """Nothing is captured here."""

    def gather_ahead(self, state: Any, verified: VerifyOutput) -> None:
        """Does nothing: features are kept when the round is learned."""


class Waiting(Generic[R]):
    """Entries of some rows that wait, side by side: T in all."""

    def __init__(self, rows: Sequence[R]) -> None:
        self.rows = [row for row in rows if row.following]  # one that has just joined has nothing waiting
        self.counts = [len(row.following) for row in self.rows]
        self.places = [
            (row, row.length + place)
            for row, count in zip(self.rows, self.counts, strict=True)
            for place in range(count)
        ]

    def features(self) -> Tensor:
        """[1, T, taps * H]"""
        return torch.cat([part for row in self.rows for part in row.waiting])[None]

    def tokens(self, device: torch.device) -> Tensor:
        """[1, T] the token after each"""
        return torch.tensor([[token for row in self.rows for token in row.following]], device=device)

    def positions(self, device: torch.device) -> Tensor:
        """[1, T]"""
        return torch.tensor([[position for _, position in self.places]], device=device)

    def finish(self) -> None:
        """They are in the head's KV store now."""
        for row, count in zip(self.rows, self.counts, strict=True):
            row.length += count
            row.waiting, row.following = [], []

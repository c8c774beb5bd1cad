"""The EAGLE-3 drafter: grows a tree with the head by beam search, one forward of the head per depth.

The head's KV cache holds one entry per token: the target's features of it with the embedding of the next. Drafted
entries come after them, with the head's own outputs as features, and are dropped at the end of the round.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graft.model import KVCache, PagePool, Row, TargetRunner, VerifyOutput
from graft.model.attention import RowKeys, Visibility
from graft.model.kv_cache import KVStore
from graft.settings import require
from graft.spec_decode.candidates import Level
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.head import Eagle3Head

_MAX_WAITING = 256  # entries of a row that wait for a draft; then they are run without one
_ONE = torch.ones(1, 1, dtype=torch.bool)


@dataclass(eq=False)
class DraftRow:
    """What the drafter keeps of one row: how much of its text the head has run, and what it has not run yet."""

    row: Row
    hidden: Tensor  # [H] the head's output at the last entry
    length: int = 0  # entries in the head's KV store
    waiting: list[Tensor] = field(default_factory=list)  # [n, 3H] features of entries that came in with the last rounds
    following: list[int] = field(default_factory=list)  # the token after each of them


@dataclass
class Eagle3State:
    """Draft state of one batch."""

    pool: PagePool
    rows: list[DraftRow]

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def keeping(self, rows: Sequence[int]) -> Eagle3State:
        return Eagle3State(self.pool, [self.rows[row] for row in rows])

    def copy_row(self, source: int, target: int, row: Row) -> None:
        own = self.rows[source]
        self.rows[target] = DraftRow(row, own.hidden, own.length, list(own.waiting), list(own.following))

    def joining(self, other: Eagle3State) -> Eagle3State:
        return Eagle3State(self.pool, self.rows + other.rows)


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head, eagerly: on a CPU, or where CUDA graphs cannot be used."""

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None) -> None:
        self.head = head
        self.settings = settings or TreeSettings()
        self.hidden_layers = head.config.target_layers
        self._stores: weakref.WeakKeyDictionary[PagePool, KVStore] = weakref.WeakKeyDictionary()
        most = head.config.draft_vocab_size
        require(self.settings.topk <= most, f"topk is {self.settings.topk}, but the head drafts from {most} tokens")

    @property
    def num_setups(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return self.head.fc.weight.device

    def open(self, cache: KVCache) -> Any:
        self.share(cache.pool)
        weight = self.head.fc.weight
        # A row whose beginning was known to others has their entries.
        rows = [DraftRow(row, weight.new_zeros(weight.shape[0]), row.length) for row in cache.rows]
        return Eagle3State(cache.pool, rows)

    def share(self, pool: PagePool) -> KVStore:
        """The head's KV store over a pool's pages."""
        store = self._stores.get(pool)
        if store is None:
            config, weight = self.head.config, self.head.fc.weight
            store = KVStore(1)
            pool.add_store(store)
            store.shape(weight, (config.num_key_value_heads, config.head_dim))
            self._stores[pool] = store  # last: what has failed is made again
        return store

    @torch.no_grad()
    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        own = state.rows[row]
        own.waiting.append(verified.hidden[verified.index[0].to(verified.hidden.device)].clone())
        own.following += following
        self._refresh(state, [own])

    def num_prefetched(self, state: Any) -> int:
        return 0

    def draft_ahead(self, state: Any, verified: VerifyOutput, chosen: Tensor) -> None:
        """Does nothing: passes run one by one, on demand."""

    def warm_up(self, target: TargetRunner, max_rows: int, keep: int | None) -> None:
        """Nothing is captured here."""

    def gather_ahead(self, state: Any, verified: VerifyOutput) -> None:
        """Does nothing: features are kept when the round is learned."""

    @torch.no_grad()
    def learn(
        self,
        state: Eagle3State,
        verified: VerifyOutput,
        nodes: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        for number, (row, path, new) in enumerate(zip(state.rows, nodes, tokens, strict=True)):
            places = verified.index[number, [0, *path]][: len(new)].to(verified.hidden.device)
            row.waiting.append(verified.hidden[places].clone())
            row.following += new
        if max(len(row.following) for row in state.rows) > _MAX_WAITING:
            self._refresh(state, state.rows)

    @torch.no_grad()
    def levels(
        self, state: Eagle3State, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Level]:
        self._refresh(state, state.rows)
        batch, topk, device = len(roots), self.settings.topk, self.device
        lengths = torch.tensor(state.lengths)
        itself = torch.eye(topk, dtype=torch.bool).expand(batch, -1, -1)
        hidden = torch.stack([row.hidden for row in state.rows])[
            :, None
        ]  # [B, F, H] of the beams, first the root alone
        parents = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # [B, F] their places in the tree
        path = torch.ones(batch, 1, device=device)  # [B, F]
        seen = itself[:, :1, :0]  # [B, F, U] the drafted entries on their paths
        depths = torch.zeros(0, dtype=torch.int64)  # [U] of the drafted entries
        width, depth = 1, 0
        while True:
            level = self._children(hidden, parents, path)
            num_beams = min(topk, level.tokens.shape[1])
            count = max(num_beams, min(keep or 0, level.tokens.shape[1]))
            path, best = level.path_probabilities.topk(count, dim=1)
            kept = level.at(best) if keep is not None else level
            yield kept.to_host()
            # The best of the new nodes are the beams that the next pass expands.
            path, best = path[:, :num_beams], best[:, :num_beams]
            tokens, origin = level.tokens.gather(1, best), best // topk
            parents = width + (best if keep is None else torch.arange(num_beams, device=device).expand_as(best))
            width += kept.tokens.shape[1]
            seen = torch.cat([_rows(seen, origin.cpu()), itself], dim=2)
            depths = torch.cat([depths, torch.full((topk,), depth)])
            positions = (lengths + depth)[:, None].expand(-1, topk).to(device)
            hidden = self._forward(state, tokens, _rows(hidden, origin), positions, depths, seen)
            depth += 1

    def _refresh(self, state: Eagle3State, rows: Sequence[DraftRow]) -> None:
        """Runs the head on the entries whose true features came in with the last rounds."""
        rows = [row for row in rows if row.following]  # one that has just joined has nothing waiting
        if not rows:
            return
        device, counts = self.device, [len(row.following) for row in rows]
        features = torch.cat([part for row in rows for part in row.waiting])[None]  # [1, T, 3H]
        tokens = torch.tensor([[token for row in rows for token in row.following]], device=device)
        places = [(row, row.length + place) for row, count in zip(rows, counts, strict=True) for place in range(count)]
        hidden = self.head.fuse(features)
        positions = torch.tensor([[position for _, position in places]], device=device)
        query, key, value = self.head.qkv(self.head.embed(tokens), hidden, positions)
        key, value = self._write(state, places, key, value)
        # Of all but each row's last entry only keys and values are needed.
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        keys = [
            RowKeys(row.row, row.length + count - 1, torch.zeros(1, dtype=torch.int64), _ONE, device)
            for row, count in zip(rows, counts, strict=True)
        ]
        window = self.head.config.sliding_window
        attended = Visibility(keys, query.dtype).attend(query[:, :, last], key, value, window, None)
        output = self.head.finish(attended.transpose(1, 2), hidden[:, last])[0]
        for row, count, new in zip(rows, counts, output, strict=True):
            row.length += count
            row.hidden = new
            row.waiting, row.following = [], []

    def _write(
        self, state: Eagle3State, places: Sequence[tuple[DraftRow, int]], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values [1, heads, T, D] at positions of rows; returns the whole store, likewise."""
        for row, position in places:
            state.pool.ensure(row.row, position + 1)
        cache = KVCache(state.pool, self.share(state.pool), [])
        cache.write_at(cache.slots_of([(row.row, position) for row, position in places]))
        return cache.update(key, value, 0)

    def _forward(
        self,
        state: Eagle3State,
        tokens: Tensor,  # [B, W]
        hidden: Tensor,  # [B, W, H]
        positions: Tensor,  # [B, W]
        depths: Tensor,  # [U] of all drafted entries, of which these are the last
        seen: Tensor,  # [B, W, U] which of them each sees
    ) -> Tensor:
        """Outputs [B, W, H] of drafted entries, which come behind those of earlier passes."""
        batch, width = tokens.shape
        before = len(depths) - width
        flat = (self.head.embed(tokens).flatten(0, 1)[None], hidden.flatten(0, 1)[None], positions.flatten()[None])
        query, key, value = self.head.qkv(*flat)
        places = [(row, row.length + before + place) for row in state.rows for place in range(width)]
        key, value = self._write(state, places, key, value)
        keys = [
            RowKeys(row.row, row.length, depths, own, tokens.device) for row, own in zip(state.rows, seen, strict=True)
        ]
        window = self.head.config.sliding_window
        attended = Visibility(keys, query.dtype).attend(query, key, value, window, None)
        return self.head.finish(attended.transpose(1, 2), flat[1])[0].unflatten(0, (batch, width))

    def _children(self, hidden: Tensor, parents: Tensor, path: Tensor) -> Level:
        """The `topk` likeliest tokens after each beam."""
        topk = self.settings.topk
        q, draft_ids = self.head.logits(hidden).float().softmax(dim=-1).topk(topk, dim=-1)  # [B, F, topk]
        return Level(
            tokens=self.head.to_target(draft_ids).flatten(1),
            parents=parents.repeat_interleave(topk, dim=1),
            probabilities=q.flatten(1),
            path_probabilities=(path[:, :, None] * q).flatten(1),
        )


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """values [B, F, n] at `index` [B, G] of its second dimension, [B, G, n]."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))

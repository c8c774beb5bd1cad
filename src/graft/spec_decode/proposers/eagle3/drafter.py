"""The EAGLE-3 drafter: grows a tree with the head by beam search, one forward of the head per depth.

The head's KV cache holds one entry per token: the target's features of it with the embedding of the next. Drafted
entries come after them, with the head's own outputs as features, and are dropped at the end of the round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from graft.model import TreeCache, VerifyOutput
from graft.model.attention import Visibility, attend
from graft.model.kv_cache import kept_rows
from graft.settings import require
from graft.spec_decode.candidates import Level
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.head import Eagle3Head

_MAX_WAITING = 256  # entries of a row that wait for a draft; then they are run without one


@dataclass
class Eagle3State:
    """Draft state of one batch: the head's KV cache, and the entries it has not run yet."""

    cache: TreeCache
    hidden: Tensor  # [B, H] the head's output at each row's last entry
    waiting: Tensor  # [B, places, 3H] features of entries that came in with the last rounds
    following: list[list[int]]  # by row the token after each of them

    def keeping(self, rows: Sequence[int]) -> Eagle3State:
        hidden, waiting = (kept_rows(stored, rows) for stored in (self.hidden, self.waiting))
        return Eagle3State(self.cache.keeping(rows), hidden, waiting, [list(self.following[row]) for row in rows])

    def copy_row(self, source: int, target: int) -> None:
        self.cache.copy_row(source, target)
        self.hidden[target] = self.hidden[source]

    def reserving(self, num_rows: int) -> Eagle3State:
        return replace(self, cache=self.cache.reserving(num_rows))

    def joining(self, other: Eagle3State) -> Eagle3State:
        num_places = max(self.waiting.shape[1], other.waiting.shape[1])
        return Eagle3State(
            cache=self.cache.joining(other.cache),
            hidden=torch.cat([self.hidden, other.hidden]),
            waiting=torch.cat([_with_places(state.waiting, num_places) for state in (self, other)]),
            following=[list(following) for following in self.following + other.following],
        )


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head, eagerly: on a CPU, or where CUDA graphs cannot be used."""

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None) -> None:
        self.head = head
        self.settings = settings or TreeSettings()
        self.hidden_layers = head.config.target_layers
        most = head.config.draft_vocab_size
        require(self.settings.topk <= most, f"topk is {self.settings.topk}, but the head drafts from {most} tokens")

    @property
    def num_setups(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return self.head.fc.weight.device

    def open(self, num_rows: int, num_slots: int) -> Eagle3State:
        # Beside the text: the drafted entries, or those of a row that is behind, as places of all rows.
        num_more = max(self.settings.depth * self.settings.topk, _MAX_WAITING)
        weight = self.head.fc.weight
        return Eagle3State(
            cache=TreeCache(1, num_rows, num_slots + num_more),
            hidden=weight.new_zeros(num_rows, weight.shape[0]),
            waiting=weight.new_zeros(num_rows, 0, weight.shape[1]),
            following=[[] for _ in range(num_rows)],
        )

    @torch.no_grad()
    def read(self, state: Eagle3State, row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        features = verified.hidden  # [1, W, 3H]
        tokens = torch.tensor([following], device=features.device)
        state.hidden[row] = self._run_entries(state.cache, slice(row, row + 1), features, tokens, [len(following)])[0]

    def num_prefetched(self, state: Any) -> int:
        return 0

    def draft_ahead(self, state: Any, verified: VerifyOutput, chosen: Tensor) -> None:
        """Does nothing: passes run one by one, on demand."""

    @torch.no_grad()
    def learn(
        self,
        state: Eagle3State,
        verified: VerifyOutput,
        nodes: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        device, num_new = state.waiting.device, max(map(len, tokens))
        counts = [len(following) for following in state.following]
        if max(counts) + num_new > state.waiting.shape[1]:
            state.waiting = _with_places(state.waiting, 2 * (max(counts) + num_new))
        # Rows with fewer new entries are padded with the root's, which their next entries overwrite.
        accepted = torch.tensor([[0, *path, *[0] * (num_new - 1 - len(path))] for path in nodes], device=device)
        rows = torch.arange(len(counts), device=device)[:, None]
        places = torch.tensor(counts, device=device)[:, None] + torch.arange(num_new, device=device)
        state.waiting[rows, places] = verified.hidden[rows, accepted]
        for following, new in zip(state.following, tokens, strict=True):
            following += new
        if max(map(len, state.following)) > _MAX_WAITING:
            self._refresh(state)

    @torch.no_grad()
    def levels(
        self, state: Eagle3State, roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Level]:
        self._refresh(state)
        batch, topk, device = len(roots), self.settings.topk, self.device
        lengths = torch.tensor(state.cache.lengths, device=device)
        itself = torch.eye(topk, dtype=torch.bool, device=device).expand(batch, -1, -1)
        hidden = state.hidden[:, None]  # [B, F, H] of the F beams, at first the root alone
        parents = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # [B, F] their places in the tree
        path = torch.ones(batch, 1, device=device)  # [B, F]
        seen = itself[:, :1, :0]  # [B, F, U] the drafted entries on their paths
        positions = parents[:, :0]  # [B, U]
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
            seen = torch.cat([_rows(seen, origin), itself], dim=2)
            positions = torch.cat([positions, (lengths + depth)[:, None].expand_as(tokens)], dim=1)
            hidden = self._forward(
                state.cache, slice(0, batch), tokens, _rows(hidden, origin), positions, seen, offset=depth * topk
            )
            depth += 1

    def _refresh(self, state: Eagle3State) -> None:
        """Runs the head on the entries whose true features came in with the last rounds."""
        counts = [len(following) for following in state.following]
        longest = max(counts)
        if longest == 0:
            return
        tokens = [[*following, *[0] * (longest - len(following))] for following in state.following]
        features = state.waiting[:, :longest]
        device = features.device
        everyone = slice(0, len(counts))
        output = self._run_entries(state.cache, everyone, features, torch.tensor(tokens, device=device), counts)
        rows = [row for row, count in enumerate(counts) if count]  # one that has just joined has nothing waiting
        state.hidden[rows] = output[rows]
        state.following = [[] for _ in counts]

    def _run_entries(
        self, cache: TreeCache, rows: slice, features: Tensor, tokens: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Runs and commits entries: target features [B, W, 3H] and each next token [B, W], the first `counts` of a row.

        Returns the output [B, H] at each row's last entry. Of the others only keys and values are computed.
        """
        device, width = tokens.device, tokens.shape[1]
        starts, number = torch.tensor(cache.lengths[rows], device=device), torch.tensor(counts, device=device)
        cache.aim(rows, width, device)
        hidden = self.head.fuse(features)
        positions = starts[:, None] + torch.arange(width, device=device)
        query, key, value = self.head.qkv(self.head.embed(tokens), hidden, positions)
        key, value = cache.update(key, value, 0)
        each, last = torch.arange(len(counts), device=device), (number - 1).clamp(min=0)
        query, hidden = query[each, :, last][:, :, None], hidden[each, last][:, None]

        window = self.head.config.sliding_window
        slots, ends = torch.arange(key.shape[2], device=device), (starts + number)[:, None]
        unseen = (slots >= ends) | (slots < ends - window if window is not None else False)  # [B, S]
        mask = torch.zeros(unseen.shape, dtype=query.dtype, device=device).masked_fill_(unseen, -torch.inf)
        num_groups = query.shape[1] // key.shape[1]
        output = self.head.finish(attend(query, key, value, mask[:, None, None].repeat(1, 1, num_groups, 1)), hidden)
        cache.advance(counts)
        return output[:, 0]

    def _forward(
        self,
        cache: TreeCache,
        rows: slice,
        tokens: Tensor,  # [B, W]
        hidden: Tensor,  # [B, W, H]
        positions: Tensor,  # [B, offset + W] of all uncommitted entries
        seen: Tensor,  # [B, W, offset + W] which of them each sees
        offset: int,
    ) -> Tensor:
        aim = cache.aim(rows, tokens.shape[1], tokens.device, offset)
        query, key, value = self.head.qkv(self.head.embed(tokens), hidden, positions[:, offset:])
        key, value = cache.update(key, value, 0)
        mask = Visibility(aim, positions, seen, query.dtype).mask(
            key.shape[2], self.head.config.sliding_window, query.shape[1] // key.shape[1]
        )
        return self.head.finish(attend(query, key, value, mask), hidden)

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


def _with_places(waiting: Tensor, count: int) -> Tensor:
    """The waiting features padded to [B, count, 3H]."""
    return nn.functional.pad(waiting, (0, 0, 0, count - waiting.shape[1]))

"""The EAGLE-3 drafter: grows a tree with the head by beam search, one forward of the head per depth.

The head's KV cache holds one entry per token: the target's features of it with the embedding of the next. Drafted
entries come after them, with the head's own outputs as features, and are dropped at the end of the round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from graft.model import PagePool, Row
from graft.model.attention import RowKeys, Visibility
from graft.settings import require
from graft.spec_decode.candidates import Level
from graft.spec_decode.proposers.drafter import BeamSearch, LevelByLevel, TreeSettings
from graft.spec_decode.proposers.eager import DraftRow, EagerDrafter, EagerState, Waiting
from graft.spec_decode.proposers.eagle3.head import Eagle3Head

_ONE = torch.ones(1, 1, dtype=torch.bool)


@dataclass(eq=False)
class Eagle3Row(DraftRow):
    """A row with the state that its first pass expands."""

    hidden: Tensor = field(kw_only=True)  # [H] the head's output at the last entry


class Eagle3Drafter(LevelByLevel, EagerDrafter[Eagle3Row]):
    """Drafts with an EAGLE-3 head, eagerly."""

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None) -> None:
        super().__init__(head, num_layers=1)
        self.head = head
        self.settings = settings or TreeSettings()
        most = head.config.draft_vocab_size
        require(self.settings.topk <= most, f"topk is {self.settings.topk}, but the head drafts from {most} tokens")

    def _new_row(self, row: Row) -> Eagle3Row:
        weight = self.head.fc.weight
        return Eagle3Row(row, row.length, hidden=weight.new_zeros(weight.shape[0]))

    @torch.no_grad()
    def levels(
        self, state: EagerState[Eagle3Row], roots: Tensor, keep: int | None = None, stops: Sequence[int] | None = None
    ) -> Iterator[Level]:
        self._refresh(state.pool, state.rows)
        batch, device = len(roots), self.device
        topk = min(self.settings.topk, keep or self.settings.topk)
        lengths = torch.tensor(state.lengths)
        itself = torch.eye(topk, dtype=torch.bool).expand(batch, -1, -1)
        hidden = torch.stack([row.hidden for row in state.rows])[:, None]  # [B, F, H] of beams, first the root alone
        search = BeamSearch(batch, topk, keep, device)
        seen = itself[:, :1, :0]  # [B, F, U] the drafted entries on their paths
        depths = torch.zeros(0, dtype=torch.int64)  # [U] of the drafted entries
        for depth in count():
            q, draft_ids = self.head.logits(hidden).float().softmax(dim=-1).topk(topk, dim=-1)  # [B, F, topk]
            yield search.level(self.head.to_target(draft_ids), q).to_host()
            tokens, origin = search.expand()
            seen = torch.cat([_rows(seen, origin.cpu()), itself], dim=2)
            depths = torch.cat([depths, torch.full((topk,), depth)])
            positions = (lengths + depth)[:, None].expand(-1, topk).to(device)
            hidden = self._forward(state, tokens, _rows(hidden, origin), positions, depths, seen)

    def _refresh(self, pool: PagePool, rows: Sequence[Eagle3Row]) -> None:
        waiting = Waiting(rows)
        if not waiting.rows:
            return
        device, counts = self.device, waiting.counts
        tokens = torch.tensor([[token for row in waiting.rows for token in row.following]], device=device)
        hidden = self.head.fuse(waiting.features())
        query, key, value = self.head.qkv(self.head.embed(tokens), hidden, waiting.positions(device))
        key, value = self.writing_at(pool, waiting.places).update(key, value, 0)
        # Of all but each row's last entry only keys and values are needed.
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        keys = [
            RowKeys(row.row, row.length + count - 1, torch.zeros(1, dtype=torch.int64), _ONE, device)
            for row, count in zip(waiting.rows, counts, strict=True)
        ]
        window = self.head.config.sliding_window
        attended = Visibility(keys, query.dtype).attend(query[:, :, last], key, value, window, None)
        output = self.head.finish(attended.transpose(1, 2), hidden[:, last])[0]
        for row, new in zip(waiting.rows, output, strict=True):
            row.hidden = new
        waiting.finish()

    def _forward(
        self,
        state: EagerState[Eagle3Row],
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
        key, value = self.writing_at(state.pool, places).update(key, value, 0)
        keys = [
            RowKeys(row.row, row.length, depths, own, tokens.device) for row, own in zip(state.rows, seen, strict=True)
        ]
        window = self.head.config.sliding_window
        attended = Visibility(keys, query.dtype).attend(query, key, value, window, None)
        return self.head.finish(attended.transpose(1, 2), flat[1])[0].unflatten(0, (batch, width))


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """values [B, F, n] at `index` [B, G] of its second dimension, [B, G, n]."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))

"""Base of the eager drafters with a recurrent head, fed with its own output: beam search, one forward per depth.

An entry of the head's KV cache is made from the target's features of a token and the embedding of the next token.
Drafted entries come after those of the text, and use the head's own outputs as features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from graft.model import KVCache, Row
from graft.model.attention import RowKeys, Visibility
from graft.model.noise import ComingDraws
from graft.spec_decode.proposers.drafter import BeamSearch, LevelByLevel
from graft.spec_decode.proposers.eager import DraftRow, EagerDrafter, EagerState
from graft.tree.device.buffers import Level


@dataclass(eq=False)
class RecurrentRow(DraftRow):
    """A row with the hidden state that the first pass expands."""

    hidden: Tensor = field(kw_only=True)  # [H] the head's output at the last entry


class RecurrentDrafter(LevelByLevel, EagerDrafter[RecurrentRow]):
    """Drafts with a recurrent head, eagerly."""

    @abstractmethod
    def _likeliest(self, hidden: Tensor, topk: int, draws: ComingDraws | None, depth: int) -> tuple[Tensor, Tensor]:
        """The `topk` likeliest tokens [B, F, topk] after the head's outputs [B, F, H], and their probabilities."""

    @abstractmethod
    def _run(self, cache: KVCache, seen: Visibility, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The head's outputs [1, T, H] at entries of tokens [1, T] and hidden states [1, T, H]."""

    def _new_row(self, row: Row) -> RecurrentRow:
        return RecurrentRow(row, row.length, hidden=self._weight.new_zeros(self._weight.shape[0]))

    @torch.no_grad()
    def levels(
        self,
        state: EagerState[RecurrentRow],
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Level]:
        self._refresh(state.pool, state.rows)
        batch, device = len(roots), self.device
        topk = min(self.settings.topk, keep or self.settings.topk)
        lengths = torch.tensor(state.lengths)
        itself = torch.eye(topk, dtype=torch.bool).expand(batch, -1, -1)
        hidden = torch.stack([row.hidden for row in state.rows])[:, None]  # [B, F, H] of beams, at first of the root
        search = BeamSearch(batch, topk, keep, device)
        seen = itself[:, :1, :0]  # [B, F, U] the drafted entries on their paths
        depths = torch.zeros(0, dtype=torch.int64)  # [U] of the drafted entries
        for depth in count():
            yield search.level(*self._likeliest(hidden, topk, draws, depth + 1)).to_host()
            tokens, origin = search.expand()
            seen = torch.cat([_rows(seen, origin.cpu()), itself], dim=2)
            depths = torch.cat([depths, torch.full((topk,), depth)])
            positions = (lengths + depth)[:, None].expand(-1, topk).to(device)
            hidden = self._expand(state, tokens, _rows(hidden, origin), positions, depths, seen)

    def _expand(
        self,
        state: EagerState[RecurrentRow],
        tokens: Tensor,  # [B, W]
        hidden: Tensor,  # [B, W, H]
        positions: Tensor,  # [B, W]
        depths: Tensor,  # [U] of all drafted entries, these last
        seen: Tensor,  # [B, W, U] which of them each sees
    ) -> Tensor:
        """Outputs [B, W, H] of new drafted entries, written after those of earlier passes."""
        batch, width = tokens.shape
        before = len(depths) - width
        places = [(row, row.length + before + place) for row in state.rows for place in range(width)]
        cache = self.cache_writing_at(state.pool, places)
        keys = [
            RowKeys(row.row, row.length, depths, own, tokens.device) for row, own in zip(state.rows, seen, strict=True)
        ]
        flat = (part.flatten(0, 1)[None] for part in (tokens, hidden, positions))
        return self._run(cache, Visibility(keys, hidden.dtype), *flat)[0].unflatten(0, (batch, width))


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """values [B, F, n] at `index` [B, G] of its second dimension, [B, G, n]."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))

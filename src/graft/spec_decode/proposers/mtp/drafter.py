"""The MTP drafter: beam search with the MTP layer, which runs at every depth.

An entry of its KV cache combines the target's last hidden state at a token with the embedding of the next token.
Drafted entries take the layer's own normed outputs instead of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.model import KVCache, PagePool
from graft.model.attention import RowKeys, Visibility
from graft.model.noise import ComingDraws
from graft.settings import require
from graft.spec_decode.proposers.drafter import TreeSettings, likeliest
from graft.spec_decode.proposers.eager import PendingEntries
from graft.spec_decode.proposers.mtp.head import MtpHead
from graft.spec_decode.proposers.recurrent import RecurrentDrafter, RecurrentRow


class MtpDrafter(RecurrentDrafter):
    """Drafts with the MTP head of the target's checkpoint, eagerly."""

    def __init__(self, head: MtpHead, settings: TreeSettings | None = None) -> None:
        super().__init__(head.target_layers, head.fc.weight, 1, *head.key_value_heads())
        self.head = head
        self.settings = settings or TreeSettings()
        topk, most = self.settings.topk, head.vocab_size
        require(topk <= most, f"topk is {topk}, but the head drafts from {most} tokens")

    def _likeliest(self, hidden: Tensor, topk: int, draws: ComingDraws | None, depth: int) -> tuple[Tensor, Tensor]:
        return likeliest(self.head.logits(hidden).float(), topk, draws, depth)

    def _refresh(self, pool: PagePool, rows: Sequence[RecurrentRow]) -> None:
        pending = PendingEntries(rows)
        if not pending.rows:
            return
        device, counts = self.device, pending.counts
        keys = [
            RowKeys(row.row, row.length, torch.arange(count), torch.ones(count, count, dtype=torch.bool).tril(), device)
            for row, count in zip(pending.rows, counts, strict=True)
        ]
        cache, features = self.cache_writing_at(pool, pending.places), pending.features()
        seen = Visibility(keys, features.dtype)
        output = self._run(cache, seen, pending.tokens(device), features, pending.positions(device))[0]
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        for row, new in zip(pending.rows, output[last], strict=True):
            row.hidden = new
        pending.finish()

    def _run(self, cache: KVCache, seen: Visibility, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        output: Tensor = self.head(cache, seen, tokens, hidden, positions)
        return output

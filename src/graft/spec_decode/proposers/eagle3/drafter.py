"""The eager EAGLE-3 drafter: beam search, one forward of the head for each depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.model import KVCache, PagePool
from graft.model.attention import RowKeys, Scores, Visibility
from graft.model.noise import ComingDraws
from graft.settings import require
from graft.spec_decode.proposers.drafter import TreeSettings, likeliest
from graft.spec_decode.proposers.eager import PendingEntries
from graft.spec_decode.proposers.eagle3.head import Eagle3Head
from graft.spec_decode.proposers.recurrent import RecurrentDrafter, RecurrentRow

_ONE = torch.ones(1, 1, dtype=torch.bool)


class Eagle3Drafter(RecurrentDrafter):
    """Drafts with an EAGLE-3 head, eagerly."""

    sharpness = 1.2  # fitted on answers to training prompts, see docs/benchmarks.md

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None) -> None:
        config = head.config
        super().__init__(config.target_layers, head.fc.weight, 1, (config.num_key_value_heads, config.head_dim))
        self.head = head
        self.settings = settings or TreeSettings()
        most = config.draft_vocab_size
        require(self.settings.topk <= most, f"topk is {self.settings.topk}, but the head drafts from {most} tokens")

    def _likeliest(self, hidden: Tensor, topk: int, draws: ComingDraws | None, depth: int) -> tuple[Tensor, Tensor]:
        logits = self.head.logits(hidden).float()
        draft_ids, q = likeliest(logits, topk, draws, depth, self.head.target_ids, self.sharpness)
        return self.head.to_target(draft_ids), q

    def _refresh(self, pool: PagePool, rows: Sequence[RecurrentRow]) -> None:
        pending = PendingEntries(rows)
        if not pending.rows:
            return
        device, counts = self.device, pending.counts
        hidden = self.head.fuse(pending.features())
        query, key, value = self.head.qkv(self.head.embed(pending.tokens(device)), hidden, pending.positions(device))
        key, value = self.cache_writing_at(pool, pending.places).update(key, value, 0)
        # Only the output at each row's last entry is needed; for the others, keys and values are enough.
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        keys = [
            RowKeys(row.row, row.length + count - 1, torch.zeros(1, dtype=torch.int64), _ONE, device)
            for row, count in zip(pending.rows, counts, strict=True)
        ]
        window = self.head.config.sliding_window
        attended = Visibility(keys, query.dtype).attend(query[:, :, last], key, value, Scores(window=window))
        output = self.head.finish(attended.transpose(1, 2), hidden[:, last])[0]
        for row, new in zip(pending.rows, output, strict=True):
            row.hidden = new
        pending.finish()

    def _run(self, cache: KVCache, seen: Visibility, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        query, key, value = self.head.qkv(self.head.embed(tokens), hidden, positions)
        key, value = cache.update(key, value, 0)
        attended = seen.attend(query, key, value, Scores(window=self.head.config.sliding_window))
        return self.head.finish(attended.transpose(1, 2), hidden)

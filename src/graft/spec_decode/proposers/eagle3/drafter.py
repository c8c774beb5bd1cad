"""The eager EAGLE-3 drafter: beam search, one forward of the head for each depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graft.model import KVCache, PagePool
from graft.model.attention import RowKeys, Scores, Visibility
from graft.model.cpu_layers import Fused
from graft.model.noise import ComingDraws
from graft.settings import require
from graft.spec_decode.proposers.drafter import TreeSettings, likeliest
from graft.spec_decode.proposers.eager import PendingEntries
from graft.spec_decode.proposers.eagle3.cpu_head import CpuHead, why_not
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
        self._fused = Fused(head, why_not, CpuHead)  # on a CPU
        self.settings = settings or TreeSettings()
        most = config.draft_vocab_size
        require(self.settings.topk <= most, f"topk is {self.settings.topk}, but the head drafts from {most} tokens")

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> Any:
        if self.device.type == "cpu":
            self._fused.refresh()
        return super().open(cache, texts)

    def _likeliest(self, hidden: Tensor, topk: int, draws: ComingDraws | None, depth: int) -> tuple[Tensor, Tensor]:
        target_ids = self.head.target_ids if draws is not None else None
        draft_ids, q = likeliest(self.head.logits(hidden).float(), topk, draws, depth, target_ids, self.sharpness)
        return self.head.to_target(draft_ids), q

    def _refresh(self, pool: PagePool, rows: Sequence[RecurrentRow]) -> None:
        pending = PendingEntries(rows)
        if not pending.rows:
            return
        device, counts = self.device, pending.counts
        cache = self.cache_writing_at(pool, pending.places)  # before `RowKeys`, because it may add pages to rows
        # Only the output at each row's last entry is needed; for the others, keys and values are enough.
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        keys = [
            RowKeys(row.row, row.length + count - 1, torch.zeros(1, dtype=torch.int64), _ONE, device)
            for row, count in zip(pending.rows, counts, strict=True)
        ]
        features = pending.features()
        seen, tokens, positions = Visibility(keys, features.dtype), pending.tokens(device), pending.positions(device)
        output = self._outputs(cache, seen, tokens, positions, None, features, last)[0]
        for row, new in zip(pending.rows, output, strict=True):
            row.hidden = new
        pending.finish()

    def _run(self, cache: KVCache, seen: Visibility, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return self._outputs(cache, seen, tokens, positions, hidden)

    def _outputs(
        self,
        cache: KVCache,
        seen: Visibility,  # of the wanted entries
        tokens: Tensor,  # [1, T]
        positions: Tensor,  # [1, T]
        hidden: Tensor | None,  # [1, T, H]; None: made from features [1, T, layers * H_t]
        features: Tensor | None = None,
        wanted: Tensor | None = None,  # [n] entries whose outputs are wanted, ascending; None: all
    ) -> Tensor:
        """The head's outputs [1, n, H] at entries, whose keys and values are written."""
        found: Tensor | None = self._fused.run(tokens, cache, seen, positions, hidden, features, wanted)
        if found is not None:
            return found
        if hidden is None:
            assert features is not None
            hidden = self.head.fuse(features)
        query, key, value = self.head.qkv(self.head.embed(tokens), hidden, positions)
        key, value = cache.update(key, value, 0)
        if wanted is not None:
            query, hidden = query[:, :, wanted], hidden[:, wanted]
        attended = seen.attend(query, key, value, Scores(window=self.head.config.sliding_window))
        return self.head.finish(attended.transpose(1, 2), hidden)

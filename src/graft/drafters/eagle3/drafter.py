"""The drafter of EAGLE-3 heads: beam search, one forward of the head for each depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.cpu_head import CpuHead, why_not
from graft.drafters.eagle3.head import Eagle3Head
from graft.drafters.head_drafter import HeadState, NewEntries
from graft.drafters.recurrent import RecurrentDrafter
from graft.model import KVCache
from graft.model.attention import Scores, Visibility
from graft.model.cpu_layers import Fused


class Eagle3Drafter(RecurrentDrafter):
    """Drafts with an EAGLE-3 head."""

    sharpness = 1.2  # fitted on answers to training prompts, see docs/benchmarks.md

    def __init__(self, head: Eagle3Head, settings: TreeSettings | None = None, fast: Any = None) -> None:
        """fast: the head's `FastHead`, where it runs in Triton."""
        config = head.config
        heads = (config.num_key_value_heads, config.head_dim)
        of_head = (config.target_layers, head.fc.weight, 1, heads, heads, fast)
        super().__init__(config.draft_vocab_size, settings, *of_head)
        self.head = head
        self._fused = Fused(head, why_not, CpuHead)  # on a CPU

    @property
    def target_ids(self) -> Tensor:
        return self.head.target_ids

    @property
    def to_target(self) -> Tensor:
        return self.head.d2t.cpu()

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> HeadState:
        if self.device.type == "cpu":
            self._fused.refresh()
        return super().open(cache, texts)

    def entered(self, new: NewEntries) -> Tensor:
        # For all entries but each row's last one, keys and values are enough.
        seen = new.seen(only_last=True)
        return self._outputs(new.cache, seen, new.tokens, new.positions, None, new.features, new.last)[0]

    def outputs(self, cache: KVCache, seen: Visibility, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
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

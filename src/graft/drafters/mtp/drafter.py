"""The drafter of MTP heads: beam search with the MTP layer, which runs at every depth.

An entry of its KV store combines the target's last hidden state at a token with the embedding of the next token.
Drafted entries take the layer's own normed outputs instead of the target's.
"""

from __future__ import annotations

from torch import Tensor

from graft.drafters.drafter import TreeSettings
from graft.drafters.head_drafter import NewEntries
from graft.drafters.mtp.head import MtpHead
from graft.drafters.recurrent import RecurrentDrafter
from graft.model import KVCache
from graft.model.attention import Visibility


class MtpDrafter(RecurrentDrafter):
    """Drafts with the MTP head of the target's checkpoint."""

    def __init__(self, head: MtpHead, settings: TreeSettings | None = None) -> None:
        super().__init__(head.vocab_size, settings, head.target_layers, head.fc.weight, 1, *head.key_value_heads())
        self.head = head

    def entered(self, new: NewEntries) -> Tensor:
        seen = new.seen(only_last=False)
        return self.outputs(new.cache, seen, new.tokens, new.features, new.positions)[0, new.last]

    def outputs(self, cache: KVCache, seen: Visibility, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        outputs: Tensor = self.head(cache, seen, tokens, hidden, positions)
        return outputs

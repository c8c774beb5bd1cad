"""The MTP head: a decoder layer of the target's own class, over the target's hidden state and the next token.

The layer is in a one-layer model of the target's class, which transformers' own code makes and runs. Embedding and
output layer are the target's modules. `checkpoint` reads its files. The drafter keeps the KV cache and the mask.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from graft.model import KVCache
from graft.model.attention import Visibility
from graft.model.overrides import use_tree_attention
from graft.model.runner import num_logits

Heads = tuple[int, int]  # number and size


class MtpHead(nn.Module):
    """The network. Shapes: T tokens, H hidden."""

    def __init__(self, block: PreTrainedModel, target: PreTrainedModel) -> None:
        """block: a model of the target's class whose only layer is the MTP layer."""
        super().__init__()
        embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
        self.block = block.eval()  # before it gets modules of the target, whose mode must not change
        block.set_input_embeddings(embedding)
        block.set_output_embeddings(output)
        width, norm = block.config.hidden_size, block.get_decoder().norm
        # Two more norms of the model's own kind.
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        weight = next(norm.parameters())
        self.fc = nn.Linear(2 * width, width, bias=False, device=weight.device, dtype=weight.dtype)
        # The normed output of the target's last layer, by transformers' numbering of hidden states.
        self.target_layers = (target.config.get_text_config().num_hidden_layers,)
        self.vocab_size = num_logits(target)

    def forward(self, cache: KVCache, seen: Visibility, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Outputs [1, T, H], the next step's `hidden`, of tokens [1, T] after hidden states [1, T, H].

        positions: [1, T], of the hidden states.
        """
        cache.read_until(seen.end)
        with use_tree_attention(self.block, seen):
            output = self.block.get_decoder()(
                inputs_embeds=self.fuse(tokens, hidden),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        normed: Tensor = output.last_hidden_state
        return normed

    def fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The layer's inputs [..., H]. The embedding comes first in `fc`."""
        embedded = self.embedding_norm(self.block.get_input_embeddings()(tokens))
        fused: Tensor = self.fc(torch.cat([embedded, self.hidden_norm(hidden)], dim=-1))
        return fused

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of the next token, from the output of `forward`."""
        logits: Tensor = self.block.get_output_embeddings()(hidden)
        return logits

    @torch.no_grad()
    def key_value_heads(self) -> tuple[Heads, Heads]:
        """Number and size of heads of the layer's keys, and of its values."""
        cache: Any = DynamicCache(config=self.block.config)
        inputs = self.fc.weight.new_zeros(1, 1, self.fc.out_features)
        self.block.get_decoder()(inputs_embeds=inputs, past_key_values=cache, use_cache=True)
        states = cache.layers[0].keys, cache.layers[0].values
        for module in self.block.modules():
            if hasattr(module, "expand_kv"):  # the cache has latents
                states = module.expand_kv(*states)
        keys, values = ((part.shape[1], part.shape[3]) for part in states)
        return keys, values

"""Fused forward of a block head over the tensors of a KV store, for draft passes in CUDA graphs.

As in `model/llama.py`, weights that one product takes together are concatenated once, and the head's parameters become
views of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graft.model.attention import KernelStep
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import rotary as rotary_kernels
from graft.model.kernels.matmul import Products
from graft.model.layout import Layout
from graft.model.llama import Layer, LayerStack, Rotary, fuse_parameters, llama_layer
from graft.spec_decode.proposers import capturable
from graft.spec_decode.proposers.block import kernels as block_kernels
from graft.spec_decode.proposers.block.head import BlockHead


class FastBlock:
    """The head's decoder layers in few kernels, for entries and for blocks."""

    def __init__(self, head: BlockHead) -> None:
        """head: one for which `why_not` is None."""
        config, layers = head.config, list[Any](head.layers)
        self.head, self.config = head, config
        embedding = head.embed_tokens.weight if config.own_embedding else head.target_embedding
        assert embedding is not None
        self._embedding = embedding.detach()
        mask = head.mask_embedding if config.own_mask else self._embedding[config.mask_token_id]
        self._mask = mask.detach().to(self._embedding.dtype)
        self._fc, self._hidden_norm = head.fc.weight.detach(), head.hidden_norm.weight.detach()
        # Weights of q, k and v, [layers, outputs, inputs]: one product gives the keys and values of all layers.
        attentions = [layer.self_attn for layer in layers]
        projections = [p.weight for own in attentions for p in (own.q_proj, own.k_proj, own.v_proj)]
        self._qkv = fuse_parameters(projections).unflatten(0, (len(layers), -1))
        self._num_queries = config.num_attention_heads * config.head_dim
        self._multiply = Products(self._embedding.device)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        what = [
            llama_layer(layer, *heads, config.rms_norm_eps, window)
            for layer, window in zip(layers, config.windows, strict=True)
        ]
        norms: list[Any] = [(own.mixer.q_norm, own.mixer.k_norm) for own in what if own.mixer.q_norm is not None]
        by_layer = [torch.stack([norm.weight.detach() for norm in each]) for each in zip(*norms, strict=True)]
        self._head_norms = (by_layer[0], by_layer[1], norms[0][0].eps) if norms else None  # [layers, head_dim]
        self._stack = LayerStack(list(map(Layer.of, what, self._qkv)), self._multiply)

    @property
    def tile(self) -> int:
        """Slots in a tile of the attention kernel."""
        tiles = attention_kernels.tiles_for(self.config.head_dim, self._embedding.dtype)
        return tiles.tokens(self.config.num_attention_heads // self.config.num_key_value_heads)

    def rotary(self, num_positions: int) -> Rotary:
        return Rotary.of(self.head.rotary, self._fc, num_positions)

    def enter(self, features: Tensor, layout: Layout, keys: Tensor, values: Tensor, rotary: Rotary) -> None:
        """Write the keys and values of entries with the target's features [E, taps * H_t] to the store.

        keys, values: [layers, slots, kv_heads, head_dim].
        """
        fused = self._multiply(features, self._fc)
        _, hidden = layer_kernels.add_norm(fused, None, self._hidden_norm, self.config.rms_norm_eps)
        weights = self._qkv[:, self._num_queries :]
        projected = torch.bmm(hidden.expand(len(weights), -1, -1), weights.mT)  # [layers, E, 2 * kv_heads * head_dim]
        rotary_kernels.rotate_and_store(projected, keys, values, layout, rotary.cos, rotary.sin, self._head_norms)

    def run(
        self,
        roots: Tensor,  # [R] int32
        step: KernelStep,  # of R * block_size slots
        seen: Sequence[KernelStep],  # by layer
        keys: Tensor,  # [layers, slots, kv_heads, head_dim]
        values: Tensor,
        rotary: Rotary,
    ) -> Tensor:
        """Hidden states [R, K, H] of the predicting slots, before the final norm."""
        width = self.config.block_size
        slots = block_kernels.slots(roots, self._embedding, self._mask, width)
        stored = list(zip(keys, values, strict=True))
        _, stream, last = self._stack(slots, step, stored, [rotary] * len(stored), seen)
        assert isinstance(last.delta, Tensor)
        return self.head.predicting((stream + last.delta).unflatten(0, (-1, width)))


def why_not(head: BlockHead) -> str | None:
    """The reason why the head cannot be captured; None if it can."""
    config = head.config
    # The kernels apply a window to earlier positions only.
    if any(window and not causal for causal, window in zip(config.causal, config.windows, strict=True)):
        return "it has a window of attention without being causal"
    return capturable.why_not(head)

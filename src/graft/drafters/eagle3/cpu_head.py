"""Fused forward of the EAGLE-3 head on a CPU: its layer and all around it are one call of `model/cpu_layers.c`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from graft.drafters.draft_head import Rotary
from graft.drafters.eagle3.head import DecoderLayer, Eagle3Head, Projections
from graft.model import network
from graft.model.attention import Visibility
from graft.model.cpu_layers import CpuLayers, all_readable
from graft.model.cpu_linear import MAX_TOKENS, FewTokensLinear
from graft.model.families import MAX_HEAD_DIM
from graft.model.kv_cache import KVCache
from graft.model.plain_modules import changed_module, has_only_weights

_KINDS = {
    *(Eagle3Head, DecoderLayer, Projections, LlamaMLP, Rotary),
    *(FewTokensLinear, nn.RMSNorm, SiLUActivation, nn.Embedding, nn.ModuleList),
}


class CpuHead(CpuLayers):
    """A head in fused layers."""

    max_tokens = MAX_TOKENS  # more are those of a prompt, for which torch's large products are faster

    def __init__(self, head: Eagle3Head) -> None:
        """head: one for which `why_not` is None."""
        config, layer = head.config, head.midlayer
        attention, mlp, heads = layer.self_attn, layer.mlp, (config.num_attention_heads, config.num_key_value_heads)
        before: Any = head.fc_norm if config.fc_norm else [head.input_norm] if config.norm_before_fc else []
        rotary = network.Rotary(head.rotary, None, config.head_dim)
        described = network.Layer(
            pre=_norm_of(layer.input_layernorm),
            mixer=network.Attention(
                (attention.q_proj, attention.k_proj, attention.v_proj),
                *(attention.o_proj, *heads, config.head_dim, config.head_dim**-0.5),
                q_norm=_norm_of(attention.q_norm) if config.head_norms else None,
                k_norm=_norm_of(attention.k_norm) if config.head_norms else None,
                rotary=rotary,
            ),
            post=None,
            pre_mlp=_norm_of(layer.post_attention_layernorm),
            mlp=network.Mlp((mlp.gate_proj, mlp.up_proj), mlp.down_proj, "silu"),
            post_mlp=None,
        )
        super().__init__(
            *(head, [described], _norm_of(head.norm)),
            fc=head.fc,
            feature_norms=list(map(_norm_of, before)),
            stream_norm=_norm_of(layer.hidden_norm),
            adds_to_normed=config.norm_before_residual,
        )
        self._head = head

    def run(
        self,
        tokens: Tensor,
        cache: KVCache,
        seen: Visibility,
        positions: Tensor,
        hidden: Tensor | None,
        features: Tensor | None = None,
        outputs: Tensor | None = None,
    ) -> Tensor | None:
        """As `Eagle3Drafter._outputs`. None: a weight has changed, and the layers must be made anew."""
        head = self._head
        embeddings = head.embed(tokens)[0]
        stream = (
            embeddings.new_empty(embeddings.shape)
            if hidden is None
            else hidden[0].clone(memory_format=torch.contiguous_format)
        )
        found = self.run_layers(cache, seen, stream, positions[0], (), embeddings, features, outputs=outputs)
        if found is None:
            return None
        normed = found[0]
        return (normed if head.config.norm_output else stream[: len(normed)])[None]


def _norm_of(norm: nn.Module) -> network.Norm:
    plain: Any = norm
    return network.Norm(plain, plain.eps)


def why_not(head: Eagle3Head) -> str | None:
    """The reason why the library cannot run a head whose linear layers `speed_up` has replaced; None if it can."""
    config, parts = head.config, list(head.modules())
    if (other := next((part for part in parts if type(part) not in _KINDS), None)) is not None:
        return f"it has a {type(other).__name__}"
    if (touched := changed_module(head)) is not None:
        return f"{touched} has a hook or a forward of its own"
    linear: list[Any] = [part for part in parts if isinstance(part, nn.Linear)]
    if any(part.bias is not None or not has_only_weights(part, FewTokensLinear) for part in linear):
        return "a linear layer has more than a weight"
    if any(part.eps != config.rms_norm_eps for part in parts if isinstance(part, nn.RMSNorm)):
        return "its norms differ in more than their weights"
    if config.sliding_window is not None or config.head_dim > MAX_HEAD_DIM:
        return "it has a window of attention, or large heads"
    embedding = [head.target_embedding] if head.target_embedding is not None else []
    return None if all_readable([*head.parameters(), *embedding]) else "its weights are not plain float32 tensors"

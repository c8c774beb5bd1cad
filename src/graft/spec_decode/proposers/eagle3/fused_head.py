"""Fused forward of the EAGLE-3 head over the tensors of a KV store, for draft passes in CUDA graphs.

As in `model/llama.py`, weights that one product takes together are concatenated once, and the head's parameters become
views of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graft.model.attention import KernelStep
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.matmul import Products
from graft.model.llama import Rotary, attend_in_store, fuse_parameters
from graft.spec_decode.proposers.eagle3 import kernels as eagle3_kernels
from graft.spec_decode.proposers.eagle3.head import Eagle3Head
from graft.tree.device.noise import DraftDraws


class FastHead:
    """The head's decoder layer and top-k output, in few kernels."""

    def __init__(self, head: Eagle3Head) -> None:
        """head: one for which `capturable.why_not` is None."""
        layer: Any = head.midlayer
        attention = layer.self_attn
        self.head, self.config = head, head.config
        embedding = head.embed_tokens.weight if head.config.own_embedding else head.target_embedding
        assert embedding is not None
        self._embedding = embedding.detach()
        self._norms = (layer.input_layernorm.weight.detach(), layer.hidden_norm.weight.detach())
        self._mlp_norm, self._norm = layer.post_attention_layernorm.weight.detach(), head.norm.weight.detach()
        norms: Any = head.fc_norm if head.config.fc_norm else ()
        self._feature_norms = fuse_parameters([norm.weight for norm in norms]).view(len(norms), -1) if norms else None
        self._qkv = fuse_parameters([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        self._o = attention.o_proj.weight.detach()
        self._gate_up = fuse_parameters([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        self._down, self._lm_head = layer.mlp.down_proj.weight.detach(), head.lm_head.weight.detach()
        self._multiply = Products(self._o.device)

    def rotary(self, num_positions: int) -> Rotary:
        return Rotary.of(self.head.rotary, self._qkv, num_positions)

    def fuse(self, features: Tensor) -> Tensor:
        """As `Eagle3Head.fuse`, with one kernel for the norms of all layers' features [T, layers * H_t]."""
        if self._feature_norms is None:
            return self.head.fuse(features)
        each = features.view(-1, self.config.target_hidden_size)
        _, normed = layer_kernels.add_norm(each, None, self._feature_norms, self.config.rms_norm_eps)
        return self.head.fc(normed.view_as(features))

    def run(
        self,
        tokens: Tensor,  # [T] int32 the token after each entry's own
        hidden: Tensor,  # [F, H] features
        origins: Tensor | None,  # [T] int32 whose features each entry takes; its own if None
        step: KernelStep,
        keys: Tensor,  # [slots, kv_heads, head_dim]
        values: Tensor,
        rotary: Rotary,
        out: Tensor | None = None,
    ) -> Tensor:
        """Outputs [T, H] of the entries: the features of the next ones. They are written to `out`, if given.

        `out` may be `hidden`.
        """
        config, eps, multiply = self.config, self.config.rms_norm_eps, self._multiply
        both, stream = eagle3_kernels.enter(
            tokens, self._embedding, hidden, origins, self._norms, eps, config.norm_before_residual
        )
        qkv = multiply(both, self._qkv)
        attended = attend_in_store(
            qkv, keys, values, step, rotary, config.num_attention_heads, window=config.sliding_window
        )
        delta = multiply(attended, self._o)
        stream, normed = layer_kernels.add_norm(stream, delta, self._mlp_norm, eps)
        delta = multiply(multiply.activate(normed, self._gate_up), self._down)
        if config.norm_output:
            return layer_kernels.add_norm(stream, delta, self._norm, eps, normed=out)[1]
        return layer_kernels.add_norm(stream, delta, self._norm, eps, total=out)[0]

    def likeliest(self, hidden: Tensor, k: int, draws: DraftDraws | None) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k draft ids after each output [R, H], their logits, and each row's logsumexp; see `topk.highest`."""
        if not self.config.norm_output:
            _, hidden = layer_kernels.add_norm(hidden, None, self._norm, self.config.rms_norm_eps)
        return topk_kernels.highest(self._multiply(hidden, self._lm_head), k, draws)

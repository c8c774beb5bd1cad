"""The EAGLE-3 head: one decoder layer that reads the target's hidden states and drafts the next tokens.

Only the network is here. `checkpoint` reads and writes its files. Drafters and the trainer keep the KV cache and the
attention mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from graft.drafters.draft_head import DraftHead, HeadConfig, layer_shape
from graft.model.attention import attend
from graft.settings import check_size, require

KeyValue = tuple[Tensor, Tensor]  # each [B, kv_heads, W, head_dim]


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Config of an EAGLE-3 head."""

    norm_before_fc: bool = False  # one norm over the concatenated features
    fc_norm: bool = False  # a norm for each layer's features
    norm_before_residual: bool = False  # the residual is the normed hidden
    norm_output: bool = False  # the normed output is fed back
    head_norms: bool = False  # norms of queries and keys, before they turn
    sliding_window: int | None = None  # tokens that are seen, itself included; all if None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        require(not (self.norm_before_fc and self.fc_norm), "norm_before_fc and fc_norm exclude each other: choose one")

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **changes: Any) -> Self:
        """Config of a new head with the shape of the target's own layers, and `changes`."""
        layers = default_target_layers(target.get_text_config().num_hidden_layers)
        return cls.of({**layer_shape(target), "target_layers": layers, **changes})


def default_target_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 reads: an early, a middle and a late one, also in tiny models."""
    early, middle, late = sorted((min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)))
    return early, middle, late


class Eagle3Head(DraftHead):
    """The network. Parameters have the names of SafeAILab's files. Shapes: B rows, W tokens, H hidden, D head_dim."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        num_features, width = len(config.target_layers), config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_features * width, eps=config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(num_features))
        self.fc = nn.Linear(num_features * width, config.hidden_size, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        """One hidden state [B, W, H] from the target's concatenated ones, [B, W, layers * H_t]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            each = features.split(self.config.target_hidden_size, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, each, strict=True)], dim=-1)
        return self.fc(features)

    def qkv(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, heads, W, D], k and v [B, kv_heads, W, D] of [B, W, H] inputs at `positions` [B, W], rotated."""
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)  # [B, W, 2H]
        attention = layer.self_attn
        query, key, value = (
            projection(both).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.config.head_norms:
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(both, positions))
        return query, key, value

    def finish(self, attention: Tensor, hidden: Tensor) -> Tensor:
        """From the attention output [B, heads, W, D] to the layer's output [B, W, H], the next step's `hidden`."""
        layer = self.midlayer
        residual = layer.hidden_norm(hidden) if self.config.norm_before_residual else hidden
        hidden = residual + layer.self_attn.o_proj(attention.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.config.norm_output else hidden

    def forward(
        self,
        embeddings: Tensor,  # [B, W, H]
        hidden: Tensor,  # [B, W, H]
        positions: Tensor,  # [B, W]
        past: KeyValue | None = None,  # of S earlier tokens
        mask: Tensor | None = None,  # [B, 1, W, S + W] bool (True is seen) or additive; causal if None
    ) -> tuple[Tensor, KeyValue]:
        """The output [B, W, H] and the new tokens' keys and values."""
        query, new_key, new_value = self.qkv(embeddings, hidden, positions)
        key, value = new_key, new_value
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        if mask is None:
            width, num_keys = query.shape[2], key.shape[2]
            seen = torch.ones(width, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - width)
            if self.config.sliding_window is not None:
                seen = seen.triu(num_keys - width - self.config.sliding_window + 1)
            mask = seen.expand(query.shape[0], 1, -1, -1)
        folded = mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
        return self.finish(attend(query, key, value, folded), hidden), (new_key, new_value)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., draft_vocab] of the next token, from the output of `finish`."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))


class DecoderLayer(nn.Module):
    """The layer's parameters, which `Eagle3Head` uses."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Projections(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config.llama())


class Projections(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        both, heads, kv_heads = 2 * config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(both, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(both, kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(both, kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=False)
        if config.head_norms:
            self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) for _ in range(2))

"""The EAGLE-3 head: one decoder layer that reads the target's hidden states and drafts the next tokens.

Only the network lives here: `checkpoint` reads and writes its files; drafters and the trainer keep the KV cache and
the attention mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from graft.errors import GraftError
from graft.model.attention import attend
from graft.settings import Settings, require

KeyValue = tuple[Tensor, Tensor]  # each [B, kv_heads, W, head_dim]
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class Eagle3Config(Settings):
    """Config of a head. `target_layers` are the target's layers whose inputs it reads, in this order."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_layers: tuple[int, ...]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    own_embedding: bool = False  # else the target's
    norm_before_fc: bool = False  # one norm over the concatenated features
    fc_norm: bool = False  # one norm for each layer's features
    norm_before_residual: bool = False  # the residual is the normed hidden
    norm_output: bool = False  # the normed output is fed back, not the plain one
    sliding_window: int | None = None  # how many tokens back are seen, itself included; all if None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "target_hidden_size",
            "vocab_size",
            "draft_vocab_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_size(name, getattr(self, name))
        require(
            self.draft_vocab_size <= self.vocab_size,
            f"the draft vocabulary ({self.draft_vocab_size:,}) is larger than the target's ({self.vocab_size:,})",
        )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"{self.num_attention_heads} attention heads do not share {self.num_key_value_heads} key heads evenly",
        )
        require(self.head_dim % 2 == 0, f"head_dim must be even for rotary positions, not {self.head_dim}")
        require(
            len(self.target_layers) > 0 and all(isinstance(layer, int) and layer >= 0 for layer in self.target_layers),
            f"target_layers must name at least one layer, none negative, not {self.target_layers}",
        )
        require(
            self.own_embedding or self.hidden_size == self.target_hidden_size,
            f"a head of width {self.hidden_size} needs an embedding of its own: "
            f"the target's is {self.target_hidden_size} wide",
        )
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        require(not (self.norm_before_fc and self.fc_norm), "norm_before_fc and fc_norm exclude each other: choose one")
        eps = self.rms_norm_eps
        require(isinstance(eps, float) and eps > 0, f"rms_norm_eps must be a positive number, not {eps!r}")
        kind = self.rope.get("rope_type")
        require(kind in _ROPE_TYPES, f"rope_type {kind!r} is not one of {', '.join(_ROPE_TYPES)}")
        require(self.rope.get("partial_rotary_factor", 1.0) == 1.0, "rotary positions for a part of a head only")
        try:
            _Rotary(self.llama())
        except (KeyError, TypeError) as error:
            raise GraftError(f"the rotary parameters {self.rope} are not usable: {error.args[0]}") from error

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **changes: Any) -> Self:
        """A new head's shape: that of one of the target's own layers, with `changes`."""
        text = target.get_text_config()
        heads = text.num_attention_heads
        shape = {
            "hidden_size": text.hidden_size,
            "target_hidden_size": text.hidden_size,
            "vocab_size": text.vocab_size,
            "draft_vocab_size": text.vocab_size,
            "intermediate_size": text.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "target_layers": default_target_layers(text.num_hidden_layers),
            "max_position_embeddings": text.max_position_embeddings,
        }
        return cls.of(shape | changes)

    def llama(self) -> LlamaConfig:
        """The same config for transformers' own modules."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope),
        )


def check_size(name: str, value: Any) -> None:
    require(isinstance(value, int) and value > 0, f"{name} must be a positive whole number, not {value!r}")


def default_target_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 reads: an early, the middle and a late one; within the model even if it is tiny."""
    early, middle, late = sorted((min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)))
    return early, middle, late


class Eagle3Head(nn.Module):
    """The network. Parameters have the names of SafeAILab's files. Shapes: B rows, W tokens, H hidden, D head_dim."""

    d2t: Tensor
    t2d: Tensor
    target_embedding: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        num_features, width = len(config.target_layers), config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_features * width, eps=config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(num_features))
        self.fc = nn.Linear(num_features * width, config.hidden_size, bias=False)
        self.midlayer = _DecoderLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.register_buffer("target_embedding", None, persistent=False)  # [vocab, H], borrowed, never saved
        with torch.device("cpu"):  # real numbers even where the parameters are only laid out, on "meta"
            self.rotary = _Rotary(config.llama())
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def borrow_embedding(self, weight: Tensor) -> None:
        """Take the target's embedding [vocab, H] for that of a head that has none. It stays the target's."""
        rows, width = weight.shape
        require(
            rows >= self.config.vocab_size and width == self.config.hidden_size,
            f"the target's embedding is [{rows:,}, {width:,}], not [{self.config.vocab_size:,}, "
            f"{self.config.hidden_size:,}]",
        )
        self.target_embedding = weight.detach()

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Let draft id i stand for target id `target_ids[i]`."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()[target_ids] = True

    def embed(self, tokens: Tensor) -> Tensor:
        """Target ids [B, W] as [B, W, H], by the head's own embedding or the target's."""
        weight = self.embed_tokens.weight if self.config.own_embedding else self.target_embedding
        if weight is None:
            raise GraftError("this head has no embedding of its own: `borrow_embedding` gives it the target's")
        return nn.functional.embedding(tokens, weight)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's hidden states [B, W, layers * H_t], concatenated, as one hidden [B, W, H]."""
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
        mask: Tensor | None = None,  # [B, 1, W, S + W] bool (True is seen) or additive; None: what came before
    ) -> tuple[Tensor, KeyValue]:
        """The output [B, W, H] and the new tokens' keys and values, which the caller keeps."""
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

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return draft_ids + self.d2t[draft_ids]


class _DecoderLayer(nn.Module):
    """The layer's parameters; `Eagle3Head` says what is done with them."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Projections(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config.llama())


class _Projections(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        both, heads, kv_heads = 2 * config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(both, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(both, kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(both, kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=False)


class _Rotary(LlamaRotaryEmbedding):
    """Rotary embedding whose frequencies stay float32 when the head is cast: bf16 would merge far positions."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

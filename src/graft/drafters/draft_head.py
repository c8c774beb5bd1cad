"""Base of the draft heads in `eagle3` and `block`: shape, embedding, draft vocabulary, rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graft.errors import GraftError
from graft.settings import Settings, check_size, require

# Sizes that have the same names in config.json.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class HeadConfig(Settings):
    """Shape of a head and its target. It reads the inputs of `target_layers`, in this order."""

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

    def __post_init__(self) -> None:
        for name in (*SIZES, "target_hidden_size", "draft_vocab_size"):
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
        eps = self.rms_norm_eps
        require(isinstance(eps, float) and eps > 0, f"rms_norm_eps must be a positive number, not {eps!r}")
        kind = self.rope.get("rope_type")
        require(kind in _ROPE_TYPES, f"rope_type {kind!r} is not one of {', '.join(_ROPE_TYPES)}")
        require(self.rope.get("partial_rotary_factor", 1.0) == 1.0, "partial rotary positions are not supported")
        try:
            Rotary(self.llama())
        except (KeyError, TypeError) as error:
            raise GraftError(f"the rotary parameters {self.rope} are not usable: {error.args[0]}") from error

    def llama(self) -> LlamaConfig:
        """The config for transformers' modules."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope),
        )


def layer_shape(target: PreTrainedConfig) -> dict[str, Any]:
    """Arguments of `HeadConfig`, except `target_layers`, for the shape of the target's own layers."""
    text = target.get_text_config()
    heads = text.num_attention_heads
    return {
        "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "max_position_embeddings": text.max_position_embeddings,
    }


class DraftHead(nn.Module):
    """Base of the networks: token embedding and draft vocabulary, each of which may be the target's."""

    config: HeadConfig
    fc: nn.Linear  # of the target's features
    d2t: Tensor
    t2d: Tensor
    target_embedding: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.register_buffer("target_embedding", None, persistent=False)  # [vocab, H], borrowed, never saved
        with torch.device("cpu"):  # not on "meta", even if the parameters are
            self.rotary = Rotary(config.llama())
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def borrow_embedding(self, weight: Tensor) -> None:
        """Use the target's embedding [vocab, H]."""
        self.target_embedding = self._fitting("embedding", weight)

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Let draft id i mean target id `target_ids[i]`."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()[target_ids] = True

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed target ids [...] as [..., H], by the head's own embedding or the target's."""
        weight = self.embed_tokens.weight if self.config.own_embedding else self.target_embedding
        if weight is None:
            raise GraftError("this head has no embedding of its own: `borrow_embedding` gives it the target's")
        return nn.functional.embedding(tokens, weight)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return draft_ids + self.d2t[draft_ids]

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary] the target id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def _fitting(self, what: str, weight: Tensor) -> Tensor:
        """The target's weight [vocab, H], detached; a GraftError if its shape differs."""
        rows, width = weight.shape
        vocab_size, hidden_size = self.config.vocab_size, self.config.hidden_size
        require(
            rows >= vocab_size and width == hidden_size,
            f"the target's {what} is [{rows:,}, {width:,}], not [{vocab_size:,}, {hidden_size:,}]",
        )
        return weight.detach()


class Rotary(LlamaRotaryEmbedding):
    """Rotary embedding whose frequencies stay float32 when the head is cast: in bf16 far positions would be equal."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

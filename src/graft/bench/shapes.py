"""Sizes of large models' layers, by name or as numbers, for cost emulation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from graft.errors import GraftError
from graft.settings import Settings, check_size, require, require_known

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from graft.drafters.draft_head import HeadConfig


_OF_EXPERTS = ("experts", "experts_per_token", "neurons")


@dataclass(frozen=True)
class ModelShape(Settings):
    """Sizes of a model's layers, which decide its cost, without the vocabulary."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    # Experts beside an MLP for all tokens, which has `intermediate` neurons; 0: there are none.
    experts: int = 0
    experts_per_token: int = 0
    neurons: int = 0  # of an expert; `intermediate` is a multiple of it

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in _OF_EXPERTS or self.experts:
                check_size(field.name, getattr(self, field.name))
        if self.experts:
            is_whole = self.intermediate % self.neurons == 0
            require(is_whole, f"intermediate={self.intermediate} must be a multiple of neurons={self.neurons}")
            require(
                self.experts_per_token <= self.experts,
                f"experts_per_token={self.experts_per_token} is more than the {self.experts} experts",
            )
        for whole, part in (("heads", "kv_heads"), ("hidden", "heads")):
            all_of, each = getattr(self, whole), getattr(self, part)
            require(all_of % each == 0, f"{whole} must be a multiple of {part}, but {all_of} is not one of {each}")
        require(self.head_dim % 2 == 0, f"head_dim must be even for rotary positions, not {self.head_dim}")

    @staticmethod
    def named(name: str) -> ModelShape:
        """A shape by name, or by numbers such as layers=32,hidden=4096,..."""
        if "=" not in name:
            require_known("shape", name, SHAPES)
            return SHAPES[name]
        numbers: dict[str, Any] = {}
        for part in name.split(","):
            key, _, value = part.partition("=")
            number = value.strip()
            numbers[key.strip()] = int(number) if number.isdecimal() else number
        if missing := [field.name for field in fields(ModelShape) if field.name not in {*numbers, *_OF_EXPERTS}]:
            raise GraftError(f"shape {name!r} lacks {', '.join(missing)}")
        return ModelShape.of(numbers)

    @classmethod
    def of_config(cls, config: LlamaConfig | HeadConfig) -> Self:
        """The shape of a model or of a head."""
        from graft.drafters.block.config import BlockConfig  # needs torch, unlike shapes

        return cls(
            layers=config.num_layers if isinstance(config, BlockConfig) else getattr(config, "num_hidden_layers", 1),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        )

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def attention_and_mlp(self) -> dict[str, Any]:
        """The sizes of a layer by their names in configs."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


SHAPES = {
    "llama-1b5": ModelShape(layers=32, hidden=2048, intermediate=5632, heads=32, kv_heads=8, head_dim=64),
    "llama-8b": ModelShape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128),
    "qwen-32b": ModelShape(layers=64, hidden=5120, intermediate=25600, heads=64, kv_heads=8, head_dim=128),
    # With heads of 128 numbers in place of 256, so that a small model's nine heads fit.
    "gemma3-4b": ModelShape(layers=34, hidden=2560, intermediate=10240, heads=16, kv_heads=4, head_dim=128),
    # A small model's MLP has the place of two of the 8 experts of a token, or of one of 4; all tokens read it.
    "qwen3-30b-a3b": ModelShape(48, 2048, 1536, 32, 4, 128, experts=126, experts_per_token=6, neurons=768),
    "gpt-oss-20b": ModelShape(24, 2880, 2880, 64, 8, 64, experts=31, experts_per_token=3, neurons=2880),
}

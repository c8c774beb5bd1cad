"""Sizes of large models' layers, by name or as numbers, for cost emulation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from graft.errors import GraftError
from graft.settings import Settings, check_size, require, require_known

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from graft.spec_decode.proposers.draft_head import HeadConfig


@dataclass(frozen=True)
class ModelShape(Settings):
    """Sizes of a Llama's layers, which decide its cost, without the vocabulary."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for field in fields(self):
            check_size(field.name, getattr(self, field.name))
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
        if missing := [field.name for field in fields(ModelShape) if field.name not in numbers]:
            raise GraftError(f"shape {name!r} lacks {', '.join(missing)}")
        return ModelShape.of(numbers)

    @classmethod
    def of_config(cls, config: LlamaConfig | HeadConfig) -> Self:
        """The shape of a model or of a head."""
        from graft.spec_decode.proposers.block.config import BlockConfig  # needs torch, unlike shapes

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
}

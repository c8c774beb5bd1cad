"""Model sizes that determine cost: by name, by numbers, or from a folder's config.json."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from graft.bench.shapes import SHAPES, Shape
from graft.errors import GraftError, ModelError
from graft.files import read_json
from graft.settings import require

BYTES = 2  # per weight and per number in the KV cache: bf16
_EXTRA = ("vocab", "experts", "active_experts")  # optional numbers that a Shape does not have


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers. In a mixture of experts, `shape.intermediate` is the size of one expert."""

    name: str
    shape: Shape
    vocab: int = 128_256
    experts: int = 0  # per layer; 0 is one dense MLP
    active_experts: int = 0  # per token
    tied: bool = False  # the embedding is also the lm_head

    def __post_init__(self) -> None:
        require(self.vocab >= 1, f"vocab must be at least 1, not {self.vocab}")
        require(
            0 <= self.active_experts <= self.experts and bool(self.active_experts) == bool(self.experts),
            f"active_experts must be between 1 and experts, not {self.active_experts} of {self.experts}",
        )

    @staticmethod
    def named(name: str) -> ModelShape:
        """A model by name, by numbers as in layers=32,hidden=4096, or by a folder with a config.json."""
        if "=" in name:
            return _of_numbers(name)
        if Path(name).is_dir():
            return _of_folder(Path(name))
        require(
            name in MODELS,
            f"unknown model {name!r}; known: {', '.join(MODELS)}; a folder with config.json; or layers=..,hidden=..",
        )
        return MODELS[name]

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's q, k, v and o projections."""
        shape = self.shape
        return shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Weights of a layer's MLP, or of one expert."""
        return 3 * self.shape.hidden * self.shape.intermediate

    @property
    def router_weights(self) -> int:
        return self.shape.hidden * self.experts

    @property
    def parameters(self) -> int:
        """All weights except those of norms."""
        layer = self.attention_weights + self.mlp_weights * max(self.experts, 1) + self.router_weights
        return self.shape.layers * layer + self.vocab * self.shape.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: of experts only its own, and no embedding."""
        layer = self.attention_weights + self.mlp_weights * max(self.active_experts, 1) + self.router_weights
        return self.shape.layers * layer + self.vocab * self.shape.hidden

    def experts_touched(self, num_tokens: float) -> float:
        """Share of a layer's experts that at least one token uses, if tokens choose independently."""
        return 1 - (1 - self.active_experts / self.experts) ** num_tokens if self.experts else 1.0

    def weights_read(self, num_tokens: float) -> float:
        """Weights that a step reads."""
        mlp = self.mlp_weights * max(self.experts, 1) * self.experts_touched(num_tokens)
        layer = self.attention_weights + self.router_weights + mlp
        return self.shape.layers * layer + self.vocab * self.shape.hidden

    @property
    def cache_numbers(self) -> int:
        """Numbers in the KV cache per token, in all layers."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim

    @property
    def head_intermediate(self) -> int:
        """MLP size of a draft head: as many neurons as a token uses in a layer of the target."""
        return self.shape.intermediate * max(self.active_experts, 1)


MODELS = {
    model.name: model
    for model in (
        ModelShape("llama-1b5", SHAPES["llama-1b5"]),
        ModelShape("llama-8b", SHAPES["llama-8b"]),
        ModelShape("qwen-32b", SHAPES["qwen-32b"], vocab=151_936),
        ModelShape("llama-70b", Shape(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128)),
        ModelShape(
            "qwen3-30b-a3b",
            Shape(layers=48, hidden=2048, intermediate=768, heads=32, kv_heads=4, head_dim=128),
            vocab=151_936,
            experts=128,
            active_experts=8,
        ),
        ModelShape(
            "qwen3-235b",
            Shape(layers=94, hidden=4096, intermediate=1536, heads=64, kv_heads=4, head_dim=128),
            vocab=151_936,
            experts=128,
            active_experts=8,
        ),
    )
}


def _of_numbers(text: str) -> ModelShape:
    """A model from the numbers of a Shape, as for `--as-cost-of`, and optionally those in `_EXTRA`."""
    extra: dict[str, Any] = {}
    numbers = []
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _EXTRA:
            numbers.append(part)
            continue
        require(value.isdecimal(), f"{key} must be a whole number, not {value!r}")
        extra[key] = int(value)
    if not numbers:
        raise GraftError(f"model {text!r} does not say {', '.join(field.name for field in fields(Shape))}")
    return ModelShape(text, Shape.named(",".join(numbers)), **extra)


def _of_folder(folder: Path) -> ModelShape:
    """A model from its config.json, without loading any code."""
    path = folder / "config.json"
    config = read_json(path)
    if isinstance(config, dict):
        config = config.get("text_config", config)  # of a model that sees too
    require(isinstance(config, dict), f"{path} is not a model's config")
    require(not config.get("kv_lora_rank"), f"{path}: the cost model does not cover multi-head latent attention")
    shared = config.get("n_shared_experts") or config.get("shared_expert_intermediate_size")
    require(not shared, f"{path}: the cost model does not cover shared experts")
    experts = _whole(path, config, "num_experts", "num_local_experts", "n_routed_experts", default=0)
    neurons = ("moe_intermediate_size", "intermediate_size") if experts else ("intermediate_size",)
    heads = _whole(path, config, "num_attention_heads")
    hidden = _whole(path, config, "hidden_size")
    shape = Shape(
        layers=_whole(path, config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_whole(path, config, *neurons),
        heads=heads,
        kv_heads=_whole(path, config, "num_key_value_heads", default=heads),
        head_dim=_whole(path, config, "head_dim", default=hidden // heads),
    )
    return ModelShape(
        folder.resolve().name,
        shape,
        vocab=_whole(path, config, "vocab_size"),
        experts=experts,
        active_experts=_whole(path, config, "num_experts_per_tok") if experts else 0,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _whole(path: Path, config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """The whole number that a config gives under the first of `names` it has."""
    for name in names:
        if (value := config.get(name)) is not None:
            least = 1 if default is None else min(default, 1)
            good = isinstance(value, int) and not isinstance(value, bool) and value >= least
            require(good, f"{path}: {name} must be a whole number of at least {least}, not {value!r}")
            return int(value)
    if default is None:
        raise ModelError(f"{path} does not say {names[0]}")
    return default

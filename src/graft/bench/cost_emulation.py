"""The cost emulation: a small model, and its head, made as wide and deep as a large one without changing what they say.

Text, drafts and accepted lengths stay the small model's; memory traffic and arithmetic become the large shape's.
Whatever is added is random where it is only computed with, and zero where the small model would hear of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graft.device_info import free_memory
from graft.errors import GraftError
from graft.model.cpu_linear import speed_up
from graft.settings import Settings, require, require_known
from graft.spec_decode.proposers.eagle3.head import Eagle3Config, Eagle3Head, check_size

_NOISE = 0.02  # standard deviation of random weights: their products stay far from overflow in every dtype
_SEED = 0
_ROPE_BY_FREQUENCY = ("default", "linear", "llama3")  # what a frequency becomes is a matter of its own value only


@dataclass(frozen=True)
class Shape(Settings):
    """What a Llama costs, its vocabulary apart."""

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
    def named(name: str) -> Shape:
        """A shape by name, or by its numbers: layers=32,hidden=4096, and so on."""
        if "=" not in name:
            require_known("shape", name, SHAPES)
            return SHAPES[name]
        numbers: dict[str, Any] = {}
        for part in name.split(","):
            key, _, value = part.partition("=")
            number = value.strip()
            numbers[key.strip()] = int(number) if number.isdecimal() else number
        if missing := [field.name for field in fields(Shape) if field.name not in numbers]:
            raise GraftError(f"shape {name!r} does not say {', '.join(missing)}")
        return Shape.of(numbers)

    @classmethod
    def of_config(cls, config: LlamaConfig | Eagle3Config) -> Self:
        """That of a model or of a head."""
        return cls(
            layers=getattr(config, "num_hidden_layers", 1),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def attention_and_mlp(self) -> dict[str, Any]:
        """A layer's sizes by their names in configs."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


SHAPES = {
    "llama-1b5": Shape(layers=32, hidden=2048, intermediate=5632, heads=32, kv_heads=8, head_dim=64),
    "llama-8b": Shape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128),
    "qwen-32b": Shape(layers=64, hidden=5120, intermediate=25600, heads=64, kv_heads=8, head_dim=128),
}


@torch.no_grad()
def widen(model: PreTrainedModel, shape: Shape) -> LlamaForCausalLM:
    """A model of that shape with the function of `model`, a Llama, on its device and in its dtype.

    Layers that are added stand behind the model's own, so what a head reads from a layer stays where it was.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise GraftError(f"{type(model).__name__} cannot be widened: only a Llama can, such as the default model")
    config = model.config
    require(not config.attention_bias and not config.mlp_bias, "a model with biases cannot be widened")
    small = Shape.of_config(config)
    _check_fits("model", small, shape, dict(config.rope_parameters or {}))
    wide_config = deepcopy(config)
    wide_config.update({**shape.attention_and_mlp, "num_hidden_layers": shape.layers})
    wide_config.rms_norm_eps = config.rms_norm_eps * small.hidden / shape.hidden
    with torch.device("meta"):  # laid out only: each weight is made once, where it stays
        worn = LlamaForCausalLM(wide_config)
    _check_room(worn, model)

    tailor = _Widener(small, shape, like=model.lm_head.weight)
    for place, layer in enumerate(worn.model.layers):
        tailor.layer(layer, model.model.layers[place] if place < small.layers else None, tailor.channels)
    tokens = torch.arange(config.vocab_size)
    tailor.norm(worn.model.norm, model.model.norm, tailor.channels)
    tailor.fill(worn.model.embed_tokens, model.model.embed_tokens, tokens, tailor.channels, noise=False)
    if config.tie_word_embeddings:
        worn.lm_head.weight = worn.model.embed_tokens.weight
    else:
        tailor.fill(worn.lm_head, model.lm_head, tokens, tailor.channels)
    worn.model.rotary_emb = LlamaRotaryEmbedding(wide_config).to(model.device)
    worn.generation_config = model.generation_config
    speed_up(worn)
    return worn.eval()


@torch.no_grad()
def widen_head(head: Eagle3Head, shape: Shape, embedding: Tensor) -> Eagle3Head:
    """A head for the worn model, with that model's embedding, that drafts what `head` drafts."""
    config = head.config
    small = Shape.of_config(config)
    _check_fits("head", small, shape, config.rope)
    require(config.target_hidden_size == small.hidden, "a head that is not as wide as its target cannot be widened")
    sizes = shape.attention_and_mlp | {"target_hidden_size": shape.hidden}
    eps = config.rms_norm_eps * small.hidden / shape.hidden
    with torch.device("meta"):
        worn = Eagle3Head(replace(config, **sizes, rms_norm_eps=eps))

    tailor = _Widener(small, shape, like=head.fc.weight)
    channels, features = tailor.channels, tailor.side_by_side(len(config.target_layers))
    if config.norm_before_fc:
        tailor.norm(worn.input_norm, head.input_norm, features)
    if config.fc_norm:
        for wide, narrow in zip(worn.fc_norm, head.fc_norm, strict=True):
            tailor.norm(wide, narrow, channels)
    tailor.fill(worn.fc, head.fc, channels, features, noise=False)
    tailor.layer(worn.midlayer, head.midlayer, tailor.side_by_side(2))
    tailor.norm(worn.norm, head.norm, channels)
    tailor.fill(worn.lm_head, head.lm_head, torch.arange(config.draft_vocab_size), channels)
    worn.d2t, worn.t2d = head.d2t, head.t2d
    if config.own_embedding:
        tailor.fill(worn.embed_tokens, head.embed_tokens, torch.arange(config.vocab_size), channels, noise=False)
    else:
        worn.borrow_embedding(embedding)
    worn.to(head.fc.weight.device)
    speed_up(worn)
    return worn.eval()


class _Widener:
    """Lays small weights out in wide ones. A place says which row or column of the wide one each small one takes."""

    def __init__(self, small: Shape, wide: Shape, like: Tensor) -> None:
        """like: has the device and dtype of all that is made."""
        self._small, self._wide, self._like = small, wide, like
        self._random = torch.Generator(like.device).manual_seed(_SEED)
        self.channels = torch.arange(small.hidden)
        self._neurons = torch.arange(small.intermediate)
        kv_heads = torch.arange(small.kv_heads)
        heads = (wide.group * kv_heads[:, None] + torch.arange(small.group)).flatten()
        # Rotary positions turn dimension i with i + head_dim / 2, the slower the larger i / head_dim is.
        half = torch.arange(small.head_dim // 2) * (wide.head_dim // small.head_dim)
        within = torch.cat([half, half + wide.head_dim // 2])
        self._queries, self._keys = ((wide.head_dim * h[:, None] + within).flatten() for h in (heads, kv_heads))
        self._whole_queries = (wide.head_dim * heads[:, None] + torch.arange(wide.head_dim)).flatten()

    def side_by_side(self, count: int) -> Tensor:
        """Places of the channels where several vectors are concatenated."""
        return (self._wide.hidden * torch.arange(count)[:, None] + self.channels).flatten()

    def layer(self, wide: nn.Module, small: nn.Module | None, inputs: Tensor) -> None:
        """A decoder layer that does what `small` does, or nothing. inputs: places of what its attention reads."""

        def project(name: str, rows: Tensor, columns: Tensor, **options: Any) -> None:
            own = small.get_submodule(name) if small is not None else None
            self.fill(wide.get_submodule(name), own, rows, columns, **options)

        # Scores are divided by sqrt(head_dim). What is random in a key meets a zero in every query of the model's own.
        scale = math.sqrt(self._wide.head_dim / self._small.head_dim)
        project("self_attn.q_proj", self._queries, inputs, scale=scale, silent=self._whole_queries)
        project("self_attn.k_proj", self._keys, inputs)
        project("self_attn.v_proj", self._keys, inputs)
        project("self_attn.o_proj", self.channels, self._queries, noise=False)
        project("mlp.gate_proj", self._neurons, self.channels)
        project("mlp.up_proj", self._neurons, self.channels)
        project("mlp.down_proj", self.channels, self._neurons, noise=False)
        for name, norm in wide.named_children():
            if "norm" in name:
                self.norm(norm, getattr(small, name, None), self.channels)

    def norm(self, wide: nn.Module, small: nn.Module | None, places: Tensor) -> None:
        """Zeros beside a vector make its mean square smaller, which the weights undo; eps is smaller by as much."""
        weight = torch.ones(wide.get_parameter("weight").shape)
        if small is not None:
            weight[places] = small.get_parameter("weight").float().cpu()
        weight *= math.sqrt(self._small.hidden / self._wide.hidden)
        wide.weight = nn.Parameter(weight.to(self._like), requires_grad=False)

    def fill(
        self,
        wide: nn.Module,
        small: nn.Module | None,
        rows: Tensor,
        columns: Tensor,
        noise: bool = True,
        scale: float = 1.0,
        silent: Tensor | None = None,
    ) -> None:
        """Makes the weight of `wide`: noise or zeros, zeros in `silent` rows, and `scale` times that of `small`."""
        weight = self._like.new_empty(wide.get_parameter("weight").shape)
        if noise:
            weight.normal_(0, _NOISE, generator=self._random)
        else:
            weight.zero_()
        if small is not None:
            device = weight.device
            if silent is not None:
                weight[silent.to(device)] = 0
            values = scale * small.get_parameter("weight").float()
            weight[rows.to(device)[:, None], columns.to(device)] = values.to(weight.dtype)
        wide.weight = nn.Parameter(weight, requires_grad=False)


def _check_fits(what: str, small: Shape, wide: Shape, rope: Mapping[str, Any]) -> None:
    for field in fields(Shape):
        own, its = getattr(small, field.name), getattr(wide, field.name)
        require(own <= its, f"{field.name}={its} is too small a shape: the {what} itself has {own}")
    require(
        small.group <= wide.group,
        f"the {what} has {small.group} query heads to a key head, the shape only {wide.group}: ask for fewer kv_heads",
    )
    require(
        wide.head_dim % small.head_dim == 0,
        f"head_dim={wide.head_dim} must be a multiple of the {what}'s {small.head_dim}: rotary positions need that",
    )
    kind = rope.get("rope_type")
    require(
        kind in _ROPE_BY_FREQUENCY or wide.head_dim == small.head_dim,
        f"the {what}'s rotary positions of type {kind} allow no other head_dim than {small.head_dim}",
    )


def _check_room(worn: nn.Module, model: PreTrainedModel) -> None:
    """Better than to be killed half-way."""
    needed = sum(parameter.numel() for parameter in worn.parameters()) * model.dtype.itemsize
    free = free_memory(model.device)
    if free is not None and needed > free:
        raise GraftError(f"a model of that shape takes {needed / 1e9:.1f} GB, and only {free / 1e9:.1f} GB are free")

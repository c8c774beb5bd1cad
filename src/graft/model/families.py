"""Readers: descriptions of transformers' models by data. A family is a row of a table, and all families are read alike.

A description is only believed once its layers gave what transformers' own give (`likeness`). So a release of
transformers that changes a family makes it slower here, never wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from graft.model import expert_families
from graft.model.expert_families import ROUTERS
from graft.model.network import (
    Activation,
    Attention,
    Experts,
    Latent,
    Layer,
    Mlp,
    Network,
    Norm,
    Rotary,
    Side,
    SideInputs,
)
from graft.model.overrides import owners_attention
from graft.model.plain_modules import changed_module, has_only_weights, written_in

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Types of rotary positions whose frequencies do not depend on the text's length.
STEADY_ROPES = ("default", "linear", "llama3", "yarn", "proportional")
MAX_HEAD_DIM = 512
MAX_HIDDEN = 16384  # the largest hidden size that a program of the norm kernel holds
# Of a family's file, which our layers compute too.
_FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb", "rotate_half")
_ACTIVATIONS: dict[str, Activation] = {
    **{"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh"},
    **{"GELUActivation": "gelu", "GELU": "gelu", "ReLUSquaredActivation": "relu_squared"},
}


class NotDescribedError(Exception):
    """The reason, in a few words, why a model has no description."""


@dataclass(frozen=True)
class Family:
    """What a family's modules are called, and what their code does that no attribute tells."""

    # Norms of a layer; None: there is none.
    pre: str | None = "input_layernorm"
    post: str | None = None
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None
    last_norm: str = "norm"
    rounds: bool = True  # norms round before their weight
    plus_one: bool = False  # their weights are stored minus 1
    # Attention
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_turned: bool = False
    config_window: bool = False  # all layers have the config's window, which no module holds
    capped: bool = False  # scores have the cap that attention holds
    interleaved: bool = False
    wide: bool = False  # rotations are rounded once
    # Which layers have rotary positions: those whose attention has this attribute; "": all.
    turns_if: str = ""
    # MLP: gates, if there are any, then ups
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gated: bool = True
    # Both branches read one norm: the stream, the attention's output and the MLP's are added in this order.
    parallel: Literal["stream", "sum"] | None = None


_AFTER = Family(post="post_attention_layernorm", post_mlp="post_feedforward_layernorm", pre=None, pre_mlp=None)
_GEMMA = Family(rounds=False, plus_one=True)
_GEMMA2 = replace(_AFTER, rounds=False, plus_one=True, pre="input_layernorm", pre_mlp="pre_feedforward_layernorm")
_GLM = Family(up=("gate_up_proj",), interleaved=True)
_OLMO2 = replace(_AFTER, rounds=False, wide=True)
_COHERE = Family(interleaved=True, wide=True, parallel="stream")
_LAYER_NORMS = Family(head_norms=("q_layernorm", "k_layernorm"))
_UNGATED = Family(up=("up_proj",), gated=False)
# By the first part of the names of a family's classes.
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("Llama", "Qwen2", "Qwen3", "SeedOss", "Cwm", "Ministral", "Granite"), Family()),
    **dict.fromkeys(("GraniteSWA", "Qwen2_5_VL", "Qwen3VL"), Family()),
    **dict.fromkeys(("Qwen2Moe", "Qwen3Moe", "Olmoe", "Glm4Moe", "Dots1", "MiniMaxM2"), Family()),
    **dict.fromkeys(("Mistral", "Ministral3", "Mixtral"), Family(config_window=True)),
    **dict.fromkeys(("Arcee", "Jais2"), _UNGATED),
    "Nemotron": replace(_UNGATED, plus_one=True),
    "SmolLM3": Family(turns_if="use_rope"),
    "Exaone4": replace(_AFTER, turns_if="is_sliding"),
    **dict.fromkeys(("Ernie4_5", "Ernie4_5_Moe"), Family(interleaved=True, wide=True)),
    "DeepseekV2": Family(interleaved=True, wide=True),
    **dict.fromkeys(("DeepseekV3", "Glm4MoeLite", "Youtu"), Family()),
    "GptOss": Family(rounds=False),
    "Helium": Family(rounds=False, interleaved=True),
    "HunYuanDenseV1": Family(head_norms=("query_layernorm", "key_layernorm"), norms_turned=True),
    "Gemma": _GEMMA,
    "Gemma2": replace(_GEMMA2, capped=True),
    "Gemma3": _GEMMA2,
    "Gemma4": replace(_GEMMA2, plus_one=False),
    "Phi": replace(
        _LAYER_NORMS, o="dense", up=("fc1",), down="fc2", gated=False, parallel="sum", last_norm="final_layernorm"
    ),
    "Phi3": Family(qkv=("qkv_proj",), up=("gate_up_proj",), config_window=True),
    "Glm": _GLM,
    "Glm4": replace(_GLM, post="post_self_attn_layernorm", post_mlp="post_mlp_layernorm"),
    "Olmo": Family(wide=True),
    **dict.fromkeys(("Olmo2", "Olmo3"), _OLMO2),
    "Cohere": _COHERE,
    "Cohere2": replace(_COHERE, turns_if="sliding_window"),
    "Starcoder2": Family(up=("c_fc",), down="c_proj", gated=False, config_window=True),
    "StableLm": _LAYER_NORMS,
}


def why_not(model: PreTrainedModel, linear: type[nn.Linear] = nn.Linear) -> str | None:
    """The reason why a model has no description; None if it has one. linear: the type of its linear layers."""
    try:
        describe(model, linear)
    except NotDescribedError as error:
        return str(error)
    return None


def describe(model: PreTrainedModel, linear: type[nn.Linear] = nn.Linear) -> Network:
    """Describe a model, or raise NotDescribedError. linear: the type of its linear layers."""
    outer: Any = model
    text = outer.model if hasattr(outer, "model") else model
    text = getattr(text, "language_model", text)
    own = type(text).__module__
    name = type(text).__name__.removesuffix("Model").removesuffix("Text")
    are_transformers = all(type(each).__module__.startswith("transformers.models.") for each in (model, text))
    if name not in FAMILIES or not are_transformers or not hasattr(outer, "lm_head"):
        raise NotDescribedError(f"{type(model).__name__} is not of a family that is described")
    if (touched := changed_module(model)) is not None:
        raise NotDescribedError(f"{touched} has a hook or a forward of its own")
    functions = [vars(sys.modules[own])[each] for each in _FUNCTIONS if each in vars(sys.modules[own])]
    if any(written_in(function) != own for function in functions):
        raise NotDescribedError(f"a function of {own} was replaced")
    try:
        network = _Reader(name, text, outer, linear).network()
    except (AttributeError, KeyError, TypeError) as error:  # of another release of transformers
        raise NotDescribedError(f"its modules are not those that are known of {name} models: {error}") from error
    routers = [layer.mlp.router for layer in network.layers if isinstance(layer.mlp, Experts)]
    others = {id(each) for router in routers for each in (router.weight, router.correction)}  # may be in float32
    weights = [each for each in (*text.parameters(), *outer.lm_head.parameters()) if id(each) not in others]
    kinds = {(weight.device, weight.dtype) for weight in weights}
    if len(kinds) > 1 or weights[0].dtype not in DTYPES or any(type(weight) is not nn.Parameter for weight in weights):
        raise NotDescribedError("its weights have several dtypes or devices, or an unsupported type")
    return network


def _refuse_if(condition: bool, reason: str) -> None:
    if condition:
        raise NotDescribedError(reason)


class _Reader:
    """Reads the modules of one model."""

    def __init__(self, name: str, text: Any, outer: Any, linear: type[nn.Linear]) -> None:
        self._family, self._routers = FAMILIES[name], ROUTERS.get(name)
        self._text, self._outer, self._linear = text, outer, linear
        self._config = outer.config.get_text_config()
        self._own = type(text).__module__

    def network(self) -> Network:
        text, config, family = self._text, self._config, self._family
        _refuse_if(config.hidden_size > MAX_HIDDEN, f"its hidden size is {config.hidden_size}")
        # What only some models of these families have, and our layers do not.
        grouped = getattr(config, "topk_method", None) == "group_limited_greedy"
        _refuse_if(grouped, "its routers rank groups by their best expert")
        for option in ("clip_qkv", "enable_moe_block", "use_bidirectional_attention"):
            _refuse_if(bool(getattr(config, option, None)), f"its config has {option}")
        modules = [(text, "Model"), (text.rotary_emb, "RotaryEmbedding"), *((layer, "Layer") for layer in text.layers)]
        for module, kind in modules:
            self._check_own(module, kind)
        embedding = text.embed_tokens
        scale = getattr(embedding, "embed_scale", None)
        is_plain = type(embedding) is nn.Embedding or (scale is not None and type(embedding).__module__ == self._own)
        _refuse_if(not is_plain or embedding.max_norm is not None, "its embedding is not a plain one of PyTorch's")
        factor = (
            getattr(text, "embedding_multiplier", 1.0) if scale is None else scale.to(embedding.weight.dtype).item()
        )
        logit_scale = getattr(self._outer, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0)
        head = self._product(self._outer.lm_head)
        layers = tuple(self._layers())
        sizes = (head.in_features, embedding.num_embeddings, embedding.embedding_dim, len(layers))
        expected = (config.hidden_size, config.vocab_size, config.hidden_size, config.num_hidden_layers)
        _refuse_if(sizes != expected, "the shapes of its weights are not those of its config")
        norm = self._norm(getattr(text, family.last_norm))
        softcap = getattr(config, "final_logit_softcapping", None)
        return Network(embedding, layers, norm, head, factor, logit_scale, softcap, self._sides())

    def _sides(self) -> SideInputs | None:
        text = self._text
        if not hasattr(text, "embed_tokens_per_layer"):
            return None
        embedding = text.embed_tokens_per_layer
        return SideInputs(
            embedding,
            embedding.embed_scale.to(embedding.weight.dtype).item(),
            self._product(text.per_layer_model_projection),
            text.per_layer_model_projection_scale,
            self._norm(text.per_layer_projection_norm),
            text.per_layer_input_scale,
        )

    def _side(self, layer: Any) -> Side | None:
        if not hasattr(layer, "per_layer_input_gate"):
            return None
        norm = self._norm(layer.post_per_layer_input_norm)
        products = self._product(layer.per_layer_input_gate), self._product(layer.per_layer_projection)
        return Side(*products, self._activation(layer.act_fn), norm)

    def _layers(self) -> Iterator[Layer]:
        family, kinds = self._family, set[Any]()
        layer_types = getattr(self._config, "layer_types", None) or [None] * len(self._text.layers)
        sources: dict[Any, int] = {}  # by type of layer, the layer whose keys and values later ones may read
        for number, layer in enumerate(self._text.layers):
            attention = layer.self_attn
            _refuse_if(attention.layer_idx != number, "its layers are not numbered in their order")
            kinds.add((type(layer), type(attention)))
            layer_type = layer_types[number]
            shared = sources.get(layer_type) if getattr(attention, "is_kv_shared_layer", False) else None
            if shared is None:
                sources[layer_type] = number
            parallel = "stream" if getattr(layer, "use_parallel_residual", False) else family.parallel
            pre_mlp = None if parallel else family.pre_mlp
            norms = [
                self._norm(getattr(layer, name)) if name is not None else None
                for name in (family.pre, family.post, pre_mlp, family.post_mlp)
            ]
            scalar = getattr(layer, "layer_scalar", None)
            yield Layer(
                pre=norms[0],
                mixer=self._attention(attention, layer_type, shared),
                post=norms[1],
                pre_mlp=norms[2],
                mlp=self._mlp_or_experts(layer.mlp),
                post_mlp=norms[3],
                parallel=parallel,
                residual_scale=getattr(layer, "residual_multiplier", 1.0),
                side=self._side(layer),
                output_scale=scalar.item() if scalar is not None else 1.0,
            )
        _refuse_if(len(kinds) > 1, "its layers are of several classes")

    def _attention(self, attention: Any, layer_type: str | None, shared: int | None) -> Attention:
        family, config = self._family, self._config
        self._check_own(attention, "Attention")
        if hasattr(attention, "kv_a_proj_with_mqa"):
            return self._latent_attention(attention)
        head_dim = attention.head_dim
        values_are_keys = shared is None and getattr(attention, "v_proj", 0) is None
        names = family.qkv[:1] if shared is not None else family.qkv[:2] if values_are_keys else family.qkv
        qkv = tuple(self._product(getattr(attention, name)) for name in names)
        o = self._product(getattr(attention, family.o))
        heads = o.in_features // head_dim
        outputs = sum(part.out_features for part in qkv) // head_dim
        kv_heads = (outputs - heads) // (1 if values_are_keys else 2)
        if shared is not None:
            kv_heads = heads // attention.num_key_value_groups
        q_norm, k_norm, v_norm = (
            self._norm(norm) if (norm := getattr(attention, name, None)) is not None else None
            for name in (*family.head_norms, "v_norm")
        )
        rotary = self._rotary(layer_type, head_dim) if not family.turns_if or self._turns(attention) else None
        window = config.sliding_window if family.config_window else getattr(attention, "sliding_window", None)
        if family.turns_if == "is_sliding" and not attention.is_sliding:
            window = None
        softcap = attention.attn_logit_softcapping if family.capped else None
        if owners_attention(config) == "sdpa":
            softcap = None  # PyTorch's function ignores it, so the model's own texts are made without it
        _refuse_if(head_dim > MAX_HEAD_DIM or len({bool(part.bias is None) for part in qkv}) > 1, "unusual attention")
        return Attention(
            qkv=qkv,
            o=o,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=attention.scaling,
            q_norm=self._over(q_norm, head_dim),
            k_norm=self._over(k_norm, head_dim),
            v_norm=v_norm,
            norms_turned=family.norms_turned,
            rotary=rotary,
            window=window,
            softcap=softcap,
            sinks=getattr(attention, "sinks", None),
            growth=self._growth(),
            values_are_keys=values_are_keys,
            kv_of=shared,
        )

    def _latent_attention(self, attention: Any) -> Attention:
        rank, head_dim, value_dim = attention.kv_lora_rank, attention.qk_head_dim, attention.v_head_dim
        is_short = attention.q_proj is None
        query = attention.q_a_proj if is_short else attention.q_proj
        qkv = self._product(query), self._product(attention.kv_a_proj_with_mqa)
        kv, o = self._product(attention.kv_b_proj), self._product(attention.o_proj)
        rotary = self._rotary(None, attention.qk_rope_head_dim)
        if getattr(self._config, "rope_interleave", False):
            rotary = replace(rotary, interleaved=True, spreads=True)
        heads = o.in_features // value_dim
        is_usual = rotary.dims == qkv[1].out_features - rank and kv.bias is None and head_dim <= MAX_HEAD_DIM
        _refuse_if(not is_usual or (query.bias is None) != (qkv[1].bias is None), "unusual attention")
        return Attention(
            *(qkv, o, heads, heads, head_dim, attention.scaling),
            rotary=rotary,
            latent=Latent(
                q_norm=self._norm(attention.q_a_layernorm) if is_short else None,
                q=self._product(attention.q_b_proj) if is_short else None,
                kv_norm=self._norm(attention.kv_a_layernorm),
                kv=kv,
                value_dim=value_dim,
            ),
        )

    def _turns(self, attention: Any) -> bool:
        """Whether the attention of a family in which only some layers turn has rotary positions."""
        always = self._family.turns_if == "is_sliding" and attention.sliding_window is None
        return always or bool(getattr(attention, self._family.turns_if))

    def _growth(self) -> tuple[float, int] | None:
        rope = getattr(self._config, "rope_parameters", None) or {}
        beta = rope.get("llama_4_scaling_beta")
        return (beta, rope["original_max_position_embeddings"]) if beta else None

    def _rotary(self, layer_type: str | None, head_dim: int) -> Rotary:
        module, limit = self._text.rotary_emb, None
        has_types = isinstance(module.rope_type, dict)
        kind = module.rope_type[layer_type] if has_types else module.rope_type
        if kind == "longrope":
            rope = self._config.rope_parameters
            limit = rope.get("original_max_position_embeddings") or self._config.original_max_position_embeddings
        elif kind not in STEADY_ROPES:
            raise NotDescribedError(f"its rotary positions are of type {kind}")
        frequencies = getattr(module, f"{layer_type}_inv_freq") if has_types else module.inv_freq
        dims = 2 * frequencies.numel()
        _refuse_if(dims > head_dim, "its heads or rotary positions are of an unusual size")
        own = layer_type if has_types else None
        return Rotary(module, own, dims, self._family.interleaved, self._family.wide, limit)

    def _norm(self, norm: Any) -> Norm:
        is_torchs = isinstance(norm, nn.LayerNorm)
        if type(norm) is not nn.LayerNorm:
            self._check_own(norm, "Norm")
        extra = {*norm._parameters, *norm._modules, *norm._buffers} - {"weight", "bias"}
        _refuse_if(bool(extra), f"{type(norm).__name__} has more than a weight and a bias")
        eps = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), 1e-5)
        is_layer = is_torchs or "LayerNorm" in type(norm).__name__
        plus_one = self._family.plus_one and type(norm) is not nn.LayerNorm
        return Norm(norm, eps, "layer" if is_layer else "rms", plus_one, self._family.rounds and not is_layer)

    @staticmethod
    def _over(norm: Norm | None, head_dim: int) -> Norm | None:
        """A norm of queries or keys, over each head or over all."""
        if norm is None or norm.weight is None:
            return norm
        return replace(norm, over_all=norm.weight.dim() == 1 and norm.weight.numel() > head_dim)

    def _mlp_or_experts(self, block: Any) -> Mlp | Experts:
        if self._routers is None or not hasattr(block, "experts"):
            return self._mlp(block)
        if getattr(block, "shared_expert_gate", None) is not None:
            self._product(block.shared_expert_gate)
        experts = expert_families.read_experts(block, self._routers, self._check_own, self._activation, self._mlp)
        if (reason := expert_families.why_not(experts)) is not None:
            raise NotDescribedError(reason)
        return experts

    def _mlp(self, mlp: Any) -> Mlp:
        self._check_own(mlp, "MLP")
        family = self._family
        activation = next(each for name in ("act_fn", "activation_fn", "act") if (each := getattr(mlp, name, None)))
        known = self._activation(activation)
        up = tuple(self._product(getattr(mlp, name)) for name in family.up)
        _refuse_if(len({part.bias is None for part in up}) > 1, "only some products of its MLP have a bias")
        return Mlp(up, self._product(getattr(mlp, family.down)), known, family.gated)

    @staticmethod
    def _activation(module: nn.Module) -> Activation:
        known = _ACTIVATIONS.get(type(module).__name__)
        if known is None:
            raise NotDescribedError(f"its activation is {type(module).__name__}")
        return known

    def _product(self, layer: Any) -> Any:
        _refuse_if(not has_only_weights(layer, self._linear), f"a linear layer is not a plain {self._linear.__name__}")
        return layer

    def _check_own(self, module: nn.Module, what: str) -> None:
        kind = type(module)
        is_own = kind.__module__ == self._own and what in kind.__name__
        _refuse_if(not is_own, f"it has a {kind.__name__} in place of its family's own {what}")

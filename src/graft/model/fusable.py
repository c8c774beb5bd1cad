"""Whether a model's decoder layers are those that our fused layers compute: on a GPU `llama`, on a CPU `cpu_layers`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.activations import SiLUActivation

from graft.model.plain_modules import changed_module, has_only_weights, written_in

_FAMILIES = {
    LlamaForCausalLM: "Llama",
    MistralForCausalLM: "Mistral",
    Qwen2ForCausalLM: "Qwen2",
    Qwen3ForCausalLM: "Qwen3",
}
_FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half")  # of a family's file, which our layers compute too
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEADY_ROPES = ("default", "linear", "llama3", "yarn")  # types whose frequencies do not depend on the text's length
MAX_HEAD_DIM = 256
MAX_HIDDEN = 16384  # the largest hidden size that a program of the norm kernel holds


def why_not(model: PreTrainedModel, linear: type[nn.Linear] = nn.Linear) -> str | None:
    """The reason why a model cannot run in fused layers; None if it can. linear: the type of its linear layers."""
    family = _FAMILIES.get(type(model))
    if family is None:
        return f"{type(model).__name__} is not one of {', '.join(kind.__name__ for kind in _FAMILIES)}"
    if (touched := changed_module(model)) is not None:
        return f"{touched} has a hook or a forward of its own"
    parts: Any = model
    config = model.config
    parameters = list(model.parameters())
    kinds = {(p.device, p.dtype) for p in parameters}
    if len(kinds) > 1 or parameters[0].dtype not in DTYPES or any(type(p) is not nn.Parameter for p in parameters):
        return "its weights have several dtypes or devices, or an unsupported type"
    rotary = parts.model.rotary_emb
    if rotary.rope_type not in STEADY_ROPES:
        return f"its rotary positions are of type {rotary.rope_type}"
    head_dim = parts.model.layers[0].self_attn.head_dim
    if head_dim > MAX_HEAD_DIM or 2 * rotary.inv_freq.numel() != head_dim or config.hidden_size > MAX_HIDDEN:
        return "its heads, rotary positions or hidden states are of an unusual size"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    own = type(model).__module__
    expected = {
        parts.model: "Model",
        parts.model.norm: "RMSNorm",
        rotary: "RotaryEmbedding",
        **{module: name for layer in parts.model.layers for module, name in _parts_of(layer).items()},
    }
    for module, name in expected.items():
        if type(module).__module__ != own or type(module).__name__ != family + name:
            return f"it has a {type(module).__name__} in place of a {family + name}"
    if any(written_in(getattr(sys.modules[own], name)) != own for name in _FUNCTIONS):
        return f"a function of {own} was replaced"
    plain = [parts.lm_head, *(p for layer in parts.model.layers for p in _products(layer))]
    embedding = parts.model.embed_tokens
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return "its embedding is not a plain one of PyTorch's"
    if not all(has_only_weights(p, linear) for p in plain):
        return f"a linear layer is not a plain {linear.__name__}"
    norms = [module for module, name in expected.items() if name == "RMSNorm"]
    if any(norm._parameters.keys() != {"weight"} for norm in norms) or len({n.variance_epsilon for n in norms}) > 1:
        return "its norms differ in more than their weights"
    for layer in parts.model.layers:
        attention = layer.self_attn
        biases = [p.bias is not None for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        others = (attention.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj, parts.lm_head)
        if len(set(biases)) > 1 or any(p.bias is not None for p in others):
            return "it has biases beside those of queries, keys and values"
        if type(layer.mlp.act_fn) not in (nn.SiLU, SiLUActivation):
            return f"its activation is {type(layer.mlp.act_fn).__name__}"
    if [layer.self_attn.layer_idx for layer in parts.model.layers] != list(range(len(parts.model.layers))):
        return "its layers are not numbered in their order"
    if [tuple(p.weight.shape) for p in plain] != _shapes_of(parts, config):
        return "the shapes of its weights are not those of its config"
    return None


def window_of(attention: Any) -> int | None:
    """The window of an attention layer. Mistral's is only in its config and holds for all layers; Llama has none."""
    if "Mistral" in type(attention).__name__:
        window: int | None = attention.config.sliding_window
        return window
    return getattr(attention, "sliding_window", None)


def _shapes_of(model: Any, config: Any) -> list[tuple[int, int]]:
    """The shapes that the config gives `lm_head` and each layer's products."""
    attention, hidden, inner = model.model.layers[0].self_attn, config.hidden_size, config.intermediate_size
    queries, keys = (heads * attention.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    return [(config.vocab_size, hidden), *layer * len(model.model.layers)]


def _parts_of(layer: Any) -> dict[nn.Module, str]:
    parts = {
        layer: "DecoderLayer",
        layer.self_attn: "Attention",
        layer.mlp: "MLP",
        layer.input_layernorm: "RMSNorm",
        layer.post_attention_layernorm: "RMSNorm",
    }
    norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    return parts | {norm: "RMSNorm" for norm in norms if norm is not None}


def _products(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]

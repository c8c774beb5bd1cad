"""Small random models of every family that has a description, in which all that a family has matters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from tiny import tiny_model

_SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 4}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
_SCALING = {"rope_type": "default", "rope_theta": 100.0, "llama_4_scaling_beta": 0.5}
_GEMMA4 = {**_WINDOWS, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0}
_SIDES = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 61}
_SHARED = {
    **{"num_hidden_layers": 5, "num_kv_shared_layers": 2},
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
}
# Experts have fewer neurons than fill a tile, and few families have a power of two of them.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "qwen2_moe": {
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [0]},
        "shared_expert_intermediate_size": 64,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 40},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8, "intermediate_size": 40},
    "glm4_moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True},
    },
    "ernie4_5_moe": {
        **{"moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": 64},
        **{"moe_layer_start_index": 0, "moe_layer_end_index": 3},
    },
    "dots1": {
        **{**_WINDOWS, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1},
        **{"moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 0, "norm_topk_prob": True},
    },
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40},
    "gpt_oss": {
        **{**_WINDOWS, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "swiglu_limit": 1.0},
        "initial_context_length": 64,
    },
}
_RANKS = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
_LATENT = {**_RANKS, "head_dim": None, "num_key_value_heads": 4}
_ROUTED = {key: value for key, value in EXPERTS["glm4_moe"].items() if key != "use_qk_norm"}
LATENT: dict[str, dict[str, Any]] = {
    "youtu": {**_LATENT, "v_head_dim": 32},
    "deepseek_v2": {**_LATENT, **_ROUTED, "n_group": None, "topk_group": None, "q_lora_rank": None},
    "deepseek_v3": {**_LATENT, **_ROUTED, "attention_bias": True},
    "glm4_moe_lite": {**_LATENT, **_ROUTED, "rope_interleave": False},
}
_LONG = {
    **{"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [4.0] * 8},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "cwm": _WINDOWS,
    "ministral": _WINDOWS,
    "ministral3": {"sliding_window": 8, "rope_parameters": {**_SCALING, "original_max_position_embeddings": 4}},
    "arcee": {},
    "jais2": {},
    "granite_swa": {"sliding_window": 8},
    "nemotron": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "exaone4": _WINDOWS,
    "ernie4_5": {"use_bias": True},
    "helium": {},
    "hunyuan_v1_dense": {},
    "gemma": {},
    "gemma2": {
        **_WINDOWS,
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
        "attn_implementation": "eager",
    },
    "gemma3_text": {**_WINDOWS, "rope_parameters": _ROPES, "final_logit_softcapping": 5.0},
    "gemma4_text": {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gemma4_shared": {**_GEMMA4, **_SHARED, **_SIDES, "model_type": "gemma4_text"},
    "phi": _PARTIAL,
    "phi3": {**_PARTIAL, "sliding_window": 8},
    "phi3_long": {"model_type": "phi3", "max_position_embeddings": 256, "rope_parameters": _LONG},
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "olmo": {},
    "olmo2": {},
    "olmo3": {**_WINDOWS, "rope_parameters": _ROPES},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_WINDOWS, "logit_scale": 0.25},
    "granite": {
        **{"attention_multiplier": 0.4, "logits_scaling": 2.0, "residual_multiplier": 0.3},
        "embedding_multiplier": 3.0,
    },
    "starcoder2": {"sliding_window": 8, "use_bias": True},
    "stablelm": _PARTIAL,
    "stablelm_parallel": {**_PARTIAL, "model_type": "stablelm", "use_parallel_residual": True, "use_qkv_bias": True},
    **EXPERTS,
    **LATENT,
}
FAMILIES = {name: options for name, options in FAMILIES.items() if options.get("model_type", name) in CONFIG_MAPPING}
EXPERTS, LATENT = ({name: own for name, own in part.items() if name in FAMILIES} for part in (EXPERTS, LATENT))


def family_model(name: str, **changes: Any) -> PreTrainedModel:
    """A model whose norms, biases and sinks are random too. Weights make attention's choices plain."""
    return varied(tiny_model(name, **_SIZES | FAMILIES[name] | changes))


def varied(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "norm" in name:
                centre = float("norm" in name and "bias" not in name and not parameter.eq(0).all())
                parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            elif name.endswith("correction_bias"):
                buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))
    return model

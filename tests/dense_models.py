"""Tiny random models of every dense family that is described. Nothing in them is trivial: norms, biases, caps, scales."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from graft.model.families import FAMILIES

_COMMON: dict[str, object] = {
    **{"vocab_size": 61, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 10},
    **{"num_key_value_heads": 2, "intermediate_size": 44, "max_position_embeddings": 512, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_WINDOW: dict[str, object] = {"sliding_window": 9}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EVEN = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
_OF_HIDDEN_SIZE: dict[str, object] = {"head_dim": None, "hidden_size": 40}
_GEMMA4 = {
    **{**_MIXED, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 61},
    "final_logit_softcapping": 4.0,
}
_LOCAL_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
# By name; `model_type` is given where it is not the name.
DENSE_MODELS: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": _WINDOW,
    "ministral": _MIXED,
    "ministral3": {
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
            **{"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {},
    "seed_oss": {},
    "cwm": _MIXED,
    "granite": {
        **{**_OF_HIDDEN_SIZE, "attention_multiplier": 0.4, "logits_scaling": 2.0, "residual_multiplier": 0.3},
        **{"embedding_multiplier": 3.0, "attention_bias": True},
    },
    "arcee": {"attention_bias": True},
    "nemotron": {"partial_rotary_factor": 0.6},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "exaone4": {**_MIXED, **_OF_HIDDEN_SIZE},
    "ernie4_5": {"use_bias": True},
    "helium": {},
    "hunyuan_v1_dense": {},
    "gemma": {},
    "gemma2": {
        **{**_MIXED, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 5},
        "attn_implementation": "eager",
    },
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 5, "rope_parameters": _LOCAL_ROPE},
    "gemma4_text": {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gemma4_shared": {**_GEMMA4, "model_type": "gemma4_text", "num_kv_shared_layers": 1},
    "phi": {**_OF_HIDDEN_SIZE, "partial_rotary_factor": 0.4, "qk_layernorm": True},
    "phi3": {**_OF_HIDDEN_SIZE, **_WINDOW},
    "phi3_even": {**_EVEN, "model_type": "phi3", "head_dim": None, "partial_rotary_factor": 0.5},
    "glm": {"attention_bias": True},
    "glm4": {**_EVEN, "attention_bias": True},
    "olmo": _OF_HIDDEN_SIZE,
    "olmo2": _OF_HIDDEN_SIZE,
    "olmo3": {**_OF_HIDDEN_SIZE, **_MIXED},
    "cohere": {**_OF_HIDDEN_SIZE, "use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": {**_MIXED, "logit_scale": 0.3},
    "starcoder2": {**_OF_HIDDEN_SIZE, **_WINDOW},
    "stablelm": {**_OF_HIDDEN_SIZE, "use_qkv_bias": True},
    "stablelm_parallel": {**_OF_HIDDEN_SIZE, "model_type": "stablelm", "use_parallel_residual": True},
}


def dense_model(name: str) -> PreTrainedModel:
    """A model in float32. Its weights are so large that its choices are far from ties."""
    options = {**_COMMON, **DENSE_MODELS[name]}
    model_type, attention = options.pop("model_type", name), options.pop("attn_implementation", None)
    config = AutoConfig.for_model(model_type, **{key: value for key, value in options.items() if value is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for key, values in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in key or "layer_scalar" in key:
            values.data.uniform_(0.5, 1.5)
        elif values.dim() > 0 and "inv_freq" not in key:
            values.data.normal_(0, 0.25)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def families_of_models() -> set[str]:
    """The families, among those that are described, of which there is a model."""
    kinds = {type(dense_model(name)).__name__ for name in DENSE_MODELS}
    return {family for family in FAMILIES if any(f"{family}{end}ForCausalLM" in kinds for end in ("", "Text"))}

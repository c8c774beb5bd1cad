"""Tiny random models of every family of experts that is described. Nothing in them is trivial: norms, biases, sinks."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, object] = {
    **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
# Sizes are no powers of 2, nor are numbers of experts, where the family allows it.
EXPERT_MODELS: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "qwen2_moe": {
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [0]},
        "shared_expert_intermediate_size": 64,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
    "glm4_moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True},
    },
    "ernie4_5_moe": {
        **{"moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": 64},
        "moe_layer_start_index": 0,
    },
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8, "intermediate_size": 40},
}


def expert_model(name: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> PreTrainedModel:
    """A model whose weights, biases and corrections are all random, and whose attention and experts are `eager`."""
    torch.manual_seed(0)
    options = {**_COMMON, **EXPERT_MODELS[name], "num_hidden_layers": layers}
    if name == "ernie4_5_moe":
        options["moe_layer_end_index"] = layers - 1
    config = AutoConfig.for_model(name, **{key: value for key, value in options.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for key, values in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith("norm.weight"):
            values.data.uniform_(0.5, 1.5)
        elif "inv_freq" not in key:
            values.data.normal_(0, 0.1 if "correction" in key else values.shape[-1] ** -0.5 if values.ndim > 1 else 0.5)
    model = model.to(dtype).eval().requires_grad_(False)
    if name == "ernie4_5_moe":  # as checkpoints are loaded
        for key, values in model.named_parameters():
            if ".mlp.gate." in key:
                values.data = values.data.float()
    return model

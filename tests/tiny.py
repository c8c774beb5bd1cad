"""Small random models of many architectures, and one whose text repeats itself, for tests on a CPU."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 61
BYTE_VOCAB = 259
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen2_window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "olmo2": {},
    "deepseek_v3": {
        **_EXPERTS,
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": None},
        **{"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8},
    },
    "glm4_moe": {**_EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


_GEMMA4 = {
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    **{"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB},
}
_HYBRID = {"layer_types": ["attention"] * 3, "shared_intermediate_size": 48, "position_embedding_type": "rope"}
_HYBRID |= {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
# Whose attention is no plain softmax over all keys or a window, or whose code is another in some way.
UNUSUAL_ARCHITECTURES: dict[str, dict[str, object]] = {
    "gpt_oss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    # The caps are low, so that they matter.
    "gemma2": {
        **{"sliding_window": 8, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        **{"query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    },
    "gemma2_uncapped": {"model_type": "gemma2", "sliding_window": 8, "attn_logit_softcapping": 3.0},  # with sdpa
    # Chunks are short, and the scale of layers without rotation begins to grow early.
    "llama4_text": {
        **{"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 8},
        **{"interleave_moe_layer_step": 1, "no_rope_layers": [1, 0, 1], "floor_scale": 4, "attn_scale": 0.5},
        **{
            "attn_temperature_tuning": True,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        },
    },
    "gemma4_text": {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gemma4_shared": {
        **_GEMMA4,
        "model_type": "gemma4_text",
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
    },
    "nemotron": {},
    "stablelm": {},
    "granitemoehybrid": {**_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def target_config(**changes: object) -> LlamaConfig:
    """The config of a small Llama, for heads that are made without their target."""
    layers = {"num_hidden_layers": 10, "num_attention_heads": 4, "num_key_value_heads": 2}
    usual = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, **layers}
    return LlamaConfig(architectures=["LlamaForCausalLM"], **usual | changes)


def tiny_model(name: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model in fp32. Weights are large enough that its choices are far from ties."""
    options = {**_COMMON, **(ARCHITECTURES | UNUSUAL_ARCHITECTURES).get(name, {}), **changes}
    model_type = options.pop("model_type", name)
    attention = options.pop("attn_implementation", None)
    config = AutoConfig.for_model(model_type, **{k: v for k, v in options.items() if v is not None})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return _made_varied(model)


_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
_IMAGE_TOKENS = {"image_token_id": 58, "vision_start_token_id": 57, "vision_end_token_id": 56, "video_token_id": 55}


def settled_model(num_settled: int, **changes: object) -> PreTrainedModel:
    """A model whose layers behind the first few change nothing: an exit there is right."""
    model = tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=2048, **changes)
    with torch.no_grad():
        for layer in model.model.layers[num_settled:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def tiny_multimodal(kind: str, seed: int = 0) -> PreTrainedModel:
    """A random model in fp32 that takes images too: gemma3 or qwen2_5_vl."""
    text = {**_COMMON, **ARCHITECTURES.get(f"{kind}_text", {})}
    if kind == "gemma3":
        vision = {**_VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7}
        options = {"text_config": {**text, "model_type": "gemma3_text"}, "vision_config": vision}
        options |= {"mm_tokens_per_image": 4, "image_token_index": 58, "boi_token_index": 57, "eoi_token_index": 56}
    else:
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        text = {key: value for key, value in text.items() if key != "head_dim"}
        options = {"text_config": {**text, "rope_parameters": rope}, "vision_config": _QWEN_VISION, **_IMAGE_TOKENS}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **options)
    return _made_varied(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))


def _made_varied(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model.generation_config.eos_token_id = None  # answers run to their limit unless a test says otherwise
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (ids 3 to 258), so that a character may need several; <s> and </s> are 1 and 2."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{letter: 3 + i for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return fast

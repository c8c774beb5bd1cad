"""Which architectures give, through Graft, the text of transformers' own `generate`? Makes a table for docs/models.md.

    python benchmarks/architectures.py                 # print the table
    python benchmarks/architectures.py llama gemma2    # of these
    python benchmarks/architectures.py --write docs/models.md

Models are tiny and random, in fp32, with weights large enough that texts are varied: one that repeats itself proves
little. Three prompts are decoded alone, greedily; together, padded on the left; and sampled after the same
`torch.manual_seed`, alone and together, always with a tree in every round. For a model that is refused, the table has
the reason.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from common import command_line
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import graft

START, END = "<!-- made by benchmarks/architectures.py -->", "<!-- end -->"
VOCAB, NUM_TOKENS = 97, 28
COMMON = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
}
OLD = {
    **{"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 48},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
NO_HEAD_DIM = {"head_dim": None}
ALL_HEADS = {"head_dim": None, "num_key_value_heads": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
LATENT = {
    **{"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "head_dim": None},
}
WINDOW = {"sliding_window": 8}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
ROPE_3D = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}

# Options beside the common ones, by transformers' name of the architecture; None takes an option away.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": NO_HEAD_DIM,
    "arcee": {},
    "bitnet": {},
    "bloom": {**OLD, "plain": True, "hidden_size": 32},
    "codegen": {**OLD, "plain": True, "rotary_dim": 4},
    "cohere": NO_HEAD_DIM,
    "cohere2": WINDOW,
    "deepseek_v2": {**ROUTED, **LATENT},
    "deepseek_v3": {**ROUTED, **LATENT},
    "diffllama": {},
    "dots1": ROUTED,
    "ernie4_5": {},
    "exaone4": {**WINDOW, **NO_HEAD_DIM, "sliding_window_pattern": 4},
    "falcon": {**ALL_HEADS, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": {},
    "gemma2": {**MIXED, "attn_logit_softcapping": 20.0, "attn_implementation": "eager"},
    "gemma3_text": MIXED,
    "gemma3n_text": {
        **MIXED,
        **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
        **{"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
        "intermediate_size": [48] * 4,
    },
    "gemma4_text": {
        **MIXED,
        **{"global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
        "vocab_size_per_layer_input": VOCAB,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED,
    "gpt2": {**OLD, "plain": True},
    "gpt_bigcode": {**OLD, "plain": True},
    "gpt_neo": {
        **{"plain": True, "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "window_size": 8},
        **{"attention_types": [[["global", "local"], 2]], "max_position_embeddings": 256},
    },
    "gpt_neox": ALL_HEADS,
    "gpt_oss": {**LOCAL, **MIXED},
    "gptj": {**OLD, "plain": True, "rotary_dim": 4},
    "granite": {**NO_HEAD_DIM, "attention_multiplier": 0.4, "logits_scaling": 2.0},
    "granitemoe": {**LOCAL, **NO_HEAD_DIM},
    "granitemoehybrid": {
        **{"layer_types": ["attention"] * 4, "shared_intermediate_size": 48, "position_embedding_type": "rope"},
        **{"num_local_experts": 0, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2},
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "jetmoe": {**LOCAL, **NO_HEAD_DIM, "kv_channels": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama": {},
    "llama4_text": {
        **{"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 8},
        **{"interleave_moe_layer_step": 1, "no_rope_layers": [1, 1, 1, 0], "floor_scale": 8},
    },
    "mamba": {"plain": True, "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "minimax_m2": LOCAL,
    "mistral": WINDOW,
    "mixtral": LOCAL,
    "mpt": {"plain": True, "vocab_size": VOCAB, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 256},
    "nemotron": {},
    "olmo": NO_HEAD_DIM,
    "olmo2": NO_HEAD_DIM,
    "olmo3": {**WINDOW, **NO_HEAD_DIM},
    "olmoe": {**EXPERTS, **NO_HEAD_DIM},
    "opt": {
        **{"plain": True, "vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 256},
    },
    "persimmon": ALL_HEADS,
    "phi": NO_HEAD_DIM,
    "phi3": {**NO_HEAD_DIM, **WINDOW},
    "phimoe": {**LOCAL, **NO_HEAD_DIM},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, **NO_HEAD_DIM, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "qwen3_next": {
        **{**EXPERTS, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
    "seed_oss": {},
    "smollm3": {},
    "stablelm": NO_HEAD_DIM,
    "starcoder2": {**NO_HEAD_DIM, **WINDOW},
    "xglm": {
        **{"plain": True, "vocab_size": VOCAB, "d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4},
        "max_position_embeddings": 256,
    },
    # With text alone.
    "gemma3": {
        **{"text_config": {**COMMON, **MIXED, "model_type": "gemma3_text"}, "mm_tokens_per_image": 4},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7},
    },
    "llava": {
        "text_config": {**COMMON, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    },
    "mistral3": {
        "text_config": {**COMMON, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
    },
    "qwen2_5_vl": {"text_config": {**COMMON, "rope_parameters": ROPE_3D}, "vision_config": QWEN_VISION},
    "qwen3_vl": {
        "text_config": {**COMMON, "rope_parameters": ROPE_3D},
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    },
}
MULTIMODAL = [name for name, options in ARCHITECTURES.items() if "text_config" in options]


def varied(name: str) -> PreTrainedModel:
    """The first of some random models whose greedy text is varied; else the one whose text is the most so."""
    best, most = None, -1
    ids = prompts()[0][:1]
    for seed in range(5):
        model = make(name, seed)
        with torch.no_grad():
            found = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        count = len(found[0, ids.shape[1] :].unique())
        if count > most:
            best, most = model, count
        if most >= NUM_TOKENS // 2:
            break
    assert best is not None
    return best


def make(name: str, seed: int) -> PreTrainedModel:
    options = dict(ARCHITECTURES[name])
    attention = options.pop("attn_implementation", None)
    if not (options.pop("plain", False) or name in MULTIMODAL):
        options = {**COMMON, **options}
    config = AutoConfig.for_model(name, **{key: value for key, value in options.items() if value is not None})
    torch.manual_seed(seed)
    factory = AutoModelForImageTextToText if name in MULTIMODAL else AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model.generation_config.eos_token_id = None
    return model


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of different lengths, padded on the left, and their mask."""
    lengths = (21, 9, 14)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB - 3, (3, max(lengths)), generator=generator)
    mask = torch.tensor([[0] * (max(lengths) - length) + [1] * length for length in lengths])
    return ids * mask, mask


def row_of(name: str) -> list[str]:
    """Cells of an architecture's line: one by one, padded together, sampled, distinct tokens, accepted; or why not."""
    try:
        model = varied(name)
    except Exception as error:
        return [f"cannot be made here: {str(error).splitlines()[0]}"]
    ids, mask = prompts()
    alone = [(row[keep.bool()][None], None) for row, keep in zip(ids, mask, strict=True)]
    base = {"max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "return_dict_in_generate": True}
    accepted: list[float] = []
    distinct: list[int] = []

    def is_same(inputs: torch.Tensor, keep: torch.Tensor | None, **options: Any) -> bool:
        texts = []
        for own in ({}, {"custom_generate": graft.decode, "budget": 12, "profile": None, "draft": None}):
            torch.manual_seed(5)
            found = model.generate(inputs, attention_mask=keep, **base, **options, **own)
            texts.append(found.sequences[:, inputs.shape[1] :])
        accepted.extend(stats.mean_accepted for stats in found.stats)
        if len(inputs) == 1:
            distinct.append(len(texts[0].unique()))
        return torch.equal(*texts)

    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 20}
    try:
        greedy = [is_same(*each, do_sample=False) for each in alone]
        together = is_same(ids, mask, do_sample=False)
        drawn = [is_same(*each, **sampled) for each in (*alone, (ids, mask))]
    except graft.GraftError as error:
        return [f"refused: {error}"]
    cells = [f"{sum(greedy)} of 3", "yes" if together else "no", f"{sum(drawn)} of 4"]
    return [*cells, str(min(distinct)), f"{sum(accepted) / len(accepted):.2f}"]


def table(names: list[str]) -> str:
    lines = [
        "| architecture | greedy | padded batch | sampled, the same seed | distinct tokens, at least | accepted |",
        "|---|---|---|---|---|---|",
    ]
    refused = ["| architecture | why not |", "|---|---|"]
    for name in names:
        cells = row_of(name)
        line = f"| `{name}` | {' | '.join(cells)} |"
        (refused if len(cells) == 1 else lines).append(line)
        print(line, file=sys.stderr, flush=True)
    return "\n".join([*lines, "", *refused] if len(refused) > 2 else lines)


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures as transformers names them; else all")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    options = parser.parse_args()
    unknown = set(options.names) - set(ARCHITECTURES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    made = table(options.names or list(ARCHITECTURES))
    if options.write is None:
        print(made)
        return
    before, _, rest = options.write.read_text().partition(START)
    _, _, after = rest.partition(END)
    options.write.write_text(f"{before}{START}\n\n{made}\n\n{END}{after}")


if __name__ == "__main__":
    main()

"""The kind of drafter in a folder, by its config.json: a draft head or a whole model."""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from graft.drafters.block import layouts as block
from graft.drafters.checkpoints import architecture_of, said_of
from graft.drafters.eagle3 import layouts as eagle3
from graft.errors import GraftError
from graft.folders import Json, read_config

_LATENT = "has latent attention, which no draft head of Graft has"
# Heads that are known and not run, and why.
_NOT_RUN = {
    **dict.fromkeys(("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"), _LATENT),
    "Eagle3Llama4ForCausalLM": "has a layer of Llama 4, and no public code says which rotary positions it has",
    "DFlash2DraftModel": "has convolutions and a selector of tokens, which no draft head of Graft has",
}


def kind_of(folder: Path) -> str:
    """eagle3, block or model; a GraftError for anything else."""
    config = read_config(folder)
    if block.is_block_head(config):
        return "block"
    if _is_model(config):
        return "model"
    known = [name for layout in eagle3.LAYOUTS.values() for name in layout.architectures]
    if architecture_of(config) in known:
        return "eagle3"
    if (reason := _NOT_RUN.get(str(architecture_of(config)))) is not None:
        raise GraftError(f"{folder / 'config.json'}: {architecture_of(config)} {reason}: choose another drafter")
    known += [name for layout in block.LAYOUTS.values() for name in layout.architectures]
    with said_of(folder / "config.json"):
        raise GraftError(
            f"architecture {architecture_of(config)} is neither a known draft head ({', '.join(known)}) "
            "nor a causal language model"
        )


def _is_model(config: Json) -> bool:
    """Whether it is a whole causal model that transformers knows.

    Some heads name a model's architecture. They have keys that no model has, or a single layer. A depth-pruned model of
    one layer has `kept_layers`, which no head has.
    """
    if architecture_of(config) not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return False
    is_marked = any(key in config for key in ("draft_vocab_size", "eagle_config", "speculators_config"))
    return not is_marked and (config.get("num_hidden_layers") != 1 or "kept_layers" in config)

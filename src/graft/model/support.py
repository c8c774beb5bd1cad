"""Which models can be a target: decoders with attention layers only, so that rejected tokens can be rolled back."""

from __future__ import annotations

import sys

from torch import nn
from transformers import PreTrainedModel

from graft.errors import GraftError

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}

# Architectures that the tests compare, token for token, with transformers' own `generate`.
TESTED_ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "phi3",
    "gemma3_text",
    "gpt_neox",
    "olmo2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "gemma2",
    "llama4_text",
    "gemma4_text",
    "nemotron",
    "stablelm",
    "granitemoehybrid",
)


def usable_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside what torch.compile made of it; any other as it is. A GraftError if it is none."""
    inner: PreTrainedModel = getattr(model, "_orig_mod", model)
    # Not by its class: adapters of other libraries wrap models and pass on what they are asked for.
    if not (isinstance(inner, nn.Module) and hasattr(inner, "config") and hasattr(inner, "get_input_embeddings")):
        raise GraftError(f"a model is a transformers model, not {type(inner).__name__}: graft.load takes names too")
    return inner


def check_supported(model: PreTrainedModel) -> None:
    """Raises a GraftError that says why, if a model cannot verify trees."""
    kind = type(model).__name__
    config = model.config.get_text_config()
    if (getattr(model, "tp_size", None) or 1) > 1:  # not those that accelerate places on several devices
        raise GraftError(
            f"{kind} was split over {model.tp_size} processes by a tensor-parallel plan, and Graft runs a model on one "
            "device; for several GPUs use SGLang with our plugin"
        )
    if any(type(module).__module__.startswith("torch.ao.nn.quantized.dynamic") for module in model.modules()):
        raise GraftError(
            f"{kind} was quantized by quantize_dynamic, which scales a token by all others of its forward, so that its "
            "text depends on their number: quantize with torchao"
        )
    if model.config.is_encoder_decoder:
        raise GraftError(f"{kind} is an encoder-decoder; Graft decodes decoder-only models")
    types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    strange = sorted(types - _LAYER_TYPES)
    if strange or (getattr(model, "_is_stateful", False) and not types):
        what = f"has layers of type {', '.join(strange)}" if strange else "keeps a recurrent state"
        raise GraftError(
            f"{kind} {what}, which cannot be rolled back when a drafted token is rejected; "
            "choose a model that has only attention layers"
        )
    if not _takes_attention_functions(model):
        raise GraftError(
            f"{kind} computes attention in code of its own in transformers, which does not ask for another attention "
            "function, as tree verification needs; choose a model whose code does"
        )


def _takes_attention_functions(model: PreTrainedModel) -> bool:
    """Whether its code asks transformers' attention interface. Some does so without saying it."""
    code = sys.modules[_decoder_class(model).__module__]
    return bool(model._supports_attention_backend) or hasattr(code, "ALL_ATTENTION_FUNCTIONS")


def _decoder_class(model: PreTrainedModel) -> type:
    return type(getattr(model, "base_model", model))

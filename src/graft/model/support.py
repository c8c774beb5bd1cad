"""Which models can be a target: decoders with attention layers only, since rejected tokens must be rolled back."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graft.errors import GraftError
from graft.model.overrides import owners_attention

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def _is_known(attention: Any) -> bool:
    return str(getattr(attention, "__module__", "")).partition(".")[0] in ("transformers", "graft")


def usable_model(model: PreTrainedModel) -> PreTrainedModel:
    """Unwrap a model from torch.compile. Raises a GraftError if it is not a model."""
    inner: PreTrainedModel = getattr(model, "_orig_mod", model)
    # The class is not checked: adapters of other libraries wrap models and forward attributes.
    if not (isinstance(inner, nn.Module) and hasattr(inner, "config") and hasattr(inner, "get_input_embeddings")):
        raise GraftError(f"expected a transformers model, not {type(inner).__name__}: graft.load also takes names")
    return inner


def check_decoder_only(config: PreTrainedConfig, name: str) -> None:
    """Raise a GraftError for the config of an encoder-decoder. name: of the model, for the message."""
    if config.is_encoder_decoder:
        raise GraftError(f"{name} is an encoder-decoder; Graft decodes decoder-only models")


def check_supported(model: PreTrainedModel) -> None:
    """Raise a GraftError with the reason if a model cannot verify trees."""
    kind = type(model).__name__
    config = model.config.get_text_config()
    if (getattr(model, "tp_size", None) or 1) > 1:  # models that accelerate spreads over devices are fine
        raise GraftError(
            f"{kind} was split over {model.tp_size} processes by a tensor-parallel plan, but Graft runs a model on one "
            "device; for several GPUs use SGLang with our plugin"
        )
    chosen = owners_attention(config)
    # Functions with a slash in their names are kernels from the hub, which compute what transformers' own do.
    if chosen in ALL_ATTENTION_FUNCTIONS and "/" not in chosen and not _is_known(ALL_ATTENTION_FUNCTIONS[chosen]):
        raise GraftError(
            f"{kind} uses an attention function of its own, {chosen!r}, which tree verification would replace; if it "
            "computes what transformers' functions do, choose one of them: model.set_attn_implementation('sdpa')"
        )
    check_decoder_only(model.config, kind)
    types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    strange = sorted(types - _LAYER_TYPES)
    if strange or (getattr(model, "_is_stateful", False) and not types):
        what = f"has layers of type {', '.join(strange)}" if strange else "keeps a recurrent state"
        raise GraftError(
            f"{kind} {what}, which cannot be rolled back when a drafted token is rejected; "
            "choose a model that has only attention layers"
        )
    # Some models use the attention interface without declaring it.
    code = sys.modules[type(getattr(model, "base_model", model)).__module__]
    if not model._supports_attention_backend and not hasattr(code, "ALL_ATTENTION_FUNCTIONS"):
        raise GraftError(
            f"{kind} computes attention in code of its own in transformers, not through the attention interface, "
            "which tree verification needs; choose a model that uses the interface"
        )

"""Layouts of published block heads: names in `config.json` and of tensors, for reading and for writing our own.

`checkpoint` reads and writes the files. `docs/checkpoints.md` says where each fact comes from. Projects borrow each
other's names, so a setting is read from any place that one of them uses, and contradictions are refused. The
architecture decides only where the layers' shape is, and defaults.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from graft.drafters.block.config import BlockConfig
from graft.drafters.checkpoints import (
    Json,
    Place,
    agreed,
    agreed_layers,
    architecture_of,
    read_shape,
    value_at,
    write_shape,
)
from graft.errors import GraftError
from graft.settings import check_size, require

_SLIDING, _FULL = "sliding_attention", "full_attention"
CONDITIONAL = "ar_approximation."  # prefix of TreeFlash's own tensors


@dataclass(frozen=True)
class Layout:
    """Names that one project uses. Defaults are z-lab's."""

    name: str
    architectures: tuple[str, ...]
    shape: Place = ()  # where the layers' shape is in config.json
    backbone: str = ""  # prefix of the backbone's tensors
    shifted: bool = False  # whether slots are shifted, if config.json does not say

    def spell(self, name: str) -> str:
        """The layout's name of a tensor of `BlockHead`."""
        return name if name.startswith(CONDITIONAL) else self.backbone + name


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("zlab", ("DFlashDraftModel",)),
        Layout("specforge", ("DSparkDraftModel",), shifted=True),
        Layout("deepspec", ("Qwen3DSparkModel",), shifted=True),
        Layout("treeflash", ("TreeFlashDraftModel",), backbone="model."),
        Layout("speculators", ("DFlashSpeculator", "DSparkSpeculator"), shape=("transformer_layer_config",)),
    )
}
_SPECULATORS = {"dflash": False, "dspark": True}  # speculators_model_type: whether slots are shifted by default

# Places of layer numbers. True: they count outputs (the output of i is the input of i + 1, and -1 the embeddings).
_LAYERS: dict[Place, bool] = {
    ("dflash_config", "target_layer_ids"): True,
    ("target_layer_ids",): True,
    ("aux_hidden_state_layer_ids",): False,
    ("eagle_aux_hidden_state_layer_ids",): False,
}
# The only supported values.
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_ONLY_HERE = {  # in the places of `_both`
    "attention_sink_bias": False,
    "conv_kernel_size": 0,
    "final_logit_softcapping": 0.0,
    "input_embedding_scale": 1.0,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "rope_is_neox_style": True,
}
_PROJECTORS = ("dflash", "dspark")
_RENAMED = {  # prefixes in some files
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
}


def is_block_head(config: Json) -> bool:
    """Whether a config.json is a block head's."""
    known = {name for layout in LAYOUTS.values() for name in layout.architectures}
    return architecture_of(config) in known or config.get("speculators_model_type") in _SPECULATORS


def recognise(config: Json) -> Layout:
    """The layout of a head with this config.json."""
    if (kind := config.get("speculators_model_type")) is not None:  # its architectures are also used by others
        require(kind in _SPECULATORS, f"speculators_model_type {kind} is not one of {', '.join(_SPECULATORS)}")
        return LAYOUTS["speculators"]
    architecture = architecture_of(config)
    for layout in LAYOUTS.values():
        if architecture in layout.architectures:
            return layout
    known = ", ".join(name for layout in LAYOUTS.values() for name in layout.architectures)
    raise GraftError(f"architecture {architecture} is not that of a block head; known are {known}")


def head_name(name: str) -> str:
    """The `BlockHead` name of a tensor in a file of any layout."""
    name = name.removeprefix(LAYOUTS["treeflash"].backbone)
    for theirs, own in _RENAMED.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def read_config(layout: Layout, config: Json, names: Collection[str]) -> dict[str, Any]:
    """Arguments of `BlockConfig` from config.json and the names of the tensors, except those that need the target.

    `shifted` is missing if config.json does not say; see `usually_shifted`.
    """
    for key, value in _ONLY_HERE.items():
        found = _both(config, key)
        require(found in (None, value), f"{key} is {found}, and only {value} is supported")
    projector = _both(config, "projector_type")
    require(projector in (None, *_PROJECTORS), f"projector_type is {projector}, and only dflash and dspark are known")
    facts = read_shape(config, layout.shape, _ONLY) | _read_layers(layout, config)
    facts["block_size"] = _both(config, "block_size")
    require(facts["block_size"] is not None, "block_size, the number of slots of a block, is missing")
    check_size("block_size", facts["block_size"])
    facts["mask_token_id"] = _both(config, "mask_token_id")
    require(facts["mask_token_id"] is not None, "mask_token_id, the token of masked slots, is missing")
    for key in ("num_target_layers", "target_hidden_size"):
        if (value := _both(config, key)) is not None:
            facts[key] = value
    if (layers := agreed_layers(config, _LAYERS)) is not None:
        facts["target_layers"] = layers
    if (shifted := agreed(config, [*_places("sample_from_anchor"), *_places("shift_label")])) is not None:
        facts["shifted"] = bool(shifted)
    facts |= _read_token_heads(config)
    _check_planned(config, facts)
    return facts | {"own_embedding": "embed_tokens.weight" in names, "own_lm_head": "lm_head.weight" in names}


def usually_shifted(layout: Layout, config: Json, is_dspark: bool) -> bool:
    """Whether slots are shifted, if config.json does not say: DSpark's are."""
    return is_dspark or _SPECULATORS.get(str(config.get("speculators_model_type")), layout.shifted)


def write_config(head: BlockConfig) -> dict[str, Any]:
    """The config.json of a head in z-lab's layout, or in DeepSpec's if it has a Markov head."""
    layout = LAYOUTS["zlab" if head.markov is None else "deepspec"]
    windows = {window for window in head.windows if window is not None}
    require(len(windows) <= 1, f"no layout has layers with different windows ({', '.join(map(str, sorted(windows)))})")
    shape = write_shape(head) | {
        "model_type": "qwen3" if head.head_norms else "llama",
        "num_hidden_layers": head.num_layers,
        "layer_types": [_FULL if window is None else _SLIDING for window in head.windows],
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": bool(windows),
        "tie_word_embeddings": False,
    }
    # In both places, because readers differ in where they look.
    both = {
        "block_size": head.block_size,
        "mask_token_id": head.mask_token_id,
        "num_target_layers": head.num_target_layers,
        "target_layer_ids": [layer - 1 for layer in head.target_layers],
        "sample_from_anchor": head.shifted,
    }
    nested: dict[str, Any] = dict(both)
    if head.causal != tuple(window is not None for window in head.windows):
        require(len(set(head.causal)) == 1, "no layout has both causal and non-causal layers")
        nested |= {"causal": head.causal[0], "causal_head": head.causal[0]}
        both["is_causal"] = head.causal[0]
    config = {"architectures": list(layout.architectures), **shape, **both, "dflash_config": nested}
    config["eagle_aux_hidden_state_layer_ids"] = list(head.target_layers)  # where vLLM looks first
    config["draft_vocab_size"] = head.draft_vocab_size
    if head.target_hidden_size != head.hidden_size:  # readers may take the mere key for a difference
        config["target_hidden_size"] = head.target_hidden_size
    if head.markov is not None:
        config |= {"markov_rank": head.markov_rank, "markov_head_type": head.markov, "enable_confidence_head": False}
    if head.conditional:
        config["treeflash_config"] = {"ar_approximation": "swiglu"}
        if head.conditional_size is not None:
            config["treeflash_config"]["intermediate_size"] = head.conditional_size
    return config


def _read_layers(layout: Layout, config: Json) -> dict[str, Any]:
    """By layer, whether it is causal, and its window."""
    shape = value_at(config, layout.shape)
    count = shape.get("num_hidden_layers")
    check_size("num_hidden_layers", count)
    types = shape.get("layer_types") or config.get("layer_types") or [_FULL] * count
    require(
        isinstance(types, list) and len(types) == count and all(kind in (_SLIDING, _FULL) for kind in types),
        f"layer_types must say {_FULL} or {_SLIDING} for each of {count} layers, not {types}",
    )
    everywhere = value_at(config, ("dflash_config", "use_swa")) and _SLIDING not in types
    window = value_at(config, ("dflash_config", "swa_window_size")) or shape.get("sliding_window")
    windows = tuple(window if everywhere or kind == _SLIDING else None for kind in types)
    require(window is not None or not (everywhere or _SLIDING in types), f"{_SLIDING} without a sliding_window")
    return {"causal": _read_causal(config, types), "windows": windows}


def _read_causal(config: Json, types: Collection[str]) -> tuple[bool, ...]:
    """Whether each layer is causal: by a setting for all layers; without one, layers with a window are."""
    said = [value_at(config, place) for place in (("is_causal",), ("dflash_config", "causal"))]
    said += [value_at(config, ("dflash_config", "causal_head"))]
    said += [False if config.get("sliding_window_non_causal") else None]
    for value in said:
        if value is not None:
            return (bool(value),) * len(types)
    return tuple(kind == _SLIDING for kind in types)


def _read_token_heads(config: Json) -> dict[str, Any]:
    rank = _both(config, "markov_rank") or 0
    require(isinstance(rank, int) and rank >= 0, f"markov_rank must be a whole number, not {rank!r}")
    method = agreed(config, [("treeflash_config", "ar_approximation"), ("ar_approximation",)])
    require(method in (None, "swiglu"), f"ar_approximation is {method}, and only swiglu is known")
    return {
        "markov": str(_both(config, "markov_head_type") or "vanilla").lower() if rank else None,
        "markov_rank": rank,
        "conditional": method is not None,
        "conditional_size": value_at(config, ("treeflash_config", "intermediate_size")),
    }


def _check_planned(config: Json, facts: Json) -> None:
    """Check speculators' number of tokens to draft: at most the slots of a block."""
    for method in value_at(config, ("speculators_config", "proposal_methods")) or ():
        planned, most = value_at(method, ("speculative_tokens",)), facts["block_size"]
        require(
            not isinstance(planned, int) or planned <= most,
            f"a block of {most} slots cannot draft the {planned} tokens of speculators_config: one is another head's",
        )


def _places(key: str) -> tuple[Place, Place]:
    return ("dflash_config", key), (key,)


def _both(config: Json, key: str) -> Any:
    return agreed(config, _places(key))

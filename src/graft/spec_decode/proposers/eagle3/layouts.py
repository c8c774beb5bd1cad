"""Layouts of published EAGLE-3 heads, one per project: names in `config.json` and of tensors, for reading and writing.

Only names and numbers are dealt with here; files are `checkpoint`'s.
`docs/checkpoints.md` says where each fact comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.errors import GraftError
from graft.settings import require
from graft.spec_decode.proposers.eagle3.head import Eagle3Config, check_size

Json = Mapping[str, Any]
Place = tuple[str, ...]  # the keys that lead to a value


_LAYER = "midlayer."  # as `Eagle3Head` has it


@dataclass(frozen=True)
class Layout:
    """Names that one project uses; defaults are SafeAILab's."""

    name: str
    architectures: tuple[str, ...]  # in config.json; the first is the one to write
    layer: str = _LAYER  # what the decoder layer's tensors start with
    shape: Place = ()  # of the decoder layer's shape in config.json
    layers: Place = ("eagle_config", "eagle_aux_hidden_state_layer_ids")  # of the numbers of the target's layers
    numbers_outputs: bool = True  # those number the layers' outputs: the output of i is the input of i + 1
    constants: Json = field(default_factory=dict)  # what else its readers need

    def spell(self, name: str) -> str:
        """The layout's name of a tensor of `Eagle3Head`."""
        return self.layer + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("safeailab", ("LlamaForCausalLM",)),
        Layout("angelslim", ("Eagle3LlamaForCausalLM",), layers=("aux_hidden_states_layer_ids",)),
        Layout("specforge", ("LlamaForCausalLMEagle3",)),
        Layout(
            "speculators",
            ("Eagle3Speculator", "Eagle3DraftModel"),
            layer="layers.0.",
            shape=("transformer_layer_config",),
            layers=("eagle_aux_hidden_state_layer_ids",),
            numbers_outputs=False,
            constants={
                "speculators_model_type": "eagle3",
                "speculators_config": {
                    "algorithm": "eagle3",
                    "default_proposal_method": "greedy",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                    "verifier": {"name_or_path": None, "architectures": []},
                },
            },
        ),
    )
}

# Copies of the target's own weights, which some versions of speculators save for training.
UNUSED_TENSORS = {"verifier_lm_head.weight", "verifier_norm.weight"}

_NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)
# What the head computes, where a config might ask for something else.
_ONLY = {
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "attention_bias": False,
    "mlp_bias": False,
}


def recognise(config: Json) -> Layout:
    """The layout of a head with this config.json."""
    architecture = (config.get("architectures") or [None])[0]
    for layout in LAYOUTS.values():
        if architecture in layout.architectures:
            return layout
    known = ", ".join(layout.architectures[0] for layout in LAYOUTS.values())
    raise GraftError(f"architecture {architecture} is not that of an EAGLE-3 head; known are {known}")


def head_name(name: str) -> str:
    """The `Eagle3Head` name of a tensor in a file of any layout."""
    for layout in LAYOUTS.values():
        if name.startswith(layout.layer):
            return _LAYER + name.removeprefix(layout.layer)
    return name


def read_config(layout: Layout, config: Json) -> dict[str, Any]:
    """Arguments of `Eagle3Config` from config.json; without `target_layers` where it means the default ones."""
    shape = _at(config, layout.shape)
    require(isinstance(shape, Mapping), f"{'.'.join(layout.shape)} is missing")
    for key, value in _ONLY.items():
        require(shape.get(key) in (None, value), f"{key} is {shape.get(key)}, and only {value} is supported")
    require(_at(config, ("eagle_config", "use_aux_hidden_state")) is not False, "it does not read the target's layers")
    for key in ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"):
        check_size(key, shape.get(key))
    heads, hidden_size = shape["num_attention_heads"], shape["hidden_size"]
    facts = {key: shape[key] for key in _SHAPE if shape.get(key) is not None}
    facts.setdefault("num_key_value_heads", heads)
    facts.setdefault("head_dim", hidden_size // heads)
    facts["target_hidden_size"] = config.get("target_hidden_size") or hidden_size
    facts["draft_vocab_size"] = config.get("draft_vocab_size") or shape["vocab_size"]
    facts["rope"] = _read_rope(shape)
    if shape.get("use_sliding_window") or "sliding_attention" in (shape.get("layer_types") or ()):
        facts["sliding_window"] = shape.get("sliding_window")
    for key in _NORMS:
        facts[key] = bool(config.get(key) or _at(config, ("eagle_config", key)))
    if (layers := _read_layers(config)) is not None:
        facts["target_layers"] = layers
    return facts


def write_config(layout: Layout, head: Eagle3Config) -> dict[str, Any]:
    """The config.json of a head in a layout."""
    rope = dict(head.rope)
    shape = {key: getattr(head, key) for key in _SHAPE}
    shape |= {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "rope_theta": rope.pop("rope_theta")}
    shape["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    shape |= {"sliding_window": head.sliding_window, "use_sliding_window": head.sliding_window is not None}
    config: dict[str, Any] = {"architectures": [layout.architectures[0]], **layout.constants}
    config |= {"draft_vocab_size": head.draft_vocab_size, **{key: getattr(head, key) for key in _NORMS}}
    if head.target_hidden_size != head.hidden_size:  # a reader may take the key itself for a difference
        config["target_hidden_size"] = head.target_hidden_size
    for spelling in (layout, LAYOUTS["speculators"]):  # which vLLM looks for first, whatever the layout
        _put(config, spelling.layers, [layer - spelling.numbers_outputs for layer in head.target_layers])
    for key, value in shape.items():
        _put(config, (*layout.shape, key), value)
    return config


def _read_layers(config: Json) -> tuple[int, ...] | None:
    """The layers whose inputs are read. The key that holds the numbers tells whether they count inputs or outputs."""
    found: dict[str, tuple[int, ...]] = {}
    for spelling in LAYOUTS.values():
        if layers := _at(config, spelling.layers):
            place = ".".join(spelling.layers)
            listed = isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)
            require(listed, f"{place} must be a list of layer numbers, not {layers!r}")
            found[place] = tuple(layer + spelling.numbers_outputs for layer in layers)
    said = " but ".join(f"{place} means the inputs of {', '.join(map(str, ids))}" for place, ids in found.items())
    require(len(set(found.values())) <= 1, f"{said}: delete the one that is wrong")
    return next(iter(found.values()), None)


def _read_rope(shape: Json) -> dict[str, Any]:
    """Rotary parameters as transformers 5 has them, from its own or the earlier spelling."""
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    require(isinstance(rope, Mapping), f"rotary parameters must be settings by name, not {rope!r}")
    known = {"rope_type": rope.get("type", "default"), "rope_theta": shape.get("rope_theta") or 10000.0}
    return known | {key: value for key, value in rope.items() if key != "type"}


def _at(config: Json, place: Place) -> Any:
    value: Any = config
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _put(config: dict[str, Any], place: Place, value: Any) -> None:
    for key in place[:-1]:
        config = config.setdefault(key, {})
    config[place[-1]] = value

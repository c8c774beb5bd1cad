"""Layouts of published EAGLE-3 heads, one for each project: names in `config.json` and of tensors.

`checkpoint` reads and writes the files. `docs/checkpoints.md` says where each fact comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graft.drafters.checkpoints import (
    Json,
    Place,
    agreed_layers,
    architecture_of,
    put_at,
    read_shape,
    value_at,
    write_shape,
)
from graft.drafters.eagle3.head import Eagle3Config
from graft.errors import GraftError
from graft.settings import require

_LAYER = "midlayer."  # in `Eagle3Head`


@dataclass(frozen=True)
class Layout:
    """Names that one project uses. Defaults are SafeAILab's."""

    name: str
    architectures: tuple[str, ...]  # in config.json; the first is written
    layer: str = _LAYER  # prefix of the decoder layer's tensors
    shape: Place = ()  # where the decoder layer's shape is in config.json
    layers: Place = ("eagle_config", "eagle_aux_hidden_state_layer_ids")  # where the target's layer numbers are
    numbers_outputs: bool = True  # these numbers count outputs: the output of layer i is the input of i + 1
    constants: Json = field(default_factory=dict)  # other keys that its readers need

    def spell(self, name: str) -> str:
        """The layout's name of a tensor of `Eagle3Head`."""
        return self.layer + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("safeailab", ("LlamaForCausalLM",)),
        Layout("angelslim", ("Eagle3LlamaForCausalLM",), layers=("aux_hidden_states_layer_ids",)),
        Layout("specforge", ("LlamaForCausalLMEagle3",)),
        Layout(  # names that vLLM takes for AngelSlim's
            "vllm",
            tuple(f"Eagle3{target}ForCausalLM" for target in ("Qwen2_5vl", "Qwen3vl", "MiniMaxM2")),
            layers=("eagle_aux_hidden_state_layer_ids",),
            numbers_outputs=False,
        ),
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

_NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
# The only supported values.
_ONLY = {"hidden_act": "silu", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}


def recognise(config: Json) -> Layout:
    """The layout of a head with this config.json."""
    architecture = architecture_of(config)
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
    """Arguments of `Eagle3Config` from config.json; without `target_layers` if it does not name them."""
    facts = read_shape(config, layout.shape, _ONLY)
    require(
        value_at(config, ("eagle_config", "use_aux_hidden_state")) is not False, "it does not read the target's layers"
    )
    shape = value_at(config, layout.shape)
    if shape.get("use_sliding_window") or "sliding_attention" in (shape.get("layer_types") or ()):
        facts["sliding_window"] = shape.get("sliding_window")
    for key in _NORMS:
        facts[key] = bool(config.get(key) or value_at(config, ("eagle_config", key)))
    layers = agreed_layers(config, {spelling.layers: spelling.numbers_outputs for spelling in LAYOUTS.values()})
    if layers is not None:
        facts["target_layers"] = layers
    return facts


def write_config(layout: Layout, head: Eagle3Config) -> dict[str, Any]:
    """The config.json of a head in a layout."""
    model_type = "qwen3" if head.head_norms else "llama"
    shape = write_shape(head) | {"model_type": model_type, "num_hidden_layers": 1}
    shape |= {"sliding_window": head.sliding_window, "use_sliding_window": head.sliding_window is not None}
    config: dict[str, Any] = {"architectures": [layout.architectures[0]], **layout.constants}
    config |= {"draft_vocab_size": head.draft_vocab_size, **{key: getattr(head, key) for key in _NORMS}}
    if head.target_hidden_size != head.hidden_size:  # readers may take the mere key for a difference
        config["target_hidden_size"] = head.target_hidden_size
    for spelling in (layout, LAYOUTS["speculators"]):  # vLLM looks for these names first
        put_at(config, spelling.layers, [layer - spelling.numbers_outputs for layer in head.target_layers])
    for key, value in shape.items():
        put_at(config, (*layout.shape, key), value)
    return config

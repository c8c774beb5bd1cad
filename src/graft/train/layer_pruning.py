"""Which decoder layers a model can do without, and a model without them over the same weights.

A layer is judged by how far the model's next-token distributions move, on the model's own answers, when it is left out.
What the layers that stay then learn is in `depth_pruned`.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from graft.errors import GraftError
from graft.model.decoder_layers import find_layers

# Fields of a config that speak of single layers; `check_layers` finds what is missing here.
_ENTRY_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
_LAYER_NUMBERS = ("mlp_only_layers",)
_NUM_FIRST_LAYERS = ("max_window_layers", "first_k_dense_replace")  # layers before this one are of another sort

Measure = Callable[[PreTrainedModel], float]


class LayerSubset:
    """A copy of a model, over the same weights, that runs some of its layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Parameters of its own over the same numbers: a cast or a gradient must not reach the model.
        own: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        own |= {id(buffer): buffer for buffer in model.buffers()}
        self.model = copy.deepcopy(model, own)
        self._owner, self._name = find_layers(self.model)
        self._layers = list(getattr(self._owner, self._name))
        self._config = copy.deepcopy(model.config.get_text_config())

    def keep(self, layers: Sequence[int]) -> PreTrainedModel:
        """The model with these layers only, ascending, until the next call."""
        kept = [self._layers[number] for number in layers]
        for number, layer in enumerate(kept):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = number  # its place in a KV cache
        setattr(self._owner, self._name, nn.ModuleList(kept))
        config = self.model.config.get_text_config()
        for key, value in fields_of_layers(self._config, layers).items():
            setattr(config, key, value)
        return self.model


def fields_of_layers(config: PreTrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
    """What a config says of single layers, and of how many there are, for a model with some of them."""
    fields: dict[str, Any] = {"num_hidden_layers": len(layers)}
    for key in _ENTRY_PER_LAYER:
        if entries := getattr(config, key, None):
            fields[key] = [entries[number] for number in layers]
    for key in _LAYER_NUMBERS:
        if numbers := getattr(config, key, None):
            fields[key] = [place for place, number in enumerate(layers) if number in numbers]
    for key in _NUM_FIRST_LAYERS:
        if isinstance(most := getattr(config, key, None), int):
            fields[key] = sum(number < most for number in layers)
    return fields


def check_layers(pruned: PreTrainedModel) -> None:
    """A GraftError unless a model made from its config has the same layers: others would load another model.

    Where a layer's place decides what it is, in ways that `fields_of_layers` does not know, the two differ.
    """
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(copy.deepcopy(pruned.config))
    own, its = (_described(getattr(*find_layers(model))) for model in (pruned, expected))
    for key in sorted(own.keys() | its.keys()):
        if own.get(key) != its.get(key):
            raise GraftError(f"{type(pruned).__name__} cannot lose layers: what one is depends on its place ({key})")


def _described(layers: nn.Module) -> dict[str, Any]:
    """Shapes of parameters and plain attributes of all modules, by name."""
    found: dict[str, Any] = {key: tuple(parameter.shape) for key, parameter in layers.named_parameters()}
    for name, module in layers.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        found |= {f"{name}.{key}": value for key, value in plain.items() if key != "training" and key[0] != "_"}
    return found


@dataclass
class RemovalOrder:
    """In which order layers go, and how far the model is from the whole one without each: mean KL divergence."""

    num_layers: int
    alone: list[float] = field(default_factory=list)  # by layer: only this one is left out
    costs: list[float] = field(default_factory=list)  # by layer: what leaving it out added when it was measured last
    removed: list[tuple[int, float]] = field(default_factory=list)  # a layer, and the divergence without all so far

    def kept(self, count: int) -> tuple[int, ...]:
        """The layers that stay of `count`; more, as long as not enough are known to go."""
        gone = {layer for layer, _ in self.removed[: self.num_layers - count]}
        return tuple(layer for layer in range(self.num_layers) if layer not in gone)


def find_removal_order(
    model: PreTrainedModel,
    count: int,
    measure: Measure,
    path: Path,
    facts: Mapping[str, Any],
    progress: Callable[[RemovalOrder], None] = lambda order: None,
    deadline: float = math.inf,
) -> RemovalOrder:
    """Greedy search: of the layers that are left, the one goes without which `measure` is least, until `count` stay.

    The fewer layers are left, the more each matters: a layer that added more when it was measured last than another one
    adds now is not measured again. All of them in every round would take several times as long.

    path: keeps what is found, from which an interrupted search goes on, also to fewer layers. facts: what the figures
    depend on; a search with others begins anew. After `deadline`, a time of `time.perf_counter`, no round begins.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    facts = {"layers": num_layers, **facts}
    order = _read_order(path, facts) or RemovalOrder(num_layers, costs=[-math.inf] * num_layers)
    subset = LayerSubset(model)
    check_layers(subset.keep(range(1, num_layers)))  # every layer in another place: said before hours of measuring
    while len(kept := order.kept(count)) > count:
        if time.perf_counter() >= deadline:
            break
        before = order.removed[-1][1] if order.removed else 0.0
        without: dict[int, float] = {}  # what was measured in this round
        for layer in sorted(kept, key=order.costs.__getitem__):
            if without and min(without.values()) - before <= order.costs[layer]:
                break
            without[layer] = measure(subset.keep([other for other in kept if other != layer]))
            order.costs[layer] = without[layer] - before
        order.alone = order.alone or list(without.values())
        order.removed.append(min(without.items(), key=lambda item: item[1]))
        _write_order(path, facts, order)
        progress(order)
    return order


def _read_order(path: Path, facts: Mapping[str, Any]) -> RemovalOrder | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = content.pop("facts")
        order = RemovalOrder(**content)
        order.removed = [(layer, divergence) for layer, divergence in order.removed]
    except (ValueError, TypeError, KeyError) as error:
        raise GraftError(f"{path} is damaged: delete it to measure anew") from error
    return order if known == dict(facts) else None


def _write_order(path: Path, facts: Mapping[str, Any], order: RemovalOrder) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"facts": dict(facts), **vars(order)}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)

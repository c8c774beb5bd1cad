"""Search for the decoder layers that a model needs least, and models that leave them out and share its weights.

A layer's importance is how far the next-token distributions on the model's own answers move without it. `depth_pruned`
trains the remaining layers.
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
from graft.files import replacing
from graft.model.decoder_layers import find_layers

# Config fields that describe single layers. `check_layers` detects models for which this list is incomplete.
_ENTRY_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
_LAYER_NUMBERS = ("mlp_only_layers",)
_NUM_FIRST_LAYERS = ("max_window_layers", "first_k_dense_replace")  # the number of first layers of another kind

Measure = Callable[[PreTrainedModel], float]


class LayerSubset:
    """A copy of a model that shares its weights and runs only some of its layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        # New Parameter objects on the same storage, so that casts and gradients do not affect the model.
        own: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        own |= {id(buffer): buffer for buffer in model.buffers()}
        self.model = copy.deepcopy(model, own)
        self._owner, self._name = find_layers(self.model)
        self._layers = list(getattr(self._owner, self._name))
        self._config = copy.deepcopy(model.config.get_text_config())

    def keep(self, layers: Sequence[int]) -> PreTrainedModel:
        """The model with only these layers, ascending. Valid until the next call."""
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
    """The config fields about layers, for a model with only these layers."""
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
    """Raise a GraftError unless the model's config recreates its layers, as loading a checkpoint does.

    They differ if a layer's position determines its kind in a way that `fields_of_layers` does not know.
    """
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(copy.deepcopy(pruned.config))
    own, its = (_described(getattr(*find_layers(model))) for model in (pruned, expected))
    for key in sorted(own.keys() | its.keys()):
        if own.get(key) != its.get(key):
            raise GraftError(f"{type(pruned).__name__} cannot lose layers: their kind depends on position ({key})")


def _described(layers: nn.Module) -> dict[str, Any]:
    """Parameter shapes and plain attributes of all modules, by name."""
    found: dict[str, Any] = {key: tuple(parameter.shape) for key, parameter in layers.named_parameters()}
    for name, module in layers.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        found |= {f"{name}.{key}": value for key, value in plain.items() if key != "training" and key[0] != "_"}
    return found


@dataclass
class RemovalOrder:
    """The order in which layers are removed, with mean KL divergences from the whole model."""

    num_layers: int
    alone: list[float] = field(default_factory=list)  # by layer: the divergence without this layer only
    costs: list[float] = field(default_factory=list)  # by layer: the divergence it added when last measured
    removed: list[tuple[int, float]] = field(default_factory=list)  # layers, and the divergence without all so far

    def kept(self, count: int) -> tuple[int, ...]:
        """The `count` layers to keep, or more if the search has not removed enough yet."""
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
    """Greedy search: remove the layer whose absence gives the lowest `measure`, until `count` layers are left.

    Layers matter more as fewer are left. So a layer that added more divergence when last measured than another one adds
    now is not measured again; measuring all in every round would take several times as long.

    path: a file of the results so far, from which a search resumes, also to fewer layers. facts: what the results
    depend on; with other facts it starts anew. No round starts after `deadline`, in `time.perf_counter` seconds.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    facts = {"layers": num_layers, **facts}
    order = read_order(path, facts) or RemovalOrder(num_layers, costs=[-math.inf] * num_layers)
    subset = LayerSubset(model)
    check_layers(subset.keep(range(1, num_layers)))  # moves every layer, to fail before hours of measuring
    while len(kept := order.kept(count)) > count:
        if time.perf_counter() >= deadline:
            break
        before = order.removed[-1][1] if order.removed else 0.0
        without: dict[int, float] = {}  # measured in this round
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


def read_order(path: Path, facts: Mapping[str, Any]) -> RemovalOrder | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = content.pop("facts")
        order = RemovalOrder(**content)
        order.removed = [(layer, divergence) for layer, divergence in order.removed]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise GraftError(f"{path} is damaged: delete it to measure anew") from error
    return order if known == dict(facts) else None


def _write_order(path: Path, facts: Mapping[str, Any], order: RemovalOrder) -> None:
    with replacing(path) as file:
        file.write((json.dumps({"facts": dict(facts), **vars(order)}, indent=1) + "\n").encode())

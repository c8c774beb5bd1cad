"""Where a transformers model keeps its decoder layers."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from graft.errors import GraftError


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    owner, name = find_layers(model)
    layers: nn.ModuleList = getattr(owner, name)
    return layers


def find_layers(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """The module that has the list of decoder layers, and the list's name in it."""
    count = model.config.get_text_config().num_hidden_layers
    for owner in model.base_model.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return owner, name
    raise GraftError(f"{type(model).__name__} has no list of its {count} layers, so layers cannot be skipped")

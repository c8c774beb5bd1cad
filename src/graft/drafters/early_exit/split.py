"""Views of a model with only some of its decoder layers: its own modules, weights, config and code.

A view copies the modules above the decoder layers, and no weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.hub.draft_names import check_exit_layer
from graft.model.decoder_layers import find_layers, layers_of
from graft.model.overrides import evaluating
from graft.settings import require


def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The model's first layers with its embedding, final norm and output layer, as a model over the same modules."""
    layers = list(layers_of(model))
    check_exit_layer(num_layers, len(layers))
    return _view(model, layers[:num_layers])


def exit_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [1, T, V] of hidden states [1, T, H], by the final norm and the output layer."""
    layer = _Given(layers_of(model)[0], hidden)
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)  # not used
    with torch.no_grad(), evaluating(model):
        logits: Tensor = _view(model, [layer])(input_ids=tokens, use_cache=False).logits
    return logits


class _Given(nn.Module):
    """Replacement of a decoder layer that returns known hidden states."""

    def __init__(self, layer: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        self.layer, self._hidden = layer, hidden

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._hidden


def _view(model: PreTrainedModel, layers: Sequence[nn.Module]) -> PreTrainedModel:
    """A view of the model with these decoder layers."""
    owner, name = find_layers(model)
    path = next(path for path, module in model.named_modules() if module is owner)
    view: PreTrainedModel = _copied(model)
    decoder: nn.Module = view
    for part in path.split(".") if path else ():
        child = _copied(decoder._modules[part])
        decoder._modules[part] = child
        decoder = child
    decoder._modules[name] = nn.ModuleList(layers)
    return view


def _copied(module: Any) -> Any:
    """A copy with the same submodules and parameters, in which submodules can be replaced."""
    is_plain = "forward" not in vars(module) and not hasattr(module, "_hf_hook")
    require(is_plain, f"{type(module).__name__} has a forward of its own, so it cannot be run in part")
    own = copy.copy(module)
    own._modules = dict(module._modules)
    own._compiled_call_impl = None  # it would run the original
    own.training = False  # of the copies; the caller sets the mode of the layers
    return own

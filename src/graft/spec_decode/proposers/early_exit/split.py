"""SplitModel: a model cut in two behind one of its decoder layers.

Both parts are views of the model: its own modules, weights, config and code, with some layers left out or stood in for.
A view has copies of the modules above the decoder layers only, and none of any weight.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.errors import GraftError
from graft.model.decoder_layers import find_layers, layers_of
from graft.model.overrides import evaluating
from graft.settings import require

_TOLERANCE = 0.02  # of the logits' spread: another computation's are further apart, another rounding's are not


class SplitModel:
    """A model's first layers and the others, each run by the model's own code. One thread at a time."""

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        """num_layers: in the first part."""
        self.model, self.num_layers = model, check_exit_layer(model, num_layers)
        layers = list(layers_of(model))
        self._last = _Recorder(layers[num_layers - 1])
        self._given = [_Given(layer) for layer in layers[:num_layers]]
        self._first, self._first_decoder = _view(model, [*layers[: num_layers - 1], self._last])
        self._rest, _ = _view(model, [*self._given, *layers[num_layers:]])

    def check(self) -> None:
        """A GraftError if both parts together are not the model: if layers hand on more than hidden states, say."""
        tokens = torch.arange(4, device=self.model.device)[None]
        tokens %= self.model.config.get_text_config().vocab_size
        arguments = {"input_ids": tokens, "use_cache": False}
        try:
            with torch.no_grad(), evaluating(self.model):
                whole = self.model(**arguments).logits.float()
                parts = self.run_rest(self.hidden_of(**arguments), **arguments).float()
            is_same = bool((whole - parts).abs().max() <= _TOLERANCE * whole.std())
        except Exception as error:  # whatever a model's code may raise
            raise GraftError(f"{self._problem}: {type(error).__name__}: {error}".partition("\n")[0]) from error
        require(is_same, self._problem)

    @property
    def _problem(self) -> str:
        return (
            f"{type(self.model).__name__} cannot be cut behind layer {self.num_layers}: its later layers need more "
            "than hidden states; draft with something else"
        )

    # arguments: those of the model's own forward.

    def run_first(self, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Logits by the first layers, the final norm and the output layer; and the first layers' hidden states."""
        logits: Tensor = self._first(**arguments).logits
        return logits, self._last.take()

    def hidden_of(self, **arguments: Any) -> Tensor:
        """The first layers' hidden states [1, T, H] alone."""
        self._first_decoder(**arguments)
        return self._last.take()

    def run_rest(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """The model's logits, from the first layers' hidden states."""
        for layer in self._given:
            layer.hidden = hidden
        try:
            logits: Tensor = self._rest(**arguments).logits
        finally:
            for layer in self._given:
                layer.hidden = None
        return logits


def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The model's first layers with its embedding, final norm and output layer, as a model over the same modules."""
    return _view(model, list(layers_of(model))[: check_exit_layer(model, num_layers)])[0]


def exit_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What the final norm and the output layer make of hidden states [1, T, H]: logits [1, T, V]."""
    layer = _Given(layers_of(model)[0])
    layer.hidden = hidden
    view, _ = _view(model, [layer])
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)  # whose embedding is not used
    with torch.no_grad(), evaluating(model):
        logits: Tensor = view(input_ids=tokens, use_cache=False).logits
    return logits


def check_exit_layer(model: PreTrainedModel, num_layers: int) -> int:
    most = len(layers_of(model)) - 1
    name = type(model).__name__
    require(most > 0, f"{name} has one layer, so there is none to exit behind: early exit needs two layers or more")
    require(
        1 <= num_layers <= most,
        f"the exit layer is {num_layers}, and must be between 1 and {most}: {name} has {most + 1} layers",
    )
    return num_layers


class _Recorder(nn.Module):
    """A decoder layer whose output is kept."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._output: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._output = self.layer(*args, **kwargs)
        return self._output

    def take(self) -> Tensor:
        output, self._output = self._output, None
        require(
            isinstance(output, Tensor), f"{type(self.layer).__name__} gives more than hidden states: no exit behind it"
        )
        assert output is not None
        return output


class _Given(nn.Module):
    """In a decoder layer's stead: gives hidden states that are known already, whatever comes in."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.hidden


def _view(model: PreTrainedModel, layers: Sequence[nn.Module]) -> tuple[PreTrainedModel, nn.Module]:
    """The model with these decoder layers, and the part of it that runs them."""
    owner, name = find_layers(model)
    path = next(path for path, module in model.named_modules() if module is owner)
    view = _copied(model)
    decoder: nn.Module = view
    for part in path.split(".") if path else ():
        child = _copied(decoder._modules[part])
        decoder._modules[part] = child
        decoder = child
    decoder._modules[name] = nn.ModuleList(layers)
    return view, decoder


def _copied(module: Any) -> Any:
    """A module of the same submodules and parameters, of which others can be put in their places."""
    is_plain = "forward" not in vars(module) and not hasattr(module, "_hf_hook")
    require(is_plain, f"{type(module).__name__} has a forward of its own, so it cannot be run in part")
    own = copy.copy(module)
    own._modules = dict(module._modules)
    own._compiled_call_impl = None  # would run the module itself
    own.training = False  # of these copies alone; whoever runs them sees to the layers
    return own

"""SplitModel: a model cut in two after one of its decoder layers.

Both parts are views of the model: its own modules, weights, config and code, with some layers left out or replaced. A
view copies only the modules above the decoder layers, and no weights.
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

_TOLERANCE = 0.02  # of the logits' standard deviation: more than rounding errors, less than wrong results


class SplitModel:
    """A model's first layers and the others, each run by the model's own code. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        """num_layers: in the first part."""
        self.model, self.num_layers = model, check_exit_layer(model, num_layers)
        layers = list(layers_of(model))
        self._last = _Recorder(layers[num_layers - 1])
        self._given = [_Given(layer) for layer in layers[:num_layers]]
        self._first, self._first_decoder = _view(model, [*layers[: num_layers - 1], self._last])
        self._rest, _ = _view(model, [*self._given, *layers[num_layers:]])

    def check(self) -> None:
        """Raise a GraftError if both parts do not give the model's output, as with layers that pass on more."""
        tokens = torch.arange(4, device=self.model.device)[None]
        tokens %= self.model.config.get_text_config().vocab_size
        arguments = {"input_ids": tokens, "use_cache": False}
        try:
            with torch.no_grad(), evaluating(self.model):
                whole = self.model(**arguments).logits.float()
                parts = self.run_rest(self.hidden_of(**arguments), **arguments).float()
            is_same = bool((whole - parts).abs().max() <= _TOLERANCE * whole.std())
        except Exception as error:  # a model's code may raise anything
            raise GraftError(f"{self._problem}: {type(error).__name__}: {error}".partition("\n")[0]) from error
        require(is_same, self._problem)

    @property
    def _problem(self) -> str:
        return (
            f"{type(self.model).__name__} cannot be cut after layer {self.num_layers}: its later layers need more "
            "than hidden states; use another drafter"
        )

    # arguments: of the model's own forward

    def run_first(self, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Logits of the early exit, and the first layers' hidden states."""
        logits: Tensor = self._first(**arguments).logits
        return logits, self._last.take()

    def hidden_of(self, **arguments: Any) -> Tensor:
        """The first layers' hidden states [1, T, H]."""
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
    """Logits [1, T, V] of hidden states [1, T, H], by the final norm and the output layer."""
    layer = _Given(layers_of(model)[0])
    layer.hidden = hidden
    view, _ = _view(model, [layer])
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)  # not used
    with torch.no_grad(), evaluating(model):
        logits: Tensor = view(input_ids=tokens, use_cache=False).logits
    return logits


def check_exit_layer(model: PreTrainedModel, num_layers: int) -> int:
    most = len(layers_of(model)) - 1
    name = type(model).__name__
    require(most > 0, f"{name} has one layer: early exit needs two layers or more")
    require(
        1 <= num_layers <= most,
        f"the exit layer is {num_layers}, and must be between 1 and {most}: {name} has {most + 1} layers",
    )
    return num_layers


class _Recorder(nn.Module):
    """A decoder layer that keeps its output."""

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
            isinstance(output, Tensor), f"{type(self.layer).__name__} gives more than hidden states: no exit after it"
        )
        assert output is not None
        return output


class _Given(nn.Module):
    """Replacement of a decoder layer that returns known hidden states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.hidden


def _view(model: PreTrainedModel, layers: Sequence[nn.Module]) -> tuple[PreTrainedModel, nn.Module]:
    """A view of the model with these decoder layers, and its module that runs them."""
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
    """A copy with the same submodules and parameters, in which submodules can be replaced."""
    is_plain = "forward" not in vars(module) and not hasattr(module, "_hf_hook")
    require(is_plain, f"{type(module).__name__} has a forward of its own, so it cannot be run in part")
    own = copy.copy(module)
    own._modules = dict(module._modules)
    own._compiled_call_impl = None  # it would run the original
    own.training = False  # of the copies; the caller sets the mode of the layers
    return own

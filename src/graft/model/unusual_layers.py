"""Linear layers that are not PyTorch's own: quantised, adapted or changed ones. They always run their own code.

What they are, in words; whether they, and other changed modules, give a token its own result; and their weight as one
matrix. Which layers are plain: `plain_modules`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.errors import GraftError
from graft.model.cpu_linear import FewTokensLinear
from graft.model.overrides import evaluating
from graft.model.plain_modules import changed_modules, is_plain_linear, package_of
from graft.quiet import say_once

# A layer's result may change by this share of its size when other tokens are in the forward, or when its input is split
# into two. In bfloat16 it changes by 0.004 at most; a scale that all tokens share changes it by 0.04 and more, and
# activations of 8 bits by 0.025 and more.
_ROUNDING = 0.01
_MOVED = 0.1  # of other modules, in which the roundings of several layers add up, and whose inputs move too
_NUM_OTHERS, _SIZE_OF_OTHERS = 12, 1e4  # float16 ends at 65,504
_COMPUTED: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()  # see `output_weight`


def unusual_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with inputs and outputs, by name, that are not plain linear layers."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "in_features", None), int) and not (_is_plain(layer) or _is_of_a_model(layer))
    }


def _is_plain(layer: nn.Module) -> bool:
    return is_plain_linear(layer) or is_plain_linear(layer, FewTokensLinear)


def _is_of_a_model(layer: nn.Module) -> bool:
    """Whether a layer is of a kind that a model's code in transformers defines, as some routers are."""
    kind: Any = type(layer)
    return kind.__module__.startswith("transformers.models.") and is_plain_linear(layer, kind)


def weights_in_words(model: PreTrainedModel) -> str:
    """What a model's weights are, such as "bfloat16", or "bitsandbytes: 210 Linear4bit layers; else bfloat16"."""
    rest = str(model.dtype).removeprefix("torch.")
    kinds = Counter(map(_kind_of, unusual_layers(model).values()))
    if not kinds:
        return rest
    config: Any = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    named = f"{getattr(method, 'value', method)}: " if method is not None else ""
    return f"{named}{', '.join(f'{count} {kind} layers' for kind, count in kinds.items())}; else {rest}"


def _kind_of(layer: nn.Module) -> str:
    weight = layer._parameters.get("weight")
    if type(layer) not in (nn.Linear, FewTokensLinear):
        return type(layer).__name__
    return type(weight).__name__ if type(weight) not in (nn.Parameter, type(None)) else "changed Linear"


@torch.no_grad()
def check_tokens_apart(model: PreTrainedModel) -> None:
    """Raise a GraftError if a layer gives a token another result when other tokens are in the forward.

    Such a layer scales the activations of all tokens together, so trees and batches would change the model's texts. One
    layer of each kind is tried: with one token alone, and beside tokens of larger activations. A layer that only rounds
    activations to few bits is taken with a warning. Other changed modules are compared as they run in the model.
    """
    layers = unusual_layers(model)
    with evaluating(model):
        _check_other_modules(model, {name for name in _unknown_modules(model) if name not in layers})
    if not layers:
        return
    say_once()
    with evaluating(model):
        shapes = _run_once(model, layers)
        rounded = None
        for name, layer in _one_of_each_kind(layers).items():
            shape = [1] * (shapes.get(name, 3) - 2) + [-1, layer.in_features]
            if not _loss_of_sums(layer, model, shape) <= _ROUNDING:  # also if it is not a number
                rounded = rounded or f"{name} ({_kind_of(layer)})"
            if not (change := _change_among_others(layer, model, shape)) <= _ROUNDING:
                raise GraftError(
                    f"{type(model).__name__} scales all tokens of a forward together, so its text depends on how many "
                    f"there are: {name} ({_kind_of(layer)}) changes its result for a token by {change:.0%} when larger "
                    "ones are beside it. Use weights whose activations keep 16 bits or have a scale for each token; "
                    "with bitsandbytes in 8 bits, llm_int8_threshold=0"
                )
    if rounded is not None:
        warnings.warn(
            f"{type(model).__name__} rounds activations to few bits, in {rounded} for example. That turns the rounding "
            "of floating point into larger differences between forwards of different sizes: a text with trees may "
            "differ from plain decoding also where no tie is near",
            stacklevel=3,
        )


def _unknown_modules(model: nn.Module) -> set[str]:
    """The names of modules that do more than their class, or whose class is not one of transformers or PyTorch."""
    known = {"torch", "transformers", package_of(__name__)}
    foreign = {name for name, module in model.named_modules() if package_of(type(module).__module__) not in known}
    return foreign | set(changed_modules(model))


def _check_other_modules(model: PreTrainedModel, names: set[str]) -> None:
    """Raise a GraftError if one of these modules gives the first token another result when others follow it.

    What each gets and returns is compared, in a forward of one token and in one of several. All that comes before a
    module moves its input by rounding only, or was named itself.
    """
    if not names:
        return
    alone, among = (_first_token_at(model, names, count) for count in (1, 1 + _NUM_OTHERS))
    for name in [name for name in alone if name in among]:
        pairs = zip(alone[name], among[name], strict=True)
        moved, change = (_share(after - before, torch.stack((before, after)).abs().amax(0)) for before, after in pairs)
        if not change <= max(_MOVED, 4 * moved):
            raise GraftError(
                f"{name or type(model).__name__} ({type(model.get_submodule(name)).__name__}) changes its result for a "
                f"token by {change:.0%} when others follow in the same forward, so the text would depend on how many "
                "there are: remove its hook or its own forward, or let it treat each token alone"
            )


def _first_token_at(model: Any, names: set[str], count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Modules' input and output for the first of `count` tokens, by name, if they have one for each token.

    An embedding has no such input. A whole network, which has none either, is left out: rounding adds up in it.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def first_token(values: Iterable[Any]) -> Tensor | None:
        tensors = (each for each in values if isinstance(each, Tensor) and each.is_floating_point())
        found = next((each for each in tensors if each.ndim > 1 and each.shape[-2] == count), None)
        # What overflows does so with one token too, and is no sign of others.
        return None if found is None else found[..., :1, :].float().nan_to_num(0, 0, 0)

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (given := first_token((*args, *kwargs.values()))) is not None:
            inputs[name] = given

    def leave(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        results = output.values() if isinstance(output, dict) else output
        found = first_token([results] if isinstance(results, Tensor) else results)
        if found is not None and (name in inputs or not any(module.children())):
            outputs[name] = found

    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            hook = module.register_forward_pre_hook(partial(enter, name), prepend=True, with_kwargs=True)
            hooks.callback(hook.remove)  # it comes before the owner's hooks, and the other after them
            hooks.callback(module.register_forward_hook(partial(leave, name)).remove)
        _run(model, count)
    return {name: (inputs.get(name, torch.zeros(1)), found) for name, found in outputs.items()}


def _run_once(model: Any, layers: dict[str, Any]) -> dict[str, int]:
    """The number of dimensions of each layer's input, by name, if one token reaches it.

    Some libraries unpack their weights in the first forward only, and some formats cannot be run at all.
    """
    shapes: dict[str, int] = {}
    with ExitStack() as hooks:
        for name, layer in layers.items():
            note = lambda _, inputs, name=name: shapes.update({name: inputs[0].ndim}) if inputs else None  # noqa: E731
            hooks.callback(layer.register_forward_pre_hook(note).remove)
        _run(model, 1)
    return shapes


def _run(model: Any, count: int) -> None:
    """A forward of the model's own over its first `count` tokens."""
    try:
        model(torch.arange(count, device=model.device)[None], use_cache=False)
    except Exception as error:  # whatever a library may raise
        dtype, words = str(model.dtype).removeprefix("torch."), str(error).strip().partition("\n")[0]
        raise GraftError(
            f"transformers itself cannot run this {type(model).__name__} ({weights_in_words(model)}) in {dtype} on "
            f"{model.device}: {type(error).__name__}: {words}; try another dtype"
        ) from error


def _one_of_each_kind(layers: dict[str, Any]) -> dict[str, Any]:
    found: dict[tuple[str, ...], str] = {}
    for name, layer in layers.items():
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        stored = sorted(f"{key} {type(each).__name__} {each.dtype}" for key, each in tensors)
        found.setdefault((_kind_of(layer), repr(getattr(layer, "quantization_scheme", None)), *stored), name)
    return {name: layers[name] for name in found.values()}


def _change_among_others(layer: Any, model: PreTrainedModel, shape: list[int]) -> float:
    """By how much a layer's result for a token changes, as a share of its size, when larger tokens are beside it."""
    noise = _noise(1 + _NUM_OTHERS, layer)
    # The token has one large number. A scale of 8 bits for it alone loses the small ones, another scale may keep them.
    token = 0.015 * noise[:1].sign()
    token[0, 0] = 5.0
    inputs = torch.cat([token, _SIZE_OF_OTHERS * noise[1:].sign()]).to(_place_of(layer, model), model.dtype).view(shape)
    alone, among = layer(inputs[..., :1, :]).float(), layer(inputs)[..., :1, :].float()
    return _share(among - alone, alone)


def _loss_of_sums(layer: Any, model: PreTrainedModel, shape: list[int]) -> float:
    """By how much the result for a sum differs from the sum of results, as a share: what rounding of inputs loses."""
    first, second = _noise(2, layer) * 0.15
    first[0], second[0] = 2.0, -2.0  # they make the scales of the parts coarser, and cancel out in the sum
    none, *results = (
        layer(inputs.to(_place_of(layer, model), model.dtype).view(shape)).float()
        for inputs in (torch.zeros_like(first), first, second, (first + second))
    )
    return _share(results[0] + results[1] - none - results[2], results[2])


def _noise(count: int, layer: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # the global one is the user's
    return torch.randn(count, layer.in_features, generator=generator)


def _place_of(layer: nn.Module, model: PreTrainedModel) -> torch.device:
    return next((each.device for each in (*layer.parameters(), *layer.buffers())), model.device)


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.norm() / whole.norm().clamp(min=1e-30))


def readable_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, without those that are numbers of a quantised layer."""
    stored = {id(tensor) for layer in unusual_layers(model).values() for tensor in layer.parameters()}
    return {name: weight for name, weight in model.named_parameters() if id(weight) not in stored}


def cast_plain_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all weights that are not in float32 or of a quantised layer the dtype that was asked for.

    Of some quantised checkpoints (FP8, bitsandbytes), transformers 5.23 leaves embeddings and norms in the file's.
    """
    for weight in readable_weights(model).values():
        if weight.dtype in (torch.bfloat16, torch.float16):
            weight.data = weight.data.to(dtype)


def output_weight(model: PreTrainedModel) -> Tensor:
    """The weight [V, H] of a model's output layer. A layer that is not plain computes it, once."""
    layer: Any = model.get_output_embeddings()
    if _is_plain(layer):
        weight: Tensor = layer.weight
        return weight
    if layer not in _COMPUTED:
        with torch.no_grad():
            rows = torch.eye(layer.in_features, dtype=model.dtype, device=model.device)
            _COMPUTED[layer] = (layer(rows) - layer(torch.zeros_like(rows[:1]))).T.contiguous()
    return _COMPUTED[layer]

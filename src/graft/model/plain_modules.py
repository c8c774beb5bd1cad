"""Whether a module computes what its class does, from its weights alone.

Code that replaces or fuses modules asks here first. What does more keeps its own code: a layer with hooks, a forward of
its own, a subclass, packed weights, or scales for its activations. What such layers are: `unusual_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from torch import nn
from torch.nn.modules import module as torch_module

_QUIET_HOOKS = "transformers.utils.output_capturing"  # transformers' own hooks, idle unless outputs are recorded
_OF_ANY_MODULE = {*vars(nn.Module()), "_is_hf_initialized"} - {"_forward_hooks", "_forward_pre_hooks"}


def changed_module(network: nn.Module) -> str | None:
    """The name of a module that does more, or other things, than the forward of its class; None if there is none."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "every module"
    return next((name or type(network).__name__ for name in changed_modules(network)), None)


def changed_modules(network: nn.Module) -> Iterator[str]:
    """The names of all modules with hooks or a forward of their own, or whose class was given another forward."""
    replaced = {kind for kind in set(map(type, network.modules())) if _has_replaced_forward(kind)}
    for name, module in network.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        hooked = any(getattr(hook, "__module__", None) != _QUIET_HOOKS for hook in hooks)
        has_own = not {"forward", "_call_impl"}.isdisjoint(vars(module)) or hasattr(module, "_hf_hook")
        if hooked or has_own or type(module) in replaced:
            yield name


def _has_replaced_forward(kind: type[nn.Module]) -> bool:
    """Whether a class was given another forward after it was defined, as some libraries do to all layers of a kind."""
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    if owner is nn.Module:
        return False
    *wrappers, forward = _unwrapped(vars(owner)["forward"])
    own = {package_of(owner.__module__), "torch", "transformers"}  # which wrap forwards themselves
    is_wrapped = any(package_of(written_in(wrapper)) not in own for wrapper in wrappers)
    return is_wrapped or (written_in(forward), forward.__qualname__) != (
        owner.__module__,
        f"{owner.__qualname__}.forward",
    )


def _unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def written_in(function: Callable[..., Any]) -> str:
    """The name of the module whose code a function is. `__module__` of a wrapper is that of what it wraps."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name


def package_of(module: str) -> str:
    return module.partition(".")[0]


def settings_of(network: nn.Module) -> list[Any]:
    """What modules hold beside weights, such as types, hooks, numbers and names of adapters, to be compared later.

    Code that was fused or captured from the network is out of date when they change.
    """
    found: list[Any] = []
    for module in network.modules():
        found.append(type(module))
        found += [_simple(value) for name, value in vars(module).items() if name not in _OF_ANY_MODULE]
    return found


def _simple(value: Any) -> Any:
    """A copy of a simple value, or of the simple values of a container; None for all else."""
    if isinstance(value, dict):
        return [(key, each) for key, each in value.items() if _is_simple(each)]
    if isinstance(value, (list, tuple, set)):
        return [each for each in value if _is_simple(each)]
    return value if _is_simple(value) else None


def _is_simple(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) or (callable(value) and not isinstance(value, nn.Module))


def is_plain_linear(layer: nn.Module, kind: type[nn.Linear] = nn.Linear) -> TypeGuard[nn.Linear]:
    """Whether a layer is of this very kind, and does what its weights say."""
    return has_only_weights(layer, kind) and changed_module(layer) is None


def has_only_weights(layer: nn.Module, kind: type[nn.Linear]) -> bool:
    """Whether a layer is of this very kind and holds a weight and a bias as PyTorch makes them, and nothing else."""
    return (
        type(layer) is kind
        and layer._parameters.keys() == {"weight", "bias"}
        and type(layer.weight) is nn.Parameter
        and type(layer.bias) in (nn.Parameter, type(None))
        and not layer._buffers
        and not layer._modules
    )

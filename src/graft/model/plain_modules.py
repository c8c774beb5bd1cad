"""Whether a module computes what its class does, from its weights alone.

Code that replaces or fuses modules asks here first. What does more keeps its own code: a layer with hooks, a forward of
its own, a subclass, packed weights, or scales for its activations. What such layers are: `unusual_layers`.
"""

from __future__ import annotations

import inspect
from typing import TypeGuard

from torch import nn
from torch.nn.modules import module as torch_module

_QUIET_HOOKS = "transformers.utils.output_capturing"  # transformers' own hooks, idle unless outputs are recorded


def changed_module(network: nn.Module) -> str | None:
    """The name of a module that does more, or other things, than the forward of its class; None if there is none."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "every module"
    replaced = {kind for kind in set(map(type, network.modules())) if _has_replaced_forward(kind)}
    for name, module in network.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        hooked = any(getattr(hook, "__module__", None) != _QUIET_HOOKS for hook in hooks)
        if hooked or "forward" in vars(module) or hasattr(module, "_hf_hook") or type(module) in replaced:
            return name or type(network).__name__
    return None


def _has_replaced_forward(kind: type[nn.Module]) -> bool:
    """Whether a class was given another forward after it was defined, as some libraries do to all layers of a kind."""
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    forward = inspect.unwrap(vars(owner)["forward"])
    defined = (owner.__module__, f"{owner.__qualname__}.forward")
    return owner is not nn.Module and (forward.__module__, forward.__qualname__) != defined


def is_plain_linear(layer: nn.Module, kind: type[nn.Linear] = nn.Linear) -> TypeGuard[nn.Linear]:
    """Whether a layer is of this very kind and has a weight and a bias as PyTorch makes them, and nothing else."""
    return (
        type(layer) is kind
        and layer._parameters.keys() == {"weight", "bias"}
        and type(layer.weight) is nn.Parameter
        and type(layer.bias) in (nn.Parameter, type(None))
        and not layer._buffers
        and not layer._modules
        and changed_module(layer) is None
    )

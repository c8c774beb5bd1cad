"""Temporary changes to the user's model, made while our forwards run and undone afterwards, even after an error.

- Attention: a model's code reads its attention function from the config, so the config names ours.
- Training mode: a model in training mode is switched to evaluation mode.
- torch.compile: compiled modules run eagerly, because steps of many sizes would be compiled again and again.

Several threads may run forwards at once: the first one makes the change, and the last one undoes it. A forward of the
model's owner in another thread still uses the attention that the owner chose (see `attention`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

NAME = "graft"  # of tree attention, among transformers' attention functions


@dataclass
class _Override:
    """A change to a model that one or more threads rely on."""

    context: AbstractContextManager[Any]  # undoes the change on exit
    before: Any  # the owner's value
    num_users: int = 0


_LOCK = threading.Lock()
_OVERRIDES: dict[tuple[str, int], _Override] = {}  # by what is changed, and the id of the config or model
_THREAD = threading.local()
_EXPANDS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
Write = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@contextmanager
def use_tree_attention(model: PreTrainedModel, step: Any) -> Iterator[None]:
    """Context in which the model's own code uses tree attention on this step, in this thread.

    The step is not passed to the forward, because not every model's layers pass on arguments that they do not know.
    The attention is set on the config directly, because `set_attn_implementation` takes 1 ms to do the same.
    """
    config = model.config.get_text_config()
    with _shared(("attention", id(config)), lambda: _set_attention(config)), _uncompiled():
        outside = current_step(), expands_latents()
        _THREAD.step, _THREAD.expands = step, _expands_latents(model)
        try:
            yield
        finally:
            _THREAD.step, _THREAD.expands = outside


@contextmanager
def _set_attention(config: PreTrainedConfig) -> Iterator[str | None]:
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield before
    finally:
        config._attn_implementation = before


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Context in which modules compiled by torch.compile run eagerly."""
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nothing is compiled without it
        yield
        return
    with _shared(("compiler", 0), lambda: torch.compiler.set_stance("force_eager")):
        yield


def current_step() -> Any:
    """The step of this thread's forward (`Visibility` or `KernelStep`); None if the forward is not one of ours."""
    return getattr(_THREAD, "step", None)


def expands_latents() -> bool:
    """Whether the model of this thread's forward caches latents, and makes keys and values of all that it gets back.

    Then the cache gives back a step's own latents, and attention stores the keys and values that are made of them.
    """
    return getattr(_THREAD, "expands", False)


def _expands_latents(model: nn.Module) -> bool:
    found = _EXPANDS.get(model)
    if found is None:
        found = _EXPANDS[model] = any(hasattr(module, "expand_kv") for module in model.modules())
    return found


def write_later(write: Write) -> None:
    """Let the attention that this thread computes next write keys and values."""
    _THREAD.write = write


def take_write() -> Write | None:
    """What `write_later` was given, once."""
    write, _THREAD.write = getattr(_THREAD, "write", None), None
    return write


def owners_attention(config: PreTrainedConfig) -> str:
    """The attention that the model's owner chose, whether or not it is overridden now."""
    with _LOCK:
        override = _OVERRIDES.get(("attention", id(config)))
        name: str = override.before if override is not None else config._attn_implementation
    return name


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode. Training mode is restored afterwards."""
    with _shared(("training", id(model)), lambda: _set_evaluation_mode(model)):
        yield


@contextmanager
def _set_evaluation_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _shared(key: tuple[str, int], make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context of a change that threads share: the first one enters what `make` returns, the last one exits it."""
    with _LOCK:
        override = _OVERRIDES.get(key)
        if override is None:
            context = make()
            override = _OVERRIDES[key] = _Override(context, context.__enter__())
        override.num_users += 1
    try:
        yield
    finally:
        with _LOCK:
            override.num_users -= 1
            if override.num_users == 0:
                del _OVERRIDES[key]
                override.context.__exit__(None, None, None)

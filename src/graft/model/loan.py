"""Loans: what our forwards change about the user's model while they run, and undo afterwards, whatever happened.

A model's code reads its attention function from the config, so that is set while one of our forwards runs; and a model
in training mode is in evaluation mode meanwhile, and what the owner has compiled runs as it was written, since steps of
all sizes would have it compiled again and again. Several threads may run forwards at once: the first sets, the last
undoes, and a forward of the model's owner, in yet another thread, uses the attention that the owner chose.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

NAME = "graft"  # of tree attention, among transformers' attention functions


@dataclass
class _Loan:
    """A change to a model, while anybody uses it."""

    before: Any  # what the owner had
    take_back: Callable[[], None]
    num_users: int = 0


_LOCK = threading.Lock()
_LOANS: dict[tuple[str, int], _Loan] = {}  # by what is changed, and the id of the config or model
_THREAD = threading.local()


@contextmanager
def tree_attention(model: PreTrainedModel, seen: Any) -> Iterator[None]:
    """Context in which the model's own code uses tree attention, in this thread, on a step that sees what `seen` says.

    It is not handed through the model as an argument: not every model's layers hand on what they do not know.
    The attention is set on the config directly: `set_attn_implementation` does the same, but takes 1 ms.
    """
    config = model.config.get_text_config()

    def begin() -> _Loan:
        before = config._attn_implementation
        config._attn_implementation = NAME
        return _Loan(before, lambda: setattr(config, "_attn_implementation", before))

    with _lent(("attention", id(config)), begin), _uncompiled():
        outside, _THREAD.seen = seen_now(), seen
        try:
            yield
        finally:
            _THREAD.seen = outside


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Context in which nothing compiled by torch.compile runs compiled."""

    def begin() -> _Loan:
        stance: Any = torch.compiler.set_stance("force_eager")
        return _Loan(None, lambda: stance.__exit__(None, None, None))

    if "torch._dynamo" not in sys.modules:  # takes seconds to import, and nothing can be compiled without it
        yield
        return
    with _lent(("compiler", 0), begin):
        yield


def seen_now() -> Any:
    """What the tokens of this thread's forward see; None if it is not one of ours."""
    return getattr(_THREAD, "seen", None)


def is_ours() -> bool:
    """Whether this thread is inside one of our forwards."""
    return seen_now() is not None


def owners_attention(config: PreTrainedConfig) -> str:
    """The attention that a model's owner chose, whether or not the model is lent."""
    with _LOCK:
        loan = _LOANS.get(("attention", id(config)))
        name: str = loan.before if loan is not None else config._attn_implementation
    return name


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode; one in training mode is back in it afterwards."""

    def begin() -> _Loan:
        training = [module for module in model.modules() if module.training] if model.training else []
        if training:
            model.eval()

        def take_back() -> None:
            for module in training:
                module.training = True

        return _Loan(training, take_back)

    with _lent(("training", id(model)), begin):
        yield


@contextmanager
def _lent(key: tuple[str, int], begin: Callable[[], _Loan]) -> Iterator[None]:
    """Context of a loan: the first to enter begins it, the last to leave takes it back."""
    with _LOCK:
        loan = _LOANS.get(key) or begin()
        _LOANS[key] = loan
        loan.num_users += 1
    try:
        yield
    finally:
        with _LOCK:
            loan.num_users -= 1
            if loan.num_users == 0:
                del _LOANS[key]
                loan.take_back()

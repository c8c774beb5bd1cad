"""Tensor parallel: a target that transformers has split over several processes, one of which decodes.

Rank 0 has the engine: prompts, trees, samplers, tables and drafters. The other ranks have their part of the weights and
of the KV cache, and run, step by step, what rank 0 runs. Keys and values have the heads of the rank's own part, as the
layers give them. Steps are transformers' own layers, eagerly: CUDA graphs, fused layers and the CPU's own matrix
products are for one process.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from graft.errors import GraftError
from graft.model.kv_cache import KVStore, PagePool, Row
from graft.model.ranks import RankGroup, rank_group
from graft.model.runner import TargetRunner
from graft.model.step import FlatStep
from graft.model.support import is_tensor_parallel
from graft.model.verified import VerifyOutput
from graft.settings import require

_NUMBERS = itertools.count(1)


def check_divisible(config: PreTrainedConfig, size: int) -> None:
    """Raises a GraftError if so many ranks cannot have as many whole heads each."""
    text = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % size:
            raise GraftError(f"{size} processes cannot share {name}={heads} evenly: start as many as divide it")


def work(model: PreTrainedModel) -> None:
    """The life of a rank other than 0: runs what rank 0 runs, until that has ended."""
    group = rank_group()
    group.meet()
    worker = _Worker(model)
    while (message := group.hear()) is not None:
        with group.together():
            worker.do(message)


def embedding_of(model: PreTrainedModel) -> Tensor:
    """The weights of the input embedding, whole."""
    return _whole(model, "embedding")


def lm_head_of(model: PreTrainedModel) -> Tensor:
    """The weights of the output layer, whole."""
    return _whole(model, "lm_head")


def _whole(model: PreTrainedModel, which: str) -> Tensor:
    weight = _weight_of(model, which)
    if not is_tensor_parallel(model) or not hasattr(weight, "full_tensor"):  # a plain one is whole on every rank
        assert isinstance(weight, Tensor)
        return weight
    group = _met(model)
    with group.together():
        group.tell(_Gather(which))
        whole: Tensor = weight.full_tensor()
    return whole


def _weight_of(model: PreTrainedModel, which: str) -> Any:
    layer: Any = model.get_input_embeddings() if which == "embedding" else model.get_output_embeddings()
    return layer.weight


def _met(model: PreTrainedModel) -> RankGroup:
    """The group of rank 0, when the others are there to work."""
    group = rank_group()
    size = getattr(model, "tp_size", None)
    try:
        require(size == group.size, f"the model is split over {size} processes, and there are {group.size}")
        require(
            group.leads,
            f"rank {group.rank} of a tensor-parallel model has no engine of its own: call graft.load on every rank",
        )
    except GraftError as error:
        group.report(error)
        raise
    group.meet()
    return group


# What rank 0 tells the others


@dataclass(frozen=True)
class _Gather:
    """To put together the weights of a layer."""

    which: str


@dataclass(frozen=True)
class _ForStore:
    """Something to do with a KV store of so many slots. dropped: stores that are needed no longer."""

    number: int
    num_slots: int
    dropped: list[int]


@dataclass(frozen=True)
class _Run(_ForStore):
    step: FlatStep
    num_run: int


@dataclass(frozen=True)
class _Move(_ForStore):
    source: Tensor
    target: Tensor
    num_layers: int | None


@dataclass(frozen=True)
class _CopyPage(_ForStore):
    source: int
    target: int


class TensorParallelTarget(TargetRunner):
    """Rank 0's runner: the others run each of its steps too."""

    _store: MirroredStore

    def __init__(self, model: PreTrainedModel, hidden_layers: Sequence[int] = (), chunk_size: int = 256) -> None:
        super().__init__(model, hidden_layers, chunk_size)
        self._group = _met(model)
        self._store = MirroredStore(model.config.get_text_config().num_hidden_layers, self._group)

    @property
    def mode(self) -> str:
        return f"eager, tensor parallel over {self._group.size} processes"

    def bytes_per_token(self) -> int:
        """Of this rank's part, which the config does not tell."""
        return self._measured_bytes_per_token()

    def _run(self, step: FlatStep, num_run: int) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        with self._group.together():
            self._group.tell(_Run(*self._store.about(), _bare(step), num_run))
            outputs = super()._run(step, num_run)
            self.synchronize()  # a rank that fails is noticed here, and not wherever the results are waited for
        return outputs


class MirroredStore(KVStore):
    """Rank 0's part of keys and values. The others do with theirs what is done with it."""

    def __init__(self, num_layers: int, group: RankGroup) -> None:
        super().__init__(num_layers)
        self.number = next(_NUMBERS)
        self._group = group
        weakref.finalize(self, _DROPPED.append, self.number)

    def about(self) -> tuple[int, int, list[int]]:
        dropped = _DROPPED[:]
        del _DROPPED[: len(dropped)]
        return self.number, self.num_slots, dropped

    def move(self, source: Tensor, target: Tensor, num_layers: int | None = None) -> None:
        with self._group.together():
            self._group.tell(_Move(*self.about(), source.cpu(), target.cpu(), num_layers))
            super().move(source, target, num_layers)

    def copy_page(self, source: int, target: int) -> None:
        with self._group.together():
            self._group.tell(_CopyPage(*self.about(), source, target))
            super().copy_page(source, target)


_DROPPED: list[int] = []  # numbers of stores that are gone


class _Worker(TargetRunner):
    """Another rank's runner: its part of every step, with a KV store for each of rank 0's."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._stores: dict[int, KVStore] = {}
        # Its pages are rank 0's. Made now, a pool of its own gives its size to a store that nobody uses.
        self._use_pool(PagePool(self.device, self.max_positions))

    @torch.no_grad()
    def do(self, message: Any) -> None:
        if isinstance(message, _Gather):
            _weight_of(self.model, message.which).full_tensor()
            return
        assert isinstance(message, _ForStore)
        for number in message.dropped:
            self._stores.pop(number, None)
        num_layers = self.model.config.get_text_config().num_hidden_layers
        self._store = self._stores.setdefault(message.number, KVStore(num_layers))
        if self._store.num_slots != message.num_slots:
            self._store.take(message.num_slots, self._store.grown(message.num_slots))
        if isinstance(message, _Run):
            self._run(message.step, message.num_run)
            self.synchronize()
        elif isinstance(message, _Move):
            self._store.move(message.source.to(self.device), message.target.to(self.device), message.num_layers)
        elif isinstance(message, _CopyPage):
            self._store.copy_page(message.source, message.target)


def _bare(step: FlatStep) -> FlatStep:
    """The step with rows that nobody gives back."""
    bare = copy.copy(step)
    bare.rows = [Row(row.line, list(row.pages), row.length) for row in step.rows]
    return bare

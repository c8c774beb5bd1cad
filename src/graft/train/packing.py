"""Packed batches: rows of several answers, with anchors at which blocks are trained; and running a model on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.model import evaluating
from graft.model.decoder_layers import layers_of
from graft.train.generate_data import Answered
from graft.train.settings import TrainSettings
from graft.train.trainer import Batches, compiled

_OPEN_ROWS = 8  # rows that still accept answers; more would waste less space and take longer to plan


@dataclass(frozen=True)
class PackedBatch:
    """R rows of T tokens. A document is a prompt with its answer; the padding counts as one more document.

    A row has N ascending anchors. An anchor is the index of a block's root, and the next token is part of an answer.
    """

    tokens: Tensor  # [R, T]
    starts: Tensor  # [R, T] index of the first token of each token's document
    anchors: Tensor  # [R, N]
    anchor_starts: Tensor  # [R, N] `starts` at the anchors
    num_labels: Tensor  # [R, N] answer tokens after the anchor; 0 for anchors that only pad the row

    def to(self, device: torch.device) -> Self:
        return type(self)(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))

    @property
    def positions(self) -> Tensor:
        """Positions [R, T] of the tokens in their documents."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) - self.starts


class PackedBatches(Batches[list[list[int]], PackedBatch]):
    """Packed batches of one fixed shape, so that nothing is compiled twice."""

    def __init__(self, answers: Sequence[Answered], settings: TrainSettings, num_anchors: int) -> None:
        self._num_anchors = num_anchors
        self._length = settings.max_tokens
        self._num_rows = max(1, settings.batch_tokens // settings.max_tokens)
        super().__init__(answers, settings)

    def _plan_epoch(self, generator: torch.Generator) -> list[list[list[int]]]:
        done: list[list[int]] = []
        opened: list[tuple[list[int], int]] = []  # answers and free tokens of each row, the fullest last
        for i in torch.randperm(len(self._answers), generator=generator).tolist():
            count = len(self._answers[i].tokens)
            fitting = next((n for n in reversed(range(len(opened))) if opened[n][1] >= count), None)
            row, room = ([], self._length) if fitting is None else opened.pop(fitting)
            opened.append(([*row, i], room - count))
            opened.sort(key=lambda each: -each[1])
            if len(opened) > _OPEN_ROWS:
                done.append(opened.pop()[0])
        done += [row for row, _ in opened]
        return [done[i : i + self._num_rows] for i in range(0, len(done), self._num_rows)]

    def _batch(self, plan: list[list[int]], step: int) -> PackedBatch:
        shape = self._num_rows, self._length
        tokens, starts = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        num_labels = torch.zeros(shape, dtype=torch.int64)
        for row, answers in enumerate(plan):
            end = 0
            for answer in (self._answers[i] for i in answers):
                start, end = end, end + len(answer.tokens)
                tokens[row, start:end] = answer.tokens
                starts[row, start:end] = start
                first = start + max(answer.num_prompt_tokens, 1) - 1  # the next token is the answer's first
                num_labels[row, first:end] = torch.arange(end - first - 1, -1, -1)
            starts[row, end:] = end
        generator = torch.Generator().manual_seed((self._settings.seed * 1_000_003 + step) * 2 + 1)
        # Draw without replacement. Positions that cannot be anchors come last and pad rows with few answers.
        draws = torch.rand(shape, generator=generator, dtype=torch.float64).masked_fill_(num_labels == 0, -1.0)
        anchors = draws.topk(min(self._num_anchors, self._length)).indices.sort(dim=1).values
        return PackedBatch(tokens, starts, anchors, starts.gather(1, anchors), num_labels.gather(1, anchors))


class Labelled(NamedTuple):
    """Some tokens [n] of a batch that an answer token follows."""

    places: Tensor  # indices into the flattened batch
    labels: Tensor  # the next tokens
    weights: Tensor  # 1, or 0 for padding


def labelled_chunks(batch: PackedBatch, size: int) -> Iterator[Labelled]:
    """All anchors of a batch that an answer token follows, in chunks of one size to avoid recompilation."""
    length = batch.tokens.shape[1]
    firsts = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None] * length
    index = (batch.anchors + firsts)[batch.num_labels > 0]
    tokens = batch.tokens.flatten()
    for part in index.split(size):
        filled = nn.functional.pad(part, (0, size - len(part)))
        yield Labelled(filled, tokens[filled + 1], (torch.arange(size, device=index.device) < len(part)).float())


@dataclass(frozen=True)
class TargetStates:
    """Hidden states of the target for a packed batch."""

    features: Tensor  # [R, T, taps * H_t]
    final: Tensor  # [R, T, H_t] after the final norm


@torch.no_grad()
def target_states(
    model: PreTrainedModel, layers: Sequence[int], batch: PackedBatch, flex: bool = False
) -> TargetStates:
    states = read_batch(model, batch, flex, output_hidden_states=True)
    features = torch.cat([states.hidden_states[layer] for layer in layers], dim=-1)
    return TargetStates(features, states.last_hidden_state)


def flex_functions(is_compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FlexAttention and its mask constructor. Compiled, the latter needs no dense mask of hundreds of megabytes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not is_compiled:
        return flex_attention, create_block_mask
    return compiled(flex_attention), compiled(create_block_mask)


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Context in which each layer of the target is compiled, for batches of one shape. Layers share what is compiled.

    Steps of an engine have many shapes, so it must not be left with compiled layers.
    """
    layers = list(layers_of(model))
    before = [layer._compiled_call_impl for layer in layers]
    try:
        for layer in layers:
            layer.compile(dynamic=False)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer._compiled_call_impl = own


def read_batch(model: PreTrainedModel, batch: PackedBatch, flex: bool = False, **options: Any) -> Any:
    """Run a model on a batch, without its output layer. Documents do not attend to each other, because positions
    restart at each.

    flex: on a GPU, use FlexAttention, which skips the masked tiles between documents.
    """
    attention = _flex_attention(model) if flex and batch.tokens.is_cuda else nullcontext()
    with evaluating(model), attention:
        return model.base_model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **options)


@contextmanager
def _flex_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model uses FlexAttention, if its class supports it."""
    config: Any = model.config.get_text_config()
    before = config._attn_implementation
    if model._supports_flex_attn:
        config._attn_implementation = "flex_attention"
    try:
        yield
    finally:
        config._attn_implementation = before

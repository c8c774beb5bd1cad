"""Training objective of depth-pruned draft models: the target's distributions with only some of its layers.

The draft model is the target without its least important layers (`layer_pruning`). The remaining layers and the final
norm are trained on the target's answers; the embedding and the output layer stay the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.model import evaluating
from graft.model.decoder_layers import find_layers
from graft.quiet import quiet_transformers
from graft.train.divergence import divergence
from graft.train.generate_data import Answered
from graft.train.layer_pruning import LayerSubset, check_layers
from graft.train.packing import Labelled, PackedBatch, PackedBatches, labelled_chunks, read_batch
from graft.train.settings import DepthPrunedSettings, TrainSettings
from graft.train.trainer import autocast, split_by_prompt

_CHUNK = 256  # tokens whose logits are in memory at once
_EVAL_BATCHES = 4


@dataclass(frozen=True)
class DepthPrunedConfig:
    """The target layers that a draft model keeps."""

    kept_layers: tuple[int, ...]


class DepthPrunedModel(nn.Module):
    """The trained parts, layers and final norm, of `model`, which is a copy of the target with some of its layers."""

    config: DepthPrunedConfig

    def __init__(self, target: PreTrainedModel, kept_layers: Sequence[int]) -> None:
        super().__init__()
        self.config = DepthPrunedConfig(tuple(kept_layers))
        model = LayerSubset(target).keep(kept_layers)
        check_layers(model)
        model.config.kept_layers = list(kept_layers)  # tells a model of one layer from a draft head
        self._model = (model,)  # a tuple hides it from torch, so that the rest is neither trained nor saved
        owner, layers = find_layers(model)
        self.parts = nn.ModuleDict(
            {
                name: child
                for name, child in owner.named_children()
                if name == layers or (not isinstance(child, nn.Embedding) and any(True for _ in child.parameters()))
            }
        )
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()  # it was shared with the target
            parameter.requires_grad_()

    @property
    def model(self) -> PreTrainedModel:
        return self._model[0]

    def save(self, folder: Path, tokenizer: Any | None) -> None:
        """Convert the parameters to bf16 and write a checkpoint that transformers loads."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)  # not the buffers: keep rotary frequencies exact
        with quiet_transformers():
            self.model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)


class Comparison(NamedTuple):
    """A model compared with the target: means over answer tokens."""

    divergence: float
    right: float  # top-1 accuracy


class ReferenceText:
    """Packed batches with the target's final hidden states, to compare other models with."""

    def __init__(self, target: PreTrainedModel, batches: Sequence[PackedBatch], settings: TrainSettings) -> None:
        self._settings, self._device = settings, target.device
        with autocast(self._device, settings):
            self._read = [(batch, _final_states(target, batch)) for batch in batches]

    @torch.no_grad()
    def compare(self, model: PreTrainedModel) -> Comparison:
        """Compare a model that has the target's output layer."""
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)  # divergence, correct tokens, tokens
        for batch, wanted in self._read:
            with autocast(self._device, self._settings):
                own = _final_states(model, batch)
            for chunk in labelled_chunks(batch, _CHUNK):
                with autocast(self._device, self._settings):
                    logits = _logits(model, own, chunk)
                    divergences, _ = divergence(logits, _logits(model, wanted, chunk), chunk.labels)
                figures = torch.stack([divergences, (logits.argmax(dim=-1) == chunk.labels).float()])
                totals[:2] += (figures * chunk.weights).sum(dim=1)
                totals[2] += chunk.weights.sum()
        total, right, count = totals.tolist()
        return Comparison(total / count, right / count)


class DepthPrunedObjective:
    """Forward KL divergence from the target at every answer token."""

    def __init__(
        self,
        head: DepthPrunedModel,
        target: PreTrainedModel,
        answers: Sequence[Answered],
        settings: DepthPrunedSettings,
    ) -> None:
        self.head, self._target, self._settings = head, target, settings
        self._device = target.device
        held_back, training = split_by_prompt(answers, settings.held_back)
        self.training_batches = PackedBatches(training, settings, settings.max_tokens)
        others = PackedBatches(held_back, settings, settings.max_tokens)
        batches = [others.at(step).to(self._device) for step in range(min(_EVAL_BATCHES, len(others)))]
        self._held_back = ReferenceText(target, batches, settings)

    def backward(self, step: int) -> dict[str, Tensor]:
        batch = self.training_batches.at(step).to(self._device)
        model = self.head.model
        with evaluating(self.head), autocast(self._device, self._settings):
            wanted = _final_states(self._target, batch)
            own: Tensor = read_batch(model, batch).last_hidden_state
        gradient, loss = torch.zeros_like(own), torch.zeros((), device=self._device)
        total = (batch.num_labels > 0).sum()
        for chunk in labelled_chunks(batch, _CHUNK):
            leaf = own.detach().flatten(0, 1)[chunk.places].requires_grad_()
            with autocast(self._device, self._settings):
                logits = _output(model, leaf)
                divergences, _ = divergence(logits, _logits(model, wanted, chunk), chunk.labels)
            part = (divergences * chunk.weights).sum() / total
            part.backward()
            assert leaf.grad is not None
            gradient.flatten(0, 1).index_add_(0, chunk.places, leaf.grad)
            loss += part.detach()
        own.backward(gradient)
        return {"loss": loss}

    def evaluate(self) -> dict[str, float]:
        """Top-1 accuracy and mean divergence on held-back answers."""
        with evaluating(self.head):
            found = self._held_back.compare(self.head.model)
        return {"held_back_right_0": found.right, "held_back_divergence": found.divergence}


def measured_text(target: PreTrainedModel, answers: Sequence[Answered], settings: DepthPrunedSettings) -> ReferenceText:
    """The sample of the training answers on which layers are compared."""
    _, training = split_by_prompt(answers, settings.held_back)
    few = replace(settings, batch_tokens=settings.measured, max_tokens=min(settings.max_tokens, settings.measured))
    batch = PackedBatches(training, few, few.max_tokens).at(0)
    return ReferenceText(target, [batch.to(target.device)], settings)


@torch.no_grad()
def _final_states(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Hidden states [R, T, H] after the final norm."""
    states: Tensor = read_batch(model, batch).last_hidden_state
    return states


@torch.no_grad()
def _logits(model: PreTrainedModel, states: Tensor, chunk: Labelled) -> Tensor:
    """Logits [n, vocab] of a chunk's tokens. states: [R, T, H]."""
    return _output(model, states.flatten(0, 1)[chunk.places])


def _output(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [n, vocab] of states [n, H]."""
    layer: Any = model.get_output_embeddings()
    logits: Tensor = layer(states.to(model.dtype))  # in training, the final norm may have another dtype
    return logits

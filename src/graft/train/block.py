"""Training objective of block heads: many blocks of a packed row in one forward pass.

The target reads each row once. As in drafting, a block starts at an anchor and attends to itself and to the tokens
before the anchor in its document. Every slot learns the target's distribution at its position; a conditional head also
learns it given the true token before the slot. Only a few blocks have their logits in memory at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.drafters.block import BlockConfig, BlockHead, KeyValue, default_target_layers
from graft.drafters.block.drafter import BlockTreeSettings
from graft.drafters.block.head import Attention, within_reach
from graft.model.attention import attend
from graft.model.unusual_layers import output_weight, readable_weights
from graft.settings import require
from graft.train.divergence import divergence
from graft.train.generate_data import Answered, spread
from graft.train.packing import (
    PackedBatch,
    PackedBatches,
    TargetStates,
    flex_functions,
    read_batch,
    target_states,
)
from graft.train.settings import BlockSettings, BlockShape
from graft.train.simulate import simulate
from graft.train.trainer import autocast, split_by_prompt

HITS = (1, 5, 16)  # top-k accuracies that evaluations report
_EVAL_BATCHES = 4


def config_for(shape: BlockShape, model: PreTrainedModel, mask_token_id: int, **changes: Any) -> BlockConfig:
    """The config of a new head for this model."""
    layers = model.config.get_text_config().num_hidden_layers
    shifted = shape.slots == "shifted"
    taps = shape.target_layers or default_target_layers(layers, shape.num_taps)
    require(
        min(taps) >= 0 and max(taps) < layers,
        f"target layers {', '.join(map(str, taps))} are not all among the model's 0 to {layers - 1}",
    )
    return BlockConfig.for_target(
        model.config,
        shape.num_layers,
        target_layers=taps,
        block_size=shape.num_drafts + (not shifted),
        conditional_size=shape.conditional_size,
        shifted=shifted,
        causal=(shape.causal,) * shape.num_layers,
        own_mask=shape.learned_mask,
        mask_token_id=mask_token_id,
        **changes,
    )


class BlockObjective:
    """Forward KL divergence of all slots from the target."""

    def __init__(
        self, head: BlockHead, model: PreTrainedModel, answers: Sequence[Answered], settings: BlockSettings
    ) -> None:
        self.head, self._model, self._settings = head, model, settings
        held_back, training = split_by_prompt(answers, settings.held_back)
        self._held_back = PackedBatches(held_back, settings, settings.anchors)
        self.training_batches = PackedBatches(training, settings, settings.anchors)
        # Only the lowest temperature, because the accepted length depends on it and runs should be comparable.
        coolest = min(answer.temperature for answer in held_back)
        self._simulated = spread([a for a in held_back if a.temperature == coolest], settings.simulated)
        self._device = head.fc.weight.device

    def backward(self, step: int) -> dict[str, Tensor]:
        batch = self.training_batches.at(step).to(self._device)
        return block_backward(self.head, self._model, batch, self._settings)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Top-k accuracies by slot, and simulated mean accepted lengths, on held-back answers."""
        totals: dict[str, Tensor] = {}
        for step in range(min(_EVAL_BATCHES, len(self._held_back))):
            batch = self._held_back.at(step).to(self._device)
            for name, counts in _hits(self.head, self._model, batch, self._settings).items():
                totals[name] = totals.get(name, torch.zeros_like(counts)) + counts
        seen = totals.pop("slots").clamp(min=1)
        figures = {
            f"held_back_{name}_{slot}": share
            for name, counts in totals.items()
            for slot, share in enumerate((counts / seen).tolist())
        }
        if self._simulated:
            with autocast(self._device, self._settings):
                settings = BlockTreeSettings(nodes=self._settings.nodes)
                results = simulate(self.head, self._model, self._simulated, settings)
            figures |= {f"accepted_{kind}": result.mean_accepted for kind, result in results.items()}
        return figures


def block_backward(
    head: BlockHead, model: PreTrainedModel, batch: PackedBatch, settings: BlockSettings
) -> dict[str, Tensor]:
    """Add a batch's gradients to the head's parameters. Returns its losses, weighted means over slots."""
    shares = {name: share for name, share in _shares(head, settings).items() if share > 0}
    device, drafts = batch.tokens.device, head.config.num_drafts
    with autocast(device, settings):
        states = target_states(model, head.config.target_layers, batch, settings.flex)
        hidden = block_hidden(head, states.features, batch, settings.flex)  # [R, N, K, H]
    losses = {name: torch.zeros((), device=device) for name in shares}
    total = _depth_weights(batch.num_labels, drafts, settings).sum().clamp(min=1.0)
    gradients = []
    for chunk in _chunks(head, model, states, batch, hidden.detach(), settings):
        leaf = chunk.hidden.requires_grad_()
        for name, share in shares.items():
            with autocast(device, settings):
                logits = _logits(head, chunk, name)
            divergences, label_log_probs = divergence(logits, chunk.wanted, chunk.labels)
            weights = _depth_weights(chunk.num_labels, drafts, settings)
            if settings.weighting == "pace":
                weights = weights * _pace(chunk.num_labels, label_log_probs, settings.pace_floor)
            loss = (divergences * weights).sum() / total
            (share * loss).backward()
            losses[name] += loss.detach()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    hidden.backward(torch.cat(gradients).view_as(hidden))
    loss = torch.stack([share * losses[name] for name, share in shares.items()]).sum()
    return {"loss": loss, **{f"loss_{name}": value for name, value in losses.items()}}


def block_hidden(head: BlockHead, features: Tensor, batch: PackedBatch, flex: bool) -> Tensor:
    """Hidden states [R, N, K, H], before the final norm, of the predicting slots of all blocks."""
    size, num_blocks = head.config.block_size, batch.anchors.shape[1]
    past = head.context(features.to(head.fc.weight.dtype), batch.positions)
    roots = batch.tokens.gather(1, batch.anchors)
    places = torch.arange(size, device=roots.device)
    positions = (batch.anchors - batch.anchor_starts)[..., None] + places  # [R, N, block_size]
    attention = block_attention(head, batch, past, flex and roots.is_cuda)
    hidden = head(head.slots(roots).flatten(1, 2), positions.flatten(1), attention)
    return head.predicting(hidden.unflatten(1, (num_blocks, size)))


# Mask function of (row, head, query, key). The keys are the row's T tokens, then all slots of its blocks.
Seen = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]


def seen_by_blocks(size: int, causal: bool, window: int | None, batch: PackedBatch) -> Seen:
    """The mask of a layer: slots see their own block, and the tokens of their document before the anchor."""
    length, anchors, starts = batch.tokens.shape[1], batch.anchors, batch.anchor_starts

    def seen(row: Tensor, _: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // size, query % size
        anchor, key_slot = anchors[row, block], key - length
        in_context = (key >= starts[row, block]) & (key < anchor)  # anchors are below the row's length
        in_block = (key_slot >= 0) & (key_slot // size == block)
        distance = anchor + slot - torch.where(in_block, anchor + key_slot % size, key)
        return (in_context | in_block) & within_reach(distance, causal, window)

    return seen


def block_attention(head: BlockHead, batch: PackedBatch, past: KeyValue, flex: bool) -> Attention:
    """Attention with a dense mask, or FlexAttention, which skips tiles that are wholly masked."""
    config, (rows, num_blocks), device = head.config, batch.anchors.shape, batch.anchors.device
    num_queries = num_blocks * config.block_size
    num_keys = batch.tokens.shape[1] + num_queries

    @functools.cache  # layers of the same kind share a mask
    def mask(causal: bool, window: int | None) -> Any:
        seen = seen_by_blocks(config.block_size, causal, window, batch)
        if flex:
            _, make = flex_functions(is_compiled=device.type == "cuda")
            return make(seen, rows, None, num_queries, num_keys, device=device)
        row = torch.arange(rows, device=device)[:, None, None]
        query = torch.arange(num_queries, device=device)[:, None]
        dense = seen(row, None, query, torch.arange(num_keys, device=device))
        return dense[:, None].repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        values = torch.cat([past[1][layer], value], dim=2)
        # One dtype: under autocast, norms leave queries and keys in fp32.
        query, keys = query.to(values.dtype), torch.cat([past[0][layer], key], dim=2).to(values.dtype)
        shown = mask(config.causal[layer], config.windows[layer])
        if not flex:
            return attend(query, keys, values, shown)
        run, _ = flex_functions(is_compiled=device.type == "cuda")
        out: Tensor = run(query, keys, values, block_mask=shown, enable_gqa=True)
        return out

    return attention


@dataclass
class _Chunk:
    """Some blocks of one row, with what they should predict."""

    hidden: Tensor  # [n, K, H]
    parents: Tensor  # [n, K] the true tokens before the labels
    labels: Tensor  # [n, K] the true tokens
    num_labels: Tensor  # [n] slots with a label
    wanted: Tensor  # [n, K, vocab] the target's logits


@torch.no_grad()
def _target_logits(head: BlockHead, model: PreTrainedModel, final: Tensor) -> Tensor:
    return nn.functional.linear(final, output_weight(model)[: head.config.vocab_size])


def _chunks(
    head: BlockHead,
    model: PreTrainedModel,
    states: TargetStates,
    batch: PackedBatch,
    hidden: Tensor,
    settings: BlockSettings,
) -> Iterator[_Chunk]:
    """All blocks, a few at a time. The target's logits are computed once per row."""
    places = torch.arange(hidden.shape[2], device=hidden.device)
    width = max(1, settings.chunk_slots // len(places))
    for row, tokens in enumerate(batch.tokens):
        with autocast(tokens.device, settings):
            wanted = _target_logits(head, model, states.final[row])  # [T, vocab]
        for first in range(0, hidden.shape[1], width):
            blocks = slice(first, first + width)
            index = (batch.anchors[row, blocks, None] + places).clamp(max=len(tokens) - 2)
            num_labels = batch.num_labels[row, blocks]
            yield _Chunk(hidden[row, blocks], tokens[index], tokens[index + 1], num_labels, wanted[index])


def _logits(head: BlockHead, chunk: _Chunk, name: str) -> Tensor:
    """Logits [n, K, vocab] of a chunk, marginal or conditional."""
    if name == "marginal":
        return head.marginals(chunk.hidden)
    return head.conditionals(chunk.hidden, chunk.parents[..., None]).squeeze(2)


def _shares(head: BlockHead, settings: BlockSettings) -> dict[str, float]:
    """The loss weights of the head's predictions."""
    if head.config.has_conditionals:
        return {"conditional": 1.0, "marginal": settings.marginal_weight}
    return {"marginal": 1.0}


def _depth_weights(num_labels: Tensor, num_drafts: int, settings: BlockSettings) -> Tensor:
    """Weights [..., K] of slots by depth, 0 for slots without a label. num_labels: [...]."""
    places = torch.arange(num_drafts, device=num_labels.device)
    weights = torch.exp(-places / settings.gamma) if settings.weighting == "decay" else torch.ones_like(places).float()
    return weights * (places < num_labels[..., None])


def _pace(num_labels: Tensor, label_log_probs: Tensor, floor: float) -> Tensor:
    """D-PACE's weights [n, K]: the part of the expected accepted length that depends on each slot."""
    places = torch.arange(label_log_probs.shape[1], device=label_log_probs.device)
    confidence = (1 - floor) * label_log_probs.exp() + floor
    reached = (confidence * (places < num_labels[:, None])).cumprod(dim=1)
    return reached.flip(1).cumsum(dim=1).flip(1)


def _hits(head: BlockHead, model: PreTrainedModel, batch: PackedBatch, settings: BlockSettings) -> dict[str, Tensor]:
    """Counts [K] by slot: of slots with a label, and of those with the label among their k likeliest tokens."""
    counts: dict[str, Tensor] = {}

    def count(name: str, which: Tensor) -> None:
        counts[name] = counts.get(name, torch.zeros(which.shape[1], device=which.device)) + which.sum(dim=0)

    with autocast(batch.tokens.device, settings):
        states = target_states(model, head.config.target_layers, batch, settings.flex)
        hidden = block_hidden(head, states.features, batch, settings.flex)
        for chunk in _chunks(head, model, states, batch, hidden, settings):
            there = _depth_weights(chunk.num_labels, head.config.num_drafts, settings) > 0
            count("slots", there)
            for name in _shares(head, settings):
                logits = _logits(head, chunk, name)
                rank = ranks(logits, chunk.labels)
                for hit in HITS:
                    count(f"{name}_hit{hit}", there & (rank < hit))
    return counts


def ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """Ranks [...] from 0 of labels [...] among logits [..., vocab]. Ties, frequent in bf16, go to the lower id."""
    own = logits.gather(-1, labels[..., None])
    is_before = torch.arange(logits.shape[-1], device=logits.device) < labels[..., None]
    return ((logits > own) | ((logits == own) & is_before)).sum(dim=-1)


@torch.no_grad()
def start_from_target(head: BlockHead, model: PreTrainedModel, batch: PackedBatch) -> None:
    """Initialize a head with the target's last layers and norm, as far as shapes agree. batch: any of its answers.

    Features of the tapped layers are scaled to size 1, because sizes differ by orders of magnitude between layers. If
    the head normalizes queries and keys, these norms restore their sizes in the target.
    """
    states = read_batch(model, batch, output_hidden_states=True).hidden_states
    width = head.config.target_hidden_size
    sizes = [float(states[layer].float().pow(2).mean(dim=-1).sqrt().median()) for layer in head.config.target_layers]
    head.fc.weight.normal_(0, 0.005)
    if head.config.hidden_size == width:
        head.fc.weight[:, -width:].diagonal().add_(1.0)  # mostly the last layer's features
    for part, size in zip(head.fc.weight.split(width, dim=1), sizes, strict=True):
        part.div_(max(size, 1e-6))
    if head.config.own_mask:
        embedding: Any = model.get_input_embeddings().weight
        head.mask_embedding.normal_(0, float(embedding.float().std()))
    target = readable_weights(model.base_model)
    if "norm.weight" in target and target["norm.weight"].shape == head.norm.weight.shape:
        head.norm.weight.copy_(target["norm.weight"])
    first = head.config.num_target_layers - head.config.num_layers
    norms: list[Tensor] = []
    for number in range(head.config.num_layers):
        prefix, own = f"layers.{first + number}.", dict(head.layers[number].named_parameters())
        its = {name.removeprefix(prefix): w for name, w in target.items() if name.startswith(prefix)}
        for name, weight in its.items():
            if name in own and own[name].shape == weight.shape:
                own[name].copy_(weight)
        if "input_layernorm.weight" in its:
            norms.append(own["input_layernorm.weight"])
        if head.config.head_norms and "self_attn.q_norm.weight" not in its and first + number >= 0:
            _match_sizes(head.layers[number], states[first + number].to(head.fc.weight.dtype))
    if norms:
        head.hidden_norm.weight.copy_(torch.stack(norms).mean(dim=0))  # shared by all layers' keys and values


def _match_sizes(layer: Any, hidden: Tensor) -> None:
    """Set the norms of queries and keys to the sizes that these have in a target without such norms."""
    attention, normed = layer.self_attn, layer.input_layernorm(hidden)
    for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
        norm.weight.fill_(float(projection(normed).float().pow(2).mean().sqrt()))


def unused_token(answers: Sequence[Answered], vocab_size: int, special: Sequence[int]) -> int:
    """A token for masked slots: of the rarest tokens in the answers that are not special, the last."""
    counts = torch.cat([answer.tokens for answer in answers]).bincount(minlength=vocab_size)
    counts[[token for token in special if token < vocab_size]] = torch.iinfo(torch.int64).max
    return vocab_size - 1 - int(counts.flip(0).argmin())

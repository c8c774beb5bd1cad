"""Training objective of EAGLE-3 heads: training-time test on the target's answers.

At unroll step s, every position is `s` drafted tokens past the last true feature. As in drafting, it attends to the
true entries up to there and then to the head's own. All steps learn the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.drafters.eagle3.head import Eagle3Head
from graft.model.unusual_layers import output_weight, readable_weights
from graft.train.divergence import divergence
from graft.train.generate_data import Answered
from graft.train.packing import (
    PackedBatch,
    PackedBatches,
    flex_functions,
    labelled_chunks,
    target_states,
)
from graft.train.settings import Eagle3Settings
from graft.train.trainer import autocast, compiled, split_by_prompt

_EVAL_BATCHES = 8
_COVERAGE = 0.98  # 0.994 needs almost twice the tokens for SmolLM2-135M, and a draft pass then takes 14 % longer
_VOCAB_STEP = 1024  # a multiple that GPUs compute fast


def count_tokens(answers: Sequence[Answered], vocab_size: int) -> Tensor:
    """How often each token [vocab_size] occurs in the answers."""
    tokens = [answer.tokens[answer.num_prompt_tokens :].long() for answer in answers]
    return torch.cat(tokens).bincount(minlength=vocab_size)


def draft_vocabulary(counts: Tensor, size: int | None = None) -> Tensor:
    """The `size` most frequent tokens, ascending.

    Without a size, as many as cover `_COVERAGE` of the answers, rounded up to a multiple of `_VOCAB_STEP`.
    """
    if size is None:
        covered = counts.sort(descending=True).values.cumsum(0) / counts.sum()
        needed = int((covered < _COVERAGE).sum()) + 1
        size = min(len(counts), -(-needed // _VOCAB_STEP) * _VOCAB_STEP)
    return counts.topk(size).indices.sort().values


@torch.no_grad()
def start_from_target(head: Eagle3Head, model: PreTrainedModel) -> None:
    """Initialize a head with the target's last layer, final norm and output rows, as far as shapes agree.

    The head then starts as a rough continuation of the last target layer it reads.
    """
    ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=head.d2t.device))
    output = output_weight(model)
    head.lm_head.weight.copy_(output[ids.to(output.device)])
    width, late = head.config.target_hidden_size, (len(head.config.target_layers) - 1) * head.config.target_hidden_size
    if head.config.hidden_size == width:
        # No noise, because some features are hundreds of times larger than others.
        head.fc.weight.zero_()[:, late:].fill_diagonal_(1.0)
    target = readable_weights(model.base_model)
    if "norm.weight" in target and target["norm.weight"].shape == head.norm.weight.shape:
        head.norm.weight.copy_(target["norm.weight"])
    own = dict(head.midlayer.named_parameters())
    last_layer = f"layers.{model.config.get_text_config().num_hidden_layers - 1}."
    for name, weight in ((n.removeprefix(last_layer), w) for n, w in target.items() if n.startswith(last_layer)):
        if name not in own:
            continue
        if own[name].shape == weight.shape:
            own[name].copy_(weight)
        elif own[name].shape == (weight.shape[0], 2 * weight.shape[1]):  # q, k, v: the half that reads the hidden
            own[name].normal_(0, 0.02)
            own[name][:, weight.shape[1] :] = weight
    own["hidden_norm.weight"].copy_(own["input_layernorm.weight"])
    own["input_layernorm.weight"].fill_(1.0)  # it normalizes embeddings, which the target's layer never reads


class Eagle3Objective:
    """KL divergence of all unrolled steps from the target, weighted by depth."""

    def __init__(
        self, head: Eagle3Head, model: PreTrainedModel, answers: Sequence[Answered], settings: Eagle3Settings
    ) -> None:
        self.head, self._model, self._settings = head, model, settings
        held_back, training = split_by_prompt(answers, settings.held_back)
        self._held_back = PackedBatches(held_back, settings, settings.max_tokens)
        self.training_batches = PackedBatches(training, settings, settings.max_tokens)
        self._device = head.fc.weight.device

    def backward(self, step: int) -> dict[str, Tensor | float]:
        batch = self.training_batches.at(step).to(self._device)
        losses, rights = unrolled_backward(self.head, self._model, batch, self._settings)
        facts: dict[str, Tensor | float] = {"loss": (losses * _weights(self._settings, losses.device)).sum()}
        return facts | {f"right_{s}": right for s, right in enumerate(rights)}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Top-1 accuracy by unrolled step on held-back answers."""
        count = min(_EVAL_BATCHES, len(self._held_back))
        batches = (self._held_back.at(step).to(self._device) for step in range(count))
        total = torch.stack([unrolled_backward(self.head, self._model, b, self._settings)[1] for b in batches])
        return {f"held_back_right_{s}": float(r) for s, r in enumerate(total.mean(dim=0))}


def unrolled_backward(
    head: Eagle3Head, model: PreTrainedModel, batch: PackedBatch, settings: Eagle3Settings
) -> tuple[Tensor, Tensor]:
    """Add a batch's gradients to the head's parameters, if gradients are enabled.

    Returns the KL divergence and the top-1 accuracy of each unrolled step, both [unroll].
    """
    device = batch.tokens.device
    with autocast(device, settings):
        states = target_states(model, head.config.target_layers, batch, settings.flex)
        outputs = unrolled_outputs(
            head, states.features, batch, settings.unroll, settings.flex and batch.tokens.is_cuda
        )
    rows = output_weight(model).detach()[head.target_ids]  # [draft vocabulary, H]
    flat, final = [step.detach().flatten(0, 1) for step in outputs], states.final.flatten(0, 1)
    gradients = [torch.zeros_like(step) for step in flat]
    losses, rights = torch.zeros(2, settings.unroll, device=device)
    # A place is scored if all unrolled steps that predict the token after it stay within its document.
    is_scored, weights = batch.positions >= settings.unroll, _weights(settings, device)
    count = (is_scored.gather(1, batch.anchors) & (batch.num_labels > 0)).sum().clamp(min=1)
    for chunk in labelled_chunks(batch, settings.chunk_tokens):
        entries = (chunk.places - 1).clamp(min=0)  # entry i predicts token i + 2
        scored = chunk.weights * is_scored.flatten()[chunk.places]
        with torch.no_grad(), autocast(device, settings):
            wanted = _wanted(nn.functional.linear(final[chunk.places], rows), settings.greedy_weight)
        likeliest = wanted.argmax(dim=-1)
        for step, weight in enumerate(weights):
            leaf = flat[step][entries].requires_grad_(torch.is_grad_enabled())
            with autocast(device, settings):
                logits = head.logits(leaf)
            divergences, _ = divergence(logits, wanted, likeliest)
            loss = (divergences * scored).sum() / count
            if leaf.requires_grad:
                (weight * loss).backward()
                assert leaf.grad is not None
                gradients[step].index_add_(0, entries, leaf.grad.to(gradients[step].dtype))
            losses[step] += loss.detach()
            rights[step] += ((head.to_target(logits.argmax(dim=-1)) == chunk.labels) * scored).sum() / count
    if torch.is_grad_enabled():
        torch.autograd.backward(outputs, [g.view_as(o) for g, o in zip(gradients, outputs, strict=True)])
    return losses, rights


def _weights(settings: Eagle3Settings, device: torch.device) -> Tensor:
    """The loss weights [unroll] of the depths."""
    weights = torch.tensor([settings.step_weight**s for s in range(settings.unroll)], device=device)
    return weights / weights.sum()


def _wanted(logits: Tensor, greedy_weight: float) -> Tensor:
    """Logits that the head should learn: the target's distribution, with some of the mass on the likeliest token."""
    if greedy_weight == 0:
        return logits
    shares = logits.float().softmax(dim=-1) * (1 - greedy_weight)
    return shares.scatter_add_(
        -1, logits.argmax(dim=-1, keepdim=True), torch.full_like(shares[:, :1], greedy_weight)
    ).log()


def unrolled_outputs(head: Eagle3Head, features: Tensor, batch: PackedBatch, unroll: int, flex: bool) -> list[Tensor]:
    """The head's outputs [R, T, H] of each unrolled step.

    Entry i has the feature of token i and the embedding of token i + 1, and predicts token i + 2.
    """
    to_qkv: Callable[..., Any] = Eagle3Head.qkv
    finish: Callable[..., Any] = Eagle3Head.finish
    if flex:  # compiled, norms and rotations take a few passes over memory, not dozens
        to_qkv, finish = compiled(to_qkv), compiled(finish)
    embeddings = head.embed(batch.tokens.roll(-1, dims=1))
    hidden = head.fuse(features.to(head.fc.weight.dtype))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    for _ in range(unroll):
        query, key, value = to_qkv(head, embeddings, hidden, batch.positions)
        keys.append(key.to(value.dtype))  # one dtype: under autocast, rotary positions make queries and keys fp32
        values.append(value)
        attention = unrolled_attention(query.to(value.dtype), keys, values, batch.starts, flex)
        outputs.append(finish(head, attention, hidden))
        hidden = _shifted(outputs[-1], 1, dim=1)  # the head's own output stands in for the next token's feature
    return outputs


def unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], starts: Tensor, flex: bool) -> Tensor:
    """Attention of unroll step s = len(keys) - 1: entry i sees true entries up to i - s, then one per later step.

    query [R, heads, T, D]; keys, values by step, [R, kv_heads, T, D]; starts [R, T]: first token of each document.
    """
    step, scale = len(keys) - 1, query.shape[-1] ** -0.5
    far, far_weight = _attention_to_text(query, keys[0], values[0], starts, step, flex)
    if step == 0:
        return far
    grouped = query.unflatten(1, (keys[0].shape[1], -1))  # [R, kv, groups, T, D]
    own_keys = [_shifted(key, step - m, dim=2)[:, :, None] for m, key in enumerate(keys)][1:]
    own_values = [_shifted(value, step - m, dim=2)[:, :, None] for m, value in enumerate(values)][1:]
    scores = [(grouped * key).sum(dim=-1, dtype=torch.float32).flatten(1, 2) * scale for key in own_keys]
    weights = torch.stack([far_weight, *scores], dim=-1).softmax(dim=-1).to(far.dtype)  # [R, heads, T, step + 1]
    out = far * weights[..., :1]
    for m, value in enumerate(own_values, start=1):
        repeated = value.expand_as(grouped).flatten(1, 2)
        out = out + repeated * weights[..., m, None]
    return out


def _attention_to_text(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, step: int, flex: bool
) -> tuple[Tensor, Tensor]:
    """Attention to the true entries up to `step` before one's own, and its log-sum-exp [R, heads, T] in fp32."""

    distance = torch.tensor(step, device=query.device)  # a tensor: another number would be compiled anew

    def seen(row: Tensor, _: Tensor | None, place: Tensor, other: Tensor) -> Tensor:
        return (other <= place - distance) & (other >= starts[row, place])

    rows, length = starts.shape
    if flex:
        run, make_mask = flex_functions(is_compiled=True)
        mask = make_mask(seen, rows, None, length, length, device=query.device)
        out, weight = run(query, key, value, block_mask=mask, enable_gqa=True, return_lse=True)
        return out, weight
    places = torch.arange(length, device=query.device)
    mask = seen(torch.arange(rows, device=query.device)[:, None, None], None, places[:, None], places)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, None], torch.finfo(torch.float32).min)  # finite: some entries see nothing
    return scores.softmax(dim=-1).to(value.dtype) @ value, scores.logsumexp(dim=-1)


def _shifted(x: Tensor, count: int, dim: int) -> Tensor:
    """x shifted along `dim` by `count`, filled with zeros."""
    if count == 0:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, count))
    return torch.cat([zeros, x.narrow(dim, 0, x.shape[dim] - count)], dim=dim)

"""Training objective of EAGLE-3 heads: training-time test on the target's answers.

At unroll step s, every position is `s` drafted tokens past the last true feature. As in drafting, it attends to the
true entries up to there and then to the head's own. All steps learn the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.model import evaluating
from graft.spec_decode.proposers.eagle3.head import Eagle3Head
from graft.train.generate_data import Answered
from graft.train.trainer import Batches, TrainSettings, autocast, split_by_prompt

_EVAL_BATCHES = 8
_ALIGNMENT = 64  # entries of a batch are a multiple of this: matrix products over odd lengths take twice the time


@dataclass(frozen=True)
class Eagle3Settings(TrainSettings):
    """Training settings of EAGLE-3 heads."""

    unroll: int = 5  # draft depths to train
    step_weight: float = 0.8  # loss weight of each depth relative to the one before

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "unroll")


def draft_vocabulary(answers: Sequence[Answered], vocab_size: int, size: int) -> tuple[Tensor, float]:
    """The `size` most frequent tokens of the answers, ascending, and the share of answer tokens they cover."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in answers:
        counts += answer.tokens[answer.num_prompt_tokens :].long().bincount(minlength=vocab_size)
    chosen = counts.topk(size).indices.sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())


@torch.no_grad()
def start_from_target(head: Eagle3Head, model: PreTrainedModel) -> None:
    """Initialize a head with the target's last layer, final norm and output rows, as far as shapes agree.

    The head then starts as a rough continuation of the last target layer it reads.
    """
    ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=head.d2t.device))
    output = model.get_output_embeddings().weight
    head.lm_head.weight.copy_(output[ids.to(output.device)])
    width, late = head.config.target_hidden_size, (len(head.config.target_layers) - 1) * head.config.target_hidden_size
    if head.config.hidden_size == width:
        # No noise, because some features are hundreds of times larger than others.
        head.fc.weight.zero_()[:, late:].fill_diagonal_(1.0)
    target = dict(model.base_model.named_parameters())
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


class PaddedBatches(Batches[list[int], tuple[Tensor, Tensor]]):
    """Batches of answers of similar length: tokens [B, T], and a mask of answer tokens [B, T]."""

    def _plan_epoch(self, generator: torch.Generator) -> list[list[int]]:
        # A little noise on the lengths varies the batches between epochs and keeps padding small.
        noise = torch.rand(len(self._answers), generator=generator) * 0.1 + 1
        order = sorted(range(len(self._answers)), key=lambda i: len(self._answers[i].tokens) * float(noise[i]))
        plan: list[list[int]] = [[]]
        longest = 0
        for i in order:
            longest = max(longest, _padded_length(len(self._answers[i].tokens)))
            if plan[-1] and longest * (len(plan[-1]) + 1) > self._settings.batch_tokens:
                plan.append([])
                longest = _padded_length(len(self._answers[i].tokens))
            plan[-1].append(i)
        return [plan[i] for i in torch.randperm(len(plan), generator=generator).tolist()]

    def _batch(self, plan: list[int], step: int) -> tuple[Tensor, Tensor]:
        answers = [self._answers[i] for i in plan]
        longest = _padded_length(max(len(a.tokens) for a in answers))
        tokens = torch.zeros(len(answers), longest, dtype=torch.int64)
        is_answer = torch.zeros(len(answers), longest, dtype=torch.bool)
        for row, answer in enumerate(answers):
            tokens[row, : len(answer.tokens)] = answer.tokens
            is_answer[row, answer.num_prompt_tokens : len(answer.tokens)] = True
        return tokens, is_answer


def _padded_length(num_tokens: int) -> int:
    """Padded length of a batch, whose last two tokens have no entry (see `unrolled_losses`)."""
    return -(-(num_tokens - 2) // _ALIGNMENT) * _ALIGNMENT + 2


def unrolled_losses(
    head: Eagle3Head, model: PreTrainedModel, tokens: Tensor, is_answer: Tensor, unroll: int
) -> tuple[Tensor, Tensor]:
    """Loss and top-1 accuracy of each unrolled step, both [unroll].

    Entry i has the feature of token i and the embedding of token i + 1, and predicts token i + 2.
    """
    with torch.no_grad(), evaluating(model):
        states = model.base_model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        features = torch.cat([states.hidden_states[layer] for layer in head.config.target_layers], dim=-1)
        scored = is_answer[:, 2:].flatten().nonzero().squeeze(1)  # [J] indices into [B * E] of entries in the loss
        ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=tokens.device))
        rows = model.get_output_embeddings().weight[ids]  # [draft vocabulary, H]
        wanted = nn.functional.linear(_taken(states.last_hidden_state[:, 1:-1], scored), rows).float().softmax(dim=-1)
        truth = tokens[:, 2:].flatten()[scored]
        embeddings = head.embed(tokens[:, 1:-1])

    positions = torch.arange(tokens.shape[1] - 2, device=tokens.device).expand(len(tokens), -1)
    hidden = head.fuse(features[:, :-2].to(head.fc.weight.dtype))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    losses, rights = [], []
    for _ in range(unroll):
        query, key, value = head.qkv(embeddings, hidden, positions)
        keys.append(key)
        values.append(value)
        output = head.finish(unrolled_attention(query, keys, values), hidden)
        logits = head.logits(_taken(output, scored)).float()
        losses.append(-(wanted * logits.log_softmax(dim=-1)).sum(dim=-1).mean())
        rights.append((head.to_target(logits.argmax(dim=-1)) == truth).float().mean())
        hidden = _shifted(output, 1, dim=1)  # the head's own output stands in for the next token's feature
    return torch.stack(losses), torch.stack(rights)


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """Rows [J, H] of values [B, E, H], by indices into [B * E]."""
    return values.flatten(0, 1).index_select(0, index)


def unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of unroll step s = len(keys) - 1: position i sees true entries up to i - s, then one per later step.

    query [B, heads, E, D]; keys, values by step, [B, kv_heads, E, D].
    """
    batch, heads, length, head_dim = query.shape
    step = len(keys) - 1
    grouped = query.view(batch, keys[0].shape[1], -1, length, head_dim)  # [B, kv, groups, E, D]
    if step == 0:
        key, value = (x[:, :, None].expand_as(grouped).flatten(1, 2) for x in (keys[0], values[0]))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    scale = head_dim**-0.5
    place = torch.arange(length, device=query.device)
    far = (grouped @ keys[0][:, :, None].transpose(-1, -2)) * scale  # [B, kv, groups, E, E]
    far = far.masked_fill(place[:, None] - step < place, -torch.inf)
    own = [_shifted(k, step - m, dim=2)[:, :, None] for m, k in enumerate(keys)][1:]
    near = torch.stack([(grouped * k).sum(dim=-1) * scale for k in own], dim=-1)  # [B, kv, groups, E, step]
    # The head's own entries are padded to a multiple of 8 in front, to keep the others aligned for matrix products.
    front = nn.functional.pad(near, (0, -step % 8), value=-torch.inf)
    shares = torch.cat([front.to(far.dtype), far], dim=-1).softmax(dim=-1).to(query.dtype)
    out = shares[..., front.shape[-1] :] @ values[0][:, :, None]
    for m, value in enumerate(values[1:]):
        out = out + shares[..., m, None] * _shifted(value, step - 1 - m, dim=2)[:, :, None]
    return out.reshape(batch, heads, length, head_dim)


def _shifted(x: Tensor, count: int, dim: int) -> Tensor:
    """x shifted along `dim` by `count`, filled with zeros."""
    if count == 0:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, count))
    return torch.cat([zeros, x.narrow(dim, 0, x.shape[dim] - count)], dim=dim)


class Eagle3Objective:
    """The losses of all unrolled steps, weighted by depth."""

    def __init__(
        self, head: Eagle3Head, model: PreTrainedModel, answers: Sequence[Answered], settings: Eagle3Settings
    ) -> None:
        self.head, self._model, self._settings = head, model, settings
        held_back, training = split_by_prompt(answers, settings.held_back)
        self._held_back, self.training_batches = PaddedBatches(held_back, settings), PaddedBatches(training, settings)
        self._device = head.fc.weight.device
        weights = torch.tensor([settings.step_weight**s for s in range(settings.unroll)], device=self._device)
        self._weights = weights / weights.sum()

    def backward(self, step: int) -> dict[str, Tensor | float]:
        tokens, losses, rights = self._losses(self.training_batches, step)
        loss = (losses * self._weights).sum()
        loss.backward()
        facts: dict[str, Tensor | float] = {"loss": loss.detach(), "tokens": tokens.numel()}
        return facts | {f"right_{s}": right for s, right in enumerate(rights)}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Top-1 accuracy by unrolled step on held-back answers."""
        count = min(_EVAL_BATCHES, len(self._held_back))
        total = torch.stack([self._losses(self._held_back, step)[2] for step in range(count)]).sum(dim=0)
        return {f"held_back_right_{s}": float(r) for s, r in enumerate(total / count)}

    def _losses(self, batches: PaddedBatches, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's tokens, and losses and top-1 accuracies by unrolled step."""
        tokens, is_answer = (x.to(self._device) for x in batches.at(step))
        with autocast(self._device, self._settings):
            return tokens, *unrolled_losses(self.head, self._model, tokens, is_answer, self._settings.unroll)

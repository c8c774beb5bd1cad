"""Chooses the exit layer of an early-exit drafter by expected speed.

On the model's own greedy answers, it counts how often the model's token is among the likeliest tokens of each of a few
layers, so that a tree would contain it. The cost of a layer is the share of the weights that a draft pass reads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.drafters.early_exit.split import exit_logits
from graft.errors import GraftError
from graft.hub.draft_names import EARLY_EXIT, check_exit_layer
from graft.model import TargetRunner
from graft.model.decoder_layers import layers_of
from graft.model.overrides import evaluating
from graft.prompt_files import user_message
from graft.quiet import quiet_transformers
from graft.settings import require

_MAX_PROMPTS = 8  # prompts to choose a layer by
_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # exit layers to try, as shares of all layers
_MAX_NEW_TOKENS = 16
_NUM_DRAFTS = 4  # tokens of a layer that a tree holds in one place, as on a CPU
_MAX_DRAFTED = 8  # tokens per round
# Prompts of several kinds, none from the benchmark.
_PROMPTS = (
    "Explain in a few sentences why leaves change their colour in autumn.",
    "Write a Python function that returns the second largest number of a list.",
    "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost? Show the steps.",
    "Write a short and friendly e-mail that moves a meeting from Monday to Wednesday.",
)


@dataclass(frozen=True)
class ExitEstimate:
    """Expected agreement, cost and speed of an exit layer."""

    layer: int
    acceptance: float  # share of the model's tokens that are among the layer's likeliest
    cost: float  # of a draft pass, in forwards of the whole model

    @property
    def speed(self) -> float:
        """Tokens / cost of a round with the best number of draft passes. Plain decoding has speed 1."""
        passes = range(1, _MAX_DRAFTED + 1)
        return max(sum(self.acceptance**i for i in range(n + 1)) / (1 + n * self.cost) for n in passes)

    @property
    def accepted_per_cost(self) -> float:
        """Accepted tokens / cost of the pass that drafted them. A single pass pays if it is above 1."""
        return self.acceptance / self.cost


def usual_prompts(model: PreTrainedModel, tokenizer: Any | None) -> list[list[int]]:
    """Default prompts to choose a layer by."""
    if tokenizer is None:
        most = len(layers_of(model)) - 1
        raise GraftError(
            f"without a tokenizer no exit layer can be chosen: name one, {EARLY_EXIT}:1 to {EARLY_EXIT}:{most}"
        )
    return [_encode(user_message(prompt, tokenizer), tokenizer) for prompt in _PROMPTS]


def _encode(prompt: str | list[dict[str, str]], tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def choose_exit_layer(model: PreTrainedModel, prompts: Sequence[list[int]]) -> int:
    """The layer with the best expected speed on answers to the first of these prompts.

    If no layer pays, the fastest would be the cheapest one, which drafts almost nothing right. Then it is the layer
    that comes closest to paying: the one with the most accepted tokens / cost.
    """
    estimates = estimate_exits(model, prompts[:_MAX_PROMPTS])
    best = max(estimates, key=lambda each: each.speed)
    if best.speed <= 1:
        best = max(estimates, key=lambda each: each.accepted_per_cost)
        warnings.warn(
            f"no exit layer is expected to pay; the one that comes closest, {best.layer}, would have "
            f"{best.acceptance:.0%} of its guesses accepted, and guessing costs {best.cost:.0%} of a forward: models "
            "that were trained for early exit draft better",
            stacklevel=2,
        )
    return best.layer


def estimate_exits(
    model: PreTrainedModel, prompts: Sequence[list[int]], layers: Sequence[int] = ()
) -> list[ExitEstimate]:
    """Estimates of some layers, by default of a few between the first and the last."""
    require(bool(prompts), "choosing an exit layer needs prompts, and there are none")
    all_layers = layers_of(model)
    count = len(all_layers)
    tried = tuple(layers) or tuple(sorted({max(round(share * count), 1) for share in _SHARES} - {count}))
    for layer in tried or (1,):
        check_exit_layer(layer, count)
    accepted, num_tokens = torch.zeros(len(tried)), 0
    for answer, hidden in _greedy_answers(model, prompts):
        for number, layer in enumerate(tried):
            likeliest = exit_logits(model, hidden[layer])[0].topk(_NUM_DRAFTS, dim=-1).indices.cpu()
            accepted[number] += (likeliest == answer[:, None]).any(dim=-1).sum()
        num_tokens += len(answer)
    output_layer: Any = model.get_output_embeddings()
    sizes, head = [_num_weights(each) for each in all_layers], _num_weights(output_layer)
    return [
        ExitEstimate(layer, float(share), (sum(sizes[:layer]) + head) / (sum(sizes) + head))
        for layer, share in zip(tried, accepted / max(num_tokens, 1), strict=True)
    ]


def _num_weights(part: nn.Module) -> int:
    return sum(weight.numel() for weight in part.parameters())


@torch.no_grad()
def _greedy_answers(model: Any, prompts: Sequence[list[int]]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The model's answers [n] to the prompts, and by layer the hidden states [1, n, H] before each token."""
    context = TargetRunner(model).max_positions or math.inf
    for prompt in prompts:
        count = len(prompt)
        require(count < context, f"a prompt of {count} tokens leaves no room for an answer in a context of {context}")
        inputs = torch.tensor([prompt], device=model.device)
        with quiet_transformers(), evaluating(model):
            text = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=int(min(_MAX_NEW_TOKENS, context - count)),
                do_sample=False,
                repetition_penalty=1.0,  # the model's generation config may set another
                pad_token_id=0,
            )
            states = model(text, output_hidden_states=True, use_cache=False).hidden_states
        yield text[0, count:].cpu(), [state[:, count - 1 : -1] for state in states]

"""Compares an engine's answers token by token with plain decoding and with transformers' `generate`.

At a first difference the logits of both tokens are computed, to tell an exact tie from an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from graft.engine import Engine, Prompt
from graft.hub.quiet import quiet_transformers
from graft.model import evaluating
from graft.model.sampler import SamplingSettings
from graft.stats import Stats


class Answer(NamedTuple):
    """New tokens, and the name of the decoder that chose them."""

    decoder: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Candidate:
    """The token that one decoder chose at a position."""

    decoder: str
    token: int | None  # None: its answer had ended
    logit: float | None  # in a plain forward over the text before


@dataclass(frozen=True)
class Difference:
    """The first position at which two answers to a prompt differ."""

    position: int  # among the new tokens, from 0
    expected: Candidate
    found: Candidate

    @property
    def is_tie(self) -> bool:
        """Equal logits: the model itself does not say which of the two comes first."""
        return self.expected.logit is not None and self.expected.logit == self.found.logit


@dataclass(frozen=True)
class Comparison:
    """One prompt's answers, compared."""

    num_tokens: int  # of the plain answer
    stats: Stats  # of the answer under test
    difference: Difference | None

    @property
    def is_tie(self) -> bool:
        return self.difference is not None and self.difference.is_tie


def plain_twin(engine: Engine) -> Engine:
    """An engine that decodes plainly with the same model object."""
    return Engine(engine.target.model, engine.tokenizer, policy="off")


def compare(engine: Engine, plain: Engine, prompt: Prompt, settings: SamplingSettings) -> Comparison:
    """Answers a prompt with both engines, and with transformers where it decodes by the same rule."""
    ids = engine.encode(prompt)
    settings = settings.fitted(len(ids), engine.target.max_positions)
    expected = Answer("plain", plain.generate(ids, **vars(settings)).ids)
    generation = engine.generate(ids, **vars(settings))
    found = Answer("graft", generation.ids)
    difference = find_difference(engine.target.model, ids, expected, found)
    if difference is None and comparable_to_transformers(engine, settings):
        reference = Answer("transformers", transformers_answer(engine, ids, settings.most_new_tokens))
        difference = find_difference(engine.target.model, ids, reference, found)
    return Comparison(len(expected.ids), generation.stats, difference)


def find_difference(
    model: PreTrainedModel, prompt_ids: Sequence[int], expected: Answer, found: Answer
) -> Difference | None:
    """The first difference between two answers to a prompt, with the model's logits of both tokens there."""
    position = first_difference(expected.ids, found.ids)
    if position is None:
        return None
    logits = next_logits(model, [*prompt_ids, *expected.ids[:position]])

    def candidate(answer: Answer) -> Candidate:
        token = answer.ids[position] if position < len(answer.ids) else None
        return Candidate(answer.decoder, token, None if token is None else float(logits[token]))

    return Difference(position, candidate(expected), candidate(found))


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first position at which two answers differ; one may have ended there."""
    pairs = enumerate(zip_longest(expected, found))
    return next((place for place, (one, other) in pairs if one != other), None)


@torch.no_grad()
def next_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [V] after `ids`, by one plain forward of the model with its own attention and no KV cache."""
    inputs = torch.tensor([list(ids)], device=model.device)
    with evaluating(model):
        return model(inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float()


def comparable_to_transformers(engine: Engine, settings: SamplingSettings) -> bool:
    """Whether the text must equal transformers': greedy, no penalties, fp32. Lower precisions round differently."""
    greedy = SamplingSettings(max_new_tokens=settings.max_new_tokens, seed=settings.seed)
    return settings == greedy and engine.target.model.dtype == torch.float32


def transformers_answer(engine: Engine, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The new tokens of transformers' own greedy `generate`, ending where the engine's answers end."""
    inputs = torch.tensor([list(prompt_ids)], device=engine.target.device)
    endings = engine.eos_token_ids
    model: Any = engine.target.model  # whose annotation leaves `generate` out
    with quiet_transformers(), evaluating(model):
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # a model's own generation config may bring another
            eos_token_id=endings or None,
            pad_token_id=endings[0] if endings else 0,
        )
    return output[0, len(prompt_ids) :].tolist()

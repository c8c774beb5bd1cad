"""Is the text the same? Answers of an engine against plain decoding and against transformers itself.

Decoding is the engine's; here it is only compared, and what a difference is worth is looked up.
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
    """New tokens, and whose they are."""

    decoder: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Candidate:
    """What one way of decoding chose at a place."""

    decoder: str
    token: int | None  # None: its answer had ended
    logit: float | None  # in a plain forward over the text before


@dataclass(frozen=True)
class Difference:
    """The first place at which two answers to a prompt part."""

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
    expected = Answer("plain", plain.generate(ids, **vars(settings)).ids)
    generation = engine.generate(ids, **vars(settings))
    found = Answer("graft", generation.ids)
    difference = find_difference(engine.target.model, ids, expected, found)
    if difference is None and comparable_to_transformers(engine, settings):
        reference = Answer("transformers", transformers_answer(engine, ids, settings.max_new_tokens))
        difference = find_difference(engine.target.model, ids, reference, found)
    return Comparison(len(expected.ids), generation.stats, difference)


def find_difference(
    model: PreTrainedModel, prompt_ids: Sequence[int], expected: Answer, found: Answer
) -> Difference | None:
    """Where two answers to a prompt first part, and what the model thinks of either token there."""
    position = first_difference(expected.ids, found.ids)
    if position is None:
        return None
    logits = next_logits(model, [*prompt_ids, *expected.ids[:position]])

    def candidate(answer: Answer) -> Candidate:
        token = answer.ids[position] if position < len(answer.ids) else None
        return Candidate(answer.decoder, token, None if token is None else float(logits[token]))

    return Difference(position, candidate(expected), candidate(found))


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first place at which two answers differ, be it that one has ended there."""
    pairs = enumerate(zip_longest(expected, found))
    return next((place for place, (one, other) in pairs if one != other), None)


@torch.no_grad()
def next_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """What follows `ids` [V], by one plain forward of the model with its own attention and no cache."""
    inputs = torch.tensor([list(ids)], device=model.device)
    with evaluating(model):
        return model(inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float()


def comparable_to_transformers(engine: Engine, settings: SamplingSettings) -> bool:
    """Greedy and nothing else, in fp32: lower precisions round differently from forward to forward."""
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

"""Is the text the same? Answers of an engine against plain decoding and against transformers itself.

Decoding is the engine's; here it is only compared, and what a difference is worth is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from transformers import PreTrainedModel

from graft.engine import Engine, Prompt
from graft.models.quiet import quiet_transformers
from graft.sampling import SamplingSettings
from graft.stats import Stats


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
    expected = plain.generate(ids, **vars(settings)).ids
    answer = engine.generate(ids, **vars(settings))
    difference = find_difference(engine.target.model, ids, ("plain", expected), ("graft", answer.ids))
    if difference is None and comparable_to_transformers(engine, settings):
        reference = transformers_answer(engine, ids, settings.max_new_tokens)
        difference = find_difference(engine.target.model, ids, ("transformers", reference), ("graft", answer.ids))
    return Comparison(len(expected), answer.stats, difference)


def find_difference(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    expected: tuple[str, Sequence[int]],
    found: tuple[str, Sequence[int]],
) -> Difference | None:
    """Where two answers, each with the name of its decoder, first part, and how close the model holds the two."""
    position = first_difference(expected[1], found[1])
    if position is None:
        return None
    logits = next_logits(model, [*prompt_ids, *expected[1][:position]])

    def candidate(decoder: str, answer: Sequence[int]) -> Candidate:
        token = answer[position] if position < len(answer) else None
        return Candidate(decoder, token, None if token is None else float(logits[token]))

    return Difference(position, candidate(*expected), candidate(*found))


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first place at which two answers differ, be it that one has ended there."""
    pairs = enumerate(zip_longest(expected, found))
    return next((place for place, (one, other) in pairs if one != other), None)


@torch.no_grad()
def next_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """What follows `ids` [V], by one plain forward of the model with its own attention and no cache."""
    return model(torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0, -1].float()


def comparable_to_transformers(engine: Engine, settings: SamplingSettings) -> bool:
    """Greedy and nothing else, in fp32: lower precisions round differently from forward to forward."""
    greedy = SamplingSettings(max_new_tokens=settings.max_new_tokens, seed=settings.seed)
    return settings == greedy and engine.target.model.dtype == torch.float32


def transformers_answer(engine: Engine, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The new tokens of transformers' own greedy `generate`, ending where the engine's answers end."""
    inputs = torch.tensor([list(prompt_ids)], device=engine.target.device)
    endings = engine.eos_token_ids
    with quiet_transformers():
        output = engine.target.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # a model's own generation config may bring another
            eos_token_id=endings or None,
            pad_token_id=endings[0] if endings else 0,
        )
    return output[0, len(prompt_ids) :].tolist()

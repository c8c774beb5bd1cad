"""Comparison of an engine's answers, token by token, with plain decoding and with transformers' `generate`.

At the first difference the scores of both tokens are computed, to tell an exact tie from an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from graft.checking.reference import processors, transformers_answer
from graft.engine import Engine, Prompt
from graft.model import evaluating
from graft.model.sampler import SamplingSettings
from graft.request.stats import Stats

_LOGITS_ALONE = LogitsProcessorList()  # greedy: a token's score is its logit


class Decoded(NamedTuple):
    """New tokens, and the name of the decoder that chose them."""

    decoder: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Candidate:
    """The token that one decoder chose at a position."""

    decoder: str
    token: int | None  # None: its answer had ended
    logit: float | None  # from a plain forward over the text before it
    # The number whose maximum a decoder takes: the logit after penalties, temperature and truncation, plus the noise of
    # a draw. None: the settings exclude the token.
    score: float | None


@dataclass(frozen=True)
class Difference:
    """The first position at which two answers to a prompt differ."""

    position: int  # among the new tokens, from 0
    expected: Candidate
    found: Candidate

    @property
    def is_tie(self) -> bool:
        """Whether the scores are equal, so that either token is right."""
        return self.expected.score is not None and self.expected.score == self.found.score


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
    """An engine for plain decoding with the same model object."""
    return Engine(engine.target.model, engine.tokenizer, policy="off")


def compare(engine: Engine, plain: Engine, prompt: Prompt, settings: SamplingSettings) -> Comparison:
    """Answer a prompt with both engines, and with transformers where it decodes by the same rule."""
    ids = engine.encode(prompt)
    settings = settings.fitted(len(ids), engine.target.max_positions)
    expected = Decoded("plain", plain.generate(ids, **vars(settings)).ids)
    generation = engine.generate(ids, **vars(settings))
    found = Decoded("graft", generation.ids)
    rule = processors(engine, settings, len(ids))
    difference = find_difference(engine.target.model, ids, expected, found, rule)
    if difference is None and comparable_to_transformers(engine, settings):
        reference = Decoded("transformers", transformers_answer(engine, ids, settings))
        difference = find_difference(engine.target.model, ids, reference, found, rule)
    return Comparison(len(expected.ids), generation.stats, difference)


def find_difference(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    expected: Decoded,
    found: Decoded,
    rule: LogitsProcessorList = _LOGITS_ALONE,
) -> Difference | None:
    """The first difference between two answers to a prompt, with the logits and scores of both tokens there.

    rule: turns logits into scores.
    """
    position = first_difference(expected.ids, found.ids)
    if position is None:
        return None
    before = [*prompt_ids, *expected.ids[:position]]
    logits = next_logits(model, before)
    inputs = torch.tensor([before], device=logits.device)
    scores = rule(inputs, logits[None])[0]  # type: ignore[arg-type]  # it asks for a LongTensor and a FloatTensor

    def candidate(answer: Decoded) -> Candidate:
        if position >= len(answer.ids):
            return Candidate(answer.decoder, None, None, None)
        token = answer.ids[position]
        score = float(scores[token])
        return Candidate(answer.decoder, token, float(logits[token]), score if math.isfinite(score) else None)

    return Difference(position, candidate(expected), candidate(found))


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first position at which two answers differ, or at which one of them has ended."""
    pairs = enumerate(zip_longest(expected, found))
    return next((place for place, (one, other) in pairs if one != other), None)


@torch.no_grad()
def next_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [V] after `ids`, by one plain forward of the model with its own attention and no KV cache."""
    inputs = torch.tensor([list(ids)], device=model.device)
    with evaluating(model):
        return model(inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float()


def comparable_to_transformers(engine: Engine, settings: SamplingSettings) -> bool:
    """Whether the tokens must equal transformers': only in fp32, because lower precisions round differently.

    With stop strings they need not: transformers ends an answer after the token that completes the string.
    """
    return not settings.stop and engine.target.model.dtype == torch.float32

"""Reference answers: transformers' own `generate`, with transformers' own logits processors.

`graft check` and tests compare Graft's answers with these, so nothing here calls Graft's sampler. The exception is the
noise that makes a draw repeatable: the reference adds it to the scores, and then the likeliest token is the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graft.engine import Engine
from graft.model import evaluating
from graft.model.noise import gumbel_noise
from graft.model.sampler import SamplingSettings
from graft.quiet import quiet_transformers

_NO_TOKEN = -1


def transformers_answer(engine: Engine, prompt_ids: Sequence[int], settings: SamplingSettings) -> list[int]:
    """The new tokens of transformers' own `generate`, which ends where the engine does. Stop strings are ignored."""
    inputs = torch.tensor([list(prompt_ids)], device=engine.target.device)
    endings = _endings(engine, settings)
    model: Any = engine.target.model  # its annotation lacks `generate`
    with quiet_transformers(), evaluating(model):
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=settings.most_new_tokens,
            do_sample=False,  # a processor adds the noise, so the likeliest token is the draw
            logits_processor=processors(engine, settings, len(prompt_ids)),
            repetition_penalty=1.0,  # overrides the model's generation config
            eos_token_id=endings or [_NO_TOKEN],  # None would mean the generation config's own
            pad_token_id=endings[0] if endings else 0,
        )
    return output[0, len(prompt_ids) :].tolist()


def processors(engine: Engine, settings: SamplingSettings, num_prompt_tokens: int) -> LogitsProcessorList:
    """Processors that turn logits into scores whose maximum is the next token, in the order of transformers.

    transformers has no presence and frequency penalties; here they come after the repetition penalty. Differences from
    Graft's sampler are possible only at the edge of a truncation. transformers' top-k keeps all tokens that equal the
    last one, Graft's keeps exactly k. And the two round the sums of top-p in different orders.
    """
    s, endings = settings, _endings(engine, settings)
    chain: list[LogitsProcessor] = []
    if s.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[token], float(bias)] for token, bias in s.logit_bias.items()]))
    if s.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(s.repetition_penalty)))
    if s.presence_penalty or s.frequency_penalty:
        chain.append(_CountPenalties(s.presence_penalty, s.frequency_penalty, num_prompt_tokens))
    if s.min_tokens and endings:
        chain.append(
            MinNewTokensLengthLogitsProcessor(num_prompt_tokens, s.min_tokens, endings, str(engine.target.device))
        )
    if s.temperature > 0:
        chain.append(TemperatureLogitsWarper(float(s.temperature)))
        if s.top_k:
            chain.append(TopKLogitsWarper(s.top_k))
        if s.top_p < 1:
            chain.append(TopPLogitsWarper(float(s.top_p)))
        if s.min_p:
            chain.append(MinPLogitsWarper(float(s.min_p)))
        assert s.seed is not None
        chain.append(_KeyedNoise(s.seed))
    return LogitsProcessorList(chain)


def _endings(engine: Engine, settings: SamplingSettings) -> list[int]:
    """The tokens that end an answer."""
    return [*([] if settings.ignore_eos else engine.eos_token_ids), *settings.stop_token_ids]


class _CountPenalties(LogitsProcessor):
    """Presence penalty, once for every token in the answer, and frequency penalty, once for every occurrence."""

    def __init__(self, presence: float, frequency: float, num_prompt_tokens: int) -> None:
        self._presence, self._frequency, self._num_prompt_tokens = presence, frequency, num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        penalized = scores.clone()
        answer = input_ids[0, self._num_prompt_tokens :].tolist()
        for token in set(answer):
            penalized[0, token] -= self._presence + self._frequency * answer.count(token)
        return penalized


class _KeyedNoise(LogitsProcessor):
    """The noise of a draw. With it the maximum of the scores is a draw from their softmax."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        seed = torch.tensor([self._seed], device=scores.device)
        position = torch.tensor([input_ids.shape[1]], device=scores.device)
        return scores + gumbel_noise(seed, position, scores.shape[1])

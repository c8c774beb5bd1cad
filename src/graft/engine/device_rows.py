"""What the rounds of the device ask of a row: whether it needs the host, how its tokens are chosen, and its prompt."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from graft.model import VerifyOutput
from graft.model.sampler import SamplingSettings, truncates
from graft.request.sequence import Sequence


def needs_host(sequence: Sequence) -> bool:
    """Whether the host has a part in the row's choices, or looks at each of its rounds."""
    s: SamplingSettings = sequence.settings
    penalties = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty or s.logit_bias
    is_watched = s.logprobs is not None or sequence.is_recorded
    return bool(penalties or s.min_tokens or is_watched or sequence.constraint is not None)


class Choice(IntEnum):
    """How the tokens of a round are chosen; the highest that a row needs counts for all."""

    GREEDY = 0
    SAMPLED = 1
    TRUNCATED = 2

    @classmethod
    def of(cls, settings: SamplingSettings) -> Choice:
        if settings.temperature == 0:
            return cls.GREEDY
        return cls.TRUNCATED if truncates(settings) else cls.SAMPLED


class ReadChunk(NamedTuple):
    """A chunk of a prompt that a step has read, to learn from."""

    verified: VerifyOutput
    preceding: list[int]  # the two tokens before it, or fewer at the beginning of the prompt
    following: list[int]  # the token after each
    salt: int  # whose table entries they become
    draft: Any  # the drafter's state, if there is a drafter, and the row in it
    row: int

"""Rows as device rounds see them: whether a row needs the host, how its tokens are chosen, and its prompt chunks."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from graft.model import VerifyOutput
from graft.model.noise import RowDraws, draft_temperature
from graft.model.sampler import SamplingSettings, truncates
from graft.request.sequence import Sequence


def needs_host(sequence: Sequence) -> bool:
    """Whether the host must help to choose the row's tokens, or must see each of its rounds."""
    s: SamplingSettings = sequence.settings
    penalties = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty or s.logit_bias
    is_watched = s.logprobs is not None or sequence.is_recorded
    return bool(penalties or s.min_tokens or is_watched or sequence.constraint is not None)


def draws_of(sequences: Iterable[Sequence], are_known: bool) -> list[RowDraws]:
    """By row, what trees know of its coming draws. Positions are left at 0, since the device knows them."""
    all_settings = (sequence.settings for sequence in sequences)
    return [
        RowDraws(s.seed or 0, 0, draft_temperature(s.temperature, s.min_p)) if are_known else RowDraws(0, 0, 0.0)
        for s in all_settings
    ]


class Choice(IntEnum):
    """How the tokens of a round are chosen. The highest value that a row needs is used for all rows."""

    GREEDY = 0
    SAMPLED = 1
    TRUNCATED = 2

    @classmethod
    def of(cls, settings: SamplingSettings) -> Choice:
        if settings.temperature == 0:
            return cls.GREEDY
        return cls.TRUNCATED if truncates(settings) else cls.SAMPLED


class ReadChunk(NamedTuple):
    """A prefilled prompt chunk, to learn from."""

    verified: VerifyOutput
    preceding: list[int]  # the two tokens before it, or fewer at the beginning of the prompt
    following: list[int]  # the token after each
    salt: int  # of the table entries to write
    draft: Any  # the drafter's state, if there is a drafter; `row` is the row in it
    row: int

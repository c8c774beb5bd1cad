"""Rows as device rounds see them: how their tokens are chosen, what is known of their draws, their prompt chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from graft.engine.staging import Staging
from graft.model import Chunk, VerifyOutput
from graft.model.noise import RowDraws, draft_temperature
from graft.model.sampler import SamplingSettings, is_adjusted, truncates
from graft.model.step import FlatStep, Part
from graft.request.sequence import Sequence as TokenSequence


def draws_of(sequences: Iterable[TokenSequence], are_known: bool) -> list[RowDraws]:
    """By row, what trees know of its coming draws. Positions are left at 0, since the device knows them."""
    all_settings = (sequence.settings for sequence in sequences)
    return [
        RowDraws(s.seed or 0, 0, draft_temperature(s.temperature, s.min_p)) if are_known else RowDraws(0, 0, 0.0)
        for s in all_settings
    ]


class ChoiceRule(IntEnum):
    """How the tokens of a round are chosen. The highest value that a row needs is used for all rows."""

    GREEDY = 0  # as the step left them: the likeliest by its own logits
    SAMPLED = 1
    TRUNCATED = 2

    @classmethod
    def of(cls, settings: SamplingSettings, has_grammar: bool = False) -> ChoiceRule:
        if settings.temperature == 0:
            return cls.SAMPLED if has_grammar or is_adjusted(settings) else cls.GREEDY
        return cls.TRUNCATED if truncates(settings) else cls.SAMPLED


class ReadChunk(NamedTuple):
    """A prefilled prompt chunk, to learn from."""

    verified: VerifyOutput
    preceding: list[int]  # the two tokens before it, or fewer at the beginning of the prompt
    following: list[int]  # the token after each
    salt: int  # of the table entries to write
    draft: Any  # the drafter's state, if there is a drafter; `row` is the row in it
    row: int


def load_chunks(
    inputs: Any, staging: Staging, first: int, num_rows: int, size: int, chunks: Sequence[Chunk]
) -> list[Part]:
    """Add prompt chunks to a step of `size` tokens, after the trees' `first`. Their rows follow the padding row.

    Returns where they are in the step. num_rows: of the trees, with padding.
    """
    if not chunks:
        return []
    step = FlatStep([], None, chunks)
    row, count = num_rows + 1, step.num_tokens
    columns = np.zeros((len(step.columns), size - first), dtype=np.int32)
    columns[:, :count] = step.columns[:, :count]
    columns[4, :count] += row
    columns[4, count:] = num_rows
    by_row = step.by_row[:, : len(chunks)].copy()
    by_row[0] += first
    numbers = staging.send(np.concatenate([columns.ravel(), by_row.ravel()]))
    inputs.columns[:, first:size].copy_(numbers[: columns.size].view(columns.shape))
    inputs.by_row[:, row : row + len(chunks)].copy_(numbers[columns.size :].view(by_row.shape))
    return [Part(part.tokens, part.index + first, part.counts) for part in step.chunks]

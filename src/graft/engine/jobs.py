"""Jobs: requests as the decode loop sees them, and the updates that their listeners get."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from graft.model.sampler import Chooser
from graft.request.batch import Batch
from graft.request.round_trace import RoundRecord
from graft.request.sequence import FinishReason, Sequence, TokenLogprob


def default_batched_tokens(device: torch.device) -> int:
    """Tokens per step: 2,048 on a GPU, where more would be no faster; 512 on a CPU, where a step would take long."""
    return 2048 if device.type == "cuda" else 512


class BusyError(Exception):
    """The queue is full, or the scheduler is closing."""

    def __init__(self, message: str, is_closing: bool = False) -> None:
        super().__init__(message)
        self.is_closing = is_closing


@dataclass(frozen=True)
class Update:
    """What a round added to one of a request's answers."""

    index: int  # of the answer
    text: str
    ids: list[int]
    logprobs: list[TokenLogprob]
    rounds: list[RoundRecord]  # empty unless the sequence is recorded
    finish_reason: FinishReason | None


FailureKind = Literal["request", "timeout", "shutdown", "server"]


@dataclass(frozen=True)
class Failure:
    """The request ended without its answers. kind: the cause."""

    kind: FailureKind
    message: str


_NUMBERS = itertools.count(1)


@dataclass(eq=False)
class Job:
    """A request. `listener` is called in the loop's thread and must be quick."""

    sequences: list[Sequence]
    listener: Callable[[Update | Failure], None] = lambda news: None  # a caller who drives the loop needs none
    salt: str = ""  # requests with the same salt share pages of the prefix cache
    deadline: float | None = None  # by time.monotonic
    cancelled: bool = False
    error: BaseException | None = None  # why it failed, if its caller drives the loop
    joined: float | None = None  # when its first round began, by time.monotonic
    told: list[int] = field(default_factory=list)  # tokens of each answer that were reported
    ended: set[int] = field(default_factory=set)  # answers whose finish was reported
    number: int = field(default_factory=lambda: next(_NUMBERS))  # a younger job has a higher number
    request: int = 0  # once submitted: the number of the first job of the same request
    is_preempted: bool = False
    # Samplers of its open answers, if they are not made from the settings. A preempted request keeps its samplers here.
    choosers: list[Chooser] = field(default_factory=list)
    # Custom prefill, for prompts that are more than tokens (images). It commits all but the last token of each prompt.
    prefill: Callable[[Batch], None] | None = None

    def __post_init__(self) -> None:
        self.told = [0] * len(self.sequences)

    @property
    def open_answers(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.sequences[0].stats.cached_tokens

    def next_update(self, sequence: Sequence) -> Update | None:
        """Everything about an answer that was not reported yet; None if there is nothing new."""
        assert sequence.text is not None
        index, ended = self.sequences.index(sequence), sequence.finish_reason is not None
        told, count, start = self.told[index], sequence.stats.tokens, sequence.num_prompt_tokens
        if index in self.ended or (told == count and not ended):
            return None
        update = Update(
            index=index,
            text=sequence.text.take(final=ended),
            ids=sequence.ids[start + told : start + count],  # without tokens after a stop string
            logprobs=sequence.logprobs[told:count],
            rounds=sequence.take_records(),
            finish_reason=sequence.finish_reason,
        )
        self.told[index] = count
        self.ended |= {index} if ended else set()
        return update

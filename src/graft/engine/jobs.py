"""Requests as the scheduler sees them: its settings, jobs, and what their listeners are told."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from graft.model.sampler import Chooser
from graft.request.round_trace import RoundRecord
from graft.request.sequence import FinishReason, Sequence, TokenLogprob
from graft.settings import Settings, require

LEAST_CHUNK = 32  # prompt tokens that every step reads at least, however many rows are decoded in it


@dataclass(frozen=True)
class SchedulerSettings(Settings):
    """How much is decoded at once."""

    max_rows: int = 16  # answers decoded together
    max_waiting: int = 64  # requests that wait for room; more are refused
    max_batched_tokens: int | None = None  # of a step, of prompts and rows that are decoded; None: `usual_step`
    # Share of the device's memory that weights, KV cache and CUDA graphs may take; on a CPU, of the machine's memory
    # for the KV cache alone. None: 0.85 of a GPU's, 0.25 of a machine's.
    memory: float | None = None
    max_cache_tokens: int | None = None  # tokens that the KV cache has room for, at most; None: what memory allows
    prefix_cache_tokens: int | None = None  # kept of texts that nobody uses, for others that begin alike; None: all

    def __post_init__(self) -> None:
        for name, least in (
            ("max_rows", 1),
            ("max_waiting", 0),
            ("max_batched_tokens", LEAST_CHUNK),
            ("max_cache_tokens", 256),
            ("prefix_cache_tokens", 0),
        ):
            value = getattr(self, name)
            require(value is None or value >= least, f"{name} must be at least {least}, not {value}")
        good = self.memory is None or 0 < self.memory <= 1
        require(good, f"memory must be a share above 0 and at most 1, such as 0.85, not {self.memory}")


def usual_step(device: torch.device) -> int:
    """Tokens of a step unless somebody says otherwise: what a GPU reads about as fast as more; a CPU would be long."""
    return 2048 if device.type == "cuda" else 512


class BusyError(Exception):
    """Too many requests are waiting, or the scheduler takes no more."""

    def __init__(self, message: str, is_closing: bool = False) -> None:
        super().__init__(message)
        self.is_closing = is_closing


@dataclass(frozen=True)
class Update:
    """What a round brought one of a request's answers."""

    index: int  # of the answer
    text: str
    ids: list[int]
    logprobs: list[TokenLogprob]
    round: RoundRecord | None  # if the sequence is recorded
    finish_reason: FinishReason | None


FailureKind = Literal["request", "timeout", "shutdown", "server"]


@dataclass(frozen=True)
class Failure:
    """The request has ended without its answers. kind: whose fault it is."""

    kind: FailureKind
    message: str


_NUMBERS = itertools.count(1)


@dataclass(eq=False)
class Job:
    """A request as the scheduler sees it. `listener` is called in the scheduler's thread, and must be quick."""

    sequences: list[Sequence]
    listener: Callable[[Update | Failure], None]
    salt: str = ""  # whose kept pages it may use
    deadline: float | None = None  # by time.monotonic
    cancelled: bool = False
    num_cached_tokens: int = 0  # of the prompt, those that were not read again
    joined: float | None = None  # when its first round began, by time.monotonic
    told: list[int] = field(default_factory=list)  # tokens of each answer that the listener has heard of
    ended: set[int] = field(default_factory=set)  # answers of whose end it has
    number: int = field(default_factory=lambda: next(_NUMBERS))  # the youngest's is the highest
    request: int = 0  # the number of the first job of the same request, once submitted
    choosers: list[Chooser] = field(default_factory=list)  # of the answers still open, when it was put back

    def __post_init__(self) -> None:
        self.told = [0] * len(self.sequences)

    @property
    def open_answers(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

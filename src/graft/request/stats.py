"""Statistics of an answer: counts of rounds and tokens, and seconds by phase."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any


class Clock:
    """Seconds by phase. Phases do not nest; the time between them counts as "host"."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, phase: str) -> _Phase:
        """A context whose time is added to a phase."""
        return _Phase(self.seconds, phase)

    def with_host(self, total: float) -> dict[str, float]:
        """Seconds by phase, with the rest of `total` as "host"."""
        return {**self.seconds, "host": max(0.0, total - sum(self.seconds.values()))}


class _Phase:
    """The context of a phase. It is not a generator, which would be slower, because a round has a dozen of them."""

    def __init__(self, seconds: defaultdict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._phase] += time.perf_counter() - self._start


@dataclass
class Stats:
    """Counts of one answer. Times are those of the whole batch in which it was decoded."""

    rounds: int = 0
    plain_rounds: int = 0  # rounds that verified only the root
    tokens: int = 0  # new tokens in the answer
    accepted: int = 0  # new tokens that came from the tree
    draft_passes: int = 0
    nodes: int = 0  # proposed nodes that were verified
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    proposed_by_source: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    setup_seconds: float = 0.0  # before prefill; with a fixed budget, a policy measures draft passes once
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=dict)

    @property
    def mean_accepted(self) -> float:
        """Mean accepted length, 1 + accepted / rounds. It is tokens per round, but a last round may be cut short."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def recalled(self) -> int:
        """Tokens that were copied from earlier answers."""
        return self.accepted_by_source.get("past", 0)

    @property
    def is_recalled(self) -> bool:
        """Whether most of the answer was copied from earlier ones, so that its speed is not that of new text."""
        return 2 * self.recalled > self.tokens

    @property
    def seconds(self) -> float:
        """Wall-clock time from the call to the end of the answer."""
        return self.setup_seconds + self.prefill_seconds + self.decode_seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "plain_rounds": self.plain_rounds,
            "tokens": self.tokens,
            "accepted": self.accepted,
            "mean_accepted": self.mean_accepted,
            "tokens_per_second": self.tokens_per_second,
            "draft_passes_per_round": self.draft_passes / self.rounds if self.rounds else 0.0,
            "nodes_per_round": self.nodes / self.rounds if self.rounds else 0.0,
            "accepted_by_source": dict(self.accepted_by_source),
            "accepted_by_depth": dict(sorted(self.accepted_by_depth.items())),
            "proposed_by_source": dict(self.proposed_by_source),
            "cached_tokens": self.cached_tokens,
            "seconds": self.seconds,
            "setup_seconds": self.setup_seconds,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "seconds_by_phase": dict(self.seconds_by_phase),
        }

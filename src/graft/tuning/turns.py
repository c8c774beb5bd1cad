"""Turns: plain decoding before and after Graft on the same prompt, which shows how noisy the machine is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graft.checking.compare import plain_twin
from graft.engine import Engine, Generation, Prompt
from graft.progress import Report
from graft.request.stats import Stats

MIN_NOISE = 0.03  # by which two runs differ even on a quiet machine
MAX_NOISE = 0.1  # above it, a measured speed-up says nothing


class Turn(NamedTuple):
    """Seconds of one prompt: plain decoding, Graft, and plain decoding again. stats: of Graft's answer."""

    before: float
    ours: float
    after: float
    stats: Stats


@dataclass(frozen=True)
class Speed:
    """A speed-up over plain decoding, and how far it can be trusted."""

    ratio: float
    noise: float  # relative: how far the plain runs before and after differ from their mean, at least MIN_NOISE
    before: float  # seconds of plain decoding before Graft
    after: float
    mean_accepted: float  # tokens per round

    @property
    def doubt(self) -> str | None:
        """Why there can be no verdict; None if there can."""
        if self.noise > MAX_NOISE:
            return (
                f"plain decoding took {self.before:.1f} s before Graft and {self.after:.1f} s after it, and single "
                f"answers differed by {self.noise:.0%} of their time: the machine is too busy to compare speeds"
            )
        # A round takes at least as long as a plain step.
        if self.ratio > self.mean_accepted * (1 + self.noise):
            return (
                f"{self.ratio:.2f} times the speed cannot come from {self.mean_accepted:.2f} tokens a round: something "
                "else slowed plain decoding down"
            )
        return None


def decode_in_turns(
    plain: Engine, engine: Engine, prompt: Prompt, max_new_tokens: int
) -> tuple[Turn, list[Generation]]:
    """Decode a prompt plainly, with the engine, and plainly again. plain: the engine's `plain_twin`."""
    answers = [each.generate(prompt, max_new_tokens=max_new_tokens) for each in (plain, engine, plain)]
    before, ours, after = (answer.stats.decode_seconds for answer in answers)
    return Turn(before, ours, after, answers[1].stats), answers


def measure_turns(
    engine: Engine, prompts: Sequence[list[int]], max_new_tokens: int, progress: Callable[[Report], None]
) -> list[Turn]:
    """Decode every prompt in turns, so that other load on the machine affects both alike."""
    plain = plain_twin(engine)
    plain.generate(prompts[0], max_new_tokens=2)  # torch's one-time work
    turns: list[Turn] = []
    for prompt in prompts:
        progress(Report("measuring", len(turns), len(prompts), "prompts: plain, Graft, plain again"))
        turns.append(decode_in_turns(plain, engine, prompt, max_new_tokens)[0])
    progress(Report("measuring", len(turns), len(prompts), "done"))
    return turns


def speed_of(turns: Sequence[Turn]) -> Speed:
    """The speed-up on all prompts together."""
    before, ours, after = (sum(seconds) for seconds in list(zip(*turns, strict=True))[:3])
    # Prompts that happened to be slow before and others that were slow after must not cancel out.
    spread = math.hypot(*(turn.before - turn.after for turn in turns))
    rounds, accepted = sum(turn.stats.rounds for turn in turns), sum(turn.stats.accepted for turn in turns)
    return Speed(
        ratio=(before + after) / 2 / ours,
        noise=max(MIN_NOISE, spread / (before + after), abs(before - after) / (before + after)),
        before=before,
        after=after,
        mean_accepted=1 + accepted / max(rounds, 1),
    )

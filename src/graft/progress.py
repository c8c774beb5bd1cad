"""Progress reports of long-running work, which the command line draws."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Progress of one stage: steps done, steps in total, and a few words."""

    stage: str
    done: int
    total: int
    words: str

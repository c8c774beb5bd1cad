"""How long work tells of its progress; what is drawn of it is the command's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """What a stage tells whoever watches: how far it is, of how much, and a few words."""

    stage: str
    done: int
    total: int
    words: str

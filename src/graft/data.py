"""Prompts from files, one JSON object a line, and how a prompt is put to a chat model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.settings import require

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """A row of a data file."""

    id: str  # the row's own, else its line number
    text: str


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` rows of a file, all if None; lines behind them are not looked at.

    A row has `prompt`, or `turns`, of which the first is taken: the others answer to what a model said.
    """
    require(limit is None or limit >= 1, f"limit must be at least 1, not {limit}")
    try:
        with open(path, "rb") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            prompts = [_prompt(line, f"{path}:{number}", number) for _, (number, line) in zip(_count(limit), lines)]
    except OSError as error:
        raise GraftError(f"cannot read {path}: {error.strerror}") from error
    require(bool(prompts), f"{path} holds no prompts; give one JSON object a line")
    return prompts

"""Prompts: read from JSON-lines files, and wrapped as chat messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.settings import require


@dataclass(frozen=True)
class PromptRow:
    """A row of a data file."""

    id: str  # the row's own, or its line number
    text: str


def read_prompts(path: str | Path, limit: int | None = None) -> list[PromptRow]:
    """The first `limit` prompts of a file, or all; later lines are not read.

    A row has `prompt` or `turns`. The first turn is taken: later ones follow up on an answer.
    """
    require(limit is None or limit >= 1, f"limit must be at least 1, not {limit}")
    try:
        with open(path, "rb") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            prompts = [_prompt(path, number, line) for number, line in islice(lines, limit)]
    except OSError as error:
        raise GraftError(f"cannot read {path}: {error.strerror}") from error
    require(bool(prompts), f"{path} holds no prompts: it needs one JSON object a line")
    return prompts


def user_message(text: str, tokenizer: Any, system: str | None = None) -> str | list[dict[str, str]]:
    """`text` as a user's chat message, or unchanged for a model without a chat template."""
    if not tokenizer.chat_template:
        require(system is None, "this model has no chat template, so it takes no system message")
        return text
    instructions = [{"role": "system", "content": system}] if system is not None else []
    return [*instructions, {"role": "user", "content": text}]


def _prompt(path: str | Path, number: int, line: bytes) -> PromptRow:
    place = f"{path}:{number}"
    try:
        row = json.loads(line.rstrip().decode())
    except UnicodeDecodeError as error:
        raise GraftError(f"{place} is not UTF-8 text ({error.reason} at byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise GraftError(f"{place} is not valid JSON ({error.msg} at column {error.colno})") from error
    require(isinstance(row, dict), f"{place} is not a JSON object")
    text = row.get("prompt")
    if "turns" in row:
        turns = row["turns"]
        text = turns[0] if isinstance(turns, list) and turns else None
    usable = isinstance(text, str) and bool(text.strip())
    require(usable, f'{place} needs "prompt": TEXT or "turns": [TEXT, ...], with some text in it')
    return PromptRow(str(row.get("id", number)), str(text))

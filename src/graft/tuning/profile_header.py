"""The header of a profile's file: what it is of, and the speeds of drafters. It is read without importing torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from graft.errors import GraftError

FORMAT = "graft-profile-1"
_FIELDS = {"model", "head", "device", "dtype"}
ANEW = "make one with graft tune"


class OtherFormatError(GraftError):
    """A profile in the format of another version."""


@contextmanager
def opened(path: Path, framework: str = "np") -> Iterator[Any]:
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise GraftError(f"{path} cannot be read as a profile ({error}): {ANEW}") from error


def read_header(path: Path) -> dict[str, Any]:
    """The model, head, device and dtype of a profile."""
    metadata = _metadata(path)
    try:
        facts = json.loads(metadata.get("about", "{}"))
        is_ours = facts.pop("format", None) == FORMAT
    except (ValueError, TypeError, AttributeError) as error:
        raise GraftError(f"{path} does not say what it is a profile of: {ANEW}") from error
    if not is_ours:
        raise OtherFormatError(f"{path} is not a profile of this version of Graft: {ANEW}")
    if facts.keys() != _FIELDS:
        raise GraftError(f"{path} does not say what it is a profile of: {ANEW}")
    return dict(facts)


def read_speeds(path: Path) -> dict[str, Any]:
    """What was measured of drafters, by name."""
    try:
        speeds = json.loads(_metadata(path).get("speeds", "{}"))
    except ValueError as error:
        raise GraftError(f"the speeds in {path} are damaged: {ANEW}") from error
    if not isinstance(speeds, dict):
        raise GraftError(f"the speeds in {path} are damaged: {ANEW}")
    return speeds


def _metadata(path: Path) -> dict[str, str]:
    with opened(path) as file:
        return file.metadata() or {}

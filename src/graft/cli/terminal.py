"""What the verbs share on the screen and at the keyboard. Answers go to stdout; all else goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from graft.cli.options import Given
from graft.errors import GraftError
from graft.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from graft.engine import Engine


def notes() -> Console:
    """For everything that is not the answer. Bound to the stderr of now."""
    return Console(stderr=True, highlight=False)


def aside(text: str) -> None:
    """A remark for somebody at a terminal; a pipe stays quiet."""
    console = notes()
    if console.is_terminal:
        console.print(text, style="dim", markup=False)


def load_engine(loading: Given) -> Engine:
    """An engine as the options ask for."""
    # A line, not a spinner: a model that is fetched first draws bars of its own.
    aside(f"Loading {loading.get('model', DEFAULT_MODEL)} ...")

    from graft.loading import load

    no_head = {"draft": None} if loading.get("draft") == "none" else {}
    return load(**loading | no_head)


@contextmanager
def utf8_stdin() -> Iterator[TextIO]:
    """stdin as UTF-8 whatever the locale; anything else in it is the user's to fix."""
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        raise GraftError(f"stdin is not UTF-8 text ({error.reason} at byte {error.start})") from error

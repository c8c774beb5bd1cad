"""Terminal input and output shared by the commands. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from graft.cli.options import Given
from graft.errors import GraftError
from graft.hub.registry import DEFAULT_MODEL
from graft.machine import WAITING

if TYPE_CHECKING:
    from graft.engine import Engine
    from graft.progress import Report


def notes() -> Console:
    """A console on the current stderr."""
    return Console(stderr=True, highlight=False)


def aside(text: str) -> None:
    """Print a remark if stderr is a terminal."""
    console = notes()
    if console.is_terminal:
        console.print(text, style="dim", markup=False)


def print_facts(facts: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> None:
    """Print facts by name, one a line. notes: on some of them."""
    width = max(map(len, facts))
    for name, value in facts.items():
        note = f" ({notes[name]})" if notes and name in notes else ""
        print(f"{name.replace('_', ' '):<{width}}  {_readable(value)}{note}")


def _readable(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_readable(each)}" for key, each in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_readable, value))
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def load_engine(
    loading: Given, isolated: bool = False, keep_learned: bool | None = False, max_new_tokens: int | None = None
) -> Engine:
    """Load the engine that the options describe.

    isolated: texts do not learn from each other. keep_learned: used if the options do not say; see `load`.
    max_new_tokens: of the answers, for which the model's context must have room.
    """
    check_loading(loading, max_new_tokens)
    # Not a spinner: fetching a model draws its own progress bars.
    aside(f"Loading {loading.get('model', DEFAULT_MODEL)} ...")
    if os.environ.get(WAITING) == "passive":
        aside(
            f"Threads sleep while they wait for each other ({WAITING}=passive), because other programs use the cores."
        )

    given: Given = {"keep_learned": keep_learned}
    with without_garbage_collection():
        from graft.device_info import pick_device

        pick_device(loading.get("device", "auto"))  # needs torch alone, and transformers takes longer
        from graft.loading import load

        engine = load(**given | _without_none(loading), isolated=isolated)
    engine.target.progress = _show_preparation
    return engine


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector, which would search the many objects of imported libraries again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_loading(loading: Given, max_new_tokens: int | None = None) -> None:
    """Check the options before torch is imported, which takes seconds. max_new_tokens: of the answers."""
    from graft.load_options import check_load_options

    unchecked = ("exact", "keep_learned", "prefix_cache")
    checked = {name: value for name, value in _without_none(loading).items() if name not in unchecked}
    check_load_options(**checked, max_new_tokens=max_new_tokens)


def _without_none(loading: Given) -> Given:
    """The options as `load` takes them, which has no word for no drafter and no profile."""
    return loading | {name: None for name in ("draft", "profile") if loading.get(name) == "none"}


def _show_preparation(report: Report) -> None:
    """Announce the first capture of CUDA graphs, which is slow because kernels are compiled."""
    if report.done == 0:
        aside("Compiling kernels and capturing CUDA graphs ...")


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show warnings as one line each, like errors, without the place and the line of code that they come from."""

    def show(message: Warning | str, *where: object) -> None:
        notes().print(f"warning: {message}", markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def checked_folder(out: Path | None) -> Path:
    """Create the results folder and check that it is writable, before any work is done."""
    if out is None:
        raise GraftError("name a folder for the results with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise GraftError(f"cannot write to {out}: {error.strerror}") from error
    return out


@contextmanager
def utf8_stdin() -> Iterator[TextIO]:
    """stdin as UTF-8 in any locale. Invalid bytes raise a GraftError."""
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        raise GraftError(f"stdin is not UTF-8 text ({error.reason} at byte {error.start})") from error


class ProgressBars:
    """Progress of long work: on a terminal one bar per stage with the time left, in a pipe one line per 5 %."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = notes()
        self._bars = Progress(
            TextColumn("{task.fields[stage]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}
        self._shown: dict[str, int] = {}

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, report: Report) -> None:
        if not self._console.is_terminal:
            part = 20 * report.done // report.total
            if part != self._shown.get(report.stage):
                self._shown[report.stage] = part
                self._console.print(f"{report.stage} {report.done}/{report.total}: {report.words}", markup=False)
            return
        if report.stage not in self._tasks:
            self._tasks[report.stage] = self._bars.add_task("", total=report.total, stage=report.stage, words="")
        self._bars.update(self._tasks[report.stage], completed=report.done, words=report.words)

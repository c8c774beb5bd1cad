"""The `graft` command, with one file per verb.

A verb is a plain function with typer annotations. To add one, write `cli/VERB.py` and list it in `VERBS`. Verbs import
heavy modules only when they run, which keeps `--help` fast, and check their arguments before they import torch.
"""

import errno
import io
import os
import sys
from typing import Annotated

import typer

from graft.cli.bench_serve import benches
from graft.cli.chat import chat
from graft.cli.check import check
from graft.cli.demo import demo
from graft.cli.doctor import doctor
from graft.cli.drafters import drafters
from graft.cli.env import env
from graft.cli.export_head import export_head
from graft.cli.export_hub import export_hub
from graft.cli.generate import generate
from graft.cli.load_check import load_check
from graft.cli.pull import pull
from graft.cli.serve import serve
from graft.cli.terminal import one_line_warnings
from graft.cli.train import train
from graft.cli.tune import tune
from graft.errors import GraftError
from graft.machine import let_waiting_threads_sleep
from graft.version import __version__

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)

_HEAD_VERBS = (train, load_check, export_head)
VERBS = (demo, generate, chat, serve, check, doctor, tune, drafters, *_HEAD_VERBS, export_hub, pull, env)

app = typer.Typer(
    name="graft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: {"data": "prompts"}.get(name, name),  # --prompts was --data in some verbs
    },
)
for verb in VERBS:
    app.command()(verb)
app.add_typer(benches)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"graft {__version__}")
        raise typer.Exit


@app.callback()
def graft(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Decode language models faster, with exactly the same text."""


def main() -> None:
    """Run the command. Errors that the user can fix print one line on stderr and exit with status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows other characters as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    let_waiting_threads_sleep()
    try:
        try:
            with one_line_warnings():
                app()
        finally:
            sys.stdout.flush()
    except GraftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _discard_stdout()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        _discard_stdout()
        where = f" {error.filename}" if error.filename else ""
        print(f"error: cannot write{where}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

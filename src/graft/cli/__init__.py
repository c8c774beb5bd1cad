"""The `graft` command. One file a verb; each imports what it needs when it runs, so that `--help` is quick.

A verb is a plain function with typer annotations. To add one: write `cli/VERB.py`, list it in `VERBS`.
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
from graft.cli.index import index
from graft.cli.load_check import load_check
from graft.cli.plan import plan
from graft.cli.pull import pull
from graft.cli.serve import serve
from graft.cli.train import train
from graft.cli.tune import tune
from graft.errors import GraftError
from graft.version import __version__

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)  # of the user's machine

_HEADS = (train, load_check, export_head)
VERBS = (demo, generate, chat, serve, check, doctor, tune, drafters, plan, *_HEADS, export_hub, pull, env)

app = typer.Typer(
    name="graft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in VERBS:
    app.command()(verb)
app.add_typer(benches)
app.add_typer(index)


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
    """Faster decoding of language models, with exactly the text the model would have written."""


def main() -> None:
    """Run the command; what the user can fix is one line on stderr and exit status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows the letters it lacks by number
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except GraftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader (`head`, say) has gone.
        _leave_stdout()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        _leave_stdout()
        where = f" {error.filename}" if error.filename else ""
        print(f"error: cannot write{where}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _leave_stdout() -> None:
    """Keeps the interpreter from flushing into a stdout that takes nothing any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

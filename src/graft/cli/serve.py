"""`graft serve`: an OpenAI-compatible server, and a page to see it work."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import LOADING, Given, Group, option, takes
from graft.cli.terminal import load_engine, notes
from graft.errors import GraftError
from graft.hub.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from graft.engine import Engine
    from graft.server.settings import ServeSettings

_users = functools.partial(option, rich_help_panel="Users")
_limit = functools.partial(option, rich_help_panel="Limits")

SERVING: Group = {
    "host": _users(str, "--host", "Address to listen at.", "127.0.0.1, this machine alone"),
    "port": _users(int, "--port", "Port to listen at; 0 takes a free one.", "8000"),
    "api_keys": _users(list[str], "--api-key", "A key that users must give; repeatable.", metavar="KEY"),
    "allowed_hosts": _users(
        list[str],
        "--allowed-hosts",
        "A host name that requests may be sent to; repeatable.",
        "any, or local ones",
        metavar="HOST",
    ),
    "ssl_certfile": _users(Path, "--ssl-certfile", "A certificate in PEM format: HTTPS.", metavar="FILE"),
    "ssl_keyfile": _users(Path, "--ssl-keyfile", "Its key, where that is a file of its own.", metavar="FILE"),
    "served_model_name": _users(str, "--served-model-name", "The model's name in requests.", "the model's own"),
    "tool_parser": _users(
        str, "--tool-parser", "How tool calls are written: hermes, llama3, qwen, mistral, pythonic.", "by the template"
    ),
    "reasoning_parser": _users(
        str, "--reasoning-parser", "What is reasoning: think (between <think> and </think>) or none.", "by the template"
    ),
    "learning": _users(
        str, "--learning", "Who learn from each other: shared, key, isolated (key and user), off.", "key if several"
    ),
    "page": _users(bool, "--page/--no-page", "The page at /.", "on"),
    "log_prompts": _users(bool, "--log-prompts", "Write prompts to the log."),
    "max_rows": _limit(int, "--max-rows", "Answers decoded together.", "16"),
    "max_waiting": _limit(int, "--max-waiting", "Requests that may wait; more get status 429.", "64"),
    "max_batched_tokens": _limit(
        int, "--max-batched-tokens", "Tokens of a step, of prompts and of answers together.", "2048; on a CPU 512"
    ),
    "memory": _limit(
        float,
        "--memory",
        "Share of the GPU's memory for weights, KV cache and graphs; on a CPU, of what there is, for the KV cache.",
        "0.85; on a CPU 0.25",
    ),
    "max_cache_tokens": _limit(
        int, "--max-cache-tokens", "Tokens that the KV cache has room for, in place of --memory.", "what memory allows"
    ),
    "prefix_cache_tokens": _limit(
        int,
        "--prefix-cache-tokens",
        "Tokens kept of texts that have ended, for others that begin alike; 0 keeps none.",
        "what the KV cache has room for",
    ),
    "max_body_bytes": _limit(int, "--max-body-bytes", "Largest request.", "2097152"),
    "max_prompt_bytes": _limit(
        int, "--max-prompt-bytes", "Longest prompt before it is tokenized.", "16 a token of the context"
    ),
    "max_prompt_tokens": _limit(int, "--max-prompt-tokens", "Longest prompt.", "the model's context"),
    "max_tokens": _limit(int, "--max-tokens", "Longest answer that may be asked for.", "4096"),
    "default_max_tokens": _limit(int, "--default-max-tokens", "Longest chat answer if nothing is said.", "1024"),
    "timeout": _limit(float, "--timeout", "Seconds a request may take.", "600"),
    "read_timeout": _limit(float, "--read-timeout", "Seconds in which a request must be wholly sent.", "30"),
    "shutdown_timeout": _limit(float, "--shutdown-timeout", "Seconds requests have left at the end.", "30"),
}


@takes(loading=LOADING, serving=SERVING)
def serve(
    config: Annotated[Path | None, typer.Option(help="A YAML file of these settings.", metavar="FILE")] = None,
    *,
    loading: Given,
    serving: Given,
) -> None:
    """Serve a model to many at once, through OpenAI's API, with a page to see it at /.

    Settings come from flags, then from the environment (GRAFT_SERVE_PORT=8001), then from --config FILE.

    [dim]Example:[/] graft serve --port 8000 --api-key secret
    """
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
        import yaml  # noqa: F401
    except ImportError as error:
        raise GraftError(f"{error.name} is missing: pip install 'graft-decoding[serve]'") from error
    from graft.server.settings import gather

    wanted, settings = gather(loading | serving, os.environ, config, tuple(LOADING))
    engine = load_engine(wanted, isolated=settings.shared_by != "all")
    _run(engine, settings, Path(str(wanted.get("model", DEFAULT_MODEL))).name)


def _run(engine: Engine, settings: ServeSettings, model_name: str) -> None:
    from graft.server.app import make_app, make_server

    if not settings.is_local and not settings.api_keys:
        notes().print("warning: anybody who reaches this machine may ask: set --api-key", markup=False)
    make_server(make_app(engine, settings, model_name), settings, log_config=_LOGS).run()


_LINES = {"format": "%(asctime)s %(levelname)s %(message)s"}
_LOGS = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"lines": _LINES},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
    "loggers": {name: {"handlers": ["stderr"], "level": "INFO"} for name in ("uvicorn", "graft.server")},
}

"""`graft serve`: an OpenAI-compatible server with a web page."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.extras import missing_extra
from graft.cli.options import LOADING, Given, Group, option, takes
from graft.cli.terminal import check_loading, load_engine, notes, without_garbage_collection
from graft.hub.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from fastapi import FastAPI

    from graft.progress import Report
    from graft.server.metrics import Metrics
    from graft.server.settings import ServeSettings
    from graft.server.startup import Startup

_server = functools.partial(option, rich_help_panel="Server")
_limit = functools.partial(option, rich_help_panel="Limits")

SERVING: Group = {
    "host": _server(str, "Address to listen on.", "127.0.0.1, this machine only"),
    "port": _server(int, "Port to listen on; 0 picks a free one.", "8000"),
    "api_keys": _server(list[str], "Require this API key; repeatable.", metavar="KEY", flag="--api-key"),
    "api_key_names": _server(
        list[str],
        "Name of an API key in the log; repeatable, in the order of the keys.",
        "key-1, key-2 ...",
        metavar="NAME",
        flag="--api-key-name",
    ),
    "allowed_hosts": _server(
        list[str],
        "Accept requests for this host name, besides local ones; repeatable.",
        "any; if --host is local, local names only",
        metavar="HOST",
    ),
    "ssl_certfile": _server(Path, "Serve HTTPS with this PEM certificate.", metavar="FILE"),
    "ssl_keyfile": _server(Path, "The certificate's key, if it is in a separate file.", metavar="FILE"),
    "served_model_name": _server(str, "The model's name in requests.", "the model's own"),
    "tool_parser": _server(
        str, "Format of tool calls: hermes, llama3, qwen, mistral, pythonic.", "from the chat template"
    ),
    "reasoning_parser": _server(
        str, "Format of reasoning: think (between <think> and </think>) or none.", "from the chat template"
    ),
    "learning": _server(
        str,
        "Requests that learn from each other: shared (all), key (same API key), isolated (same key and user), off.",
        "key with several API keys, else shared",
    ),
    "page": _server(bool, "Serve the web page at /.", "on"),
    "log_prompts": _server(bool, "Write prompts to the log.", flag="--log-prompts"),
    "access_log": _server(bool, "Log every request, also those for the page or /health.", flag="--access-log"),
    "log_format": _server(str, "Log lines of text, or of JSON.", "text", metavar="text|json"),
    "max_rows": _limit(int, "Answers decoded together in a batch.", "16"),
    "max_waiting": _limit(int, "Requests that may wait; further ones get status 429.", "64"),
    "max_batched_tokens": _limit(int, "Tokens per step, prefill and decode together.", "2048; on a CPU 512"),
    "memory": _limit(
        float,
        "On a GPU, share of its memory for weights, KV cache and graphs; on a CPU, share of the machine's memory for "
        "the KV cache.",
        "0.85; on a CPU 0.25",
    ),
    "max_cache_tokens": _limit(int, "KV cache size in tokens, instead of --memory.", "what --memory allows"),
    "prefix_cache_tokens": _limit(
        int, "Tokens of finished texts kept in the prefix cache; 0 turns it off.", "all that fit"
    ),
    "max_body_bytes": _limit(int, "Largest request body.", "2097152"),
    "max_prompt_bytes": _limit(int, "Longest prompt, in bytes.", "16 for each token of the context"),
    "max_prompt_tokens": _limit(int, "Longest prompt, in tokens.", "the model's context"),
    "max_tokens": _limit(int, "Longest answer that a request may ask for.", "4096"),
    "default_max_tokens": _limit(int, "Longest chat answer if the request sets no limit.", "1024"),
    "timeout": _limit(float, "Seconds a request may take.", "600"),
    "read_timeout": _limit(float, "Seconds a client may take to send its request.", "30"),
    "shutdown_timeout": _limit(float, "Seconds that running requests get to finish at shutdown.", "30"),
}


@takes(loading=LOADING, serving=SERVING)
def serve(
    config: Annotated[Path | None, typer.Option(help="A YAML file with these settings.", metavar="FILE")] = None,
    *,
    loading: Given,
    serving: Given,
) -> None:
    """Serve a model through an OpenAI-compatible API, with a web page at /.

    Flags override environment variables (GRAFT_SERVE_PORT=8001), which override --config FILE.

    [dim]Example:[/] graft serve --port 8000 --api-key secret
    """
    for module in ("fastapi", "llguidance", "prometheus_client", "uvicorn", "yaml"):
        if find_spec(module) is None:
            raise missing_extra(module, "serve")
    from graft.server.settings import gather
    from graft.server.startup import address_of, listen

    wanted, settings = gather(loading | serving, os.environ, config, tuple(LOADING))
    check_loading(wanted)
    sockets = listen(settings)
    model = str(wanted.get("model", DEFAULT_MODEL))
    notes().print(f"Listening on {address_of(settings, sockets)}; loading {model} ...", markup=False, soft_wrap=True)
    if not settings.is_local and not settings.api_keys:
        notes().print("warning: anyone who can reach this machine can use the server: set --api-key", markup=False)
    _run(wanted, settings, Path(model).name, sockets)


def _run(wanted: Given, settings: ServeSettings, model_name: str, sockets: list[socket]) -> None:
    """Answer from now on, and load the model beside that."""
    from graft.server.connection import make_server
    from graft.server.gateway import Gateway
    from graft.server.logs import log_config

    def load(startup: Startup, metrics: Metrics) -> FastAPI:
        with without_garbage_collection():
            import graft.loading  # noqa: F401 - takes seconds
            from graft.server.app import make_app

        startup.enter("loading the model")
        engine = load_engine(wanted, isolated=settings.sharing != "shared")
        show = engine.target.progress

        def progress(report: Report) -> None:
            startup.show(report)
            show(report)

        engine.target.progress = progress
        return make_app(engine, settings, model_name, startup, metrics)

    gateway = Gateway(settings, model_name, load)
    server = make_server(gateway, settings, gateway.drain, log_config=log_config(settings.log_format))
    gateway.on_failure = lambda: setattr(server, "should_exit", True)
    try:
        server.run(sockets)
    except KeyboardInterrupt:
        if gateway.is_loading:  # the thread cannot be interrupted, and may be inside a library's import
            os._exit(130)
        raise
    if gateway.failure is not None:
        raise gateway.failure

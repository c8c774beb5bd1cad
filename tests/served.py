"""A server of a tiny model on a free port, and how tests ask it."""

import inspect
import threading
from contextlib import contextmanager

import httpx

from gates import PATIENCE, until
from graft import Engine
from graft.server.app import make_app
from graft.server.connection import make_server
from graft.server.gateway import Gateway
from graft.server.settings import ServeSettings
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

# httpx gives up after five seconds unless it is told otherwise, which a busy machine may need for a small answer.
_LIMITS = inspect.signature(httpx.get).parameters["timeout"].default
_LIMITS.connect = _LIMITS.read = _LIMITS.write = _LIMITS.pool = PATIENCE

GREEDY = {"temperature": 0, "max_tokens": 12}
A_LETTER = {"67": 100}  # a bias by which every token is a letter, so that a stream begins with the first
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def new_model():
    return tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=1024, num_hidden_layers=1)


def new_engine(**options):
    return Engine(new_model(), byte_tokenizer(), budget=12, **options)


@contextmanager
def running(engine=None, waits=True, clock=None, **settings):
    """A server on a free port. waits: until it is ready. clock: what its event loop goes by."""
    settings = ServeSettings(**{"shutdown_timeout": 1.0, "port": 0, **settings})
    engine = engine or new_engine(isolated=settings.sharing != "shared")
    gateway = Gateway(settings, "tiny", lambda *shared: make_app(engine, settings, "tiny", *shared))
    server = make_server(gateway, settings, gateway.drain, log_level="warning", loop="asyncio")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    if clock is not None:
        clock.rule(server.servers[0].get_loop())
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"{'https' if settings.ssl_certfile else 'http'}://127.0.0.1:{port}"
    try:
        if waits:
            until(lambda: gateway.is_ready)
        yield url
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive()


def post(url, path="/v1/completions", **body):
    return httpx.post(url + path, json=body, timeout=PATIENCE)


def metric(url, name, **headers):
    lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"graft:{name}{{"))

"""The gateway listens while the model loads, and answers how far it is; then it passes requests to the app.

Nothing here imports torch, so that the first answer comes within a second.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from graft.rendering import render
from graft.server.guard import PAGE_HEADERS, Guard, record_refusal
from graft.server.metrics import Metrics
from graft.server.refusals import RefusedError
from graft.server.settings import ServeSettings
from graft.server.startup import Startup
from graft.version import __version__

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("graft.server")


class Gateway:
    """The ASGI app of the whole server. A thread loads the model and makes the app that answers requests."""

    def __init__(
        self, settings: ServeSettings, model_name: str, make_app: Callable[[Startup, Metrics], FastAPI]
    ) -> None:
        """make_app: loads the model; runs in a thread of its own."""
        self._model_name = settings.served_model_name or model_name
        self.metrics = Metrics(self._model_name)
        self.startup = Startup()
        self.failure: BaseException | None = None  # the error that ended the loading
        self.on_failure: Callable[[], None] = lambda: None
        self._make_app = make_app
        self._app: FastAPI | None = None
        self._lifespan: AbstractAsyncContextManager[Any] | None = None
        self._is_stopping = False
        self._has_page = settings.page
        self._guarded = Guard(self._answer, settings, self.metrics)
        self._thread = threading.Thread(target=self._load, name="graft-loading", daemon=True)

    @property
    def is_loading(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        return self._app is not None and bool(self._app.state.serving.is_warm)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            await self._guarded(scope, receive, send)

    def drain(self, seconds: float) -> None:
        """Give running requests so many seconds, then end them. New ones are refused from now on."""
        self._is_stopping = True
        if self._app is not None:
            self._app.state.serving.scheduler.close(seconds)

    async def _live(self, receive: Receive, send: Send) -> None:
        """The lifespan: begin to load, and end the app when the server has stopped."""
        await receive()
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._is_stopping = True
        if self._app is not None and self._lifespan is not None:
            await self._lifespan.__aexit__(None, None, None)
        await send({"type": "lifespan.shutdown.complete"})

    def _load(self) -> None:
        try:
            app = self._make_app(self.startup, self.metrics)
            asyncio.run_coroutine_threadsafe(self._enter(app), self._loop).result()
        except BaseException as error:
            if not self._is_stopping:
                self.failure = error
                self.on_failure()

    async def _enter(self, app: FastAPI) -> None:
        if self._is_stopping:
            return
        lifespan = app.router.lifespan_context(app)
        await lifespan.__aenter__()
        self._lifespan, self._app = lifespan, app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer while there is no app yet."""
        path, status = scope["path"], "stopping" if self._is_stopping else "loading"
        response: Response
        if path == "/live":
            response = JSONResponse({"status": status})
        elif path == "/version":
            response = JSONResponse({"version": __version__})
        elif path == "/metrics":
            response = self.metrics.response()
        elif path == "/" and self._has_page and not self._is_stopping:
            facts = self.startup.details(status) | {"model": self._model_name}
            response = HTMLResponse(render("loading.html", **facts), 503, PAGE_HEADERS | {"Retry-After": "1"})
        else:
            stopping = RefusedError(503, "the server is shutting down; try again later", Retry_After="1")
            refusal = stopping if self._is_stopping else self.startup.refusal(status)
            record_refusal(scope, refusal)
            response = refusal.response
        await response(scope, receive, send)

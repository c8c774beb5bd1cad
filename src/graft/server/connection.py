"""What uvicorn has no setting for: time limits on requests and on shutdown.

uvicorn waits for ever for the rest of a request. When its shutdown time is over, it cuts answers off without an error
that clients can read; here the scheduler ends them first, with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from socket import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from graft.server.logs import log_request
from graft.server.refusals import dump_json, error_body, new_request_id
from graft.server.settings import ServeSettings

# Seconds until an idle connection is closed. Clients and proxies close theirs earlier (usually after 5 or 60), so none
# sends a request on a connection that is just being closed.
_KEEP_ALIVE = 75
GRACE = 3.0  # seconds that clients have to read the last events when the server stops


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with a time limit from a request's first byte (or the connection's start) to its last byte."""

    read_timeout = 30.0  # see `make_protocol`
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # In these states a part of the head or body is still missing.
        self._watch(self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(False)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called when the server begins to stop. Refuse a request that is still incomplete."""
        if self._timer is not None:
            self._watch(False)
            self._refuse(503, "the server is shutting down")
        else:
            super().shutdown()

    def _watch(self, is_partial: bool) -> None:
        if is_partial and self._timer is None:
            self._timer = self.loop.call_later(self.read_timeout, self._give_up)
        elif not is_partial and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        self._refuse(408, f"the request was not complete within {self.read_timeout:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, with an error if a request has begun and its response has not."""
        if self.transport.is_closing():
            return
        is_asked = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if is_asked and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.conn.their_state is h11.SEND_BODY:  # end the handler, which waits for the rest
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body, request_id = dump_json(error_body(status, message)), new_request_id()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                "x-request-id": request_id,
            }
            log_request(request_id, None, status, message, reason=message)
            head = h11.Response(status_code=status, headers=list(headers.items()))
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def make_protocol(read_timeout: float) -> type[TimedProtocol]:
    return type("TimedProtocol", (TimedProtocol,), {"read_timeout": read_timeout})


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets the app itself end the answers that take too long at shutdown.

    Until they have ended it goes on listening, so that new requests are told to try again later.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[float], Any], seconds: float) -> None:
        """drain: gives running requests so many seconds, then ends them; may be called again with fewer."""
        super().__init__(config)
        self._drain, self._seconds = drain, seconds

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        draining = asyncio.create_task(asyncio.to_thread(self._drain, self._seconds))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=0.1)
        if self.force_exit:
            await asyncio.to_thread(self._drain, 0.0)
        await draining
        closing = asyncio.create_task(self._close())
        await super().shutdown(sockets)
        await closing

    async def _close(self) -> None:
        end = time.monotonic() + GRACE
        while self.server_state.tasks and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):  # the clients do not read
            if connection.transport is not None:
                connection.transport.abort()


def make_server(
    app: Any, settings: ServeSettings, drain: Callable[[float], Any], **logging_options: Any
) -> DrainingServer:
    """The server of an ASGI app. drain: see `DrainingServer`."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=make_protocol(settings.read_timeout),
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE,
        server_header=False,
        ws="none",
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        **logging_options,
    )
    return DrainingServer(config, drain, settings.shutdown_timeout)

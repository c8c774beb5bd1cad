"""Connections under uvicorn: requests that are never wholly sent are ended, and a server that stops ends its answers.

uvicorn itself waits for ever for the rest of a request, and when its patience with answers ends it breaks them off,
which clients see as plain text or as nothing. Here the scheduler ends them first, with an error they can read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from socket import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from graft.server.refusals import error_body, new_request_id

_GRACE = 3.0  # seconds that clients have to read the end of their answers when the server stops


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with a limit on the seconds from a request's first byte (or the connection's start) to its last."""

    read_timeout = 30.0  # see `make_protocol`
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Data, and still no whole request: a head or a body of which a part is missing.
        self._watch(self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(False)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called when the server begins to stop: a request of which a part is missing is no longer waited for."""
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
        self._refuse(408, f"the request was not wholly sent within {self.read_timeout:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answers, unless nothing has been asked or an answer has begun, and closes the connection."""
        if self.transport.is_closing():
            return
        is_asked = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if is_asked and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.conn.their_state is h11.SEND_BODY:  # its handler waits for the rest, and may end now
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body = json.dumps(error_body(status, message)).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                "x-request-id": new_request_id(),
            }
            head = h11.Response(status_code=status, headers=list(headers.items()))
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def make_protocol(read_timeout: float) -> type[TimedProtocol]:
    return type("TimedProtocol", (TimedProtocol,), {"read_timeout": read_timeout})


class DrainingServer(uvicorn.Server):
    """A uvicorn server whose answers are ended by the app itself when it stops and they take too long."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[float], Any], seconds: float) -> None:
        """drain: lets what is under way go on for so many seconds, then ends it; may be called again to hurry."""
        super().__init__(config)
        self._drain, self._seconds = drain, seconds

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        closing = asyncio.create_task(self._close())
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.to_thread(self._drain, 0.0)
        await closing

    async def _close(self) -> None:
        await asyncio.to_thread(self._drain, self._seconds)
        end = time.monotonic() + _GRACE
        while self.server_state.tasks and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):  # of clients that do not read
            if connection.transport is not None:
                connection.transport.abort()

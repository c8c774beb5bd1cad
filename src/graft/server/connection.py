"""What uvicorn has no setting for: time limits on requests and on shutdown, and clients that stop sending early.

uvicorn waits for ever for the rest of a request. It treats a client that has finished sending as disconnected. When its
shutdown time is over, it cuts answers off without an error that clients can read; here the scheduler ends them first,
with an error.
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
EVENT_STREAM = "graft.event_stream"  # key of a request's scope: whether its answer is a stream of events
_FIRST_PROBE, _LAST_PROBE = 0.05, 5.0  # seconds between probes of a client that has stopped sending


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with a time limit from a request's first byte (or the connection's start) to its last byte."""

    read_timeout = 30.0  # see `make_protocol`
    _timer: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None
    _is_half_closed = False  # the client sends nothing more, but may still read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # In these states a part of the head or body is still missing.
        self._watch(self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. Returns whether to keep the connection open, to answer what it has asked.

        A client that is gone looks the same until something is sent to it, so it is probed while it waits.
        HTTP/1.0 has no response that could be a probe, and asyncio cannot keep a TLS connection half open: these are
        closed.
        """
        is_asking = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if not is_asking or self.scheme == "https" or self.conn.their_http_version == b"1.0":
            return False
        self._is_half_closed = True
        self._probe_client(_FIRST_PROBE)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next request, if one has been sent already
        if self._is_half_closed and self.conn.their_state is h11.DONE:
            self._probe_client(_FIRST_PROBE)
        elif self._is_half_closed:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(False)
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)

    def _probe_client(self, seconds: float) -> None:
        """Send something that clients skip. If the client is gone, one of the next probes fails."""
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        probe: h11.Event | None = None
        if self.conn.our_state is h11.SEND_RESPONSE:
            probe = h11.InformationalResponse(status_code=100, headers=[])
        elif self.conn.our_state is h11.SEND_BODY and self.scope.get(EVENT_STREAM):
            probe = h11.Data(data=b":\n\n")  # a comment between two events
        if probe is not None and not self.transport.is_closing():
            self.transport.write(self.conn.send(probe) or b"")
            self._probe = self.loop.call_later(seconds, self._probe_client, min(2 * seconds, _LAST_PROBE))

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

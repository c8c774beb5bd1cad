"""The start of the server: listening sockets, and the progress that /health reports."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from graft.errors import GraftError
from graft.progress import Report
from graft.server.refusals import Json, RefusedError
from graft.server.settings import ServeSettings

_BACKLOG = 2048


@dataclass
class Startup:
    """Progress of the start. done and total count the steps of a stage; total is 0 if they are not known."""

    stage: str = "importing libraries"
    done: int = 0
    total: int = 0
    began: float = field(default_factory=time.monotonic)

    def enter(self, stage: str) -> None:
        self.stage, self.done, self.total = stage, 0, 0

    def show(self, report: Report) -> None:
        self.stage, self.done, self.total = report.stage, report.done, report.total

    def details(self, status: str) -> Json:
        """How far the start is, for machines and for the page."""
        seconds = round(time.monotonic() - self.began, 1)
        return {"status": status, "stage": self.stage, "done": self.done, "total": self.total, "seconds": seconds}

    def refusal(self, status: str) -> RefusedError:
        """The answer to requests until the start is done. status: loading or starting."""
        details = self.details(status)
        steps = f", {self.done} of {self.total}" if self.total else ""
        message = f"the server is {status} ({self.stage}{steps}, {details['seconds']:.0f} s so far); try again later"
        error = RefusedError(503, message, Retry_After="1")
        error.details = details
        return error


def listen(settings: ServeSettings) -> list[socket.socket]:
    """Sockets that listen on every address of the host. Connections wait until they are accepted."""
    host, port, sockets = settings.host, settings.port, list[socket.socket]()
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise GraftError(f"cannot listen on {host}: {error.strerror}") from error
    try:
        for family, *_, address in dict.fromkeys(found):
            # Port 0 is a free one: all addresses get the same.
            chosen = port or (sockets[0].getsockname()[1] if sockets else 0)
            place: Any = (address[0], chosen, *address[2:])
            sockets.append(socket.create_server(place, family=family, backlog=_BACKLOG))
    except OSError as error:
        for made in sockets:
            made.close()
        if error.errno == errno.EADDRINUSE:
            words = f"port {port} of {host} is in use: stop the other server, or choose another --port"
            raise GraftError(words) from error
        raise GraftError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return sockets


def address_of(settings: ServeSettings, sockets: list[socket.socket]) -> str:
    """The server's address as a URL."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.ssl_certfile else 'http'}://{host}:{sockets[0].getsockname()[1]}"

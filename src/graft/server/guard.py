"""Middleware for every request: allowed hosts, API keys, the limit on body size, and request ids."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graft.server.refusals import error_body, new_request_id, reason_for

_STATIC = Path(__file__).parent / "static"
PAGE_FILES = {f"/{file.relative_to(_STATIC).as_posix()}": file for file in _STATIC.rglob("*") if file.is_file()}
PAGE_FILES["/"] = PAGE_FILES.pop("/index.html")
OPEN = {*PAGE_FILES, "/health", "/live", "/version"}  # paths that need no API key
_COUNTED = ("/v1/", "/tokenize", "/detokenize")  # their refusals are counted in the metrics
_ID = re.compile(r"[\x21-\x7e]{1,128}")  # a request id that a client may choose


class _TooLargeError(Exception):
    pass


class Guard:
    """ASGI middleware that refuses wrong hosts, unknown API keys and large bodies before anything reads them."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_body_bytes: int, hosts: Sequence[str]) -> None:
        """hosts: allowed Host headers, `*.example.com` for all subdomains; empty: any."""
        self._app = app
        self._keys = [sha256(key.encode()).digest() for key in keys]  # equal lengths, whatever the keys' are
        self._max_body_bytes = max_body_bytes
        self._hosts = [host.lower() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        scope["graft.id"] = given if _ID.fullmatch(given) else new_request_id()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = scope["graft.id"]
            await send(message)

        async def refuse(status: int, message: str, headers: dict[str, str] | None = None) -> None:
            count_refusal(scope, status)
            await JSONResponse(error_body(status, message), status, headers)(scope, receive, named)

        if self._hosts and not self._is_known_host(headers.get("host", "")):
            await refuse(400, "this Host is not allowed here: see --allowed-hosts")
            return
        if self._keys and scope["path"] not in OPEN:
            key = self._known_key(headers.get("authorization", ""))
            if key is None:
                message = "give a valid API key: Authorization: Bearer KEY"
                await refuse(401, message, {"www-authenticate": "Bearer"})
                return
            scope["graft.key"] = key
        too_large = f"the body is larger than the {self._max_body_bytes} bytes allowed here"
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            await refuse(413, too_large)
            return
        num_received = 0

        async def counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                scope["graft.too_large"] = True
                raise _TooLargeError
            return message

        async def unless_too_large(message: Message) -> None:
            # The app may have made a response of the error.
            if num_received <= self._max_body_bytes:
                await named(message)
            elif message["type"] == "http.response.start":
                await JSONResponse(error_body(413, too_large), 413)(scope, receive, named)

        await self._app(scope, counted, unless_too_large)

    def _is_known_host(self, given: str) -> bool:
        host = re.sub(r":\d*$", "", given).lower()
        return any(
            known in ("*", host) or (known.startswith("*.") and host.endswith(known[1:])) for known in self._hosts
        )

    def _known_key(self, authorization: str) -> str | None:
        """The digest of a valid key, else None. Compares with all keys, each in constant time."""
        scheme, _, given = authorization.partition(" ")
        digest = sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return digest.hex() if scheme.lower() == "bearer" and any(matches) else None


def count_refusal(scope: Scope, status: int) -> None:
    """Count a request that was refused before decoding."""
    if scope.get("graft.too_large"):
        status = 413  # whatever the app made of the incomplete body
    if scope["path"].startswith(_COUNTED):
        scope["app"].state.serving.metrics.failed(reason_for(status))

"""Middleware before every request: API keys and the limit on body size."""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PAGE = {"/", "/page.css", "/page.js", "/api.js", "/parts.js", "/tree.js", "/markdown.js"}
_OPEN = _PAGE | {"/health", "/version"}  # to anybody


class _TooLargeError(Exception):
    pass


class Guard:
    """ASGI middleware that refuses unknown API keys and too large bodies before anything reads them."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [sha256(key.encode()).digest() for key in keys]  # of one length, whatever the keys' is
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._keys and scope["path"] not in _OPEN:
            key = self._known_key(headers.get("authorization", ""))
            if key is None:
                await _refuse(send, 401, "give a valid API key: Authorization: Bearer KEY", "www-authenticate: Bearer")
                return
            scope["graft.key"] = key
        too_large = f"the body is larger than the {self._max_body_bytes} bytes allowed here"
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            await _refuse(send, 413, too_large)
            return
        num_received = 0

        async def counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                raise _TooLargeError
            return message

        async def unless_too_large(message: Message) -> None:
            # The app may have turned the error into a response of its own.
            if num_received <= self._max_body_bytes:
                await send(message)
            elif message["type"] == "http.response.start":
                await _refuse(send, 413, too_large)

        await self._app(scope, counted, unless_too_large)

    def _known_key(self, authorization: str) -> str | None:
        """A digest of the given key if it is valid, else None. All keys are compared, each in constant time."""
        scheme, _, given = authorization.partition(" ")
        digest = sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return digest.hex() if scheme.lower() == "bearer" and any(matches) else None


async def _refuse(send: Send, status: int, message: str, *headers: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    lines = ["content-type: application/json", *headers]
    pairs = [tuple(part.strip().encode() for part in line.split(":", 1)) for line in lines]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})

"""Middleware for every request: allowed hosts, API keys, the limit on body size, request ids, and its log line."""

from __future__ import annotations

import hmac
import re
import time
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graft.server.logs import log_request
from graft.server.metrics import Metrics
from graft.server.refusals import RefusedError, new_request_id, reason_for
from graft.server.settings import ServeSettings

_STATIC = Path(__file__).parent / "static"
PAGE_FILES = {f"/{file.relative_to(_STATIC).as_posix()}": file for file in _STATIC.rglob("*") if file.is_file()}
PAGE_FILES["/"] = PAGE_FILES.pop("/index.html")
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
OPEN = {*PAGE_FILES, "/health", "/live", "/version"}  # paths that need no API key
_API = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"}
_KNOWN = OPEN | _API | {"/metrics", "/openapi.json"}  # paths that appear as they are in the log and in metrics
_COUNTED = ("/v1/", "/tokenize", "/detokenize")  # their refusals are counted in the metrics
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
_ID = re.compile(r"[\x21-\x7e]{1,128}")  # a request id that a client may choose


class _TooLargeError(Exception):
    pass


class Guard:
    """ASGI middleware that refuses wrong hosts, unknown API keys and large bodies before anything reads them.

    It also counts every response in the metrics, and logs those that are refused or fail, or all of them.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        digests = [sha256(key.encode()).digest() for key in settings.api_keys]  # of equal length, unlike the keys
        self._key_names = dict(zip(digests, settings.key_names, strict=True))
        self._max_body_bytes = settings.max_body_bytes
        self._hosts = [host.lower() for host in settings.hosts]
        self._logs_all, self._logs_messages = settings.access_log, settings.log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 500
        given = Headers(scope=scope).get("x-request-id", "")
        scope["graft.id"] = given if _ID.fullmatch(given) else new_request_id()
        scope["graft.metrics"] = self._metrics

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = scope["graft.id"]
            await send(message)

        try:
            await self._handle(scope, receive, named)
        except BaseException:
            status = 500
            raise
        finally:
            self._record(scope, status, time.monotonic() - began)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        path = scope["path"] if scope["path"] in _KNOWN else getattr(scope.get("route"), "path", "other")
        self._metrics.responded(method, path, status, seconds)
        # A probe that finds the server not ready yet is no refused request, nor is the page that says so.
        is_expected = path == "/health" or (path, status) == ("/", 503)
        is_told = status >= 400 and not is_expected and not scope.get("graft.is_logged")
        if self._logs_all or is_told:
            reason = scope.get("graft.message" if self._logs_messages else "graft.reason", "")
            words = f"{method} {path} {seconds:.3f} s" + (f": {reason}" if reason else "")
            log_request(
                scope["graft.id"], scope.get("graft.key_name"), status, words, method=method, path=path,
                seconds=round(seconds, 3), reason=reason,
            )  # fmt: skip

    async def _handle(self, scope: Scope, receive: Receive, named: Send) -> None:
        headers = Headers(scope=scope)

        async def refuse(refusal: RefusedError) -> None:
            record_refusal(scope, refusal)
            await refusal.response(scope, receive, named)

        if self._hosts and not self._is_known_host(headers.get("host", "")):
            await refuse(RefusedError(400, "this Host is not allowed here: see --allowed-hosts", reason="host"))
            return
        if self._key_names and scope["path"] not in OPEN:
            key = self._known_key(headers.get("authorization", ""))
            if key is None:
                message = "give a valid API key: Authorization: Bearer KEY"
                await refuse(RefusedError(401, message, reason="key", www_authenticate="Bearer"))
                return
            scope["graft.key"], scope["graft.key_name"] = key.hex(), self._key_names[key]
        too_large = RefusedError(413, f"the body is larger than the {self._max_body_bytes} bytes allowed here")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            await refuse(too_large)
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
                note_refusal(scope, too_large)
                await too_large.response(scope, receive, named)

        await self._app(scope, counted, unless_too_large)

    def _is_known_host(self, given: str) -> bool:
        host = re.sub(r":\d*$", "", given).lower()
        return any(
            known in ("*", host) or (known.startswith("*.") and host.endswith(known[1:])) for known in self._hosts
        )

    def _known_key(self, authorization: str) -> bytes | None:
        """The digest of a valid key, else None. Compares with all keys, each in constant time."""
        scheme, _, given = authorization.partition(" ")
        digest = sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._key_names]
        return digest if scheme.lower() == "bearer" and any(matches) else None


def record_refusal(scope: Scope, refusal: RefusedError) -> None:
    """Store the reason for the log line, and count the request unless it was counted when it was decoded."""
    note_refusal(scope, refusal)
    if scope["path"].startswith(_COUNTED) and not refusal.is_counted:
        # The app sees only a part of a body that is too large, so it may give any other reason.
        scope["graft.metrics"].failed(reason_for(413 if scope.get("graft.too_large") else refusal.status))


def note_refusal(scope: Scope, refusal: RefusedError) -> None:
    """Store the reason for the log line of this request."""
    scope["graft.reason"], scope["graft.message"] = refusal.reason, refusal.message

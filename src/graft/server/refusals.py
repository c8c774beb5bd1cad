"""Errors of the HTTP API in OpenAI's format: a status, a type, a code and a message."""

from __future__ import annotations

import secrets
from typing import Any

Json = dict[str, Any]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "unavailable",
    504: "timeout",
}
# Labels of failed requests in the metrics
_REASONS = {401: "key", 404: "model", 408: "timeout", 413: "size", 429: "busy", 503: "busy", 504: "timeout"}


def error_body(status: int, message: str, param: str | None = None) -> Json:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": _CODES.get(status)}}


def reason_for(status: int) -> str:
    """The metrics' label of a refusal with this status."""
    return _REASONS.get(status, "request" if status < 500 else "server")


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class RefusedError(Exception):
    """An HTTP error in OpenAI's format."""

    is_counted = False  # in the metrics already

    def __init__(self, status: int, message: str, param: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> Json:
        return error_body(self.status, self.message, self.param)


class FailedError(RefusedError):
    """A failure after the request was accepted."""

    is_counted = True

"""Errors of the HTTP API in OpenAI's format: a status, a type, a code and a message."""

from __future__ import annotations

import json
import secrets
from typing import Any

from starlette.responses import JSONResponse

Json = dict[str, Any]

# By status: the error's type and code, and the label of failed requests in the metrics
_STATUSES: dict[int, tuple[str, str | None, str]] = {
    401: ("authentication_error", "invalid_api_key", "key"),
    403: ("permission_error", None, "request"),
    404: ("not_found_error", "not_found", "model"),
    408: ("timeout_error", "request_timeout", "timeout"),
    413: ("invalid_request_error", "request_too_large", "size"),
    429: ("rate_limit_error", "rate_limit_exceeded", "busy"),
    503: ("server_error", "unavailable", "busy"),
    504: ("timeout_error", "timeout", "timeout"),
}


def _described(status: int) -> tuple[str, str | None, str]:
    usual = ("invalid_request_error", None, "request") if status < 500 else ("server_error", None, "server")
    return _STATUSES.get(status, usual)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> Json:
    """code: instead of the usual one of the status."""
    kind, usual_code, _ = _described(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code or usual_code}}


def reason_for(status: int) -> str:
    """The metrics' label of a refusal with this status."""
    return _described(status)[2]


def _log_reason(status: int, message: str, param: str | None) -> str:
    """The reason for the log. Messages about a request's content can repeat its text, so they are left out."""
    if status in (400, 404):
        return f"{reason_for(status)}, field {param}" if param else reason_for(status)
    return message


def dump_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


class AsciiJson(JSONResponse):
    """A JSON response in ASCII, which can repeat even lone surrogates of a request."""

    def render(self, content: Any) -> bytes:
        return dump_json(content)


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class RefusedError(Exception):
    """An HTTP error in OpenAI's format."""

    is_counted = False  # whether the metrics and the log have it already

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        reason: str | None = None,
        **headers: str,
    ) -> None:
        """param: the field that is wrong. code: replaces the usual one of the status.

        reason: for the log, without anything that the client wrote; by default made of status and param.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.details: Json = {}  # further fields of the body
        self.reason = reason or _log_reason(status, message, param)

    @property
    def body(self) -> Json:
        return self.details | error_body(self.status, self.message, self.param, self.code)

    @property
    def response(self) -> AsciiJson:
        return AsciiJson(self.body, self.status, self.headers)


class FailedError(RefusedError):
    """A failure after the request was accepted."""

    is_counted = True

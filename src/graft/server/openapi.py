"""The OpenAPI document: the routes, what they take (`schema`), their errors and API keys. Answers are JSON objects.

OpenAI documents the fields of its formats, and docs/server.md what Graft adds to them.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from graft.server.refusals import Json

_REFUSALS = {
    400: "The request is not understood or not supported; the message says what.",
    401: "No API key, or a wrong one.",
    404: "No such model.",
    408: "The request was not complete in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting.",
    500: "The request failed; the server's log says why.",
    503: "The server is loading, starting, shutting down, or busy compiling slow JSON schemas.",
    504: "The request took longer than allowed.",
}
_EVENT: Json = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_DETAILS: Json = {
    "type": "object",
    "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
}
_ERROR: Json = {"type": "object", "properties": {"error": _DETAILS}, "required": ["error"]}


def errors(*statuses: int) -> dict[int | str, Json]:
    """Error responses of a route, for FastAPI; without statuses, those of routes that tokenize or decode."""
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _REFUSALS[status], "content": content} for status in statuses or _REFUSALS}


def streamable(events: str) -> dict[int | str, Json]:
    """The responses of a route that can stream, for FastAPI. events: what the data of the events is."""
    words = f"Server-sent events, if `stream` is true. Their data is JSON: {events}."
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    content["text/event-stream"] = {"itemSchema": {**_EVENT, "description": words}}
    return {**errors(), 200: {"description": "The answer.", "content": content}}


def document(app: FastAPI, has_keys: bool, open_paths: set[str]) -> Json:
    """The OpenAPI document, without statuses that never occur, and with the API key if one is needed."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, methods in made["paths"].items():
        for route in methods.values():
            route["responses"].pop("422", None)  # FastAPI's default; here it is 400
            if has_keys and path not in open_paths:
                route["security"] = [{"key": []}]
            else:
                route["responses"].pop("401", None)
    parts = made["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts["schemas"].pop(name, None)
    if has_keys:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return made

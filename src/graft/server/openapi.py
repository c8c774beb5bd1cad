"""The API's answers as pydantic models, and the OpenAPI document. Models of requests are in `schema`.

OpenAI's formats are described in outline: OpenAI documents their fields. What Graft adds is described whole.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, create_model

from graft.server.refusals import Json


class Output(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AsOpenAI(BaseModel):
    """In OpenAI's format, with more fields than are named here."""

    model_config = ConfigDict(extra="allow")


def _model(name: str, base: type[BaseModel] = Output, /, **fields: Any) -> Any:
    """A model of these fields, beside those of its base: a type, or a type and a default."""
    return create_model(name, __base__=base, **fields)


def _list_of(model: Any) -> Any:
    return GenericAlias(list, (model,))


_Details = _model("ErrorDetails", message=str, type=str, param=str | None, code=str | None)
Error = _model("Error", error=_Details)

_Speculation = _model(
    "Speculation",
    num_rounds=int,
    num_draft_tokens=int,
    num_accepted_tokens=int,
    mean_acceptance_length=float,
    draft_acceptance_rate=float,
    accepted_per_position=list[int],
    accepted_by_source=dict[str, int],
    decode_seconds=float,
    prefill_seconds=float,
)
_RoundToken = _model("RoundToken", id=int, text=str, origin=str)
_Round = _model(
    "Round",
    tokens=list[str],
    parents=list[int],
    probabilities=list[float],
    sources=list[str],
    accepted=list[int],
    num_pruned=int,
    num_hidden=int,
    new=_list_of(_RoundToken),
)
_PromptLogprob = _model("PromptLogprob", logprob=float, decoded_token=str)
_PromptLogprobs = _list_of(GenericAlias(dict, (str, _PromptLogprob)) | None)


def _completion(name: str, kind: str, **content: Any) -> Any:
    """A chat or text completion. content: what a choice holds, by the name of its field."""
    choice = _model(
        f"{name}Choice",
        AsOpenAI,
        index=int,
        finish_reason=Literal["stop", "length", "tool_calls"],
        **content,
        speculation=_Speculation,
        rounds=(_list_of(_Round), []),
        prompt_logprobs=(_PromptLogprobs, []),
    )
    fields = {"created": int, "model": str, "choices": _list_of(choice), "usage": Json}
    return _model(name, AsOpenAI, id=str, object=Literal[kind], **fields)


ChatCompletion = _completion("ChatCompletion", "chat.completion", message=Json)
Completion = _completion("Completion", "text_completion", text=str)
ModelResponse = _model(
    "ModelResponse",
    AsOpenAI,
    id=str,
    object=Literal["response"],
    created_at=int,
    status=Literal["completed", "incomplete"],
    model=str,
    output=list[Json],
    usage=Json,
    speculation=_Speculation,
)

ModelCard = _model("ModelCard", id=str, object=Literal["model"], created=int, owned_by=str, max_model_len=int | None)
ModelList = _model("ModelList", object=Literal["list"], data=_list_of(ModelCard))
Tokens = _model("Tokens", tokens=list[int], count=int, max_model_len=int | None)
Detokenized = _model("Detokenized", prompt=str)
Health = _model("Health", status=Literal["ok"], weights=str, steps=str, not_fused=str | None)
NotReady = _model(
    "NotReady", Error, status=(str, ""), stage=(str, ""), done=(int, 0), total=(int, 0), seconds=(float, 0.0)
)
Live = _model("Live", status=Literal["loading", "starting", "ok", "stopping"])
Version = _model("Version", version=str)

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


def errors(*statuses: int) -> dict[int | str, Json]:
    """Error responses of a route, for FastAPI; without statuses, those of routes that tokenize or decode."""
    return {status: {"description": _REFUSALS[status], "model": Error} for status in statuses or _REFUSALS}


not_ready: dict[int | str, Json] = {503: {"description": _REFUSALS[503], "model": NotReady}}


def streamable(model: type[BaseModel], events: str) -> dict[int | str, Json]:
    """The responses of a route that can stream, for FastAPI. events: what the data of the events is."""
    words = f"Server-sent events, if `stream` is true. Their data is JSON: {events}."
    content = {"text/event-stream": {"itemSchema": {**_EVENT, "description": words}}}
    return {**errors(), 200: {"description": "The answer.", "model": model, "content": content}}


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

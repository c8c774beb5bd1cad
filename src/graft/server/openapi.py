"""The API's answers as pydantic models, and the OpenAPI document. Models of requests are in `schema`."""

from __future__ import annotations

from types import GenericAlias
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, create_model

from graft.server.refusals import Json


class Output(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _model(name: str, base: type[BaseModel] = Output, /, **fields: Any) -> Any:
    """A model of these fields, beside those of its base: a type, or a type and a default."""
    return create_model(name, __base__=base, **fields)


def _list_of(model: Any) -> Any:
    return GenericAlias(list, (model,))


_Details = _model("ErrorDetails", message=str, type=str, param=str | None, code=str | None)
Error = _model("Error", error=_Details)

_Cached = _model("PromptTokensDetails", cached_tokens=int)
_Usage = _model("Usage", prompt_tokens=int, completion_tokens=int, total_tokens=int, prompt_tokens_details=_Cached)
_Reasoning = _model("ReasoningTokens", reasoning_tokens=int)
_ChatUsage = _model("ChatUsage", _Usage, completion_tokens_details=_Reasoning)
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
_Choice = _model(
    "Choice",
    index=int,
    finish_reason=Literal["stop", "length", "tool_calls"],
    speculation=_Speculation,
    rounds=(_list_of(_Round), []),
    prompt_logprobs=(_list_of(GenericAlias(dict, (str, _PromptLogprob)) | None), []),
)
_Completion = _model("AnyCompletion", id=str, created=int, model=str)

_Function = _model("AnsweredFunction", name=str, arguments=str)
_Call = _model("AnsweredCall", id=str, type=Literal["function"], function=_Function)
_Message = _model(
    "AnsweredMessage",
    role=Literal["assistant"],
    content=str | None,
    reasoning_content=(str, ""),
    tool_calls=(_list_of(_Call), []),
)
_TopLogprob = _model("TopLogprob", token=str, logprob=float, bytes=list[int])
_ChatLogprob = _model("ChatLogprob", _TopLogprob, top_logprobs=_list_of(_TopLogprob))
_ChatLogprobs = _model("ChatLogprobs", content=_list_of(_ChatLogprob))
_ChatChoice = _model("ChatChoice", _Choice, message=_Message, logprobs=_ChatLogprobs | None)
ChatCompletion = _model(
    "ChatCompletion", _Completion, object=Literal["chat.completion"], choices=_list_of(_ChatChoice), usage=_ChatUsage
)

_TextLogprobs = _model(
    "TextLogprobs",
    tokens=list[str],
    token_logprobs=list[float | None],
    top_logprobs=list[dict[str, float] | None],
    text_offset=list[int],
)
_TextChoice = _model("TextChoice", _Choice, text=str, logprobs=_TextLogprobs | None)
Completion = _model(
    "Completion", _Completion, object=Literal["text_completion"], choices=_list_of(_TextChoice), usage=_Usage
)


class ResponseItem(BaseModel):
    """A message, a function call or reasoning."""

    model_config = ConfigDict(extra="allow")
    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["completed", "incomplete"]


_ResponseUsage = _model(
    "ResponseUsage",
    input_tokens=int,
    input_tokens_details=_Cached,
    output_tokens=int,
    output_tokens_details=_Reasoning,
    total_tokens=int,
)
_IncompleteDetails = _model("IncompleteDetails", reason=Literal["max_output_tokens"])
ModelResponse = _model(
    "ModelResponse",
    id=str,
    object=Literal["response"],
    created_at=int,
    status=Literal["completed", "incomplete"],
    error=None,
    incomplete_details=_IncompleteDetails | None,
    instructions=str | None,
    max_output_tokens=int | None,
    model=str,
    output=list[ResponseItem],
    parallel_tool_calls=bool,
    previous_response_id=None,
    store=Literal[False],
    temperature=float | None,
    text=dict[str, Any],
    tool_choice=str | dict[str, Any],
    tools=list[dict[str, Any]],
    top_p=float | None,
    truncation=Literal["disabled"],
    metadata=dict[str, str],
    usage=_ResponseUsage,
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

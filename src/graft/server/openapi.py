"""The API's answers as pydantic models, and the OpenAPI document. Models of requests are in `schema`."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict

from graft.server.refusals import Json


class Output(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Output):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Output):
    error: ErrorDetails


class PromptTokensDetails(Output):
    cached_tokens: int


class Usage(Output):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ReasoningTokens(Output):
    reasoning_tokens: int


class ChatUsage(Usage):
    completion_tokens_details: ReasoningTokens


class Speculation(Output):
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    accepted_per_position: list[int]
    accepted_by_source: dict[str, int]
    decode_seconds: float
    prefill_seconds: float


class RoundToken(Output):
    id: int
    text: str
    origin: str


class Round(Output):
    tokens: list[str]
    parents: list[int]
    probabilities: list[float]
    sources: list[str]
    accepted: list[int]
    num_pruned: int
    num_hidden: int
    new: list[RoundToken]


class AnsweredFunction(Output):
    name: str
    arguments: str


class AnsweredCall(Output):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(Output):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[AnsweredCall] = []


class PromptLogprob(Output):
    logprob: float
    decoded_token: str


class _Choice(Output):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    speculation: Speculation
    rounds: list[Round] = []
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []


class TopLogprob(Output):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Output):
    content: list[ChatLogprob]


class ChatChoice(_Choice):
    message: AnsweredMessage
    logprobs: ChatLogprobs | None


class TextLogprobs(Output):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Choice):
    text: str
    logprobs: TextLogprobs | None


class ChatCompletion(Output):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class Completion(Output):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ResponseItem(BaseModel):
    """A message, a function call or reasoning."""

    model_config = ConfigDict(extra="allow")
    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["completed", "incomplete"]


class ResponseUsage(Output):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(Output):
    reason: Literal["max_output_tokens"]


class ModelResponse(Output):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    usage: ResponseUsage
    speculation: Speculation


class ModelCard(Output):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Output):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Output):
    tokens: list[int]
    count: int
    max_model_len: int | None


class Detokenized(Output):
    prompt: str


class Health(Output):
    status: Literal["ok"]
    steps: str


class Live(Output):
    status: Literal["starting", "ok", "stopping"]


class Version(Output):
    version: str


_REFUSALS = {
    400: "The request is not understood or not supported; the message says what.",
    401: "No API key, or a wrong one.",
    404: "No such model.",
    408: "The request was not complete in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting.",
    500: "The request failed; the server's log says why.",
    503: "The server is starting, shutting down, or busy compiling slow JSON schemas.",
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

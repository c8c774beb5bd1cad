"""OpenAI's Responses API. A request becomes a chat; its answer becomes items and events. Nothing is stored."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from graft.engine.jobs import Update
from graft.server.answers import ChatAnswers, event_data, speculation
from graft.server.inert_fields import Effort, InertFields, InertResponses
from graft.server.refusals import Json, RefusedError
from graft.server.schema import (
    ChatRequest,
    FunctionChoice,
    FunctionTool,
    JsonSchema,
    Length,
    RequestBody,
    StreamOptions,
)
from graft.server.strict import Bool, Strict, Text, only
from graft.server.tool_parsers import Arguments, CallStart, Content, Piece


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


TextParts = Annotated[list[InputText], Field(min_length=1, fail_fast=True)]


class InputItem(Strict):
    id: Text | None = None
    status: Text | None = None


class InputMessage(InputItem):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | TextParts
    phase: Text | None = None


class FunctionCall(InputItem):
    """An earlier call, with the name and arguments as the model wrote them."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionCallOutput(InputItem):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | TextParts


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None


class ResponseTool(FunctionTool):
    type: Literal["function"]


class ResponseToolChoice(FunctionChoice):
    type: Literal["function"]


class ResponseAllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolChoice], Field(min_length=1, max_length=128)]


class ResponseReasoning(Strict):
    effort: Effort | None = None
    summary: Text | None = None  # there is none: reasoning comes whole
    generate_summary: Text | None = None
    context: Text | None = None
    mode: Annotated[Any, only("standard")] = None


# What the response could include, if it had any of it. Log-probabilities are not among them.
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema and type json_schema require each other")
        return self


class ResponseText(Strict):
    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Bool | None = False


class ResponseChat(ChatRequest):
    """A request for a response as a chat. Its errors name the fields of the response."""

    prompt_field: ClassVar[str] = "input"
    format_field: ClassVar[str] = "text.format"

    @property
    def length_field(self) -> str:
        return "max_output_tokens"


class ResponsesRequest(RequestBody, InertResponses):
    """A request for a response.

    What would need stored state is refused: previous_response_id, conversation, background.
    """

    input: (
        Text
        | Annotated[
            list[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem],
            Field(min_length=1, fail_fast=True),
        ]
    )
    instructions: Text | None = None
    max_output_tokens: Length | None = None
    stream_options: ResponseStreamOptions | None = None
    text: ResponseText | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | ResponseAllowedTools | None = None
    parallel_tool_calls: Bool | None = None
    reasoning: ResponseReasoning | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None

    def as_chat(self) -> ResponseChat:
        """This request as a chat completion."""
        given: Json = {name: getattr(self, name) for name in _SAME if name in self.model_fields_set}
        given |= {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            given["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools
            ]
        given["tool_choice"] = _chat_choice(self.tool_choice)
        given["reasoning_effort"] = self.reasoning.effort if self.reasoning is not None else None
        if self.stream_options is not None:
            given["stream_options"] = {"include_obfuscation": self.stream_options.include_obfuscation}
        form = self.text.format if self.text is not None else None
        if form is not None:
            given["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                schema = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
                given["response_format"]["json_schema"] = schema
        try:
            return ResponseChat.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise RefusedError(400, str(first["msg"]).removeprefix("Value error, ")) from error

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thought: str | None = None
        for item in self.input:
            is_answer = isinstance(item, FunctionCall) or (isinstance(item, InputMessage) and item.role == "assistant")
            if thought is not None and not is_answer:
                messages.append(_reasoning_message(thought))
                thought = None
            if isinstance(item, ReasoningItem):
                thought = "".join(part.text for part in item.content or ()) or None
            elif isinstance(item, FunctionCallOutput):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
            elif isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": _joined(item.content)})
                if item.role == "assistant":
                    messages[-1]["reasoning_content"], thought = thought, None
            else:
                if thought is not None or not messages or messages[-1]["role"] != "assistant":
                    messages.append(_reasoning_message(thought))
                    thought = None
                function = {"name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        return messages if thought is None else [*messages, _reasoning_message(thought)]


_SAME = {"parallel_tool_calls", *RequestBody.model_fields.keys() - InertFields.model_fields.keys()}


def _chat_choice(choice: str | ResponseToolChoice | ResponseAllowedTools | None) -> str | Json | None:
    """A tool choice as a chat completion has it."""
    if isinstance(choice, ResponseToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, ResponseAllowedTools):
        allowed = {"mode": choice.mode, "tools": [_chat_choice(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _reasoning_message(thought: str | None) -> Json:
    """An answer without text, for instance one that was cut during its reasoning."""
    return {"role": "assistant", "content": None, "reasoning_content": thought}


def _joined(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponseAnswers(ChatAnswers):
    """The one answer to a request as a response: a list of output items, which a stream sends as events."""

    ending = b""

    def __init__(self, request: ResponsesRequest, *args: Any, **options: Any) -> None:
        """args, options: for `Answers`."""
        super().__init__(*args, **options)
        self.id, self._request = f"resp_{secrets.token_hex(16)}", request
        self._items: list[Json] = []
        self._num_events = 0

    # Events of a stream

    def opening(self) -> list[Json]:
        begun = self._response("in_progress", [])
        # The events of the first token are made earlier and sent later: they leave the numbers 0 and 1 to these.
        return [
            {"type": "response.created", "sequence_number": 0, "response": begun},
            {"type": "response.in_progress", "sequence_number": 1, "response": begun},
        ]

    def chunks_for(self, job: int, update: Update) -> list[Json]:
        answer = self.answers[0]
        pieces, _ = answer.add(update)
        events = [event for piece in pieces for event in self._events_for(piece)]
        if answer.reason is not None:
            if not self._items:
                events += self._begin(_message())
            events += self._end(is_cut=answer.reason == "length")
        return [self._numbered(event) for event in events]

    def closing(self, with_usage: bool) -> list[Json]:
        whole = self.whole()
        return [self._numbered({"type": f"response.{whole['status']}", "response": whole})]

    def failure(self, error: RefusedError) -> list[Json]:
        body = error.body["error"]
        failed = self._response("failed", self._items)
        failed["error"] = {"code": body["code"] or body["type"], "message": body["message"]}
        return [self._numbered({"type": "response.failed", "response": failed})]

    def event(self, chunk: Json, options: StreamOptions) -> bytes:
        padded = bool(options.include_obfuscation) and str(chunk["type"]).endswith(".delta")
        return f"event: {chunk['type']}\n".encode() + b"data: " + event_data(chunk, padded) + b"\n\n"

    def _numbered(self, event: Json) -> Json:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events + 1}

    def _events_for(self, piece: Piece) -> list[Json]:
        """Events of a piece of the answer, which may end one item and begin another."""
        if isinstance(piece, CallStart):
            return [*self._end(), *self._begin(_call(piece))]
        if isinstance(piece, Arguments):
            self._items[-1]["arguments"] += piece.text
            return [{"type": "response.function_call_arguments.delta", **self._place, "delta": piece.text}]
        kind = "message" if isinstance(piece, Content) else "reasoning"
        events: list[Json] = []
        if not self._items or self._items[-1]["type"] != kind or self._items[-1]["status"] != "in_progress":
            events = [*self._end(), *self._begin(_message() if kind == "message" else _thought())]
        part = self._items[-1]["content"][0]
        part["text"] += piece.text
        delta = {"type": f"response.{part['type']}.delta", **self._place, "content_index": 0, "delta": piece.text}
        return [*events, {**delta, "logprobs": []} if kind == "message" else delta]

    @property
    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _begin(self, item: Json) -> list[Json]:
        self._items.append(item)
        bare = {**item, "content": []} if "content" in item else {**item}
        place = len(self._items) - 1
        events: list[Json] = [{"type": "response.output_item.added", "output_index": place, "item": bare}]
        if item["type"] == "message":
            part = {**item["content"][0]}
            events.append({"type": "response.content_part.added", **self._place, "content_index": 0, "part": part})
        return events

    def _end(self, is_cut: bool = False) -> list[Json]:
        """Events that end the current item, if there is one."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item, place = self._items[-1], self._place
        item["status"] = "incomplete" if is_cut else "completed"
        events: list[Json] = []
        if item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            events.append({"type": "response.function_call_arguments.done", **place, **call})
        else:
            part = {**item["content"][0]}
            is_text = item["type"] == "message"
            done = {"type": f"response.{part['type']}.done", **place, "content_index": 0, "text": part["text"]}
            events.append({**done, "logprobs": []} if is_text else done)
            if is_text:
                events.append({"type": "response.content_part.done", **place, "content_index": 0, "part": part})
        return [
            *events,
            {"type": "response.output_item.done", "output_index": place["output_index"], "item": {**item}},
        ]

    # The whole response

    def whole(self) -> Json:
        cut = self.answers[0].reason == "length"
        whole = self._response("incomplete" if cut else "completed", self._items)
        whole["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        whole["usage"] = self._usage
        whole["speculation"] = speculation(self.answers[0].sequence.stats)
        return whole

    @property
    def _usage(self) -> Json:
        usage = self.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, output: list[Json]) -> Json:
        request = self._request
        given = request.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self.model_name,
            "output": [{**item} for item in output],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": request.top_p,
            "truncation": "disabled",
            "metadata": request.metadata or {},
            "usage": None,
        }


def _item(kind: str, prefix: str, **fields: Any) -> Json:
    return {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **fields}


def _message() -> Json:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return _item("message", "msg", role="assistant", content=[part])


def _thought() -> Json:
    return _item("reasoning", "rs", summary=[], content=[{"type": "reasoning_text", "text": ""}])


def _call(start: CallStart) -> Json:
    return _item("function_call", "fc", call_id=start.id, name=start.name, arguments="")

"""Request bodies as pydantic models. A field that is not declared here is refused by name, never ignored."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from graft.server.grammar import Wanted

SEED = 2**62 - 2**16  # a request's further answers take the seeds after it

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
_TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # JSON's keys are text
Text = Annotated[str, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
_Pattern = Annotated[str, Field(strict=True, min_length=1)]


def _is_a_word(value: Any) -> Any:
    """0 and 1 equal False and True, and are not meant here."""
    if type(value) is not bool:
        raise ValueError("give true or false")
    return value


def _can_be_repeated(value: dict[str, Any]) -> dict[str, Any]:
    """Python reads NaN and 1e999, which no JSON of ours can repeat."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("it holds a number that is not finite") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _checked_in_parts(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """An object's entries, a few at a time: the first part with a bad one ends it."""
    if not isinstance(given, dict):
        return check(given)
    entries = iter(given.items())
    checked: dict[Any, Any] = {}
    while part := dict(islice(entries, 16)):
        checked |= check(part)
    return checked


JsonObject = Annotated[dict[str, Any], AfterValidator(_can_be_repeated)]
# Each unbounded list or object fails at its first bad entries: an error for each would take long and much memory.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
_FewAtATime = WrapValidator(_checked_in_parts)  # not every version of pydantic has fail_fast for objects
Metadata = Annotated[dict[Text, Text], _FewAtATime]
_Biases = Annotated[dict[_TokenName, Annotated[float, Field(strict=True, ge=-100, le=100)]], _FewAtATime]
_Variables = Annotated[dict[Text, bool | int | float | Text], _FewAtATime]
_StopText = Annotated[str, Field(strict=True, max_length=1024)]  # compared with the text's end at every token
No = Annotated[Literal[False], BeforeValidator(_is_a_word)]  # what is not supported may be declined


class Strict(BaseModel):
    # In JSON schema: what is not declared may be null, which is the same as absent.
    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, json_schema_extra={"additionalProperties": {"type": "null"}}
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        """Clients write null for what they do not say, fields that are not known here among them."""
        if not isinstance(given, dict):
            return given
        said = {name: value for name, value in given.items() if value is not None}
        unknown = said.keys() - cls._known_names()
        if len(unknown) > 1:  # one is enough to refuse it by, and each would have an error of its own
            first = next(name for name in said if name in unknown)
            return {name: value for name, value in said.items() if name == first or name not in unknown}
        return said

    @classmethod
    @cache
    def _known_names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


class StreamOptions(Strict):
    include_usage: Bool | None = False  # in a last chunk
    continuous_usage_stats: Bool | None = False  # in every chunk
    include_obfuscation: Bool | None = False  # events are padded, so that their sizes do not tell what they hold


class JsonSchema(Strict):
    name: Text | None = "answer"
    description: Text | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: Bool | None = None  # False: where the schema cannot be compiled, any JSON will do


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema")
        return self


class StructuredOutputs(Strict):
    json_: JsonObject | None = Field(default=None, alias="json")
    regex: _Pattern | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if sum(value is not None for value in (self.json_, self.regex, self.choice)) != 1:
            raise ValueError("give one of json, regex and choice")
        return self


class Sampling(Strict):
    """Fields of both kinds of completion: OpenAI's, those of them that change nothing here, vLLM's, Graft's own."""

    model: Text | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = 1.0
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = 1
    stream: Bool | None = False
    stream_options: StreamOptions | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(strict=True, gt=-SEED, lt=SEED)] | None = None
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = 0.0
    logit_bias: _Biases | None = None
    response_format: ResponseFormat | None = None
    user: Text | None = None
    store: No | None = None  # nothing is stored
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = 0  # 0 and -1 are off
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=100)] | None = 1.0
    min_tokens: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = 0
    ignore_eos: Bool | None = False
    stop_token_ids: TokenIds | None = None
    guided_regex: _Pattern | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None  # the same, by a newer name
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    speculate: Bool | None = True  # False decodes plainly
    return_rounds: Bool | None = False  # every round's tree and each token's origin come with the answer

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream")
        asked = (self.wanted_schema, self.guided_regex, self.guided_choice, self.structured_outputs)
        if sum(value is not None for value in asked) > 1:
            raise ValueError(
                "an answer fits one thing: give one of response_format, guided_regex, guided_choice, structured_outputs"
            )
        if self.is_guided and (self.ignore_eos or self.min_tokens):
            raise ValueError("ignore_eos and min_tokens do not go with a response_format: JSON ends where it ends")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs does not go with stream")
        return self

    @property
    def is_guided(self) -> bool:
        """Whether the answer must fit something."""
        asked = (self.wanted_schema, self.guided_regex, self.guided_choice, self.structured_outputs)
        return any(value is not None for value in asked)

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the response_format; an empty one fits anything that is JSON."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.json_schema is None:
            return {"type": "object"}
        return self.response_format.json_schema.schema_ or {}

    @property
    def wanted(self) -> Wanted | None:
        """What the answer must fit, if anything."""
        if self.wanted_schema is not None:
            return Wanted.schema(self.wanted_schema)
        asked = self.structured_outputs or StructuredOutputs.model_construct()
        if asked.json_ is not None:
            return Wanted.schema(asked.json_, "structured_outputs")
        regex, choice = self.guided_regex or asked.regex, self.guided_choice or asked.choice
        if regex is not None:
            return Wanted("regular expression", regex, "guided_regex" if self.guided_regex else "structured_outputs")
        if choice is not None:
            return Wanted.choice(choice, "guided_choice" if self.guided_choice else "structured_outputs")
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives are wanted beside each token of the prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def is_lenient(self) -> bool:
        """Whether any JSON will do where the schema cannot be compiled."""
        wanted = self.response_format.json_schema if self.response_format is not None else None
        return wanted is not None and wanted.strict is False

    def settings(self, max_new_tokens: int, logprobs: int | None) -> dict[str, Any]:
        """Keywords for `SamplingSettings`; null fields are left out and take the default there."""
        given = {
            "max_new_tokens": max_new_tokens,
            "logprobs": logprobs,
            "top_k": max(self.top_k or 0, 0),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            **{name: getattr(self, name) for name in _SAME},
        }
        return {name: value for name, value in given.items() if value is not None}


_SAME = (
    "top_p", "n", "seed", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos", "stop_token_ids",
)  # fmt: skip


class TextPart(Strict):
    type: Literal["text"]
    text: Text


FunctionName = Annotated[str, Field(strict=True, pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionTool(Strict):
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None  # a JSON schema; absent: there are none
    strict: Bool | None = None  # whether calls must fit the schema even where none is forced


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool

    def as_dict(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": parameters}}


class FunctionChoice(Strict):
    name: FunctionName


class ToolChoice(Strict):
    type: Literal["function"]
    function: FunctionChoice


class CalledFunction(Strict):
    """A call of the past, in whatever words the model made it: a client sends back what it was given."""

    name: Text
    arguments: Text


class ToolCall(Strict):
    id: Text
    type: Literal["function"] | None = "function"
    function: CalledFunction
    index: int | None = None  # of a streamed one that was put together

    def as_dict(self) -> dict[str, Any]:
        """As chat templates know it: its arguments are an object, or text where they are none."""
        function = {"name": self.function.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    @property
    def arguments(self) -> dict[str, Any] | str:
        text = self.function.arguments
        try:
            found = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return text
        return found if isinstance(found, dict) else text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)] | None = None
    name: Text | None = None  # refused where the model's chat template leaves it out
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    annotations: list[Any] | None = None  # of an answer's text; they add nothing to it

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.role != "assistant" and self.content is None:
            raise ValueError("content is missing")
        for name in ("refusal", "annotations", "tool_calls", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name):
                raise ValueError(f"{name} goes with the role assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id goes with the role tool, and the role tool with it")
        return self

    @property
    def text(self) -> str:
        content = self.refusal or "" if self.content is None else self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def as_dict(self) -> dict[str, Any]:
        """As chat templates know it."""
        role = "system" if self.role == "developer" else self.role
        more: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("name", "tool_call_id", "reasoning_content")
            if getattr(self, name) is not None
        }
        if self.tool_calls:
            more["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return {"role": role, "content": self.text, **more}


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    logprobs: Bool | None = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: Bool | None = True  # False: one call at most
    chat_template_kwargs: _Variables | None = None

    @model_validator(mode="after")
    def _is_a_chat(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name!r}, which is not among the tools")
        if choice == "required" and not names:
            raise ValueError("tool_choice goes with tools")
        if self.must_call and self.is_guided:
            raise ValueError("response_format does not go with a tool_choice that forces a call")
        if self.offered and self.is_guided and self.wanted_schema is None:
            raise ValueError("guided_regex, guided_choice and structured_outputs do not go with tools")
        if self.constrains_calls and (self.ignore_eos or self.min_tokens):
            raise ValueError("ignore_eos and min_tokens do not go with calls that are forced, strict or one at most")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens say different things; give one")
        return self

    @property
    def is_silent(self) -> bool:
        return False

    @property
    def must_call(self) -> bool:
        return isinstance(self.tool_choice, ToolChoice) or self.tool_choice == "required"

    @property
    def constrains_calls(self) -> bool:
        """Whether a grammar says how the answer may call tools, and so where it ends."""
        is_strict = any(tool.function.strict for tool in self.callable)
        return bool(self.callable) and (self.must_call or is_strict or self.parallel_tool_calls is False)

    @property
    def offered(self) -> list[Tool]:
        """Tools that the model is told of: none if it may not call any."""
        return [] if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def callable(self) -> list[Tool]:
        """Of them, those that it may call."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return [tool for tool in self.offered if tool.function.name == choice.function.name]
        return self.offered

    @property
    def max_calls(self) -> int:
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, ToolChoice) else 1 << 10

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampling):
    prompt: (
        Annotated[Text, Field(min_length=1)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=128)]
        | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None  # 0 goes with echo
    echo: Bool | None = False
    best_of: Literal[1] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens of 0 goes with echo or prompt_logprobs")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def is_silent(self) -> bool:
        """Whether nothing but the prompt is wanted."""
        return self.max_tokens == 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((count for count in (self.prompt_logprobs, echoed) if count is not None), default=None)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TokenizeRequest(Strict):
    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: _Variables | None = None

    @property
    def offered(self) -> list[Tool]:
        return self.tools or []

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs go with messages")
        return self


class DetokenizeRequest(Strict):
    model: Text | None = None
    tokens: TokenIds

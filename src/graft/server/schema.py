"""Request bodies as pydantic models. Unknown fields are refused by name, never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from graft.server.grammar import GrammarSpec
from graft.server.inert_fields import Effort, InertChat, InertFields, InertSampling, NoEntries, Off
from graft.server.strict import Bool, InParts, JsonObject, SchemaObject, Strict, Text, TokenIds, only

_SEED_LIMIT = 2**62 - 2**16  # below the sampler's limit: further answers of a request use the seeds after its own

_TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # keys of JSON objects are strings
_Pattern = Annotated[str, Field(strict=True, min_length=1)]
_Biases = Annotated[dict[_TokenName, Annotated[float, Field(strict=True, ge=-100, le=100)]], InParts]
_Variables = Annotated[dict[Text, bool | int | float | Text], InParts]
_StopText = Annotated[str, Field(strict=True, max_length=1024)]  # compared with the end of the text at every token
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Length = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
_NumLogprobs = Annotated[int, Field(strict=True, ge=0, le=20)]
_Penalty = Annotated[float, Field(strict=True, ge=-2, le=2)]


class StreamOptions(Strict):
    include_usage: Bool | None = False  # send usage in a last chunk
    continuous_usage_stats: Bool | None = False  # send usage in every chunk
    include_obfuscation: Bool | None = False  # pad events, so that their size does not reveal their text


class JsonSchema(Strict):
    name: Text | None = "answer"
    description: Text | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: Bool | None = None  # False: any JSON is allowed if the schema cannot be compiled


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and type json_schema require each other")
        return self


class StructuredOutputs(Strict):
    json_: SchemaObject | None = Field(default=None, alias="json")
    regex: _Pattern | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if sum(value is not None for value in (self.json_, self.regex, self.choice)) != 1:
            raise ValueError("give one of json, regex and choice")
        return self


class RequestBody(InertFields):
    """Fields of completions and responses: OpenAI's, vLLM's and Graft's own."""

    model: Text | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = 1.0
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stream: Bool | None = False
    stop: _StopText | Annotated[list[_StopText], Field(max_length=16)] | None = None
    presence_penalty: _Penalty | None = 0.0
    frequency_penalty: _Penalty | None = 0.0
    logit_bias: _Biases | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = 0  # 0 and -1: off
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=100)] | None = 1.0
    min_tokens: _Count | None = 0
    ignore_eos: Bool | None = False
    stop_token_ids: TokenIds | None = None
    user: Text | None = None  # see --learning
    speculate: Bool | None = True  # False: plain decoding


class Sampling(RequestBody, InertSampling):
    """More fields of both kinds of completion."""

    max_tokens: Length | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = 1
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: SchemaObject | None = None
    guided_regex: _Pattern | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None  # newer name of the guided fields
    prompt_logprobs: _NumLogprobs | None = None
    return_rounds: Bool | None = False  # add every round's tree and each token's origin

    format_field: ClassVar[str] = "response_format"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream")
        if sum(value is not None for value in self._constraints) > 1:
            raise ValueError(f"give only one of {', '.join(_CONSTRAINTS[:-1])} and {_CONSTRAINTS[-1]}")
        if self.is_constrained and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                f"ignore_eos and min_tokens cannot be combined with {self.format_field}, which ends the answer"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be combined with stream")
        return self

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar constrains the answer."""
        return any(value is not None for value in self._constraints)

    @property
    def _constraints(self) -> tuple[Any, ...]:
        return self.response_schema, *(getattr(self, name) for name in _CONSTRAINTS[1:])

    @property
    def response_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the response_format; an empty one allows any JSON."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.json_schema is None:
            return {"type": "object"}
        return self.response_format.json_schema.schema_ or {}

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """The grammar of the answer, if there is one."""
        if self.response_schema is not None:
            return GrammarSpec.schema(self.response_schema, self.format_field)
        asked = self.structured_outputs or StructuredOutputs.model_construct(
            json_=self.guided_json, regex=self.guided_regex, choice=self.guided_choice
        )

        def param(kind: str) -> str:
            return "structured_outputs" if self.structured_outputs is not None else f"guided_{kind}"

        if asked.json_ is not None:
            return GrammarSpec.schema(asked.json_, param("json"))
        if asked.regex is not None:
            return GrammarSpec("regular expression", asked.regex, param("regex"))
        return None if asked.choice is None else GrammarSpec.choice(asked.choice, param("choice"))

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to each token of the prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def is_lenient(self) -> bool:
        """Whether any JSON is allowed if the schema cannot be compiled."""
        wanted = self.response_format.json_schema if self.response_format is not None else None
        return self.response_schema is not None and wanted is not None and wanted.strict is False

    @property
    def sampler_seed(self) -> int | None:
        """The seed; None, a random one, for -1. A seed outside the sampler's range is mapped into it."""
        if self.seed == -1:
            return None
        if self.seed is None or abs(self.seed) < _SEED_LIMIT:
            return self.seed
        return self.seed % _SEED_LIMIT

    def settings(self, max_new_tokens: int, logprobs: int | None) -> dict[str, Any]:
        """Keywords for `SamplingSettings`, without null fields, which take the default there."""
        given = {
            "max_new_tokens": max_new_tokens,
            "logprobs": logprobs,
            "top_k": max(self.top_k or 0, 0),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "seed": self.sampler_seed,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            **{name: getattr(self, name) for name in _SAME},
        }
        return {name: value for name, value in given.items() if value is not None}


_CONSTRAINTS = ("response_format", "guided_json", "guided_regex", "guided_choice", "structured_outputs")
_SAME = (
    "top_p", "n", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos", "stop_token_ids",
)  # fmt: skip


class TextPart(Strict):
    type: Literal["text"]
    text: Text


FunctionName = Annotated[str, Field(strict=True, pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionTool(Strict):
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None  # a JSON schema; absent: no parameters
    strict: Bool | None = None  # calls must fit the schema even if no call is forced


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool

    def as_dict(self) -> dict[str, Any]:
        """For chat templates."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**function, "parameters": parameters}}


class FunctionChoice(Strict):
    name: FunctionName


class ToolChoice(Strict):
    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1, max_length=128)]


class AllowedToolChoice(Strict):
    """Some of the tools, one of which may or must be called. All of them stay in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(Strict):
    """An earlier call, with the name and arguments as the model wrote them."""

    name: Text
    arguments: Text


class ToolCall(Strict):
    id: Text
    type: Literal["function"] | None = "function"
    function: CalledFunction
    index: int | None = None  # clients that collect a stream may leave it there

    def as_dict(self) -> dict[str, Any]:
        """For chat templates. The arguments are an object, or text if they are not valid JSON."""
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
    name: Text | None = None  # for chat templates; most ignore it
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # newer name of the same
    annotations: list[Any] | None = None  # of an answer's text; ignored

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.role != "assistant" and self.content is None:
            raise ValueError("content is missing")
        for name in ("refusal", "annotations", "tool_calls", "reasoning_content", "reasoning"):
            if self.role != "assistant" and getattr(self, name):
                raise ValueError(f"{name} requires the role assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id and the role tool require each other")
        return self

    @property
    def text(self) -> str:
        content = self.refusal or "" if self.content is None else self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def as_dict(self) -> dict[str, Any]:
        """For chat templates."""
        role = "system" if self.role == "developer" else self.role
        more = self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        thought = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if thought is not None:
            more["reasoning_content"] = thought
        if self.tool_calls:
            more["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return {"role": role, "content": self.text, **more}


class ChatPrompt(Strict):
    """The fields that a chat's prompt is made of."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: _Variables | None = None
    add_generation_prompt: Bool | None = None  # True, unless the last message is continued
    continue_final_message: Bool | None = False  # the answer continues the last message, which is an assistant's

    prompt_field: ClassVar[str] = "messages"

    @model_validator(mode="after")
    def _can_be_continued(self) -> Self:
        if not self.continue_final_message:
            return self
        last = self.messages[-1] if self.messages else None
        if self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        if last is None or last.role != "assistant" or not last.text or last.tool_calls:
            raise ValueError("continue_final_message requires a last message of the assistant with text and no calls")
        return self

    @property
    def offered(self) -> list[Tool]:
        """Tools in the prompt."""
        return self.tools or []

    @property
    def template_options(self) -> dict[str, Any]:
        """Keywords for the chat template, without the client's own."""
        if self.continue_final_message:
            return {"continue_final_message": True, "add_generation_prompt": False}
        return {} if self.add_generation_prompt is not False else {"add_generation_prompt": False}


class ChatRequest(Sampling, ChatPrompt, InertChat):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Length | None = None  # goes before max_tokens
    logprobs: Bool | None = False
    top_logprobs: _NumLogprobs | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: Bool | None = None  # False: at most one call. True: a forced answer may have several
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _is_a_chat(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        unknown = [name for name in self.chosen_names or () if name not in names]
        if unknown:
            raise ValueError(f"tool_choice names {unknown[0]!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice requires tools")
        if self.offered and self.is_constrained and self.response_schema is None:
            raise ValueError("guided fields and structured_outputs cannot be combined with tools")
        if self.constrains_calls and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                "ignore_eos and min_tokens cannot be combined with calls that are forced, strict or not parallel"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """The functions that tool_choice names; None: it names none."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return [choice.function.name]
        if isinstance(choice, AllowedToolChoice):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return None

    @property
    def response_schema(self) -> dict[str, Any] | None:
        """None if a call is forced: a call cannot also have the format."""
        return None if self.must_call else super().response_schema

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        is_required = isinstance(choice, AllowedToolChoice) and choice.allowed_tools.mode == "required"
        return isinstance(choice, ToolChoice) or choice == "required" or is_required

    @property
    def constrains_calls(self) -> bool:
        """Whether a grammar constrains the calls, and so decides where the answer ends."""
        is_strict = any(tool.function.strict for tool in self.callable)
        is_narrowed = len(self.callable) < len(self.offered)
        return bool(self.callable) and (self.must_call or is_strict or is_narrowed or self.parallel_tool_calls is False)

    @property
    def offered(self) -> list[Tool]:
        """Tools in the prompt: none if the model may not call any."""
        return [] if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def callable(self) -> list[Tool]:
        """Tools that the model may call."""
        names = self.chosen_names
        return [tool for tool in self.offered if names is None or tool.function.name in names]

    @property
    def max_calls(self) -> int:
        """The most calls of an answer. A forced answer has one unless several are asked for: nothing else ends it."""
        if isinstance(self.tool_choice, ToolChoice) or self.parallel_tool_calls is False:
            return 1
        return 1 << 10 if not self.must_call or self.parallel_tool_calls else 1

    @property
    def template_options(self) -> dict[str, Any]:
        options = super().template_options
        if self.reasoning_effort is not None:  # templates have the one variable, the other, or none
            options["reasoning_effort"] = self.reasoning_effort
            options["enable_thinking"] = self.reasoning_effort != "none"
        return options

    @property
    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def length_field(self) -> str:
        """The field that limits the answer."""
        return "max_tokens" if self.max_completion_tokens is None and self.max_tokens else "max_completion_tokens"

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
    logprobs: _NumLogprobs | None = None
    max_tokens: _Count | None = None  # 0 requires echo or prompt_logprobs
    echo: Bool | None = False
    add_special_tokens: Bool | None = True  # such as the one that begins a text
    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, only("")] = None

    prompt_field: ClassVar[str] = "prompt"
    length_field: ClassVar[str] = "max_tokens"

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens of 0 requires echo or prompt_logprobs")
        return self

    @property
    def requested_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def is_prompt_only(self) -> bool:
        """Whether the request asks for nothing but the prompt."""
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


class TokenizeRequest(ChatPrompt):
    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: Bool | None = None
    return_token_strs: Off = None
    mm_processor_kwargs: NoEntries = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if self.prompt is not None and getattr(self, name):
                raise ValueError(f"{name} requires messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens requires prompt: a chat template writes its own")
        return self


class DetokenizeRequest(Strict):
    model: Text | None = None
    tokens: TokenIds

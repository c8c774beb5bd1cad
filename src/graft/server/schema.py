"""Request bodies as pydantic models. A field that is not declared here is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_SEED = 2**62 - 2**16  # a request's further answers take the seeds after it

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
_TokenName = Annotated[int, Field(ge=0, lt=2**31)]  # JSON's keys are text
Text = Annotated[str, Field(strict=True)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        """Clients write null for what they do not say, fields that are not known here among them."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class StreamOptions(Strict):
    include_usage: bool = False  # in a last chunk
    continuous_usage_stats: bool = False  # in every chunk
    include_obfuscation: bool = False  # events are padded, so that their sizes do not tell what they hold


class JsonSchema(Strict):
    name: Text = "answer"
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None  # False: where the schema cannot be compiled, any JSON will do


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema")
        return self


class Sampling(Strict):
    """Fields of both kinds of completion: OpenAI's, those of them that change nothing here, vLLM's, Graft's own."""

    model: Text | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(gt=-_SEED, lt=_SEED)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    logit_bias: dict[_TokenName, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    user: Text | None = None
    store: Literal[False] | None = None  # nothing is stored
    metadata: dict[Text, Text] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = 0  # 0 and -1 are off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = 1.0
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 0
    ignore_eos: bool | None = False
    stop_token_ids: list[TokenId] | None = None
    speculate: bool | None = True  # False decodes plainly
    return_rounds: bool | None = False  # every round's tree and each token's origin come with the answer

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream")
        if self.wanted_schema is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError("ignore_eos and min_tokens do not go with a response_format: JSON ends where it ends")
        return self

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must fit; an empty one fits anything that is JSON."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.json_schema is None:
            return {"type": "object"}
        return self.response_format.json_schema.schema_ or {}

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
            **{name: getattr(self, name) for name in _SAME},
        }
        return {name: value for name, value in given.items() if value is not None}


_SAME = (
    "top_p", "n", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos", "stop_token_ids",
)  # fmt: skip


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: Text | None = None
    refusal: Text | None = None
    annotations: list[Any] | None = None  # of an answer's text; they add nothing to it

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.role != "assistant" and self.content is None:
            raise ValueError("content is missing")
        for name in ("refusal", "annotations"):
            if self.role != "assistant" and getattr(self, name):
                raise ValueError(f"{name} goes with the role assistant")
        return self

    def as_dict(self) -> dict[str, str]:
        content = self.refusal or "" if self.content is None else self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": "system" if self.role == "developer" else self.role, "content": text, **named}


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _is_a_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens say different things; give one")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampling):
    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=128)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens or 16

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
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    model: Text | None = None
    tokens: list[TokenId]

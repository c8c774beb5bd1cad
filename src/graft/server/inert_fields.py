"""Fields of OpenAI's and vLLM's requests that change nothing here.

Some are ignored whatever their value, because no answer depends on them. Others are accepted only with the value that
describes what the server does anyway, and refused by name with any other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from graft.server.strict import Metadata, Strict, Text, only

Off = Annotated[Any, only(False)]
On = Annotated[Any, only(True)]
NoItems = Annotated[Any, only([])]
NoEntries = Annotated[Any, only({})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class InertFields(Strict):
    """Inert fields of all requests for answers."""

    store: Off = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: Text | None = None
    request_id: Text | None = None  # the header x-request-id is used instead
    session_id: Text | None = None
    priority: Annotated[Any, only(0)] = None
    skip_special_tokens: On = None
    include_stop_str_in_output: Off = None
    mm_processor_kwargs: NoEntries = None
    vllm_xargs: NoEntries = None


class InertSampling(InertFields):
    """Inert fields of both kinds of completion."""

    use_beam_search: Off = None
    length_penalty: Annotated[Any, only(1.0)] = None
    watermarking: Off = None
    spaces_between_special_tokens: On = None
    truncation_side: Literal["left", "right"] | None = None  # nothing is truncated
    bad_words: NoItems = None
    guided_decoding_backend: Text | None = None
    return_tokens_as_token_ids: Off = None
    return_token_ids: Off = None
    return_token_offsets: Off = None
    return_mm_kwargs: On = None
    routed_experts_prompt_start: Annotated[Any, only(0)] = None
    stream_interval: Annotated[int, Field(strict=True, ge=1)] | None = None
    thinking_token_budget: Annotated[Any, only(-1)] = None


class InertChat(InertSampling):
    """Inert fields of chat completions."""

    modalities: Annotated[Any, only(["text"])] = None
    functions: NoItems = None
    function_call: Annotated[Any, only("none", "auto")] = None
    documents: NoItems = None
    prediction: dict[str, Any] | None = None  # could only make the answer faster
    verbosity: Annotated[Any, only("medium")] = None
    echo: Off = None
    add_special_tokens: Off = None  # the chat template writes them
    include_reasoning: On = None
    media_io_kwargs: NoEntries = None
    return_prompt_text: Off = None


class InertResponses(InertFields):
    """Inert fields of responses."""

    background: Off = None
    truncation: Annotated[Any, only("disabled")] = None
    top_logprobs: Annotated[Any, only(0)] = None
    max_tool_calls: Annotated[int, Field(strict=True, ge=0)] | None = None  # counts built-in tools; there are none
    enable_response_messages: Off = None

"""The official `openai` client against a running server: chats, tools, responses, JSON, log-probabilities, and curl.

    graft serve --port 8000 &
    python bench/client_round_trip.py [--url http://127.0.0.1:8000] [--model NAME] [--api-key KEY]

What is asked for whole is asked for again as a stream, greedily, and must be the same. Tool calls go the whole way:
the assistant's message as `model_dump()` makes it, and a tool's result behind it, are sent back. A line for each check;
the exit status is 1 if any fails. --model: the first that the server names, if not given.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx2 as httpx
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
ASKED = [{"role": "user", "content": "What is the weather in Rome? Use celsius."}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather of a city now.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
RESULT = "21 degrees and sunny"


class Person(BaseModel):
    """What the JSON checks ask for."""

    name: str
    age: int
    likes: Literal["tea", "coffee"]


@dataclass
class Checks:
    """The checks, each a method that says what it saw, or fails with an AssertionError."""

    client: OpenAI
    url: str
    model: str
    api_key: str

    def chat(self, **options: Any) -> Any:
        return self.client.chat.completions.create(model=self.model, temperature=0, **options)

    def respond(self, **options: Any) -> Any:
        return self.client.responses.create(model=self.model, temperature=0, **options)

    # Chats

    def chat_whole_and_streamed(self) -> str:
        whole = self.chat(messages=QUESTION, max_tokens=32)
        *chunks, last = self.chat(
            messages=QUESTION, max_tokens=32, stream=True, stream_options={"include_usage": True}
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text and text == whole.choices[0].message.content, (text, whole.choices[0].message.content)
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert last.usage.completion_tokens == whole.usage.completion_tokens > 0, last.usage
        return f"{text!r}"

    def speculation_changes_no_text(self) -> str:
        texts, accepted = [], []
        for speculate in (True, False):
            answer = self.chat(messages=QUESTION, max_tokens=48, extra_body={"speculate": speculate})
            texts.append(answer.choices[0].message.content)
            accepted.append(answer.choices[0].model_extra["speculation"]["mean_acceptance_length"])
        assert texts[0] == texts[1], texts
        assert accepted[1] == 1.0, accepted
        return f"{accepted[0]} tokens a round, plainly {accepted[1]}"

    def a_seed_draws_the_same_text_again(self) -> str:
        drawn = [
            self.client.chat.completions.create(
                model=self.model, messages=QUESTION, temperature=1.0, seed=7, max_tokens=24, extra_body=body
            )
            .choices[0]
            .message.content
            for body in ({}, {}, {"speculate": False})
        ]
        assert drawn[0] == drawn[1] == drawn[2], drawn
        return f"{drawn[0]!r}"

    def log_probabilities(self) -> str:
        answer = self.chat(messages=QUESTION, max_tokens=8, logprobs=True, top_logprobs=3)
        entries = answer.choices[0].logprobs.content
        assert len(entries) == answer.usage.completion_tokens
        for entry in entries:
            values = [other.logprob for other in entry.top_logprobs]
            assert len(values) == 3 and values == sorted(values, reverse=True), values
            assert entry.logprob == values[0] <= 0 and entry.token == entry.top_logprobs[0].token, entry
        chunks = self.chat(messages=QUESTION, max_tokens=8, logprobs=True, top_logprobs=3, stream=True)
        streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        assert [entry.token for entry in streamed] == [entry.token for entry in entries]
        text = self.client.completions.create(
            model=self.model, prompt="The sky is", temperature=0, max_tokens=4, logprobs=2, echo=True
        )
        found = text.choices[0].logprobs
        assert "".join(found.tokens) == text.choices[0].text and found.token_logprobs[0] is None
        return f"{len(entries)} tokens, mean {sum(entry.logprob for entry in entries) / len(entries):.3f}"

    # JSON

    def json_of_a_schema(self) -> str:
        messages = [{"role": "user", "content": "Describe Ann, who is 30 and likes tea, as JSON."}]
        schema = {**Person.model_json_schema(), "additionalProperties": False}
        schema["properties"]["name"]["maxLength"] = 20
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
        whole = self.chat(messages=messages, max_tokens=80, response_format=form).choices[0]
        person = Person.model_validate_json(whole.message.content)
        chunks = self.chat(messages=messages, max_tokens=80, response_format=form, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
        item = {"type": "json_schema", "name": "person", "schema": schema, "strict": True}
        response = self.respond(input=messages, max_output_tokens=80, text={"format": item})
        assert response.output_text == whole.message.content, response.output_text
        parsed = self.client.chat.completions.parse(
            model=self.model, messages=messages, temperature=0, max_tokens=400, response_format=Person
        )
        assert isinstance(parsed.choices[0].message.parsed, Person), parsed.choices[0]
        return f"{person!r}"

    # Tools

    def tool_choice_auto(self) -> str:
        whole = self.chat(messages=ASKED, tools=TOOLS, max_tokens=64).choices[0]
        message, reason = self.streamed(messages=ASKED, tools=TOOLS, tool_choice="auto", max_tokens=64)
        self.same(whole.message, message)
        assert reason == whole.finish_reason, (reason, whole.finish_reason)
        self.goes_back(whole.message)
        num_calls = len(whole.message.tool_calls or ())
        return f"{num_calls} calls, {len(whole.message.content or '')} characters of text"

    def tool_choice_required(self) -> str:
        return self.forced("required")

    def tool_choice_named(self) -> str:
        return self.forced(NAMED)

    def tool_choice_none(self) -> str:
        answer = self.chat(messages=ASKED, tools=TOOLS, tool_choice="none", max_tokens=16).choices[0]
        assert answer.message.content and not answer.message.tool_calls
        return f"{answer.message.content!r}"

    def forced(self, choice: Any) -> str:
        options = {"messages": ASKED, "tools": TOOLS, "tool_choice": choice, "max_tokens": 400}
        whole = self.chat(**options).choices[0]
        assert whole.finish_reason in ("tool_calls", "stop") and whole.message.tool_calls, whole
        self.good(call.function for call in whole.message.tool_calls)
        message, reason = self.streamed(**options)
        assert reason == whole.finish_reason == "tool_calls", (reason, whole.finish_reason)
        self.same(whole.message, message)
        with self.client.chat.completions.stream(model=self.model, temperature=0, **options) as stream:
            for _ in stream:
                pass
        self.same(whole.message, stream.get_final_completion().choices[0].message)
        self.goes_back(whole.message)
        self.goes_back(message)
        return ", ".join(call.function.arguments for call in whole.message.tool_calls)

    def streamed(self, **options: Any) -> tuple[ChatCompletionMessage, str]:
        """The message of a stream, put together as applications do, and why it ended."""
        content, calls, reason = "", list[dict[str, Any]](), ""
        for chunk in self.chat(stream=True, **options):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for part in delta.tool_calls or ():
                if part.index == len(calls):
                    function = {"name": part.function.name, "arguments": ""}
                    calls.append({"id": part.id, "type": part.type, "function": function})
                calls[part.index]["function"]["arguments"] += part.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
        told = {"role": "assistant", "content": content or None, "tool_calls": calls or None}
        return ChatCompletionMessage.model_validate(told), reason

    def goes_back(self, message: Any) -> None:
        """Sends an assistant's message back, with results of its calls."""
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls or ()
        ] or [{"role": "user", "content": "Go on."}]
        messages = [*ASKED, message.model_dump(), *results]
        answer = self.chat(messages=messages, tools=TOOLS, max_tokens=16).choices[0].message
        assert answer.content or answer.tool_calls, answer

    def same(self, one: Any, other: Any) -> None:
        assert (one.content or "") == (other.content or ""), (one.content, other.content)
        first, second = (
            [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
            for message in (one, other)
        )
        assert first == second, (first, second)

    def good(self, functions: Any) -> None:
        """Calls of get_weather with arguments that fit."""
        for function in functions:
            given = json.loads(function.arguments)
            assert function.name == "get_weather" and set(given) == {"city", "unit"}, function
            assert given["unit"] in ("celsius", "fahrenheit") and len(given["city"]) <= 24, given

    # Responses

    def response_whole_and_streamed(self) -> str:
        whole = self.respond(input=QUESTION, max_output_tokens=32)
        events = list(self.respond(input=QUESTION, max_output_tokens=32, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text and text == whole.output_text == events[-1].response.output_text
        assert text == self.chat(messages=QUESTION, max_tokens=32).choices[0].message.content
        return f"{text!r}"

    def response_with_a_tool(self) -> str:
        tool = {"type": "function", **WEATHER, "strict": True}
        choice = {"type": "function", "name": "get_weather"}
        options = {"tools": [tool], "tool_choice": choice, "max_output_tokens": 400}
        whole = self.respond(input=ASKED, **options)
        events = list(self.respond(input=ASKED, stream=True, **options))
        calls = [item for item in whole.output if item.type == "function_call"]
        self.good(calls)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert calls and "".join(deltas) == calls[0].arguments, (calls, deltas)
        for response in (whole, events[-1].response):
            items = [item.model_dump() for item in response.output]
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
                for item in items
                if item["type"] == "function_call"
            ]
            assert results, items
            after = self.respond(input=[*ASKED, *items, *results], tools=[tool], max_output_tokens=16)
            assert after.output, after
        free = self.respond(input=ASKED, tools=[tool], max_output_tokens=48)
        events = list(self.respond(input=ASKED, tools=[tool], max_output_tokens=48, stream=True))
        assert events[-1].response.output_text == free.output_text
        return calls[0].arguments

    # Without the client

    def curl(self) -> str:
        if shutil.which("curl") is None:
            return "there is no curl here: not tried"
        body = {"model": self.model, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
        headers = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {self.api_key}"]
        command = ["curl", "-sS", "--fail-with-body", f"{self.url}/v1/chat/completions", *headers]
        ran = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        text = json.loads(ran.stdout)["choices"][0]["message"]["content"]
        assert text == self.chat(messages=QUESTION, max_tokens=16).choices[0].message.content
        return f"{text!r}"

    def all(self) -> Sequence[Callable[[], str]]:
        return (
            self.chat_whole_and_streamed,
            self.speculation_changes_no_text,
            self.a_seed_draws_the_same_text_again,
            self.log_probabilities,
            self.json_of_a_schema,
            self.tool_choice_auto,
            self.tool_choice_required,
            self.tool_choice_named,
            self.tool_choice_none,
            self.response_whole_and_streamed,
            self.response_with_a_tool,
            self.curl,
        )


def wait_for(url: str) -> None:
    """Waits, for some minutes, until the server is ready."""
    end = time.monotonic() + 300
    while True:
        try:
            if httpx.get(f"{url}/health").status_code != 503:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > end:
            sys.exit(f"error: no server is ready at {url}")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="as the server names it")
    parser.add_argument("--api-key", default="none")
    arguments = parser.parse_args()
    url = arguments.url.rstrip("/").removesuffix("/v1")
    wait_for(url)
    client = OpenAI(base_url=f"{url}/v1", api_key=arguments.api_key, timeout=600, max_retries=0)
    model = arguments.model or client.models.list().data[0].id
    num_failed = 0
    for check in Checks(client, url, model, arguments.api_key).all():
        start = time.monotonic()
        try:
            said, word = check(), "ok"
        except Exception as error:  # the others are still to be seen
            said, word = f"{type(error).__name__}: {error}", "FAILED"
            num_failed += 1
        name = check.__name__.replace("_", " ")  # type: ignore[attr-defined]
        print(f"{word:6} {name} ({time.monotonic() - start:.1f} s): {said}", flush=True)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()

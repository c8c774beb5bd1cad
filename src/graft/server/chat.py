"""From chat messages to a prompt, by the model's chat template. Templates without tools get them as text."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Literal

from graft.engine import Engine
from graft.errors import GraftError
from graft.server.control_tokens import ControlTokens, Hidden
from graft.server.refusals import Json, RefusedError
from graft.server.schema import ChatPrompt
from graft.server.tool_formats import FORMATS, Format, format_of
from graft.server.tool_parsers import THINK_MARKERS
from graft.settings import require

Thinks = Literal["may", "does"]
_PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
_TOOLS = """\
You can call functions. They are listed here, one JSON object to a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as a JSON object in this form, and write nothing else:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>
What it returns will be shown to you in this form:
<tool_response>
the result
</tool_response>"""


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat's prompt, and whether the answer may begin with reasoning."""

    text: str
    text_with_placeholders: str  # for control tokens that the client wrote
    hidden: Hidden
    thinks: Thinks | None


class ChatTemplate:
    """The chat template of an engine's tokenizer, and the format in which its model writes tool calls."""

    def __init__(self, engine: Engine, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        """tool_parser: auto, or the name of a format. reasoning_parser: auto, think or none."""
        self._engine = engine
        self._own_names = set(inspect.signature(engine.tokenizer.apply_chat_template).parameters)  # type: ignore[union-attr]
        template = engine.tokenizer.chat_template or ""  # type: ignore[union-attr]
        text = template if isinstance(template, str) else "\n".join(template.values())
        self.renders_tools = self._probe()
        found = format_of(text) or FORMATS["hermes"]
        self.format: Format = found if tool_parser == "auto" else FORMATS[tool_parser]
        require(
            self.renders_tools or not text or self.format.name in ("hermes", "qwen"),
            f"the model's chat template has no tools, so they are written as hermes: use that instead of {tool_parser}",
        )
        self.splits_reasoning = "<think>" in text if reasoning_parser == "auto" else reasoning_parser == "think"
        self._control_tokens = ControlTokens(engine.tokenizer)
        added = engine.tokenizer.get_added_vocab()  # type: ignore[union-attr]
        markers = (*self.format.markers, *THINK_MARKERS)
        self.marker_ids = {marker: added[marker] for marker in markers if marker in added}

    def render(self, body: ChatPrompt) -> RenderedChat:
        """The text of a chat's prompt."""
        variables = body.chat_template_kwargs or {}
        for name in sorted(variables.keys() & self._own_names):
            raise RefusedError(400, f"chat_template_kwargs.{name} is not supported", f"chat_template_kwargs.{name}")
        given: Json = {
            "messages": with_names([message.as_dict() for message in body.messages or ()]),
            "tools": [tool.as_dict() for tool in body.offered],
            "options": {**body.template_options, **variables},
        }
        try:
            hidden = self._control_tokens.hide(given)
            text = self._render(**hidden.given, field=body.prompt_field)
            whole = self._render(**given, field=body.prompt_field) if hidden.placeholders else text
        except RecursionError:
            raise RefusedError(400, "the tools are nested too deeply", "tools") from None
        return RenderedChat(whole, text, hidden, self._thinks(body, text))

    def encode(self, chat: RenderedChat) -> list[int]:
        """Token ids of a chat's prompt. Control tokens that the client wrote are ordinary text."""
        ids = self._control_tokens.encode(chat.text_with_placeholders, chat.hidden)
        return ids if ids is not None else self._engine.encode(chat.text, is_rendered=True)

    def _thinks(self, body: ChatPrompt, prompt: str) -> Thinks | None:
        """Whether an answer may begin with reasoning, or the prompt has begun the reasoning already."""
        if not self.splits_reasoning:
            return None
        begun = body.messages[-1].text if body.continue_final_message and body.messages else ""
        is_open = begun.rfind("<think>") > begun.rfind("</think>") or prompt.rstrip().endswith("<think>")
        return "does" if is_open else "may"

    def kept_ids(self, has_tools: bool, thinks: Thinks | None) -> frozenset[int]:
        """Special tokens that the parser of an answer looks for, and that must therefore stay in its text."""
        markers = (*(self.format.markers if has_tools else ()), *(THINK_MARKERS if thinks is not None else ()))
        return frozenset(self.marker_ids[marker] for marker in markers if marker in self.marker_ids)

    def _render(self, messages: list[Json], tools: list[Json], options: Json, field: str) -> str:
        """Render the template. field: where the request has the messages."""
        if not self.renders_tools:
            messages, tools = without_tools(messages, tools), []
        try:
            return self._engine.render_chat(messages, **({"tools": tools} if tools else {}), **options)
        except GraftError as error:
            raise RefusedError(400, str(error), field) from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise RefusedError(400, message, field) from error

    def _probe(self) -> bool:
        """Whether the template writes tools into the prompt."""
        messages = [{"role": "user", "content": "x"}]
        try:
            return self._engine.render_chat(messages) != self._engine.render_chat(messages, tools=[_PROBE])
        except Exception:  # there is no template, or it refuses these messages
            return False


def with_names(messages: list[Json]) -> list[Json]:
    """Add the function's name to every tool result; some templates write it."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def without_tools(messages: list[Json], tools: list[Json]) -> list[Json]:
    """Messages for a template without tools: tools, calls and results become text."""
    said: list[Json] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if said and "results" in said[-1]:
                said[-1]["results"].append(content)
            else:
                said.append({"role": "user", "results": [content]})
            continue
        calls = [
            f"<tool_call>\n{json.dumps({k: call['function'][k] for k in ('name', 'arguments')}, ensure_ascii=False)}"
            "\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        said.append({**kept, "content": "\n".join([*([content] if content else []), *calls])})
    if tools:
        words = _TOOLS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if said and said[0]["role"] == "system":
            said[0] = {**said[0], "content": f"{said[0]['content']}\n\n{words}"}
        else:
            said.insert(0, {"role": "system", "content": words})
    return [{"role": m["role"], "content": "\n".join(m["results"])} if "results" in m else m for m in said]

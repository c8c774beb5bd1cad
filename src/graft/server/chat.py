"""From chat messages to a prompt, by the model's chat template. Templates without tools get them as text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Literal

from graft.engine import Engine
from graft.errors import GraftError
from graft.server.refusals import Json, RefusedError
from graft.server.schema import Message, Tool
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
        added = engine.tokenizer.get_added_vocab()  # type: ignore[union-attr]
        markers = (*self.format.markers, *THINK_MARKERS)
        self.marker_ids = {marker: added[marker] for marker in markers if marker in added}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Json) -> str:
        """The text of the prompt. options: variables of the template."""
        for name in sorted(options.keys() & self._own_names):
            raise RefusedError(400, f"chat_template_kwargs.{name} is not supported", f"chat_template_kwargs.{name}")
        listed = [tool.as_dict() for tool in tools]
        given = with_names([message.as_dict() for message in messages])
        roles = [message["role"] for message in given]
        if not self.renders_tools:
            try:
                given, listed = without_tools(given, listed), []
            except RecursionError:
                raise RefusedError(400, "the tools are nested too deeply", "tools") from None
        text = self._render(given, listed, options)
        # Check for each role that the template writes names: render again without the names of that role.
        named = [place for place, m in enumerate(messages) if m.name is not None and m.role != "tool"]
        for role, place in {roles[place]: place for place in reversed(named)}.items():
            nameless = [{k: v for k, v in m.items() if k != "name" or m["role"] != role} for m in given]
            if self._render(nameless, listed, options) == text:
                name = f"messages.{place}.name"
                raise RefusedError(400, f"{name} is not supported: the model's chat template ignores it", name)
        return text

    def thinks(self, prompt: str) -> Thinks | None:
        """Whether an answer may begin with reasoning, or the prompt has begun the reasoning already."""
        if not self.splits_reasoning:
            return None
        return "does" if prompt.rstrip().endswith("<think>") else "may"

    def kept_ids(self, has_tools: bool, thinks: Thinks | None) -> frozenset[int]:
        """Special tokens that the parser of an answer looks for, and that must therefore stay in its text."""
        markers = (*(self.format.markers if has_tools else ()), *(THINK_MARKERS if thinks is not None else ()))
        return frozenset(self.marker_ids[marker] for marker in markers if marker in self.marker_ids)

    def _render(self, messages: list[Json], tools: list[Json], options: Json) -> str:
        try:
            return self._engine.render_chat(messages, **({"tools": tools} if tools else {}), **options)
        except GraftError as error:
            raise RefusedError(400, str(error), "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise RefusedError(400, message, "messages") from error

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

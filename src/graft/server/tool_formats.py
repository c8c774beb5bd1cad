"""Formats of tool calls, one for each family of models, and grammars that force calls in them.

A grammar is in llguidance's Lark dialect. It allows only calls that the format's parser can read, with arguments that
fit the function's schema.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graft.errors import GraftError
from graft.server.grammar import MAX_SIZE, SPACING
from graft.server.refusals import Json
from graft.server.tool_calls import call_head
from graft.server.tool_parsers import CallsAlone, MarkedCalls, Parser, PythonicCalls

_MAX_CALLS = 8  # in one answer under a grammar
_WITHOUT_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINED = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "dependentSchemas"}

Mark = Callable[[str], str]  # a marker as a Lark expression


@dataclass(frozen=True)
class Function:
    """A function that a model may call. schema: of its arguments; None: anything."""

    name: str
    schema: Json | None


class Format(ABC):
    """How one family of models writes calls."""

    name: str
    opening: str  # begins a call, and occurs in no other text
    markers: tuple[str, ...] = ()  # the parser looks for them; some tokenizers have special tokens for them
    is_whole_answer = False  # True: only an answer that begins with a call has calls

    @abstractmethod
    def rules(self, functions: Sequence[Function], max_calls: int, mark: Mark, is_open: bool) -> list[str]:
        """Lark rules. The rule `calls` stands for 1 to `max_calls` calls.

        is_open: the opening marker is written already.
        """

    @abstractmethod
    def parser(self, functions: Sequence[Function]) -> Parser:
        """functions: those that may be called."""

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


class Hermes(Format):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each call."""

    name, opening, closing = "hermes", "<tool_call>", "</tool_call>"
    markers = (opening, closing)

    def rules(self, functions: Sequence[Function], max_calls: int, mark: Mark, is_open: bool) -> list[str]:
        opening = mark(self.opening)
        more = f" ({_quoted(chr(10))} {opening} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        calls = f"calls: call{more}" if is_open else f"calls: {opening} call{more}"
        return [calls, *_json_calls(functions, "arguments", "\n", f"{_quoted('}' + chr(10))} {mark(self.closing)}")]

    def parser(self, functions: Sequence[Function]) -> Parser:
        return MarkedCalls(self.new_id, self.opening, self.closing)


class Qwen(Hermes):
    """Hermes, or the form of Qwen's coder models: <function=name><parameter=key>value</parameter></function>."""

    name = "qwen"

    def parser(self, functions: Sequence[Function]) -> Parser:
        return MarkedCalls(self.new_id, self.opening, self.closing, {f.name: f.schema for f in functions})


class Llama3(Format):
    """The answer is {"name": ..., "parameters": {...}}, or several of them with semicolons between."""

    name, opening, is_whole_answer = "llama3", '{"name"', True
    markers = ("<|python_tag|>",)

    def rules(self, functions: Sequence[Function], max_calls: int, mark: Mark, is_open: bool) -> list[str]:
        return [_repeated("calls", "; ", max_calls), *_json_calls(functions, "parameters")]

    def parser(self, functions: Sequence[Function]) -> Parser:
        return CallsAlone(self.new_id, self.markers, [f.name for f in functions])


class Mistral(Format):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; newer models write [TOOL_CALLS]name[ARGS]{...}.

    Some put [CALL_ID] and an id of their own behind the name.
    """

    name, opening = "mistral", "[TOOL_CALLS]"
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def rules(self, functions: Sequence[Function], max_calls: int, mark: Mark, is_open: bool) -> list[str]:
        opening = "" if is_open else mark(self.opening)
        calls = f"calls: {opening} {_quoted('[')} listed {_quoted(']')}"
        return [calls, _repeated("listed", ", ", max_calls), *_json_calls(functions, "arguments")]

    def parser(self, functions: Sequence[Function]) -> Parser:
        return CallsAlone(self.new_id, (self.opening,), [f.name for f in functions])

    def new_id(self) -> str:
        """Mistral's chat templates refuse ids of any other form."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Pythonic(Format):
    """[name(key="value"), ...], as in Python; values may be written as in JSON."""

    name, opening, is_whole_answer = "pythonic", "[", True

    def rules(self, functions: Sequence[Function], max_calls: int, mark: Mark, is_open: bool) -> list[str]:
        calls = f"calls: {_quoted('[')} listed {_quoted(']')}"
        each = [rule for i, function in enumerate(functions) for rule in _keyword_rules(i, function)]
        return [calls, _repeated("listed", ", ", max_calls), _any_call(functions), *each]

    def parser(self, functions: Sequence[Function]) -> Parser:
        return PythonicCalls(self.new_id)


FORMATS: dict[str, Format] = {f.name: f for f in (Hermes(), Llama3(), Qwen(), Mistral(), Pythonic())}


def format_of(template: str) -> Format | None:
    """The format that a chat template asks the model for; None if it cannot be recognised."""
    if "<tool_call>" in template:
        return FORMATS["qwen" if "<function=" in template else "hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if re.search(r"\[\w+\(\w+=\w+", template):
        return FORMATS["pythonic"]
    if "<|python_tag|>" in template or ('"parameters"' in template and "<|eot_id|>" in template):
        return FORMATS["llama3"]
    return None


# Grammars


@contextmanager
def _refuse_deep_nesting() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise GraftError("these JSON schemas are nested too deeply") from None


@_refuse_deep_nesting()
def call_grammar(
    form: Format,
    functions: Sequence[Function],
    *,
    is_forced: bool,
    max_calls: int,
    thinks: str | None,
    answer: Json | None,
    marker_ids: Mapping[str, int],
) -> str:
    """A Lark grammar of answers that are calls. Unless calls are forced, text or JSON of the schema `answer` may come.

    thinks: "may": the answer may begin with reasoning; "does": reasoning has begun in the prompt. marker_ids: markers
    that are special tokens. Raises a GraftError if no grammar is possible or it would be too large.
    """
    # Check the size first: the grammar may repeat parts of a schema many times.
    size = sum(len(json.dumps(schema)) for schema in (answer, *(f.schema for f in functions)))
    if size > MAX_SIZE:
        raise GraftError(f"these JSON schemas have {size} characters, more than the {MAX_SIZE} allowed here")

    def mark(text: str) -> str:
        """A marker as its special token, else letter by letter."""
        return f"<[{marker_ids[text]}]>" if text in marker_ids else _quoted(text)

    def until(rule: str, marker: str, unless: str = "") -> list[str]:
        """A rule for any text that ends with a marker."""
        if marker in marker_ids:  # the text must not spell it
            spelt = f"/(?s:.*)/ & ~/(?s:.*{_escaped(marker)}.*)/"
            return [f"{rule}: {rule.upper()} <[{marker_ids[marker]}]>", f"{rule.upper()}: {spelt}{unless}"]
        # Lazy: it ends with the first marker.
        return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: /(?s:.*{_escaped(marker)})/{unless}"]

    may_be_text = not is_forced and answer is None and not form.is_whole_answer
    rules = form.rules(functions, min(max_calls, _MAX_CALLS), mark, is_open=may_be_text)
    # The lexer takes the longest match, so text must not look like the beginning of reasoning.
    unless = r" & ~/(?s:[ \n]*<think>.*)/" if thinks == "may" else ""
    if is_forced:
        body = "calls"
    elif answer is not None:
        body = "calls | json"
        rules.append(f"json: %json {_embedded(answer)}")
    elif form.is_whole_answer:
        body = "SPACE calls | OTHER"
        first = _escaped(form.opening[0])
        rules += [r"SPACE: /[ \n]*/", rf"OTHER: /(?s:[ \n]*([^ \n{first}].*)?)/{unless}"]
    else:
        body = "TEXT | before calls"
        rules += [
            f"TEXT: /(?s:.*)/ & ~/(?s:.*{_escaped(form.opening)}.*)/{unless}",
            *until("before", form.opening, unless),
        ]
    if thinks is not None:
        rules += [*until("thought", "</think>"), r"THEN: /[ \n]*/"]
        opening = mark("<think>") + " thought" if thinks == "may" else "thought"
        then = f"THEN ({body})" if is_forced or answer is not None else f"({body})"
        body = f"{opening} {then}" if thinks == "does" else f"{body} | {opening} {then}"
    return "\n".join([f"start: {body}", *rules]) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _repeated(rule: str, separator: str, max_calls: int) -> str:
    return f"{rule}: call" if max_calls == 1 else f"{rule}: call ({_quoted(separator)} call){{0,{max_calls - 1}}}"


def _any_call(functions: Sequence[Function]) -> str:
    return "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))


def _json_calls(functions: Sequence[Function], key: str, before: str = "", end: str = '"}"') -> list[str]:
    """Rules of calls that are JSON objects. key: what the format calls the arguments; before, end: around them."""
    rules = [_any_call(functions)]
    for i, function in enumerate(functions):
        rules += [
            f"call_{i}: {_quoted(before + call_head(function.name, key))} args_{i} {end}",
            f"args_{i}: %json {_embedded(_closed(function.schema))}",
        ]
    return rules


def _embedded(schema: Json) -> str:
    return json.dumps({**schema, "x-guidance": SPACING})


def _closed(schema: Any) -> Any:
    """The schema without further properties unless it asks for them: otherwise a model could keep inventing some."""
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, dict) or not schema:
        return schema if schema else _WITHOUT_ARGUMENTS
    return _closed_part(schema)


def _closed_part(schema: Any) -> Any:
    if not isinstance(schema, dict) or _COMBINED & schema.keys():
        return schema
    closed = dict(schema)
    if isinstance(closed.get("properties"), dict):
        closed["properties"] = {name: _closed_part(part) for name, part in closed["properties"].items()}
        closed.setdefault("additionalProperties", False)
    if "items" in closed:
        closed["items"] = _closed_part(closed["items"])
    return closed


def _keyword_rules(i: int, function: Function) -> list[str]:
    """Rules of a call with keyword arguments, in the schema's order: the required ones and any of the others."""
    schema = _closed(function.schema)
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise GraftError(f"the schema of {function.name}: properties must be an object")
    listed = schema.get("required", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise GraftError(f"the schema of {function.name}: required must be a list of names")
    required = set(listed)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    names = [name for name in properties if name.isidentifier()]
    rules = [f"call_{i}: {_quoted(function.name + '(')} first_{i}_0 {_quoted(')')}"]
    size = 0
    for k, name in enumerate(names):
        part = properties[name] if isinstance(properties[name], dict) else {}
        value = _embedded({**shared, **part} if '"$ref"' in json.dumps(part) else part)
        size += len(value)  # definitions are repeated for each argument that refers to them
        if size > MAX_SIZE:
            raise GraftError(f"the grammar of {function.name} has more than the {MAX_SIZE} characters allowed here")
        rules.append(f"value_{i}_{k}: %json {value}")
        for state, before in (("first", ""), ("more", ", ")):
            given = f"{_quoted(f'{before}{name}=')} value_{i}_{k} more_{i}_{k + 1}"
            skipped = "" if name in required else f" | {state}_{i}_{k + 1}"
            rules.append(f"{state}_{i}_{k}: {given}{skipped}")
    rules += [f"{state}_{i}_{len(names)}: {_quoted('')}" for state in ("first", "more")]
    return rules

"""Tool calls: how models of a family write them, grammars that force them, and parsers that read them as they come.

A format is one family's way of writing calls. Its grammar is in llguidance's Lark dialect, so that a forced call always
is one that its parser reads, with arguments that fit the function's schema.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from graft.errors import GraftError
from graft.server.grammar import MAX_SIZE, SPACING
from graft.server.refusals import Json

_MOST_CALLS = 8  # of one answer, where a grammar forces them
_WITHOUT_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINED = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "dependentSchemas"}


@dataclass(frozen=True)
class Function:
    """A function that a model may call. schema: of its arguments; None: anything."""

    name: str
    schema: Json | None


# Pieces of an answer, as a parser reads them


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments, in JSON."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | Arguments


class Parser(ABC):
    """Reads an answer's text, which comes in pieces of any size."""

    num_reasoning = 0  # characters, from the text's beginning, that are reasoning and its markers

    @abstractmethod
    def feed(self, text: str) -> list[Piece]: ...

    @abstractmethod
    def finish(self) -> list[Piece]:
        """What was held back, when the answer has ended."""


# Formats

Mark = Callable[[str], str]


class Format(ABC):
    """One family's way of writing calls."""

    name: str
    opening: str  # what a call begins with, and no other text holds
    markers: tuple[str, ...] = ()  # that the parser looks for, and that may be tokens of their own
    is_whole_answer = False  # calls stand alone: a text that does not begin with one has none

    @abstractmethod
    def rules(self, functions: Sequence[Function], most: int, mark: Mark, is_open: bool) -> list[str]:
        """Lark rules, of which `calls` is one call or up to `most`.

        mark: a marker as a Lark expression. is_open: the first marker has been written already.
        """

    @abstractmethod
    def parser(self, functions: Sequence[Function]) -> Parser:
        """functions: those that may be called."""

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


class Hermes(Format):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, once for each call."""

    name, opening = "hermes", "<tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def rules(self, functions: Sequence[Function], most: int, mark: Mark, is_open: bool) -> list[str]:
        opening, closing = mark(self.opening), mark("</tool_call>")
        more = f" ({_quoted(chr(10))} {opening} call){{0,{most - 1}}}" if most > 1 else ""
        calls = f"calls: call{more}" if is_open else f"calls: {opening} call{more}"
        forms = [
            f"call_{i}: {_quoted(_head(f, 'arguments'))} args_{i} {_quoted('}' + chr(10))} {closing}"
            for i, f in enumerate(functions)
        ]
        return [calls, _one_of(functions), *forms, *_arguments(functions)]

    def parser(self, functions: Sequence[Function]) -> Parser:
        return _MarkedCalls(self, self.opening, "</tool_call>")


class Qwen(Hermes):
    """As Hermes, and the form of Qwen's coder models: <function=name><parameter=key>value</parameter></function>."""

    name = "qwen"

    def parser(self, functions: Sequence[Function]) -> Parser:
        return _MarkedCalls(self, self.opening, "</tool_call>", {f.name: f.schema for f in functions})


class Llama3(Format):
    """The answer is {"name": ..., "parameters": {...}}, or several of them with semicolons between."""

    name, opening, is_whole_answer = "llama3", '{"name"', True
    markers = ("<|python_tag|>",)

    def rules(self, functions: Sequence[Function], most: int, mark: Mark, is_open: bool) -> list[str]:
        calls = [
            f"call_{i}: {_quoted(_head(f, 'parameters', ''))} args_{i} {_quoted('}')}" for i, f in enumerate(functions)
        ]
        return [_several("; ", most), _one_of(functions), *calls, *_arguments(functions)]

    def parser(self, functions: Sequence[Function]) -> Parser:
        return _CallsAlone(self, self.markers, functions)


class Mistral(Format):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; newer models write [TOOL_CALLS]name[ARGS]{...}.

    Some put [CALL_ID] and an id of their own behind the name.
    """

    name, opening = "mistral", "[TOOL_CALLS]"
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def rules(self, functions: Sequence[Function], most: int, mark: Mark, is_open: bool) -> list[str]:
        calls = [
            f"call_{i}: {_quoted(_head(f, 'arguments', ''))} args_{i} {_quoted('}')}" for i, f in enumerate(functions)
        ]
        opening = "" if is_open else mark(self.opening)
        listed = f"calls: {opening} {_quoted('[')} listed {_quoted(']')}"
        return [listed, _several(", ", most, "listed"), _one_of(functions), *calls, *_arguments(functions)]

    def parser(self, functions: Sequence[Function]) -> Parser:
        return _CallsAlone(self, (self.opening,), functions)

    def new_id(self) -> str:
        """Its templates refuse ids of any other form."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Pythonic(Format):
    """[name(key="value"), ...], as in Python; values may be written as in JSON."""

    name, opening, is_whole_answer = "pythonic", "[", True

    def rules(self, functions: Sequence[Function], most: int, mark: Mark, is_open: bool) -> list[str]:
        rules = [f"calls: {_quoted('[')} listed {_quoted(']')}", _several(", ", most, "listed"), _one_of(functions)]
        for i, function in enumerate(functions):
            rules += _keyword_rules(i, function)
        return rules

    def parser(self, functions: Sequence[Function]) -> Parser:
        return _PythonicCalls(self)


FORMATS: dict[str, Format] = {f.name: f for f in (Hermes(), Llama3(), Qwen(), Mistral(), Pythonic())}


def format_of(template: str) -> Format | None:
    """The format that a chat template asks the model for, if it can be told."""
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
def _depth_refused() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise GraftError("these JSON schemas are nested too deeply") from None


@_depth_refused()
def call_grammar(
    form: Format,
    functions: Sequence[Function],
    *,
    is_forced: bool,
    most: int,
    thinks: str | None,
    answer: Json | None,
    mark_ids: Mapping[str, int],
) -> str:
    """A grammar, in Lark, of answers that are calls, or, unless forced, text or JSON of the schema `answer` instead.

    thinks: "may" or "does": reasoning may come first, or has begun in the prompt. mark_ids: tokens that are markers.
    A GraftError if there can be none, or it would be too large.
    """
    # Counted before the grammar is written, which may hold parts of a schema many times.
    size = sum(len(json.dumps(schema)) for schema in (answer, *(f.schema for f in functions)))
    if size > MAX_SIZE:
        raise GraftError(f"these JSON schemas have {size} characters, more than the {MAX_SIZE} allowed here")

    def mark(text: str) -> str:
        """A marker: the token of that name, or it is spelt."""
        return f"<[{mark_ids[text]}]>" if text in mark_ids else _quoted(text)

    def until(rule: str, marker: str, unless: str = "") -> list[str]:
        """A rule of any text and, behind it, a marker."""
        if marker in mark_ids:  # which no text holds
            spelt = f"/(?s:.*)/ & ~/(?s:.*{_escaped(marker)}.*)/"
            return [f"{rule}: {rule.upper()} <[{mark_ids[marker]}]>", f"{rule.upper()}: {spelt}{unless}"]
        # Lazy: it ends with the first marker.
        return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: /(?s:.*{_escaped(marker)})/{unless}"]

    is_text = not is_forced and answer is None and not form.is_whole_answer
    rules = [*form.rules(functions, min(most, _MOST_CALLS), mark, is_open=is_text)]
    # What is no reasoning must not look like its beginning: the lexer takes the longest that fits.
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


def _head(function: Function, key: str, before: str = "\n") -> str:
    return f'{before}{{"name": {json.dumps(function.name)}, {json.dumps(key)}: '


def _several(between: str, most: int, rule: str = "calls") -> str:
    return f"{rule}: call" if most == 1 else f"{rule}: call ({_quoted(between)} call){{0,{most - 1}}}"


def _one_of(functions: Sequence[Function]) -> str:
    return "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))


def _arguments(functions: Sequence[Function]) -> list[str]:
    return [f"args_{i}: %json {_embedded(_closed(f.schema))}" for i, f in enumerate(functions)]


def _embedded(schema: Json) -> str:
    return json.dumps({**schema, "x-guidance": SPACING})


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name, where it does not speak of them: what fits it still fits
    the one given, and a model cannot go on inventing properties."""
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, dict) or not schema:
        return schema if schema else _WITHOUT_ARGUMENTS
    return _closed_part(schema)


def _closed_part(schema: Any) -> Any:
    if not isinstance(schema, dict) or _COMBINED & schema.keys():
        return schema
    there = dict(schema)
    if isinstance(there.get("properties"), dict):
        there["properties"] = {name: _closed_part(part) for name, part in there["properties"].items()}
        there.setdefault("additionalProperties", False)
    if "items" in there:
        there["items"] = _closed_part(there["items"])
    return there


def _keyword_rules(i: int, function: Function) -> list[str]:
    """Rules of a call with keyword arguments: those that are required, and any of the others, in order."""
    schema = _closed(function.schema)
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise GraftError(f"the schema of {function.name}: properties is no object")
    listed = schema.get("required", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise GraftError(f"the schema of {function.name}: required is no list of names")
    required = set(listed)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    names = [name for name in properties if name.isidentifier()]
    rules = [f"call_{i}: {_quoted(function.name + '(')} first_{i}_0 {_quoted(')')}"]
    size = 0
    for k, name in enumerate(names):
        part = properties[name] if isinstance(properties[name], dict) else {}
        value = _embedded({**shared, **part} if '"$ref"' in json.dumps(part) else part)
        size += len(value)  # definitions come again for each argument that refers to them
        if size > MAX_SIZE:
            raise GraftError(f"the grammar of {function.name} has more than the {MAX_SIZE} characters allowed here")
        rules.append(f"value_{i}_{k}: %json {value}")
        for state, before in (("first", ""), ("more", ", ")):
            given = f"{_quoted(f'{before}{name}=')} value_{i}_{k} more_{i}_{k + 1}"
            skipped = "" if name in required else f" | {state}_{i}_{k + 1}"
            rules.append(f"{state}_{i}_{k}: {given}{skipped}")
    rules += [f"{state}_{i}_{len(names)}: {_quoted('')}" for state in ("first", "more")]
    return rules


# Parsers

THINK_MARKERS = ("<think>", "</think>")
_LONGEST_HEAD = 512  # characters, of a call before its arguments
_SPACE = re.compile(r"\s*")


def _behind_space(text: str, place: int) -> int:
    """The first place from this one on that is no white space."""
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


class Thinking(Parser):
    """Reasoning between <think> and </think>, apart from what another parser reads behind it."""

    def __init__(self, has_begun: bool, then: Parser | None) -> None:
        """has_begun: the prompt ends with <think>."""
        self._inside: bool | None = True if has_begun else None  # None: not known yet
        self._then = then or PlainText()
        self._held = ""
        self._space: list[str] = []  # what came before anything else
        self._num_read = 0  # characters
        self._is_after = False  # and nothing has come since

    def feed(self, text: str) -> list[Piece]:
        if self._inside is False:
            return self._passed_on(text)
        self._num_read += len(text)
        if not self._held and self._inside is None:
            start = _behind_space(text, 0)
            self._space.append(text[:start])
            text = text[start:]
        self._held += text
        pieces: list[Piece] = []
        if self._inside is None:
            if len(self._held) < len("<think>") and "<think>".startswith(self._held):
                return []
            self._inside = self._held.startswith("<think>")
            if not self._inside:
                return self._then.feed(self._all_held())
            self._held = self._held.removeprefix("<think>")
        before, marker, after = self._held.partition("</think>")
        self.num_reasoning = self._num_read - len(after)
        if marker:
            self._inside, self._held, self._is_after = False, "", True
            pieces += [Reasoning(before)] if before else []
            return pieces + self._passed_on(after)
        safe = len(before) - _overlap(before, "</think>")
        self._held = before[safe:]
        return [Reasoning(before[:safe])] if safe else []

    def finish(self) -> list[Piece]:
        if self._inside:
            held, self._held = self._held, ""
            return [Reasoning(held)] if held else []
        held = self._all_held() if self._inside is None else ""
        return (self._then.feed(held) if held else []) + self._then.finish()

    def _all_held(self) -> str:
        """What is held, with the white space before it."""
        held, self._held, self._space = "".join([*self._space, self._held]), "", []
        return held

    def _passed_on(self, text: str) -> list[Piece]:
        if self._is_after:
            text = text.lstrip()
            self._is_after = not text
        return self._then.feed(text) if text else []


class PlainText(Parser):
    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class _Reader(Parser):
    """What parsers of calls share: numbers and ids of calls, and white space that is held back before a call."""

    def __init__(self, form: Format) -> None:
        self._format = form
        self._buffer = ""
        self._num_calls = 0
        self._space: list[str] = []

    def _append(self, text: str) -> None:
        """Adds to the buffer, of which nobody else has a reference meanwhile: then Python need not copy it."""
        buffer, self._buffer = self._buffer, ""
        buffer += text
        self._buffer = buffer

    def _content(self, text: str) -> list[Piece]:
        """Text, but for white space at its end, which may stand before a call."""
        end = len(text.rstrip())
        if not end:
            self._space.append(text)
            return []
        content = "".join([*self._space, text[:end]])
        self._space = [text[end:]]
        return [Content(content)]

    def _last_content(self, text: str) -> list[Piece]:
        text = "".join([*self._space, text])
        self._space = []
        return [Content(text)] if text and not (self._num_calls and not text.strip()) else []

    def _call(self, name: str, arguments: str) -> list[Piece]:
        index, self._num_calls, self._space = self._num_calls, self._num_calls + 1, []
        start = CallStart(index, self._format.new_id(), name)
        return [start, Arguments(index, arguments)] if arguments else [start]


class _MarkedCalls(_Reader):
    """Calls between two markers, with text around them. A call ends where its JSON does: a string may hold a marker."""

    def __init__(
        self, form: Format, opening: str, closing: str, schemas: Mapping[str, Json | None] | None = None
    ) -> None:
        """schemas: of the functions' arguments, by name; then calls may be written as XML."""
        super().__init__(form)
        self._opening, self._closing, self._schemas = opening, closing, schemas
        self._json: _JsonCall | None = None  # the call that is being read
        self._xml: _XmlCall | None = None  # the same, as XML
        self._opened = ""  # the marker that it began with; another call before the closing one has none
        self._is_told = False  # a call has been, and its closing marker is still to come
        self._start = 0  # what the buffer begins with, and nobody needs to look at again: white space, for a call
        self._searched = 0  # the closing marker does not begin before

    def feed(self, text: str) -> list[Piece]:
        self._append(text)
        pieces: list[Piece] = []
        while True:
            if self._is_told and not self._is_past_closing():
                return pieces
            if self._json is None:
                before, marker, after = self._buffer.partition(self._opening)
                if not marker:
                    safe = len(before) - _overlap(before, self._opening)
                    self._go_on(before[safe:])
                    return pieces + self._content(before[:safe])
                pieces += self._content(before)
                self._go_on(after)
                self._json, self._opened = _JsonCall(self._closing), self._opening
            self._start = _behind_space(self._buffer, self._start)
            if self._buffer.startswith("{", self._start):
                pieces += self._streamed()
                end = self._json.end
            elif self._is_xml():
                self._xml = self._xml or _XmlCall(self._closing)
                self._xml.read(self._buffer)
                end = self._xml.end
            else:  # another form, or none
                place = self._buffer.find(self._closing, self._searched)
                self._searched = max(len(self._buffer) - len(self._closing) + 1, 0)
                end = place if place >= 0 else None
            if end is None:
                return pieces
            if self._json.index is None:
                found = self._found(self._buffer[:end])
                pieces += self._call(*found) if found else self._content(self._opened + self._buffer[:end])
                if found is None:  # its closing marker is text as well
                    self._json = self._xml = None
                    start = _behind_space(self._buffer, end)
                    pieces += self._content(self._buffer[end:start])
                    if self._buffer.startswith(self._closing, start):
                        pieces += self._content(self._closing)
                        start += len(self._closing)
                    self._go_on(self._buffer[start:])
                    continue
            self._go_on(self._buffer[end:])
            self._json, self._xml, self._is_told = None, None, True

    def _go_on(self, rest: str) -> None:
        self._buffer, self._start, self._searched = rest, 0, 0

    def _is_past_closing(self) -> bool:
        """Whether it is known what follows a call: its closing marker, which is then behind us, or something else."""
        rest = self._buffer[self._start :].lstrip("} \n\r\t")  # there may be a brace too many
        self._start = len(self._buffer) - len(rest)
        if self._closing.startswith(rest) or self._may_be_xml(rest):
            return False  # a part may have come
        is_closed = rest.startswith(self._closing)
        self._go_on(rest.removeprefix(self._closing) if is_closed else self._buffer.lstrip())
        self._is_told = False
        if not is_closed and self._is_xml():
            self._opened, self._json = "", _JsonCall(self._closing)
        return True

    def finish(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        if self._is_told:  # whatever is there is the beginning of a closing marker
            return []
        if self._json is None:
            return self._last_content(rest)
        if self._json.index is not None:  # cut in the middle: what there was is told already
            return []
        if self._xml is not None:
            self._xml.read(rest, is_all=True)
        found = self._found(rest)
        return self._call(*found) if found is not None else self._last_content(self._opened + rest)

    def _streamed(self) -> list[Piece]:
        assert self._json is not None
        pieces: list[Piece] = []
        name, arguments = self._json.read(self._buffer)
        if name is not None:
            self._json.index = self._num_calls
            pieces += self._call(name, "")
        if arguments:
            assert self._json.index is not None
            pieces.append(Arguments(self._json.index, arguments))
        return pieces

    def _found(self, body: str) -> tuple[str, str] | None:
        """A whole call's name and arguments."""
        if self._xml is None:
            return _call_of(body)
        if self._xml.name is None or not self._xml.is_call:
            return None
        schema = (self._schemas or {}).get(self._xml.name) or {}
        properties = schema.get("properties")
        parts = properties if isinstance(properties, dict) else {}
        arguments = {key: _value(text, _types(parts.get(key), schema)) for key, text in self._xml.values}
        return self._xml.name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)

    def _is_xml(self) -> bool:
        return self._schemas is not None and self._buffer.startswith(_XmlCall.OPENING, self._start)

    def _may_be_xml(self, text: str) -> bool:
        return self._schemas is not None and text != _XmlCall.OPENING and _XmlCall.OPENING.startswith(text)


class _CallsAlone(_Reader):
    """Calls that are the whole answer, or stand behind a marker: objects, or a list of them. The rest is text."""

    _BETWEEN = "[](),; \n\r\t"

    def __init__(self, form: Format, markers: Sequence[str], functions: Sequence[Function]) -> None:
        super().__init__(form)
        self._markers = markers
        self._names = {function.name for function in functions}
        self._reads_calls = True  # until there is text
        self._is_marked = False  # a marker came before what is read
        self._before = ""  # what stands before the object that is being read, and is text if that is no call
        self._json: _JsonCall | None = None  # the object
        self._bare: tuple[str, int] | None = None  # the name before it, and where the object begins
        self._follows_call = False
        self._longest = max(map(len, markers))
        self._scanned = 0, False  # how far the buffer is nobody's text, and whether a marker is in it

    def feed(self, text: str) -> list[Piece]:
        self._append(text)
        pieces: list[Piece] = []
        while True:
            if self._reads_calls:
                pieces += self._calls()
                if self._reads_calls:
                    return pieces
            found = [place for marker in self._markers if (place := self._buffer.find(marker)) >= 0]
            held = max(_overlap(self._buffer, marker) for marker in self._markers)
            end = min(found, default=len(self._buffer) - held)
            pieces += self._content(self._buffer[:end])
            self._go_on(self._buffer[end:])
            if not found:
                return pieces
            self._reads_calls, self._follows_call = True, False

    def _calls(self) -> list[Piece]:
        """Calls as far as they have come, and text that is none."""
        pieces: list[Piece] = []
        while True:
            if self._json is None and not self._begins():
                if not self._reads_calls:
                    pieces += self._content(self._before)
                    self._before = ""
                return pieces
            assert self._json is not None
            name, arguments = self._json.read(self._buffer)
            if name is not None and (self._is_marked or name in self._names):
                self._json.index = self._num_calls
                pieces += self._call(name, "")
            if arguments and self._json.index is not None:
                pieces.append(Arguments(self._json.index, arguments))
            end = self._json.end
            if end is None:
                return pieces
            self._follows_call = True
            if self._json.index is None:
                found = self._found(self._buffer[:end])
                pieces += self._call(*found) if found else self._content(self._before + self._buffer[:end])
                self._follows_call = found is not None
            self._go_on(self._buffer[end:])
            self._json, self._bare, self._before = None, None, ""

    def _go_on(self, rest: str) -> None:
        self._buffer, self._scanned = rest, (0, False)

    def _begins(self) -> bool:
        """Whether an object begins, which may be a call; if there is text instead, no calls are read any more."""
        start, is_marked, may_go_on = self._between()
        is_marked = is_marked or (self._follows_call and self._is_marked)
        rest = self._buffer[start:]
        head = re.match(r"([\w-]+)(?:\[CALL_ID\]\w*)?(\[ARGS\])?\s*(?=\{)", rest)
        is_call = head is not None and (head[1] in self._names or (is_marked and head[2] is not None))
        if may_go_on or (not is_call and self._may_be_name(rest, is_marked)):
            return False
        self._before, self._is_marked = self._text_before(start), is_marked
        self._go_on(rest)
        if not is_call and not rest.startswith("{"):
            self._reads_calls = False
            return False
        if head is None or not is_call:
            self._json = _JsonCall()
        elif head[2] is not None:
            self._go_on(_head(Function(head[1], None), "arguments", "") + rest[head.end() :])
            self._json = _JsonCall()
            self._json.is_bare = True
        else:  # a name and a brace may be prose: no call before all of it is there
            self._json = _JsonCall(place=head.end())
            self._bare = head[1], head.end()
        return True

    def _between(self) -> tuple[int, bool, bool]:
        """Where brackets, commas, white space and markers end, whether a marker is there, and whether more may come."""
        (place, is_marked), may_go_on = self._scanned, True
        while place < len(self._buffer):
            coming = self._buffer[place : place + self._longest]
            marker = next((m for m in self._markers if coming.startswith(m)), None)
            if marker is not None:
                place, is_marked = place + len(marker), True
            elif any(m.startswith(coming) for m in self._markers):
                break
            elif coming[0] in self._BETWEEN:
                place += 1
            else:
                may_go_on = False
                break
        self._scanned = place, is_marked
        return place, is_marked, may_go_on

    def _text_before(self, place: int) -> str:
        """What stands before that place and is text, if no call follows. Behind a call, what ends a list is not."""
        before = self._buffer[:place]
        if not self._follows_call:
            return before
        opens = re.search(r"[\[(]", before)
        return before[opens.start() :] if opens else ""

    def _may_be_name(self, text: str, is_marked: bool) -> bool:
        """Whether the text may be the beginning of a name with its arguments."""
        if len(text) > _LONGEST_HEAD:
            return False
        there = re.fullmatch(r"([\w-]+)(\[CALL_ID\]\w*)?(\[[A-Z_]*\]?)?(\s*)", text)
        if there is None:
            return False
        coming = there[3] or ""
        if not "[ARGS]".startswith(coming) and (there[2] or not "[CALL_ID]".startswith(coming)):
            return False
        is_whole = bool(there[2] or there[3] or there[4])
        return is_marked or any(n == there[1] if is_whole else n.startswith(there[1]) for n in self._names)

    def _found(self, text: str) -> tuple[str, str] | None:
        """The call that a whole object is, if it is one."""
        if self._bare is not None:
            name, place = self._bare
            return (name, text[place:]) if _is_object(text[place:]) else None
        found = _call_of(text)
        return found if found and (self._is_marked or found[0] in self._names) else None

    def finish(self) -> list[Piece]:
        if self._json is not None and self._json.index is not None:
            return []
        rest = self._before + self._buffer
        if self._json is None and self._follows_call:
            start, _, may_go_on = self._between()
            rest = "" if may_go_on else self._text_before(start) + self._buffer[start:]
        self._buffer = self._before = ""
        return self._last_content(rest)


class _PythonicCalls(_Reader):
    """A list of calls written as in Python, which is the whole answer. Nothing of it is run."""

    # What a list begins with: a character each, or any number of them. No two that follow each other match the same.
    _HEAD = tuple(map(re.compile, (r"\s*", r"\[", r"\s*", r"\w", r"\w*", r"\s*", r"\(")))

    def __init__(self, form: Format) -> None:
        super().__init__(form)
        self._is_list: bool | None = None
        self._num_matched, self._place = 0, 0  # parts of the head, and where the next begins

    def feed(self, text: str) -> list[Piece]:
        self._append(text)
        if self._is_list is None:
            self._is_list = self._begins_list()
        if self._is_list is not False:
            return []  # until its end
        before, self._buffer = self._buffer, ""
        return self._content(before)

    def _begins_list(self) -> bool | None:
        """Whether the answer is a list of calls; None: not known yet. Each letter is looked at once."""
        while self._num_matched < len(self._HEAD):
            found = self._HEAD[self._num_matched].match(self._buffer, self._place)
            if found is None:
                return None if self._place == len(self._buffer) else False
            self._place = found.end()
            if self._place == len(self._buffer) and self._HEAD[self._num_matched].pattern.endswith("*"):
                return None  # more of it may come
            self._num_matched += 1
        return True

    def finish(self) -> list[Piece]:
        found = _python_calls(self._buffer) if self._is_list else None
        if found is None:
            return self._last_content(self._buffer)
        return [piece for name, arguments in found for piece in self._call(name, arguments)]


class _JsonCall:
    """Reads {"name": ..., "arguments": {...}} while it comes: the name once, arguments bit by bit."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

    def __init__(self, closing: str = "", place: int | None = None) -> None:
        """closing: a marker that ends the object even where a brace is missing. place: where arguments alone begin."""
        self._closing, self._has_head = closing, place is None
        self.index: int | None = None  # of the call, once its name is told
        self.end: int | None = None  # where the object ends in the text
        self.is_bare = False  # written as a name and its arguments: the object around them has no end
        self._place, self._depth, self._in_string, self._is_escaped = place or 0, 0, False, False
        self._arguments: tuple[int, int | None] | None = None  # where they begin and end
        self._must_end = False  # behind the arguments: a comma or the last brace comes, or it is missing
        self._told = 0

    def read(self, text: str) -> tuple[str | None, str]:
        """The name, when it is first known, and arguments that have come since the last call. text: all so far."""
        name = None
        if self._has_head and self._arguments is None:
            if head := self._HEAD.match(text):
                with suppress(ValueError):  # a name with an escape that is none: no call
                    name = str(json.loads(head[1], strict=False))
                    self._arguments, self._told = (head.end(), None), head.end()
            self._has_head = len(text) <= _LONGEST_HEAD  # another order of keys: it is read when all is there
        while self._place < len(text) and self.end is None:
            coming = text[self._place : self._place + len(self._closing)]
            if coming and not self._in_string and self._closing.startswith(coming):
                self.end = self._place if coming == self._closing else None  # None: more of the marker may come
                break
            if self._must_end and text[self._place] not in ",} \n\r\t":
                self.end = self._place
                break
            self._step(text[self._place])
        if self._arguments is None:
            return None, ""
        until = min(self._place if self._arguments[1] is None else self._arguments[1], len(text))
        new, self._told = text[self._told : until], max(until, self._told)
        return name, new

    def _step(self, letter: str) -> None:
        place, self._place = self._place, self._place + 1
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
        elif letter == ",":
            self._must_end = False
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            if self._depth == 1 and self._arguments is not None and self._arguments[1] is None:
                self._arguments, self._must_end = (self._arguments[0], place + 1), True
                if self.is_bare:
                    self.end = place + 1
            if self._depth <= 0:
                self.end = place + 1


class _XmlCall:
    """Reads <function=NAME><parameter=KEY>VALUE</parameter>...</function> while it comes, each letter about once.

    A value may hold anything, markers too: it ends where its own end is followed by what may follow it.
    """

    OPENING = "<function="
    _HEAD = re.compile(r"\s*<function=([^>\s]+)>")
    _KEY = re.compile(r"<parameter=([^>\s]+)>\n?")
    _KEY_COMES = re.compile(r"<parameter=[^>\s]*")
    _BACK = 64  # letters: no end of a value, with the space behind it, is longer

    def __init__(self, closing: str) -> None:
        self.name: str | None = None
        self.values: list[tuple[str, str]] = []
        self.end: int | None = None  # where the call ends in the text, or text begins that is none of it
        self.is_call = False  # and it has come to its end
        self._closing = closing
        # Where a value's end is missing, the call's still is.
        self._value_end = re.compile(rf"\n?(?:</parameter>|(?=</function>\s*{re.escape(closing)}))")
        self._place = 0  # behind what was read
        self._key: str | None = None  # of the value that is being read
        self._searched = 0  # the value's end is not before
        self._behind = 0  # where white space ends behind what may be the value's end

    def read(self, text: str, is_all: bool = False) -> None:
        """Takes in what has come. text: all so far; is_all: no more will come."""
        if self.name is None:
            head = self._HEAD.match(text)
            if head is None:
                if is_all or len(text) > _LONGEST_HEAD:
                    self.end = len(text)
                return
            self.name, self._place = head[1], head.end()
        while self.end is None:
            goes_on = self._read_between(text, is_all) if self._key is None else self._read_value(text, is_all)
            if not goes_on:
                return

    def _read_between(self, text: str, is_all: bool) -> bool:
        """The next value's key, or the end. Returns whether to go on reading."""
        self._place = _behind_space(text, self._place)
        rest = text[self._place : self._place + _LONGEST_HEAD]
        if key := self._KEY.match(rest):
            if key.end() == len(rest) and not rest.endswith("\n") and not is_all:
                return False  # the line break behind it is no part of the value
            self._key, self._place = key[1], self._place + key.end()
            self._searched = self._place
            return True
        if rest.startswith("</function>"):
            self.end, self.is_call = self._place + len("</function>"), True
        elif rest.startswith(self._closing):
            self.end, self.is_call = self._place, True
        elif is_all or not self._may_follow(rest):
            self.end = self._place
        return False

    def _read_value(self, text: str, is_all: bool) -> bool:
        for found in self._value_end.finditer(text, self._searched):
            self._behind = _behind_space(text, max(found.end(), self._behind))
            rest = text[self._behind : self._behind + _LONGEST_HEAD]
            is_followed = rest.startswith(("<parameter=", "</function>", self._closing)) or (is_all and not rest)
            if not is_followed and not is_all and self._may_follow(rest):
                self._searched = found.start()
                return False
            if is_followed:
                assert self._key is not None
                self.values.append((self._key, text[self._place : found.start()]))
                self._place, self._key = found.end(), None
                return True
            self._searched = found.end()
        if is_all:
            self.end = len(text)
        self._searched = max(self._searched, len(text) - self._BACK)
        return False

    def _may_follow(self, text: str) -> bool:
        """Whether it may be the beginning of what stands behind a value, or is nothing yet."""
        if len(text) < _LONGEST_HEAD and self._KEY_COMES.fullmatch(text):
            return True
        return any(marker.startswith(text) for marker in ("<parameter=", "</function>", self._closing))


def _call_of(text: str) -> tuple[str, str] | None:
    """A call's name and arguments, whatever the order of its keys; None if it is none."""
    try:
        call = json.loads(text, strict=False)
        name = call["name"]
        given = call.get("arguments", call.get("parameters"))
        given = {} if given in (None, "") else given  # as models write for functions without parameters
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and _is_object(arguments) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False


_JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def _value(text: str, types: set[str]) -> Any:
    """A value as JSON, else as text. types: those that its schema allows, if it says so."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # JSON has no infinite numbers
    except (ValueError, RecursionError):
        return text
    kind = _JSON_TYPES.get(type(value), "null")
    is_other = kind in types or (kind == "integer" and "number" in types)
    return text if "string" in types and (kind == "string" or not is_other) else value


def _types(schema: Any, root: Json, depth: int = 0) -> set[str]:
    """The types that a schema of a value names. root: where its references lead."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    named = schema.get("type", [])
    types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    values = schema.get("enum")
    listed = [*(values if isinstance(values, list) else []), *([schema["const"]] if "const" in schema else [])]
    types |= {_JSON_TYPES.get(type(value), "null") for value in listed}
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            types |= _types(part, root, depth + 1)
    reference = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(schema.get("$ref", "")))
    if reference is not None:
        definitions = root.get(reference[1])
        types |= _types(definitions.get(reference[2]), root, depth + 1) if isinstance(definitions, dict) else set()
    return types


_WORDS = {"true": True, "false": False, "null": None}


def _python_calls(text: str) -> list[tuple[str, str]] | None:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        calls = []
        for call in tree.elts:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                return None
            arguments = {str(word.arg): _literal(word.value) for word in call.keywords}
            calls.append((call.func.id, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
        return calls
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(part) for part in node.elts]
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


def _overlap(text: str, marker: str) -> int:
    """How many characters at the text's end may be the beginning of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0

"""Readers of one tool call, as JSON, XML or Python. `tool_parsers` finds the calls in an answer."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from typing import Any

from graft.server.refusals import Json

MAX_HEAD = 512  # characters of a call before its arguments
_SPACE = re.compile(r"\s*")


def skip_space(text: str, place: int) -> int:
    """The first place from this one on that is not white space."""
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def call_head(name: str, key: str = "arguments") -> str:
    """The JSON of a call up to its arguments. key: what the format calls them."""
    return f'{{"name": {json.dumps(name)}, {json.dumps(key)}: '


class JsonCall:
    """Reads {"name": ..., "arguments": {...}} from a stream: first the name, then the arguments as they arrive."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

    def __init__(self, closing: str = "", place: int | None = None) -> None:
        """closing: a marker that ends the object even if a brace is missing. place: where arguments alone begin."""
        self._closing, self._has_head = closing, place is None
        self.index: int | None = None  # the call's number, once its name was sent
        self.end: int | None = None  # where the object ends in the text
        self.is_bare = False  # the call is a name and arguments: there is no enclosing object to close
        self._place, self._depth, self._in_string, self._is_escaped = place or 0, 0, False, False
        self._arguments: tuple[int, int | None] | None = None  # where they begin and end
        self._must_end = False  # the arguments are over: a comma or the last brace follows, or the brace is missing
        self._sent_until = 0

    def read(self, text: str) -> tuple[str | None, str]:
        """The name, once it is known, and the arguments that are new since the last call. text: all so far."""
        name = None
        if self._has_head and self._arguments is None:
            if head := self._HEAD.match(text):
                with suppress(ValueError):  # an invalid escape in the name: not a call
                    name = str(json.loads(head[1], strict=False))
                    self._arguments, self._sent_until = (head.end(), None), head.end()
            self._has_head = len(text) <= MAX_HEAD  # keys in another order are read when the object is complete
        while self._place < len(text) and self.end is None:
            coming = text[self._place : self._place + len(self._closing)]
            if coming and not self._in_string and self._closing.startswith(coming):
                self.end = self._place if coming == self._closing else None  # None: the marker may be incomplete
                break
            if self._must_end and text[self._place] not in ",} \n\r\t":
                self.end = self._place
                break
            self._step(text[self._place])
        if self._arguments is None:
            return None, ""
        until = min(self._place if self._arguments[1] is None else self._arguments[1], len(text))
        new, self._sent_until = text[self._sent_until : until], max(until, self._sent_until)
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


class XmlCall:
    """Reads <function=NAME><parameter=KEY>VALUE</parameter>...</function> from a stream, in linear time.

    A value may contain anything, even markers. It ends at a </parameter> that is followed by something that may follow
    a value.
    """

    OPENING = "<function="
    _HEAD = re.compile(r"\s*<function=([^>\s]+)>")
    _KEY = re.compile(r"<parameter=([^>\s]+)>\n?")
    _PARTIAL_KEY = re.compile(r"<parameter=[^>\s]*")
    _VALUE_END = re.compile(r"\n?(</parameter>|</function>)")
    _MAX_VALUE_END = len("\n</parameter>")

    def __init__(self, closing: str) -> None:
        self.name: str | None = None
        self.values: list[tuple[str, str]] = []
        self.end: int | None = None  # where the call ends, or where text begins that does not belong to it
        self.is_call = False  # the call is complete
        self._closing = closing
        self._place = 0  # the text before it has been read
        self._key: str | None = None  # the key of the value that is being read
        self._searched = 0  # the value does not end before this place
        self._behind = 0  # end of the white space behind a possible end of the value

    def read(self, text: str, is_all: bool = False) -> None:
        """Read what is new. text: all so far; is_all: no more will come."""
        if self.name is None:
            head = self._HEAD.match(text)
            if head is None:
                if is_all or len(text) > MAX_HEAD:
                    self.end = len(text)
                return
            self.name, self._place = head[1], head.end()
        while self.end is None:
            continues = self._read_key(text, is_all) if self._key is None else self._read_value(text, is_all)
            if not continues:
                return

    def _read_key(self, text: str, is_all: bool) -> bool:
        """Read the next key, or the call's end. Returns whether to continue."""
        self._place = skip_space(text, self._place)
        rest = text[self._place : self._place + MAX_HEAD]
        if key := self._KEY.match(rest):
            if key.end() == len(rest) and not rest.endswith("\n") and not is_all:
                return False  # a line break may follow, which is not part of the value
            self._key, self._place = key[1], self._place + key.end()
            self._searched = self._place
            return True
        if rest.startswith("</function>"):
            self.end, self.is_call = self._place + len("</function>"), True
        elif rest.startswith(self._closing):
            self.end, self.is_call = self._place, True
        elif is_all or not self._may_become(rest, ("<parameter=", "</function>", self._closing)):
            self.end = self._place
        return False

    def _read_value(self, text: str, is_all: bool) -> bool:
        for found in self._VALUE_END.finditer(text, self._searched):
            # If a value's own end is missing, the call's end closes it.
            has_end = found[1] == "</parameter>"
            followers = ("<parameter=", "</function>", self._closing) if has_end else (self._closing,)
            self._behind = skip_space(text, max(found.end(), self._behind))
            rest = text[self._behind : self._behind + MAX_HEAD]
            is_followed = rest.startswith(followers) or (has_end and is_all and not rest)
            if not is_followed and not is_all and self._may_become(rest, followers):
                self._searched = found.start()
                return False
            if is_followed:
                assert self._key is not None
                self.values.append((self._key, text[self._place : found.start()]))
                self._place, self._key = found.end() if has_end else found.start(1), None
                return True
            self._searched = found.end()
        if is_all:
            self.end = len(text)
        self._searched = max(self._searched, len(text) - self._MAX_VALUE_END)
        return False

    def _may_become(self, text: str, markers: tuple[str, ...]) -> bool:
        """Whether the text is empty, or the beginning of a marker or of a key."""
        if "<parameter=" in markers and len(text) < MAX_HEAD and self._PARTIAL_KEY.fullmatch(text):
            return True
        return any(marker.startswith(text) for marker in markers)

    def arguments(self, schema: Json) -> str:
        """The values as a JSON object. schema: of the arguments; it says which values are text."""
        properties = schema.get("properties")
        parts = properties if isinstance(properties, dict) else {}
        values = {key: _value(text, _types(parts.get(key), schema)) for key, text in self.values}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)


def parse_json_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call, its keys in any order; None if the text is not a call."""
    try:
        call = json.loads(text, strict=False)
        name = call["name"]
        given = call.get("arguments", call.get("parameters"))
        given = {} if given in (None, "") else given  # as models write for functions without parameters
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and is_object(arguments) else None


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False


_JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def _value(text: str, types: set[str]) -> Any:
    """A value as JSON if it is JSON, else as text. types: those that its schema allows, if it names any."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # JSON has no infinite numbers
    except (ValueError, RecursionError):
        return text
    kind = _JSON_TYPES.get(type(value), "null")
    is_other = kind in types or (kind == "integer" and "number" in types)
    return text if "string" in types and (kind == "string" or not is_other) else value


def _types(schema: Any, root: Json, depth: int = 0) -> set[str]:
    """The types that a value's schema names. root: the schema that its references refer to."""
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


def parse_python_calls(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments of a list of calls in Python; None if the text is something else. Nothing is executed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        calls = []
        for call in tree.elts:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                return None
            if any(word.arg is None for word in call.keywords):  # **values
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

"""Streaming parsers that split an answer into text, reasoning and tool calls. `tool_formats` says which parser to use.

All of them take time in proportion to the text, whatever a model writes and however the text is cut into pieces.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graft.server.refusals import Json
from graft.server.tool_calls import (
    MAX_HEAD,
    JsonCall,
    XmlCall,
    call_head,
    is_object,
    parse_json_call,
    parse_python_calls,
    skip_space,
)

THINK_MARKERS = ("<think>", "</think>")


# Pieces of an answer


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


# Parsers


class Parser(ABC):
    """Parser of one answer, whose text arrives in parts of any size."""

    num_reasoning_chars = 0  # at the beginning of the text; its markers count

    @abstractmethod
    def feed(self, text: str) -> list[Piece]: ...

    @abstractmethod
    def finish(self) -> list[Piece]:
        """What was held back, once the answer has ended."""


class PlainText(Parser):
    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Thinking(Parser):
    """Reasoning between <think> and </think>. Another parser reads what follows."""

    def __init__(self, has_begun: bool, then: Parser | None) -> None:
        """has_begun: the prompt ends with <think>."""
        self._inside: bool | None = True if has_begun else None  # None: not known yet
        self._then = then or PlainText()
        self._held = ""
        self._space: list[str] = []  # at the beginning of the text
        self._num_read = 0  # characters
        self._is_after = False  # nothing but white space has followed the reasoning yet

    def feed(self, text: str) -> list[Piece]:
        if self._inside is False:
            return self._pass_on(text)
        self._num_read += len(text)
        if not self._held and self._inside is None:
            start = skip_space(text, 0)
            self._space.append(text[:start])
            text = text[start:]
        self._held += text
        if self._inside is None:
            if len(self._held) < len("<think>") and "<think>".startswith(self._held):
                return []
            self._inside = self._held.startswith("<think>")
            if not self._inside:
                return self._then.feed(self._take_held())
            self._held = self._held.removeprefix("<think>")
        before, marker, after = self._held.partition("</think>")
        self.num_reasoning_chars = self._num_read - len(after)
        if marker:
            self._inside, self._held, self._is_after = False, "", True
            return [*([Reasoning(before)] if before else []), *self._pass_on(after)]
        safe = len(before) - _overlap(before, "</think>")
        self._held = before[safe:]
        return [Reasoning(before[:safe])] if safe else []

    def finish(self) -> list[Piece]:
        if self._inside:
            held, self._held = self._held, ""
            return [Reasoning(held)] if held else []
        held = self._take_held() if self._inside is None else ""
        return (self._then.feed(held) if held else []) + self._then.finish()

    def _take_held(self) -> str:
        """The held text, with the white space before it."""
        held, self._held, self._space = "".join([*self._space, self._held]), "", []
        return held

    def _pass_on(self, text: str) -> list[Piece]:
        if self._is_after:
            text = text.lstrip()
            self._is_after = not text
        return self._then.feed(text) if text else []


class CallsOnly(Parser):
    """The calls that another parser finds. Where a call is forced, all else is the markup of a call that was cut."""

    def __init__(self, calls: Parser) -> None:
        self._calls = calls

    def feed(self, text: str) -> list[Piece]:
        return self._without_text(self._calls.feed(text))

    def finish(self) -> list[Piece]:
        return self._without_text(self._calls.finish())

    def _without_text(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if not isinstance(piece, Content)]


class _CallParser(Parser):
    """Base of the parsers of calls. It numbers the calls, and holds white space back until it is known to be text."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._buffer = ""
        self._num_calls = 0
        self._space: list[str] = []

    def _append(self, text: str) -> None:
        """Add to the buffer. CPython appends in place only if a string has one reference, so `self` drops its own."""
        buffer, self._buffer = self._buffer, ""
        buffer += text
        self._buffer = buffer

    def _content(self, text: str) -> list[Piece]:
        """The text without white space at its end, which is held back."""
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
        start = CallStart(index, self._new_id(), name)
        return [start, Arguments(index, arguments)] if arguments else [start]

    def _read_json(self, call: JsonCall, is_known: Callable[[str], bool] = lambda name: True) -> list[Piece]:
        """What is new of a call in the buffer. is_known: whether a function of this name may be called."""
        pieces: list[Piece] = []
        name, arguments = call.read(self._buffer)
        if name is not None and is_known(name):
            call.index = self._num_calls
            pieces += self._call(name, "")
        if arguments and call.index is not None:
            pieces.append(Arguments(call.index, arguments))
        return pieces


class MarkedCalls(_CallParser):
    """Calls between two markers, with text around them.

    A call ends where its JSON does, because a string in it may contain a marker.
    """

    def __init__(
        self,
        new_id: Callable[[], str],
        opening: str,
        closing: str,
        schemas: Mapping[str, Json | None] | None = None,
    ) -> None:
        """schemas: of the functions' arguments, by name. With them, calls may be written as XML."""
        super().__init__(new_id)
        self._opening, self._closing, self._schemas = opening, closing, schemas
        self._json: JsonCall | None = None  # the call that is being read
        self._xml: XmlCall | None = None  # the same, as XML
        self._opened = ""  # the marker it began with; empty for a second call before the closing marker
        self._awaits_closing = False  # a call is complete, and its closing marker has not come
        self._start = 0  # the buffer before this place is white space and was read
        self._searched = 0  # the closing marker does not begin before this place

    def feed(self, text: str) -> list[Piece]:
        self._append(text)
        pieces: list[Piece] = []
        while True:
            if self._awaits_closing and not self._is_past_closing():
                return pieces
            if self._json is None:
                before, marker, after = self._buffer.partition(self._opening)
                if not marker:
                    safe = len(before) - _overlap(before, self._opening)
                    self._set_buffer(before[safe:])
                    return pieces + self._content(before[:safe])
                pieces += self._content(before)
                self._set_buffer(after)
                self._json, self._opened = JsonCall(self._closing), self._opening
            self._start = skip_space(self._buffer, self._start)
            if self._buffer.startswith("{", self._start):
                pieces += self._read_json(self._json)
                end = self._json.end
            elif self._is_xml():
                self._xml = self._xml or XmlCall(self._closing)
                self._xml.read(self._buffer)
                end = self._xml.end
            else:  # another form, or not a call
                place = self._buffer.find(self._closing, self._searched)
                self._searched = max(len(self._buffer) - len(self._closing) + 1, 0)
                end = place if place >= 0 else None
            if end is None:
                return pieces
            if self._json.index is None:
                found = self._parse(self._buffer[:end])
                pieces += self._call(*found) if found else self._content(self._opened + self._buffer[:end])
                if found is None:  # not a call: its closing marker is text as well
                    self._json = self._xml = None
                    start = skip_space(self._buffer, end)
                    pieces += self._content(self._buffer[end:start])
                    if self._buffer.startswith(self._closing, start):
                        pieces += self._content(self._closing)
                        start += len(self._closing)
                    self._set_buffer(self._buffer[start:])
                    continue
            self._set_buffer(self._buffer[end:])
            self._json, self._xml, self._awaits_closing = None, None, True

    def finish(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        if self._awaits_closing:  # the rest is the beginning of a closing marker
            return []
        if self._json is None:
            return self._last_content(rest)
        if self._json.index is not None:  # cut in the middle, and already sent as far as it came
            return []
        if self._xml is not None:
            self._xml.read(rest, is_all=True)
        found = self._parse(rest)
        return self._call(*found) if found is not None else self._last_content(self._opened + rest)

    def _set_buffer(self, rest: str) -> None:
        self._buffer, self._start, self._searched = rest, 0, 0

    def _is_past_closing(self) -> bool:
        """Whether enough text has arrived to tell what follows a call. Skips the closing marker if it is that."""
        rest = self._buffer[self._start :].lstrip("} \n\r\t")  # there may be a brace too many
        self._start = len(self._buffer) - len(rest)
        if self._closing.startswith(rest) or self._may_be_xml(rest):
            return False  # it may be an incomplete marker
        is_closed = rest.startswith(self._closing)
        self._set_buffer(rest.removeprefix(self._closing) if is_closed else self._buffer.lstrip())
        self._awaits_closing = False
        if not is_closed and self._is_xml():
            self._opened, self._json = "", JsonCall(self._closing)
        return True

    def _parse(self, body: str) -> tuple[str, str] | None:
        """Name and arguments of a complete call."""
        if self._xml is None:
            return parse_json_call(body)
        if self._xml.name is None or not self._xml.is_call:
            return None
        return self._xml.name, self._xml.arguments((self._schemas or {}).get(self._xml.name) or {})

    def _is_xml(self) -> bool:
        return self._schemas is not None and self._buffer.startswith(XmlCall.OPENING, self._start)

    def _may_be_xml(self, text: str) -> bool:
        return self._schemas is not None and text != XmlCall.OPENING and XmlCall.OPENING.startswith(text)


class CallsAlone(_CallParser):
    """Calls that are the whole answer or follow a marker: objects, or a list of them. Everything else is text."""

    _SEPARATORS = "[](),; \n\r\t"

    def __init__(self, new_id: Callable[[], str], markers: Sequence[str], names: Sequence[str]) -> None:
        """names: of the functions that may be called."""
        super().__init__(new_id)
        self._markers = markers
        self._names = set(names)
        self._reads_calls = True  # until text comes
        self._is_marked = False  # a marker came before what is read
        self._before = ""  # what stands before the current object; text if the object is not a call
        self._json: JsonCall | None = None  # the object
        self._bare: tuple[str, int] | None = None  # the name before the object, and where the object begins
        self._follows_call = False
        self._longest = max(map(len, markers))
        self._scanned = 0, False  # where the buffer's separators end so far, and whether a marker is among them

    def feed(self, text: str) -> list[Piece]:
        self._append(text)
        pieces: list[Piece] = []
        while True:
            if self._reads_calls:
                pieces += self._read_calls()
                if self._reads_calls:
                    return pieces
            found = [place for marker in self._markers if (place := self._buffer.find(marker)) >= 0]
            held = max(_overlap(self._buffer, marker) for marker in self._markers)
            end = min(found, default=len(self._buffer) - held)
            pieces += self._content(self._buffer[:end])
            self._set_buffer(self._buffer[end:])
            if not found:
                return pieces
            self._reads_calls, self._follows_call = True, False

    def finish(self) -> list[Piece]:
        if self._json is not None and self._json.index is not None:
            return []
        rest = self._before + self._buffer
        if self._json is None and self._follows_call:
            start, _, may_continue = self._skip_separators()
            rest = "" if may_continue else self._text_before(start) + self._buffer[start:]
        self._buffer = self._before = ""
        return self._last_content(rest)

    def _read_calls(self) -> list[Piece]:
        """Calls as far as they have come, and text between them."""
        pieces: list[Piece] = []
        while True:
            if self._json is None and not self._begin_object():
                if not self._reads_calls:
                    pieces += self._content(self._before)
                    self._before = ""
                return pieces
            assert self._json is not None
            pieces += self._read_json(self._json, self._is_callable)
            end = self._json.end
            if end is None:
                return pieces
            self._follows_call = True
            if self._json.index is None:
                found = self._parse(self._buffer[:end])
                pieces += self._call(*found) if found else self._content(self._before + self._buffer[:end])
                self._follows_call = found is not None
            self._set_buffer(self._buffer[end:])
            self._json, self._bare, self._before = None, None, ""

    def _set_buffer(self, rest: str) -> None:
        self._buffer, self._scanned = rest, (0, False)

    def _is_callable(self, name: str) -> bool:
        return self._is_marked or name in self._names

    def _begin_object(self) -> bool:
        """Whether an object begins that may be a call. If text comes instead, stop reading calls."""
        start, is_marked, may_continue = self._skip_separators()
        is_marked = is_marked or (self._follows_call and self._is_marked)
        rest = self._buffer[start:]
        head = re.match(r"([\w-]+)(?:\[CALL_ID\]\w*)?(\[ARGS\])?\s*(?=\{)", rest)
        is_call = head is not None and (head[1] in self._names or (is_marked and head[2] is not None))
        if may_continue or (not is_call and self._may_be_name(rest, is_marked)):
            return False
        self._before, self._is_marked = self._text_before(start), is_marked
        self._set_buffer(rest)
        if not is_call and not rest.startswith("{"):
            self._reads_calls = False
            return False
        if head is None or not is_call:
            self._json = JsonCall()
        elif head[2] is not None:
            self._set_buffer(call_head(head[1]) + rest[head.end() :])
            self._json = JsonCall()
            self._json.is_bare = True
        else:  # a name and a brace may be prose, so the call is read when it is complete
            self._json = JsonCall(place=head.end())
            self._bare = head[1], head.end()
        return True

    def _skip_separators(self) -> tuple[int, bool, bool]:
        """Where separators and markers end, whether a marker is among them, and whether more may come."""
        (place, is_marked), may_continue = self._scanned, True
        while place < len(self._buffer):
            coming = self._buffer[place : place + self._longest]
            marker = next((m for m in self._markers if coming.startswith(m)), None)
            if marker is not None:
                place, is_marked = place + len(marker), True
            elif any(m.startswith(coming) for m in self._markers):
                break
            elif coming[0] in self._SEPARATORS:
                place += 1
            else:
                may_continue = False
                break
        self._scanned = place, is_marked
        return place, is_marked, may_continue

    def _text_before(self, place: int) -> str:
        """The text before that place, if no call follows. The end of a list of calls is not text."""
        before = self._buffer[:place]
        if not self._follows_call:
            return before
        opens = re.search(r"[\[(]", before)
        return before[opens.start() :] if opens else ""

    def _may_be_name(self, text: str, is_marked: bool) -> bool:
        """Whether the text may be the beginning of a name with its arguments."""
        if len(text) > MAX_HEAD:
            return False
        found = re.fullmatch(r"([\w-]+)(\[CALL_ID\]\w*)?(\[[A-Z_]*\]?)?(\s*)", text)
        if found is None:
            return False
        coming = found[3] or ""
        if not "[ARGS]".startswith(coming) and (found[2] or not "[CALL_ID]".startswith(coming)):
            return False
        is_whole = bool(found[2] or found[3] or found[4])
        return is_marked or any(n == found[1] if is_whole else n.startswith(found[1]) for n in self._names)

    def _parse(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a complete object, if it is a call."""
        if self._bare is not None:
            name, place = self._bare
            return (name, text[place:]) if is_object(text[place:]) else None
        found = parse_json_call(text)
        return found if found and self._is_callable(found[0]) else None


class PythonicCalls(_CallParser):
    """A list of calls in Python's syntax, which is the whole answer."""

    _HEAD = re.compile(r"\s*(?:\[\s*(?:\w+\s*(\()?)?)?")  # of a list of calls, as far as it has come

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id)
        self._is_list: bool | None = None  # None: not known yet

    def feed(self, text: str) -> list[Piece]:
        self._append(text)
        if self._is_list is None:
            head = self._HEAD.match(self._buffer, 0, MAX_HEAD)
            assert head is not None  # all its parts are optional
            is_partial = head.end() == len(self._buffer)
            self._is_list = True if head[1] else None if is_partial else False
        if self._is_list is not False:
            return []  # a list is parsed when it is complete
        before, self._buffer = self._buffer, ""
        return self._content(before)

    def finish(self) -> list[Piece]:
        found = parse_python_calls(self._buffer) if self._is_list else None
        if found is None:
            return self._last_content(self._buffer)
        return [piece for name, arguments in found for piece in self._call(name, arguments)]


def _overlap(text: str, marker: str) -> int:
    """How many characters at the text's end may be the beginning of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0

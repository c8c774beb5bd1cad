"""JSON schemas, regular expressions and grammars of tool calls, compiled by llguidance to constrain decoding.

Schemas are untrusted, so their size and compile time are bounded. They are compiled in threads. llguidance releases the
interpreter lock but cannot be interrupted: a schema that takes too long is refused while its thread runs on. When all
threads are taken that way, further schemas are refused; requests without a schema are not affected.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from graft.errors import GraftError
from graft.model.grammar import NOTHING_LEFT, depth_first

# One space where people put one, and none elsewhere: otherwise an unsure model could write spaces for ever.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_SIZE = 64 << 10  # characters
_MAX_SECONDS = 5.0
_NUM_THREADS = 2
_MAX_REASON = 200  # characters of an error

T = TypeVar("T")


class SchemasBusyError(Exception):
    """All compiler threads are busy with slow schemas."""


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar in one of llguidance's languages. param: the request's field that it comes from."""

    kind: Literal["JSON schema", "regular expression", "grammar"]
    text: str
    param: str = "response_format"

    @classmethod
    def schema(cls, schema: Any, param: str = "response_format") -> GrammarSpec:
        try:
            return cls("JSON schema", json.dumps(schema), param)
        except (ValueError, RecursionError) as error:
            raise GraftError(f"{param} cannot be used: {error}") from error

    @classmethod
    def choice(cls, texts: Sequence[str], param: str) -> GrammarSpec:
        return cls("grammar", "start: " + " | ".join(json.dumps(text) for text in texts), param)


class Grammars:
    """Compiles grammars for one model's tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        self._threads = _Threads(_NUM_THREADS)

    async def compile(self, spec: GrammarSpec) -> LLMatcher:
        """The grammar in its start state.

        Raises a GraftError if the grammar is invalid, empty, too large or too slow to compile, and a SchemasBusyError
        if no compiler thread becomes free.
        """
        size = len(spec.text)
        if size > MAX_SIZE:
            raise GraftError(f"{spec.param} has {size} characters, more than the {MAX_SIZE} allowed here")
        try:
            return await self._threads.run(lambda: self._compiled(spec), _MAX_SECONDS)
        except TimeoutError:
            raise GraftError(f"{spec.param} takes longer than {_MAX_SECONDS:g} s to compile: make it simpler") from None

    def _compiled(self, spec: GrammarSpec) -> LLMatcher:
        try:
            if spec.kind == "JSON schema":
                grammar = LLMatcher.grammar_from_json_schema(spec.text, defaults=SPACING)
            elif spec.kind == "regular expression":
                grammar = LLMatcher.grammar_from_regex(spec.text)
            else:
                grammar = LLMatcher.grammar_from_lark(spec.text)
            error = LLMatcher.validate_grammar(grammar, self._tokenizer)
            if not error:
                matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
                error = _error_at_start(matcher)
                if not error:
                    return matcher
        except BaseException as caught:  # many kinds of errors, and panics, which are not an `Exception`
            error = str(caught)
        raise GraftError(f"{spec.param} cannot be used: {_reason(error)}")

    def constraint(self, grammar: LLMatcher, param: str = "response_format") -> GrammarConstraint:
        """A new answer's state in a grammar. param: the request's field that the grammar comes from."""
        return GrammarConstraint(grammar.deep_copy(), param)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, which may be part of a character."""
        return bytes(self._tokenizer.decode_bytes([token]))


def _error_at_start(matcher: LLMatcher) -> str:
    """llguidance's words if nothing fits the grammar, or only a text without end does; else empty."""
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    if not probe.is_error():
        probe.consume_tokens(probe.compute_ff_tokens()[:1])  # a token that must come, if there is one
    return str(probe.get_error()) if probe.is_error() else ""


def _reason(error: str) -> str:
    """llguidance's error as one short line, without its state and its source."""
    error = error.partition("<state>")[0].strip()
    if error.startswith("NoExtensionBias"):
        return "nothing fits it"
    if "Too many items" in error:
        return "it asks for a text without end, or is too complex"
    if found := re.search(r"^error: (.*)", error, re.MULTILINE):  # of a regular expression
        return f"invalid regular expression: {found[1]}"
    lines = [line for line in error.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]  # not excerpts of the source
    words = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", " ".join(" ".join(lines).split()))
    return words if len(words) <= _MAX_REASON else words[:_MAX_REASON] + "..."


class GrammarConstraint:
    """One answer's state in its grammar; implements the constraint of `graft.model.grammar`."""

    def __init__(self, matcher: LLMatcher, param: str = "response_format") -> None:
        self._matcher, self._param = matcher, param
        self._ended = False
        self.error: str | None = None

    def mask(self, scores: Tensor) -> Tensor:
        if self._ended or self.error is not None:
            return scores
        packed = self._ask(lambda: self._matcher.compute_bitmask())
        if packed is None or self._has_failed():
            return scores
        bits = np.frombuffer(packed, dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: len(scores)].astype(bool))
        masked = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        if not bool(masked.isfinite().any()):
            self.fail(NOTHING_LEFT)
            return scores
        return masked

    def take(self, token: int) -> None:
        if self._ended or self.error is not None:
            return
        self._ended = self._ask(lambda: self._matcher.is_stopped()) is True  # then this token ends the answer
        if not self._ended and self.error is None and not self._ask(lambda: self._matcher.consume_token(token)):
            self._has_failed()

    def masks(self, tokens: Sequence[int], parents: Sequence[int], out: np.ndarray) -> dict[int, str]:
        out[:] = -1
        failures: dict[int, str] = {}
        if self._ended or self.error is not None:
            return failures
        matcher, path = None, list[int]()  # a copy of the state after these nodes' tokens; None: to be made
        closed = set[int]()  # nodes that no walk reaches, or after which the answer has ended
        for node in depth_first(parents):
            if node and parents[node] in closed:
                closed.add(node)
                continue
            try:
                if matcher is None:
                    matcher = self._matcher.deep_copy()
                    matcher.consume_tokens([tokens[taken] for taken in path])
                while path and path[-1] != parents[node]:
                    matcher.rollback(1)
                    path.pop()
                if node:
                    if matcher.is_stopped() or not matcher.try_consume_tokens([tokens[node]]):
                        closed.add(node)
                        continue
                    path.append(node)
                bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                error = str(matcher.get_error()) if matcher.is_error() else None
            except BaseException as panic:  # as in `_ask`
                error = str(panic)
            if error is None:
                out[node] = bits[: out[node].nbytes].view(out.dtype)
            else:  # the copy cannot be used any more
                failures[node], matcher = _reason(error), None
                closed.add(node)
                path = [taken for taken in path if taken != node]
        return failures

    def _has_failed(self) -> bool:
        if self.error is None and self._ask(lambda: self._matcher.is_error()):
            self.fail(_reason(str(self._ask(lambda: self._matcher.get_error()))))
        return self.error is not None

    def fail(self, reason: str) -> None:
        self.error = f"{self._param} cannot be followed: {reason}"

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Call the matcher. A panic in it is not an `Exception`; it ends this answer only."""
        try:
            return question()
        except BaseException as error:
            self.fail(_reason(str(error)))
            return None


class _Threads:
    """At most `count` threads for work that may never end; abandoned work keeps its thread.

    An executor would not do: later work, and the interpreter's exit, would wait for abandoned work.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def run(self, work: Callable[[], T], seconds: float) -> T:
        """Run the work. Raises a TimeoutError if it takes longer, a SchemasBusyError if no thread becomes free."""
        try:
            await asyncio.wait_for(self._free.acquire(), seconds)
        except TimeoutError:
            raise SchemasBusyError("the server is busy compiling slow JSON schemas") from None
        loop, answer = asyncio.get_running_loop(), Future[T]()
        answer.set_running_or_notify_cancel()  # the work cannot be cancelled: it frees its thread when it is done

        def release(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free.release)

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        answer.add_done_callback(release)
        try:
            threading.Thread(target=run, name="graft-schema", daemon=True).start()
        except BaseException:
            self._free.release()
            raise
        return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)

"""JSON schemas, regular expressions and grammars of tool calls, compiled by llguidance: they constrain the tokens that
may be accepted.

A schema comes from a stranger, so its size and its compile time are bounded. It is compiled in a thread: llguidance
releases the interpreter lock meanwhile, but cannot be interrupted, so a schema that takes too long is refused while its
thread runs on to its end. When all threads are taken that way, further schemas are refused; requests without a schema
are not affected.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from graft.errors import GraftError

# One space where people put one, and none elsewhere: a model in doubt could write spaces for ever.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_SIZE = 64 << 10  # characters
_MAX_SECONDS = 5.0
_NUM_THREADS = 2

T = TypeVar("T")


class SchemasBusyError(Exception):
    """All compiler threads are busy with schemas that take long."""


@dataclass(frozen=True)
class Wanted:
    """What an answer must fit, in one of llguidance's languages. param: the request's field that asks for it."""

    kind: Literal["JSON schema", "regular expression", "grammar"]
    text: str
    param: str = "response_format"

    @classmethod
    def schema(cls, schema: Any, param: str = "response_format") -> Wanted:
        try:
            return cls("JSON schema", json.dumps(schema), param)
        except (ValueError, RecursionError) as error:
            raise GraftError(f"this JSON schema cannot be used: {error}") from error

    @classmethod
    def choice(cls, texts: Sequence[str], param: str) -> Wanted:
        return cls("grammar", "start: " + " | ".join(json.dumps(text) for text in texts), param)


class Grammars:
    """Compiles what answers must fit for one model's tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        self._threads = _Threads(_NUM_THREADS)

    async def compile(self, wanted: Wanted) -> LLMatcher:
        """The grammar in its start state.

        A GraftError if it is invalid, nothing fits it, or it is too large or takes too long; a SchemasBusyError if no
        compiler thread becomes free.
        """
        what, size = f"this {wanted.kind}", len(wanted.text)
        if size > MAX_SIZE:
            raise GraftError(f"{what} has {size} characters, more than the {MAX_SIZE} allowed here")
        try:
            return await self._threads.run(lambda: self._compiled(wanted), _MAX_SECONDS)
        except TimeoutError:
            raise GraftError(f"{what} takes longer than {_MAX_SECONDS:g} s to compile: make it simpler") from None

    def _compiled(self, wanted: Wanted) -> LLMatcher:
        try:
            if wanted.kind == "JSON schema":
                grammar = LLMatcher.grammar_from_json_schema(wanted.text, defaults=SPACING)
            elif wanted.kind == "regular expression":
                grammar = LLMatcher.grammar_from_regex(wanted.text)
            else:
                grammar = LLMatcher.grammar_from_lark(wanted.text)
            error = LLMatcher.validate_grammar(grammar, self._tokenizer)
            if not error:
                return LLMatcher(self._tokenizer, grammar, log_level=0)
        except BaseException as caught:  # the library's errors are of many kinds, and its panics are no `Exception`
            error = str(caught)
        raise GraftError(f"this {wanted.kind} cannot be used: {' '.join(error.split())}")

    def constraint(self, grammar: LLMatcher) -> GrammarConstraint:
        return GrammarConstraint(grammar.deep_copy())

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; they may be part of a character."""
        return bytes(self._tokenizer.decode_bytes([token]))


class GrammarConstraint:
    """One answer's state in its grammar; implements the constraint of `graft.model.grammar`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
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
            self.error = "what the answer must fit cannot be met: nothing that it allows here may be written"
            return scores
        return masked

    def take(self, token: int) -> None:
        if self._ended or self.error is not None:
            return
        self._ended = self._ask(lambda: self._matcher.is_stopped()) is True  # then the token is the answer's end
        if not self._ended and self.error is None and not self._ask(lambda: self._matcher.consume_token(token)):
            self._has_failed()

    def num_allowed(self, tokens: Sequence[int]) -> int:
        if self.error is not None:
            return 0
        return self._ask(lambda: int(self._matcher.validate_tokens(list(tokens)))) or 0

    def _has_failed(self) -> bool:
        if self.error is None and self._ask(lambda: self._matcher.is_error()):
            self.error = f"the grammar failed: {self._ask(lambda: self._matcher.get_error())}"
        return self.error is not None

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Calls the matcher. A panic inside it is no `Exception`, and ends this answer only."""
        try:
            return question()
        except BaseException as error:
            self.error = f"the grammar failed: {error}"
            return None


class _Threads:
    """At most `count` threads for work that may never end: work that was given up keeps its thread.

    Not an executor: later work would queue behind such work, and so would the interpreter's exit.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def run(self, work: Callable[[], T], seconds: float) -> T:
        """Runs the work; a TimeoutError if it takes longer, a SchemasBusyError if no thread is free in that time."""
        try:
            await asyncio.wait_for(self._free.acquire(), seconds)
        except TimeoutError:
            raise SchemasBusyError("JSON schemas that take long are being compiled") from None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(finish: Callable[[], None]) -> None:
            self._free.release()
            if not answer.done():  # else nobody waits any more
                finish()

        def run() -> None:
            try:
                result = work()
                finish: Callable[[], None] = lambda: answer.set_result(result)  # noqa: E731
            except Exception as error:
                finish = partial(answer.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, finish)

        try:
            threading.Thread(target=run, name="graft-schema", daemon=True).start()
        except BaseException:
            self._free.release()
            raise
        return await asyncio.wait_for(answer, seconds)

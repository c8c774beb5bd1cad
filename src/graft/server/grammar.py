"""JSON schemas, regular expressions and grammars of tool calls, compiled by llguidance to constrain decoding.

Schemas are untrusted, so their size and compile time are bounded. They are compiled in threads. llguidance releases the
interpreter lock but cannot be interrupted: a schema that takes too long is refused while its thread runs on. When all
threads are taken that way, further schemas are refused; requests without a schema are not affected.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from torch import Tensor

from graft.errors import GraftError
from graft.machine import num_cores
from graft.model.grammar import NOTHING_LEFT, GrammarTree, TreeMasks, depth_first

# One space where people put one, and none elsewhere: otherwise an unsure model could write spaces for ever.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_SIZE = 64 << 10  # characters
_MAX_SECONDS = 5.0
_NUM_THREADS = 2
_MOST_THREADS = 16  # that compute masks
# Tokens whose masks are known at once where a string may go on for so many characters.
_SLICES = [rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (10, 15, 20, 30)] + [r'[^"\\\x00-\x1F\x7F]+']
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
        self._tokenizer = from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None, slices=_SLICES
        )
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
        return GrammarConstraint(grammar, param)

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
        """matcher: the grammar in its start state."""
        self._start, self._matcher, self._param = matcher, matcher.deep_copy(), param
        self._taken: list[int] = []
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
        self._taken.append(token)

    @staticmethod
    def masks(trees: Sequence[GrammarTree], out: np.ndarray) -> list[TreeMasks]:
        found = [TreeMasks([-1] * len(tree.tokens), {}) for tree in trees]
        numbers, errors = itertools.count(), dict[int, str]()
        walks = [tree.constraint._walk(tree, own, numbers, errors) for tree, own in zip(trees, found, strict=True)]
        # Each grammar goes to its next node, and then the masks of all are computed together.
        while work := [asked for walk in walks if (asked := next(walk, None)) is not None]:
            errors |= _fill(work, out)
        return found

    def _walk(
        self, tree: GrammarTree, found: TreeMasks, numbers: Iterator[int], errors: Mapping[int, str]
    ) -> Iterator[tuple[LLMatcher, int]]:
        """Go through the nodes that are allowed. At each, ask for the mask of the matcher's state, by its number."""
        path = list[int]()
        for node in depth_first(tree.parents) if not self._ended and self.error is None else ():
            if node and found.numbers[tree.parents[node]] < 0:
                continue
            try:
                is_allowed, error = self._enter(tree, node, path), self._matcher.get_error()
            except BaseException as panic:  # as in `_ask`
                is_allowed, error = False, str(panic)
            if is_allowed:
                number = next(numbers)
                yield self._matcher, number
                error = errors.get(number, "")
            if error:  # the matcher cannot be used any more
                found.failures[node] = _reason(error)
                path = [taken for taken in path if taken != node]
                self._ask(partial(self._read_again, [tree.tokens[taken] for taken in path]))
            elif is_allowed:
                found.numbers[node] = number
        self._ask(lambda: self._matcher.rollback(len(path)))

    def _enter(self, tree: GrammarTree, node: int, path: list[int]) -> bool:
        """Go to a node from the end of a path, both of which change. Returns whether the grammar allows it."""
        while path and path[-1] != tree.parents[node]:
            self._matcher.rollback(1)
            path.pop()
        if node and not self._matcher.try_consume_tokens([tree.tokens[node]]):
            return False
        path += [node] if node else []
        return True

    def _read_again(self, path: list[int]) -> None:
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens([*self._taken, *path])

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


@cache
def _executor() -> LLExecutor:
    return LLExecutor(min(num_cores(), _MOST_THREADS))


def _fill(work: list[tuple[LLMatcher, int]], out: np.ndarray) -> dict[int, str]:
    """Write the masks of these states as rows of out, in parallel and without the interpreter lock.

    Returns errors by row. Grammars of one request share a lock of llguidance's, so their masks come one by one.
    """
    try:
        fill_next_token_bitmask_par(_executor(), work, out)
        return {number: error for matcher, number in work if (error := matcher.get_error())}
    except BaseException as panic:  # as in `_ask`; nobody knows whose it is
        if len(work) == 1:
            return {work[0][1]: str(panic)}
        return {number: error for one in work for number, error in _fill([one], out).items()}


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

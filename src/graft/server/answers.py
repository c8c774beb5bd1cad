"""Answers in OpenAI's format: the scheduler's updates become chunks of a stream, or one object at the end."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from graft.engine.jobs import Job, Update
from graft.request.detokenizer import TextStream
from graft.request.round_trace import RoundRecord
from graft.request.sequence import FinishReason, TokenLogprob
from graft.request.sequence import Sequence as TokenSequence
from graft.request.stats import Stats
from graft.server.grammar import Grammars
from graft.server.refusals import Json, RefusedError, dump_json
from graft.server.schema import StreamOptions
from graft.server.tool_calls import is_object
from graft.server.tool_parsers import CallStart, Content, Parser, Piece, PlainText, Reasoning

_EVENT_SIZE = 256  # bytes; padded events are a multiple of it long


class Answers(ABC):
    """The answers of one request during decoding. Answer i of prompt j has the index j * n + i.

    A subclass has the JSON format of one kind of completion.
    """

    object: str
    chunk_object: str
    prefix: str
    ending = b"data: [DONE]\n\n"  # the last event of a stream that does not fail

    def __init__(
        self,
        model_name: str,
        grammars: Grammars,
        jobs: list[Job],
        *,
        tokenizer: Any | None = None,
        parser: Callable[[], Parser] = PlainText,
        is_one_call: bool = False,
        echoed: Sequence[str] = (),
        is_prompt_only: bool = False,
        with_prompt_logprobs: bool = False,
        is_streamed: bool = True,
    ) -> None:
        """tokenizer: spells the tokens of rounds; None: without rounds. parser: makes a parser for each answer.

        is_one_call: each answer is one tool call and nothing else. echoed: the prompts, with which the answers begin.
        is_prompt_only: the answers themselves are not wanted. is_streamed: otherwise only `whole` is sent.
        """
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.model_name, self.created = model_name, int(time.time())
        self.jobs, self._grammars, self._echoed, self._is_streamed = jobs, grammars, echoed, is_streamed
        self._is_prompt_only, self._with_prompt_logprobs = is_prompt_only, with_prompt_logprobs
        self.sequences = [sequence for job in jobs for sequence in job.sequences]
        self.answers = [
            GrowingAnswer(index, sequence, tokenizer, parser(), is_one_call)
            for index, sequence in enumerate(self.sequences)
        ]
        self._per_job = len(jobs[0].sequences)
        self._echoed_logprobs: dict[int, Json] = {}  # by job

    # The format

    @abstractmethod
    def choice(self, answer: GrowingAnswer, logprobs: Json | None) -> Json:
        """A complete answer."""

    @abstractmethod
    def delta(self, answer: GrowingAnswer, pieces: Sequence[Piece], logprobs: Json | None, reason: str | None) -> Json:
        """The new part of an answer, for one chunk of a stream."""

    @abstractmethod
    def logprobs(self, answer: GrowingAnswer, tokens: Sequence[TokenLogprob], text_offset: int, is_first: bool) -> Json:
        """Log-probabilities of an answer's tokens. text_offset: where the first of them starts in the answer's text.

        is_first: the tokens are the answer's first, so those of an echoed prompt come before them.
        """

    def prompt_logprobs(self, job: Job) -> list[Json | None]:
        """Log-probabilities of the prompt's tokens, with vLLM's field names. The first token has none."""
        return [
            None,
            *(
                {
                    str(other): {"logprob": max(value, -9999.0), "decoded_token": self.spell(other)}
                    for other, value in ({token.token: token.logprob} | token.alternatives).items()
                }
                for token in job.sequences[0].prompt_logprobs
            ),
        ]

    def spell(self, token: int) -> str:
        """A token's text by itself, as log-probabilities name it."""
        return self._grammars.bytes_of(token).decode(errors="replace")

    @property
    def usage(self) -> Json:
        prompt = sum(job.sequences[0].num_prompt_tokens for job in self.jobs)
        new = 0 if self._is_prompt_only else sum(sequence.stats.tokens for sequence in self.sequences)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(job.num_cached_tokens for job in self.jobs)},
        }

    # A stream

    def opening(self) -> list[Json]:
        """Chunks of a stream before its first token."""
        return []

    def closing(self, with_usage: bool) -> list[Json]:
        """Chunks of a stream after its last token."""
        return [{**self._chunk([]), "usage": self.usage}] if with_usage else []

    def failure(self, error: RefusedError) -> list[Json]:
        """Chunks of a stream that fails."""
        return [error.body]

    def event(self, chunk: Json, options: StreamOptions) -> bytes:
        """A chunk as a server-sent event."""
        if options.continuous_usage_stats and "choices" in chunk:
            chunk = {**chunk, "usage": self.usage}
        return b"data: " + event_data(chunk, bool(options.include_obfuscation)) + b"\n\n"

    def answer_of(self, job: int, update: Update) -> GrowingAnswer:
        return self.answers[job * self._per_job + update.index]

    def size_of_echo(self, job: int, update: Update) -> int:
        """Characters and log-probabilities of the prompt that the chunks of an update repeat."""
        if not self._echoed or not self.answer_of(job, update).is_fresh:
            return 0
        return len(self._echoed[job]) + len(self.jobs[job].sequences[0].prompt_logprobs)

    def chunks_for(self, job: int, update: Update) -> list[Json]:
        """Add an update to its answer. Returns the chunks to send."""
        answer = self.answer_of(job, update)
        is_first = answer.is_fresh
        if self._is_prompt_only:
            reason: FinishReason | None = "length" if update.finish_reason is not None else None
            update = replace(update, text="", logprobs=[], finish_reason=reason)
        (pieces, rounds), offset = answer.add(update), answer.num_spelt_chars
        logprobs = None
        if is_first and self._echoed:
            pieces.insert(0, Content(self._echoed[job]))
        asked = self._is_streamed and answer.sequence.settings.logprobs is not None
        if asked and (update.logprobs or (is_first and self._echoed)):
            logprobs = self.logprobs(answer, update.logprobs, offset, is_first)
            answer.num_spelt_chars += sum(len(self.spell(token.token)) for token in update.logprobs)
        if not (pieces or logprobs or rounds or answer.reason):
            return []
        choice = self.delta(answer, pieces, logprobs, answer.reason)
        if rounds:
            choice["rounds"] = rounds
        if answer.reason is not None:
            choice["speculation"] = speculation(answer.sequence.stats)
        return [self._chunk([choice])]

    def _chunk(self, choices: list[Json]) -> Json:
        head = {"id": self.id, "created": self.created, "model": self.model_name}
        return {**head, "object": self.chunk_object, "choices": choices}

    # The answers as one object

    @property
    def is_done(self) -> bool:
        return all(answer.reason is not None for answer in self.answers)

    def whole(self) -> Json:
        choices = []
        of_prompts = [self.prompt_logprobs(job) for job in self.jobs] if self._with_prompt_logprobs else []
        for answer in self.answers:
            sequence = answer.sequence
            asked = sequence.settings.logprobs is not None
            new = [] if self._is_prompt_only else sequence.logprobs
            choice = self.choice(answer, self.logprobs(answer, new, 0, True) if asked else None)
            if self._echoed:
                choice["text"] = self._echoed[answer.index // self._per_job] + choice["text"]
            if of_prompts:
                choice["prompt_logprobs"] = of_prompts[answer.index // self._per_job]
            choice["speculation"] = speculation(sequence.stats)
            if answer.rounds:
                choice["rounds"] = answer.rounds
            choices.append(choice)
        return {**self._chunk(choices), "object": self.object, "usage": self.usage}


class ChatAnswers(Answers):
    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, answer: GrowingAnswer, logprobs: Json | None) -> Json:
        message: Json = {"role": "assistant", "content": answer.text if answer.text or not answer.calls else None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = answer.calls
        return {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": answer.reason}

    def delta(self, answer: GrowingAnswer, pieces: Sequence[Piece], logprobs: Json | None, reason: str | None) -> Json:
        delta: Json = {}
        calls: dict[int, Json] = {}  # one entry each: some clients read only the first of a chunk
        for piece in pieces:
            if isinstance(piece, Content):
                delta["content"] = delta.get("content", "") + piece.text
            elif isinstance(piece, Reasoning):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
            elif isinstance(piece, CallStart):
                calls[piece.index] = {"index": piece.index, **_new_call(piece)}
            else:
                call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        rest = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": answer.index, **rest} for answer in self.answers])]

    def logprobs(self, answer: GrowingAnswer, tokens: Sequence[TokenLogprob], text_offset: int, is_first: bool) -> Json:
        return {
            "content": [
                {
                    **self._entry(token.token, token.logprob),
                    "top_logprobs": [self._entry(*pair) for pair in token.alternatives.items()],
                }
                for token in tokens
            ]
        }

    def _entry(self, token: int, logprob: float) -> Json:
        spelt = self._grammars.bytes_of(token)
        return {"token": spelt.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(spelt)}

    @property
    def usage(self) -> Json:
        count = sum(answer.num_reasoning_tokens for answer in self.answers)
        return {**super().usage, "completion_tokens_details": {"reasoning_tokens": count}}


class TextAnswers(Answers):
    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, answer: GrowingAnswer, logprobs: Json | None) -> Json:
        return {"index": answer.index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.reason}

    def delta(self, answer: GrowingAnswer, pieces: Sequence[Piece], logprobs: Json | None, reason: str | None) -> Json:
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        return {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, answer: GrowingAnswer, tokens: Sequence[TokenLogprob], text_offset: int, is_first: bool) -> Json:
        if not self._echoed:
            return self._spelt(tokens, text_offset)
        number = answer.index // self._per_job
        if number not in self._echoed_logprobs:
            self._echoed_logprobs[number] = self.echoed_logprobs(number)
        before = self._echoed_logprobs[number]
        new = self._spelt(tokens, text_offset + before["text_offset"][-1] + len(before["tokens"][-1]))
        return {name: [*before[name], *new[name]] for name in new} if is_first else new

    def echoed_logprobs(self, job: int) -> Json:
        """Log-probabilities of a prompt's tokens. The first token has none."""
        sequence = self.jobs[job].sequences[0]
        first = self.spell(sequence.ids[0])
        others = self._spelt(sequence.prompt_logprobs, len(first))
        unscored = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: [value, *others[name]] for name, value in unscored.items()}

    def _spelt(self, tokens: Sequence[TokenLogprob], text_offset: int) -> Json:
        spelt = [self.spell(token.token) for token in tokens]
        offsets = [text_offset + length for length in accumulate(map(len, spelt), initial=0)]
        return {
            "tokens": spelt,
            "token_logprobs": [max(token.logprob, -9999.0) for token in tokens],
            "top_logprobs": [
                {self.spell(other): max(value, -9999.0) for other, value in token.alternatives.items()}
                for token in tokens
            ],
            "text_offset": offsets[:-1],
        }


def _new_call(start: CallStart) -> Json:
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": ""}}


class GrowingAnswer:
    """One answer: its text, reasoning and tool calls so far, and its rounds if the request asks for them."""

    def __init__(
        self, index: int, sequence: TokenSequence, tokenizer: Any | None, parser: Parser, is_one_call: bool
    ) -> None:
        self.index, self.sequence, self._is_one_call = index, sequence, is_one_call
        self.text = ""
        self.reasoning = ""
        self.calls: list[Json] = []
        self.num_spelt_chars = 0  # characters of the tokens that log-probabilities were sent for
        self.reason: str | None = None
        self.is_fresh = True  # no update has come yet
        self.updated = 0.0  # time.monotonic() of the last update
        self.rounds: list[Json] = []
        self._parser = parser
        self._tokenizer = tokenizer
        kept = sequence.text.kept if sequence.text is not None else frozenset()
        # It has no stop strings, so its text may be longer than the answer.
        self._spelling = TextStream(tokenizer, sequence.ids, kept=kept) if tokenizer is not None else None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, with its markers."""
        text = self.sequence.text
        return text.num_tokens(self._parser.num_reasoning_chars) if text is not None else 0

    @property
    def _is_whole_call(self) -> bool:
        """Whether the answer is one call that lacks nothing but the markup after its arguments."""
        return self._is_one_call and is_object(self.calls[0]["function"]["arguments"])

    def add(self, update: Update) -> tuple[list[Piece], list[Json]]:
        """Add an update. Returns its pieces and rounds."""
        self.is_fresh = False
        pieces = self._parser.feed(update.text)
        if update.finish_reason is not None:
            pieces += self._parser.finish()
        for piece in pieces:
            if isinstance(piece, Content):
                self.text += piece.text
            elif isinstance(piece, Reasoning):
                self.reasoning += piece.text
            elif isinstance(piece, CallStart):
                self.calls.append(_new_call(piece))
            else:
                self.calls[piece.index]["function"]["arguments"] += piece.text
        self.reason = update.finish_reason
        if self.calls and (self.reason == "stop" or (self.reason == "length" and self._is_whole_call)):
            self.reason = "tool_calls"
        if self._spelling is None:
            return pieces, []
        new = [_round_as_json(record, self._tokenizer, self._spelling) for record in update.rounds]
        self.rounds += new
        return pieces, new


def _round_as_json(record: RoundRecord, tokenizer: Any, spelling: TextStream) -> Json:
    """A round as JSON: its tree, and each new token with the proposer it came from."""
    new = []
    for token, origin in zip(record.new_tokens, record.origins, strict=True):
        spelling.push(token)
        new.append({"id": token, "text": spelling.take(), "origin": origin})
    return {
        "tokens": [tokenizer.decode([token]) for token in record.tokens],
        "parents": record.parents,
        "probabilities": [round(probability, 3) for probability in record.probabilities],
        "sources": record.sources,
        "accepted": record.accepted,
        "num_pruned": record.num_pruned,
        "num_hidden": record.num_hidden,
        "new": new,
    }


def event_data(content: Json, is_padded: bool = False) -> bytes:
    """JSON of an event. Padding hides how much text it has."""
    if not is_padded:
        return dump_json(content)
    size = len(dump_json({**content, "obfuscation": ""}))
    return dump_json({**content, "obfuscation": secrets.token_hex(_EVENT_SIZE)[: -size % _EVENT_SIZE]})


def speculation(stats: Stats) -> Json:
    """Speculation counters of one answer, with vLLM's names where it has them."""
    return {
        "num_rounds": stats.rounds,
        "num_draft_tokens": stats.nodes,
        "num_accepted_tokens": stats.accepted,
        "mean_acceptance_length": round(stats.mean_accepted, 3),
        "draft_acceptance_rate": round(stats.accepted / stats.nodes, 4) if stats.nodes else 0.0,
        "accepted_per_position": [
            stats.accepted_by_depth[depth] for depth in range(1, max(stats.accepted_by_depth, default=0) + 1)
        ],
        "accepted_by_source": dict(stats.accepted_by_source),
        "decode_seconds": round(stats.decode_seconds, 4),
        "prefill_seconds": round(stats.prefill_seconds, 4),
    }

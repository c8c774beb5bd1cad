"""Responses in OpenAI's format, made from the scheduler's updates: chunks of a stream, or one object at the end."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from graft.core.scheduler import Job, Update
from graft.detokenizer import TextStream
from graft.round_trace import RoundRecord
from graft.sequence import Sequence, TokenLogprob
from graft.server.grammar import Grammars
from graft.stats import Stats

Json = dict[str, Any]


class Shape(ABC):
    """JSON format of one kind of completion."""

    object: str
    chunk_object: str
    prefix: str

    def __init__(self, model_name: str, grammars: Grammars) -> None:
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model_name}
        self._grammars = grammars

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def whole(self, choices: list[Json], jobs: list[Job]) -> Json:
        return {**self._head, "object": self.object, "choices": choices, "usage": usage(jobs)}

    def chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def usage_chunk(self, jobs: list[Job]) -> Json:
        return {**self.chunk([]), "usage": usage(jobs)}

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        """An answer in a response that is not streamed."""

    @abstractmethod
    def delta(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        """The new text of an answer in one chunk of a stream."""

    @abstractmethod
    def logprobs(self, tokens: list[TokenLogprob], text_offset: int) -> Json:
        """Log-probabilities of tokens. text_offset: where the first of them starts in the answer's text."""

    def first(self, index: int) -> Json | None:
        """The chunk that a stream sends before an answer's first token, if any."""
        return None

    def _spell(self, token: int) -> str:
        return self._grammars.bytes_of(token).decode(errors="replace")


class ChatShape(Shape):
    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def delta(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def first(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def logprobs(self, tokens: list[TokenLogprob], text_offset: int) -> Json:
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


class TextShape(Shape):
    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    delta = choice

    def logprobs(self, tokens: list[TokenLogprob], text_offset: int) -> Json:
        spelt = [self._spell(token.token) for token in tokens]
        offsets = [text_offset + sum(map(len, spelt[:place])) for place in range(len(spelt))]
        return {
            "tokens": spelt,
            "token_logprobs": [max(token.logprob, -9999.0) for token in tokens],
            "top_logprobs": [
                {self._spell(other): max(value, -9999.0) for other, value in token.alternatives.items()}
                for token in tokens
            ],
            "text_offset": offsets,
        }


class Answers:
    """The answers of one request while they are decoded. Answer i of prompt j has the index j * n + i."""

    def __init__(self, shape: Shape, jobs: list[Job], tokenizer: Any, with_rounds: bool) -> None:
        self.shape, self.jobs = shape, jobs
        sequences = [sequence for job in jobs for sequence in job.sequences]
        self._answers = [_Answer(sequence, tokenizer if with_rounds else None) for sequence in sequences]
        self._per_job = len(jobs[0].sequences)

    @property
    def is_done(self) -> bool:
        return all(answer.reason is not None for answer in self._answers)

    def first(self) -> Json | None:
        """The first chunk of a stream."""
        choices = [self.shape.first(index) for index in range(len(self._answers))]
        return self.shape.chunk([c for c in choices if c is not None]) if choices[0] is not None else None

    def take(self, job: int, update: Update) -> Json | None:
        """The chunk for an update; None while there is nothing to send."""
        index = job * self._per_job + update.index
        answer = self._answers[index]
        rounds, offset = answer.take(update), answer.spelt
        logprobs = None
        if update.logprobs:
            logprobs = self.shape.logprobs(update.logprobs, offset)
            answer.spelt += sum(len(self.shape._spell(token.token)) for token in update.logprobs)
        if not (update.text or logprobs or rounds or update.finish_reason):
            return None
        choice = self.shape.delta(index, update.text, logprobs, update.finish_reason)
        if rounds:
            choice["rounds"] = rounds
        if update.finish_reason is not None:
            choice["speculation"] = speculation(answer.sequence.stats)
        return self.shape.chunk([choice])

    def whole(self) -> Json:
        choices = []
        for index, answer in enumerate(self._answers):
            sequence = answer.sequence
            asked = sequence.settings.logprobs is not None
            logprobs = self.shape.logprobs(sequence.logprobs, 0) if asked else None
            choice = self.shape.choice(index, answer.text, logprobs, answer.reason)
            choice["speculation"] = speculation(sequence.stats)
            if answer.rounds:
                choice["rounds"] = answer.rounds
            choices.append(choice)
        return self.shape.whole(choices, self.jobs)


class _Answer:
    """One answer, with its rounds if they were asked for."""

    def __init__(self, sequence: Sequence, tokenizer: Any | None) -> None:
        self.sequence = sequence
        self.text = ""
        self.spelt = 0  # characters of its tokens, as log-probabilities spell them
        self.reason: str | None = None
        self.rounds: list[Json] = []
        self._tokenizer = tokenizer
        # Knows no stop strings: the answer is a prefix of its text.
        self._spelling = TextStream(tokenizer, sequence.ids) if tokenizer is not None else None

    def take(self, update: Update) -> list[Json]:
        self.text += update.text
        self.reason = update.finish_reason
        if self._spelling is None or update.round is None:
            return []
        new = [_round_as_json(update.round, self._tokenizer, self._spelling)]
        self.rounds += new
        return new


def _round_as_json(record: RoundRecord, tokenizer: Any, spelling: TextStream) -> Json:
    """A round as JSON, for drawing: its tree, and the new text by proposer."""
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


def usage(jobs: Iterable[Job]) -> Json:
    jobs = list(jobs)
    prompt = sum(job.sequences[0].num_prompt_tokens for job in jobs)
    new = sum(sequence.stats.tokens for job in jobs for sequence in job.sequences)
    cached = sum(job.num_cached_tokens for job in jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def speculation(stats: Stats) -> Json:
    """Speculation counters of one answer, by vLLM's names where it has them."""
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

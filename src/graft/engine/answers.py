"""Answers: what `generate` returns, and the stream that gives an answer piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from graft.request.round_trace import RoundRecord
from graft.request.sequence import FinishReason, TokenLogprob
from graft.request.sequence import Sequence as TokenSequence
from graft.request.stats import Stats


@dataclass(frozen=True)
class Choice:
    """One answer."""

    text: str  # "" when the engine has no tokenizer
    ids: list[int]  # the new tokens, including the one that ended the answer
    finish_reason: FinishReason | None  # None when it was cancelled
    seed: int  # with this seed, the same settings give the same answer
    logprobs: list[TokenLogprob]
    stats: Stats


@dataclass(frozen=True)
class Generation:
    """All answers to one prompt; `text`, `ids`, `finish_reason` and `stats` are those of the first."""

    prompt_ids: list[int]
    choices: list[Choice]

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> Generation:
        choices = []
        for s in sequences:
            assert s.settings.seed is not None
            text = s.text.text if s.text is not None else ""
            choices.append(Choice(text, s.new_ids, s.finish_reason, s.settings.seed, s.logprobs, s.stats))
        return cls(sequences[0].ids[: sequences[0].num_prompt_tokens], choices)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def ids(self) -> list[int]:
        return self.choices[0].ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def stats(self) -> Stats:
        return self.choices[0].stats


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer's text; `cancel` it or read `result` at any time."""

    def __init__(
        self,
        sequence: TokenSequence,
        rounds: Generator[list[TokenSequence], None, None],
        watch: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        """rounds: an iterator that decodes one round per step. watch: called with the record of every round."""
        self._sequence, self._rounds, self._watch = sequence, rounds, watch
        sequence.is_recorded = watch is not None

    def __next__(self) -> str:
        text = self._sequence.text
        assert text is not None
        for _ in self._rounds:
            if self._watch is not None:
                for record in self._sequence.take_records():
                    self._watch(record)
            piece = text.take(final=self._sequence.finish_reason is not None)
            if piece:
                return piece
        raise StopIteration

    def cancel(self) -> None:
        """End the answer now and free its KV cache. Accepted tokens stay in `result`."""
        self._rounds.close()

    @property
    def result(self) -> Generation:
        self._sequence.conclude()
        return Generation.of([self._sequence])

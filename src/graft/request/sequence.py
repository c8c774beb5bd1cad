"""Sequence: an answer that is being decoded: its tokens, its text, and when it ends."""

from __future__ import annotations

import itertools
from collections.abc import Container
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from graft.model.grammar import Constraint
from graft.model.sampler import SamplingSettings
from graft.model.verified import VerifyOutput
from graft.request.detokenizer import TextStream
from graft.request.round_trace import RoundRecord
from graft.request.stats import Stats
from graft.tree.tree import PADDING, ROOT, DraftTree

FinishReason = Literal["stop", "length"]
_NUMBERS = itertools.count(1)
_PLACES_AT_ONCE = 256  # prompt log-probabilities computed together; each takes several floats per vocabulary token


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-probability of a token, before temperature, penalties and truncation."""

    token: int
    logprob: float
    alternatives: dict[int, float]  # the likeliest tokens at that position


class Sequence:
    """One answer: its tokens so far (the last one is the next round's root), its text and its statistics."""

    def __init__(
        self,
        prompt: SequenceOf[int],
        settings: SamplingSettings,
        eos_token_ids: SequenceOf[int] = (),
        tokenizer: Any | None = None,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """kept: special tokens that are part of the text."""
        self.number = next(_NUMBERS)
        self.owner: int | None = None  # isolated texts learn only from texts of the same owner; None: from none
        self.group: int | None = None  # common to all answers of a request to one prompt
        self.ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.settings = settings
        self.stats = Stats()
        self.logprobs: list[TokenLogprob] = []
        self.num_prompt_logprobs: int | None = None  # alternatives to report for each prompt token; None: none wanted
        self.prompt_logprobs: list[TokenLogprob] = []  # of prefilled prompt tokens, without the first
        self.finish_reason: FinishReason | None = None
        self.failure: Exception | None = None  # the error that ended it
        self.text = TextStream(tokenizer, prompt, settings.stop, kept) if tokenizer is not None else None
        self.constraint: Constraint | None = None  # the grammar of its text, such as a JSON schema's
        self.speculates = True  # whether its rounds may have trees
        self.is_recorded = False  # whether its rounds are recorded
        self.shows_all = False  # whether records include rejected nodes that may be other users' text
        self._records: list[RoundRecord] = []  # of rounds that were not taken yet
        self._unsettled: list[_Unsettled] = []
        self._is_stopped = False  # by a stop string; the last counted token completes it
        self.endings = frozenset(settings.stop_token_ids) | (
            frozenset() if settings.ignore_eos else frozenset(eos_token_ids)
        )
        self._most_ids = len(prompt) + settings.most_new_tokens

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.num_prompt_tokens :]

    @property
    def num_new(self) -> int:
        return len(self.ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        return self._most_ids - len(self.ids)

    def read_prompt(self, start: int, verified: VerifyOutput) -> None:
        """Take the prompt's log-probabilities from a prefilled chunk that begins at `start`. May be repeated."""
        if self.num_prompt_logprobs is None:
            return
        known = len(self.prompt_logprobs)  # of tokens 1 to `known`; place `known` gives the next one
        end = min(start + verified.counts[0], self.num_prompt_tokens - 1)
        if not start <= known < end:
            return
        for first in range(known, end, _PLACES_AT_ONCE):
            self._read_places(start, first, min(first + _PLACES_AT_ONCE, end), verified, self.num_prompt_logprobs)

    def _read_places(self, start: int, first: int, end: int, verified: VerifyOutput, num_alternatives: int) -> None:
        """Take the log-probabilities of the tokens after places `first` to `end`; the chunk begins at `start`."""
        places = verified.index[0, first - start : end - start].to(verified.logits.device)
        logprobs = torch.log_softmax(verified.logits[places], dim=1)
        tokens = self.ids[first + 1 : end + 1]
        own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
        values, others = logprobs.topk(min(num_alternatives, logprobs.shape[1]), dim=1)
        for token, value, *pair in zip(tokens, own, others.tolist(), values.tolist(), strict=True):
            self.prompt_logprobs.append(TokenLogprob(token, value, dict(zip(*pair, strict=True))))

    def extend(self, tokens: SequenceOf[int], nodes: SequenceOf[int], row: TreeRow) -> None:
        """Append a round's tokens, and end exactly where plain decoding would have ended.

        Text and statistics are slow and not urgent, so `settle` updates them later. It may find a stop string one round
        late; tokens after it are dropped here. nodes: the accepted nodes. row: the verified tree.
        """
        if self._is_stopped:
            self._drop_after_stop()
            return
        if self.settings.logprobs is None and not self._may_end_with(tokens):
            self.ids += tokens
            self._unsettled.append(_Unsettled(tokens, nodes, row))
            if self.is_recorded:
                self.settle()
            return
        num_new = 0
        for depth, token in enumerate(tokens):
            if self.settings.logprobs is not None:
                parent = nodes[depth - 1] if depth else 0  # the node after which the token was chosen
                self.logprobs.append(row.logprob(parent, token, self.settings.logprobs))
            self.ids.append(token)
            num_new += 1
            self.finish_reason = self._ending(token)
            if self.finish_reason is not None:
                break
        self._unsettled.append(_Unsettled(tokens[:num_new], nodes[:num_new], row))
        if self.finish_reason is not None:
            self.conclude()
            if self.text is not None and not self._is_stopped:
                self.text.finish()
        elif self.is_recorded:
            self.settle()

    def settle(self) -> None:
        """Bring text, stop strings, statistics and the round's record up to date with the rounds so far."""
        while self._unsettled and not self._is_stopped:
            round = self._unsettled.pop(0)
            self._count(round, self._read(round.tokens))

    def take_records(self) -> list[RoundRecord]:
        """The records of its rounds since the last call."""
        records, self._records = self._records, []
        return records

    def conclude(self) -> None:
        """Settle between two rounds, where an answer may end, and drop tokens after a stop string."""
        self.settle()
        if self._is_stopped:
            self._drop_after_stop()

    def _read(self, tokens: SequenceOf[int]) -> int:
        """Add tokens to the text, up to the end of a stop string. Returns how many were added."""
        stats, text, least = self.stats, self.text, self.settings.min_tokens
        if text is None:
            stats.tokens += len(tokens)
            return len(tokens)
        for number, token in enumerate(tokens, start=1):
            stats.tokens += 1
            if text.push(token, may_stop=stats.tokens >= least):
                self._is_stopped = True
                return number
        return len(tokens)

    def _count(self, round: _Unsettled, num_new: int) -> None:
        stats, row = self.stats, round.row
        stats.rounds += 1
        if num_nodes := row.num_nodes:
            stats.nodes += num_nodes
            for name, count in row.proposed_by_source().items():
                stats.proposed_by_source[name] += count
        else:
            stats.plain_rounds += 1
        accepted = round.nodes[:num_new]
        stats.accepted += len(accepted)
        for depth, node in enumerate(accepted, start=1):
            stats.accepted_by_depth[depth] += 1
            stats.accepted_by_source[row.source(node)] += 1
        if self.is_recorded:
            self._records.append(row.record(accepted, round.tokens[:num_new], self.shows_all))

    def _drop_after_stop(self) -> None:
        del self.ids[self.num_prompt_tokens + self.stats.tokens :]
        del self.logprobs[self.stats.tokens :]
        self.finish_reason = "stop"

    def _may_end_with(self, tokens: SequenceOf[int]) -> bool:
        """Whether one of these tokens may end the answer."""
        return len(self.ids) + len(tokens) >= self._most_ids or not self.endings.isdisjoint(tokens)

    def _ending(self, token: int) -> FinishReason | None:
        """Why the answer ends with this last token; None if it does not end."""
        if self.num_new >= self.settings.min_tokens and token in self.endings:
            return "stop"
        return "length" if self.num_remaining == 0 else None


class _Unsettled(NamedTuple):
    """A round that is not in text and statistics yet."""

    tokens: SequenceOf[int]
    nodes: SequenceOf[int]
    row: TreeRow


class Scores(Protocol):
    """Log-probabilities of a round's tokens that the host does not compute itself."""

    def logprob(self, row: int, node: int, token: int, num_alternatives: int) -> TokenLogprob:
        """That of a token chosen after a node of a row's tree."""
        ...


class TreeRow:
    """One row of a verified tree, for statistics, log-probabilities and round records."""

    def __init__(
        self,
        tree: DraftTree,
        verified: VerifyOutput | None,
        row: int,
        source_names: SequenceOf[str],
        considered: DraftTree | None = None,
        common_sources: Container[str] = (),
        knew_noise: bool = False,
        scores: Scores | None = None,
    ) -> None:
        """verified, or else scores: needed only for log-probabilities. considered: the tree, then pruned candidates.

        common_sources: see `Policy`. knew_noise: see `RoundRecord`.
        """
        self._tree, self._considered, self._row = tree, considered or tree, row
        self._verified, self._scores = verified, scores
        self._names, self._common_sources = source_names, common_sources
        self._knew_noise = knew_noise

    @property
    def num_nodes(self) -> int:
        return self._tree.num_nodes[self._row]

    def source(self, node: int) -> str:
        return self._names[self._tree.source_lists[self._row][node]]

    def proposed_by_source(self) -> dict[str, int]:
        counts = self._tree.counts_by_source[self._row]
        return {self._names[source]: count for source, count in enumerate(counts) if source > ROOT and count}

    def record(self, accepted: SequenceOf[int], new_tokens: SequenceOf[int], shows_all: bool = True) -> RoundRecord:
        """The round in plain lists, without padding.

        Unless `shows_all`, rejected nodes that may be other users' text are left out.
        """
        tree = self._considered
        tokens, parents, probabilities, sources = (
            values[self._row].tolist() for values in (tree.tokens, tree.parents, tree.probabilities, tree.sources)
        )
        there = [node for node, source in enumerate(sources) if source != PADDING]
        place: dict[int, int] = {}
        for node in there:
            is_own = shows_all or node in accepted or self._names[sources[node]] not in self._common_sources
            if is_own and (node == 0 or parents[node] in place):
                place[node] = len(place)
        nodes = list(place)
        return RoundRecord(
            tokens=[tokens[node] for node in nodes],
            parents=[place[parents[node]] for node in nodes],
            probabilities=[probabilities[node] for node in nodes],
            sources=[self._names[sources[node]] for node in nodes],
            accepted=[place[node] for node in accepted],
            new_tokens=list(new_tokens),
            num_pruned=sum(node > self.num_nodes for node in nodes),
            num_hidden=len(there) - len(nodes),
            knew_noise=self._knew_noise and len(there) > 1,
        )

    def logprob(self, node: int, token: int, num_alternatives: int) -> TokenLogprob:
        if self._scores is not None:
            return self._scores.logprob(self._row, node, token, num_alternatives)
        assert self._verified is not None
        place = int(self._verified.index[self._row, node])
        logprobs = torch.log_softmax(self._verified.logits[place], dim=0)
        values, tokens = logprobs.topk(min(num_alternatives, len(logprobs)))
        alternatives = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token, float(logprobs[token]), alternatives)

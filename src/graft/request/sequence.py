"""Sequence: one answer while it is decoded, its tokens, its text, and the rules by which it ends."""

from __future__ import annotations

import itertools
from collections.abc import Container
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
_PLACES_AT_ONCE = 256  # of a prompt: each takes a float for every token of the vocabulary, several times over


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-probability of a token, before temperature, penalties and truncation."""

    token: int
    logprob: float
    alternatives: dict[int, float]  # the most likely tokens at that position


class Sequence:
    """One answer: its tokens so far (the last is the next round's root), its text and its statistics."""

    def __init__(
        self,
        prompt: SequenceOf[int],
        settings: SamplingSettings,
        eos_token_ids: SequenceOf[int] = (),
        tokenizer: Any | None = None,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """kept: special tokens that are part of its text."""
        self.number = next(_NUMBERS)
        self.owner: int | None = None  # where texts are isolated, one owner's learn from each other; None: nobody's
        self.group: int | None = None  # the same for all answers that a request wants to one prompt
        self.ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.settings = settings
        self.stats = Stats()
        self.logprobs: list[TokenLogprob] = []
        self.num_prompt_logprobs: int | None = None  # how many alternatives to report beside each token of the prompt
        self.prompt_logprobs: list[TokenLogprob] = []  # of the prompt's tokens but the first, as far as it is read
        self.finish_reason: FinishReason | None = None
        self.failure: Exception | None = None  # why it cannot go on
        self.text = TextStream(tokenizer, prompt, settings.stop, kept) if tokenizer is not None else None
        self.constraint: Constraint | None = None  # the grammar that its text must fit, such as JSON of a schema
        self.speculates = True  # whether its rounds may have trees
        self.is_recorded = False  # whether `last_round` is kept, for somebody who watches
        self.shows_all = False  # whether that includes rejected nodes that may be other users' text
        self.last_round: RoundRecord | None = None
        self._unsettled: list[_Unsettled] = []
        self._is_stopped = False  # by a stop string, found at the last token that the statistics count
        self._endings = frozenset(settings.stop_token_ids) | (
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
        """Takes log-probabilities of the prompt from a chunk of it, which begins at `start`. May be read again."""
        if self.num_prompt_logprobs is None:
            return
        known = len(self.prompt_logprobs)  # of tokens 1 to `known`: the next is that behind place `known`
        end = min(start + verified.counts[0], self.num_prompt_tokens - 1)
        if not start <= known < end:
            return
        for first in range(known, end, _PLACES_AT_ONCE):
            self._read_places(start, first, min(first + _PLACES_AT_ONCE, end), verified, self.num_prompt_logprobs)

    def _read_places(self, start: int, first: int, end: int, verified: VerifyOutput, num_others: int) -> None:
        """Takes those of the tokens behind the places from `first` to `end`; the chunk begins at `start`."""
        places = verified.index[0, first - start : end - start].to(verified.logits.device)
        logprobs = torch.log_softmax(verified.logits[places], dim=1)
        tokens = self.ids[first + 1 : end + 1]
        own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
        values, others = logprobs.topk(min(num_others, logprobs.shape[1]), dim=1)
        for token, value, *pair in zip(tokens, own, others.tolist(), values.tolist(), strict=True):
            self.prompt_logprobs.append(TokenLogprob(token, value, dict(zip(*pair, strict=True))))

    def extend(self, tokens: SequenceOf[int], nodes: SequenceOf[int], row: TreeRow) -> None:
        """Appends a round's tokens, and ends exactly where plain decoding would have ended.

        What takes long and nobody waits for, the text and the statistics, is left to `settle`: a stop string is found
        there, perhaps a round late, and what came behind it is dropped here. nodes: the accepted nodes. row: the
        verified tree.
        """
        if self._is_stopped:
            self._drop_behind_stop()
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
        if self.finish_reason is not None or self.is_recorded:
            self.settle()
        if self.finish_reason is not None:
            self._end_text()

    def settle(self) -> None:
        """Catches up with the rounds so far: text, stop strings, statistics, and what a watcher sees."""
        while self._unsettled and not self._is_stopped:
            round = self._unsettled.pop(0)
            self._count(round, self._read(round.tokens))

    def conclude(self) -> None:
        """Settles between two rounds, where an answer may end: nothing is behind a stop string any more."""
        self.settle()
        if self._is_stopped:
            self._drop_behind_stop()

    def _read(self, tokens: SequenceOf[int]) -> int:
        """Adds tokens to the text. Returns how many there were up to a stop string, if one came."""
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
            self.last_round = row.record(accepted, round.tokens[:num_new], self.shows_all)

    def _end_text(self) -> None:
        if self._is_stopped:
            self._drop_behind_stop()
        elif self.text is not None:
            self.text.finish()

    def _drop_behind_stop(self) -> None:
        del self.ids[self.num_prompt_tokens + self.stats.tokens :]
        del self.logprobs[self.stats.tokens :]
        self.finish_reason = "stop"

    def _may_end_with(self, tokens: SequenceOf[int]) -> bool:
        """False only if none of these tokens ends the answer."""
        return len(self.ids) + len(tokens) >= self._most_ids or not self._endings.isdisjoint(tokens)

    def _ending(self, token: int) -> FinishReason | None:
        """Why the answer ends with its last token, if it does."""
        if self.num_new >= self.settings.min_tokens and token in self._endings:
            return "stop"
        return "length" if self.num_remaining == 0 else None


class _Unsettled(NamedTuple):
    """A round that the text and the statistics do not know of yet."""

    tokens: SequenceOf[int]
    nodes: SequenceOf[int]
    row: TreeRow


class TreeRow:
    """One row of a verified tree, as statistics, log-probabilities and round records need it."""

    def __init__(
        self,
        tree: DraftTree,
        verified: VerifyOutput,
        row: int,
        source_names: SequenceOf[str],
        considered: DraftTree | None = None,
        common_sources: Container[str] = (),
    ) -> None:
        """considered: the tree with pruned candidates behind its nodes. common_sources: see `Policy`."""
        self._tree, self._considered, self._row = tree, considered or tree, row
        self._verified = verified
        self._names, self._common_sources = source_names, common_sources

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

        Unless it shows all, nodes that may be other users' text are left out if they were not accepted.
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
        )

    def logprob(self, node: int, token: int, num_alternatives: int) -> TokenLogprob:
        place = int(self._verified.index[self._row, node])
        logprobs = torch.log_softmax(self._verified.logits[place], dim=0)
        values, tokens = logprobs.topk(min(num_alternatives, len(logprobs)))
        alternatives = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token, float(logprobs[token]), alternatives)

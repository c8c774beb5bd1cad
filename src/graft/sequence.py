"""Sequence: one answer while it is decoded, its tokens, its text, and the rules by which it ends."""

from __future__ import annotations

import itertools
from collections.abc import Container
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from graft.detokenizer import TextStream
from graft.model.grammar import Constraint
from graft.model.sampler import SamplingSettings
from graft.round_trace import RoundRecord
from graft.spec_decode.tree import PADDING, ROOT, DraftTree
from graft.stats import Stats

FinishReason = Literal["stop", "length"]
_NUMBERS = itertools.count(1)


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
    ) -> None:
        self.number = next(_NUMBERS)
        self.owner: int | None = None  # where texts are isolated, one owner's learn from each other; None: nobody's
        self.ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.settings = settings
        self.stats = Stats()
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.failure: Exception | None = None  # why it cannot go on
        self.text = TextStream(tokenizer, prompt, settings.stop) if tokenizer is not None else None
        self.constraint: Constraint | None = None  # the grammar that its text must fit, such as JSON of a schema
        self.is_recorded = False  # whether `last_round` is kept, for somebody who watches
        self.shows_all = False  # whether that includes rejected nodes that may be other users' text
        self.last_round: RoundRecord | None = None
        self._endings = frozenset(settings.stop_token_ids) | (
            frozenset() if settings.ignore_eos else frozenset(eos_token_ids)
        )

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.num_prompt_tokens :]

    @property
    def num_remaining(self) -> int:
        return self.settings.max_new_tokens - self.stats.tokens

    def extend(self, tokens: SequenceOf[int], nodes: SequenceOf[int], row: TreeRow) -> None:
        """Appends a round's tokens one by one, and ends exactly where plain decoding would have ended.

        nodes: the accepted nodes. row: the verified tree.
        """
        stats, num_before = self.stats, self.stats.tokens
        stats.rounds += 1
        if row.num_nodes:
            stats.nodes += row.num_nodes
            for name, count in row.proposed_by_source().items():
                stats.proposed_by_source[name] += count
        else:
            stats.plain_rounds += 1
        for depth, token in enumerate(tokens):
            if self.settings.logprobs is not None:
                parent = nodes[depth - 1] if depth else 0  # the node after which the token was chosen
                self.logprobs.append(row.logprob(parent, token, self.settings.logprobs))
            self.ids.append(token)
            stats.tokens += 1
            self.finish_reason = self._ending(token)
            if self.finish_reason is not None:
                break
        num_new = stats.tokens - num_before
        accepted = nodes[:num_new]
        stats.accepted += len(accepted)
        for depth, node in enumerate(accepted, start=1):
            stats.accepted_by_depth[depth] += 1
            stats.accepted_by_source[row.source(node)] += 1
        if self.finish_reason is not None and self.text is not None:
            self.text.finish()
        if self.is_recorded:
            self.last_round = row.record(accepted, tokens[:num_new], self.shows_all)

    def _ending(self, token: int) -> FinishReason | None:
        old_enough = self.stats.tokens >= self.settings.min_tokens
        stop_string = self.text is not None and self.text.push(token, may_stop=old_enough)
        if stop_string or (old_enough and token in self._endings):
            return "stop"
        return "length" if self.num_remaining == 0 else None


class TreeRow:
    """One row of a verified tree, as statistics, log-probabilities and round records need it."""

    def __init__(
        self,
        tree: DraftTree,
        logits: Tensor,
        row: int,
        source_names: SequenceOf[str],
        considered: DraftTree | None = None,
        common_sources: Container[str] = (),
    ) -> None:
        """considered: the tree with pruned candidates behind its nodes. common_sources: see `Policy`."""
        self._tree, self._considered, self._row = tree, considered or tree, row
        self._sources, self._counts = tree.source_lists[row], tree.counts_by_source[row]
        self._logits = logits
        self._names, self._common_sources = source_names, common_sources
        self.num_nodes = sum(self._counts[ROOT + 1 :])

    def source(self, node: int) -> str:
        return self._names[self._sources[node]]

    def proposed_by_source(self) -> dict[str, int]:
        return {self._names[source]: count for source, count in enumerate(self._counts) if source > ROOT and count}

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
        logprobs = torch.log_softmax(self._logits[self._row, node], dim=0)
        values, tokens = logprobs.topk(min(num_alternatives, len(logprobs)))
        alternatives = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token, float(logprobs[token]), alternatives)

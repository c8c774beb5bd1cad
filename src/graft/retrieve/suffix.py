"""Suffix lookup: what followed the longest earlier occurrences of the text's own end.

It looks in the text itself and in texts that were finished before, at the root and under the likeliest drafted
nodes: a drafted token may complete an occurrence that the text alone does not have.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graft.pool import Pool
from graft.retrieve.base import History, Judged, Weigh, named, part_of
from graft.retrieve.rows import Place, Row, add_rows, likeliest_places

_MIN_MATCH = 2
_MAX_MATCH = 24
_MAX_OCCURRENCES = 12  # the most recent ones of a pair of tokens are looked at
_MATCHES = (2, 3, 4, 6, 9, 13, 18, _MAX_MATCH)  # least lengths of the evidence buckets
_SHARES = (0.0, 0.3, 0.6, 0.9)  # least shares, among the occurrences that came as far

Continuation = tuple[int, list[int]]  # match length, following tokens


class SuffixIndex:
    """Texts one behind the other, indexed by pairs of tokens; the oldest go when there are too many tokens."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        self._starts: list[int] = []  # of each text, as places count since the first ever
        self._dropped = 0  # tokens that are gone
        self._ends: dict[tuple[int, int], deque[int]] = {}  # pair -> places just behind its occurrences

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def texts(self) -> list[list[int]]:
        places = [start - self._dropped for start in self._starts] + [len(self._tokens)]
        return [self._tokens[a:b] for a, b in pairwise(places)]

    def begin(self) -> None:
        """What comes from here on is another text: no match and no continuation reaches over its start."""
        self._starts.append(self._dropped + len(self._tokens))

    def extend(self, tokens: Sequence[int]) -> None:
        start = self._starts[-1] - self._dropped
        for token in tokens:
            self._tokens.append(token)
            if len(self._tokens) - start >= _MIN_MATCH:
                pair = (self._tokens[-2], token)
                ends = self._ends.get(pair)
                if ends is None:
                    ends = self._ends[pair] = deque(maxlen=_MAX_OCCURRENCES)
                ends.append(self._dropped + len(self._tokens))
        while self._max_tokens is not None and len(self._tokens) > self._max_tokens and len(self._starts) > 1:
            self._drop_oldest()

    def continuations(self, suffix: Sequence[int], length: int) -> list[Continuation]:
        """Of every occurrence of the suffix's last pair: how far back it matches, and up to `length` tokens behind."""
        if len(suffix) < _MIN_MATCH:
            return []
        found = []
        tokens, starts = self._tokens, self._starts
        for absolute in self._ends.get((suffix[-2], suffix[-1]), ()):
            following = bisect_left(starts, absolute)  # the text behind the occurrence's
            start, end = starts[following - 1] - self._dropped, absolute - self._dropped
            stop = starts[following] - self._dropped if following < len(starts) else len(tokens)
            if end == stop:
                continue  # its text's end
            match, most = _MIN_MATCH, min(end - start, len(suffix), _MAX_MATCH)
            while match < most and tokens[end - match - 1] == suffix[-match - 1]:
                match += 1
            found.append((match, tokens[end : min(end + length, stop)]))
        return found

    def _drop_oldest(self) -> None:
        del self._starts[0]
        count = self._starts[0] - self._dropped
        for pair in pairwise(self._tokens[:count]):
            ends = self._ends.get(pair)
            while ends and ends[0] <= self._dropped + count:
                ends.popleft()
            if ends is not None and not ends:
                del self._ends[pair]
        del self._tokens[:count]
        self._dropped += count


class SuffixLookup:
    """A tree of what followed the longest matches: first of the text itself, then of finished texts."""

    names: tuple[str, ...] = ("suffix", "past")
    # Longer matches are surer, and so are tokens that all occurrences agree on.
    prior = (
        (torch.linspace(0.35, 0.95, len(_MATCHES))[:, None] * torch.tensor([0.25, 0.5, 0.75, 1.0]))
        .flatten()
        .expand(2, -1)
        .clone()
    )

    def __init__(
        self,
        depth: int = 32,
        num_nodes: int = 40,  # of the tree at one place
        num_drafted: int = 10,  # drafted nodes that are looked up beside the root
        max_past_tokens: int = 200_000,
        keep_past: bool = True,  # finished texts help later ones
    ) -> None:
        self._depth, self._num_nodes, self._num_drafted = depth, num_nodes, num_drafted
        self._own: WeakKeyDictionary[History, SuffixIndex] = WeakKeyDictionary()
        self._max_past_tokens = max_past_tokens
        self._past = SuffixIndex(max_past_tokens)
        self._keeps_past = keep_past

    def propose(self, pool: Pool, histories: Sequence[History], first: int, weigh: Weigh, max_depth: int) -> None:
        rows = [Row(pool) for _ in histories]
        places = likeliest_places(pool, self._num_drafted, max_depth)
        for history, row, its_places in zip(histories, rows, places, strict=True):
            indices = (self._index(history), self._past)
            for place in its_places:
                suffix = history.ids[-_MAX_MATCH:] + place.path
                length = min(self._depth, max_depth - place.depth)
                for source, index in enumerate(indices):
                    self._add(row, place, source, index.continuations(suffix, length))
        add_rows(pool, rows, first, weigh)

    def _add(self, row: Row, place: Place, source: int, found: list[Continuation]) -> None:
        """A tree of what was found, below a place, breadth first until it is full."""
        if not found:
            return
        longest = max(match for match, _ in found)
        # Shorter matches than half the longest only spread the same few places thinner.
        branches = deque([(place.node, place.depth, [chain for match, chain in found if 2 * match > longest])])
        left = self._num_nodes
        while branches and left > 0:
            parent, depth, branch = branches.popleft()
            # A token further down is reached only if the ones before fitted: by then the match is longer.
            match = longest + depth - place.depth
            following: dict[int, list[list[int]]] = {}
            for chain in branch:
                if len(chain) > depth - place.depth:
                    following.setdefault(chain[depth - place.depth], []).append(chain)
            for token, chains in sorted(following.items(), key=lambda item: -len(item[1]))[:left]:
                evidence = _evidence(match, len(chains) / len(branch))
                branches.append((row.add(parent, token, depth + 1, source, evidence), depth + 1, chains))
                left -= 1

    def learn(self, judged: Judged) -> None:
        """Nothing to do: texts are taken from their histories."""

    def finish(self, history: History) -> None:
        if self._keeps_past:
            self._past.begin()
            self._past.extend(history.ids)

    def state(self) -> dict[str, Tensor]:
        texts = self._past.texts
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
        return named("past", {"tokens": tokens, "lengths": lengths})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._past = SuffixIndex(self._max_past_tokens)
        if past := part_of(state, "past"):
            tokens = iter(past["tokens"].tolist())
            for length in past["lengths"].tolist():
                self._past.begin()
                self._past.extend(list(islice(tokens, length)))

    def _index(self, history: History) -> SuffixIndex:
        index = self._own.get(history)
        if index is None:
            index = self._own[history] = SuffixIndex()
            index.begin()
        index.extend(history.ids[len(index) :])
        return index


def _evidence(match: int, share: float) -> int:
    length = bisect_right(_MATCHES, match) - 1
    return length * len(_SHARES) + bisect_right(_SHARES, share) - 1

"""Suffix lookup: what followed the longest earlier occurrences of the text's own end, in the same context."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graft.retrieve.base import History
from graft.retrieve.rows import TreeRow, stacked
from graft.target import Verified
from graft.tree import DraftTree

_MIN_MATCH = 2
_MAX_MATCH = 32
_MAX_OCCURRENCES = 16  # the most recent ones of a pair of tokens are remembered
_NUM_BUCKETS = 13  # two per doubling of the match length


class SuffixIndex:
    """One sequence's tokens, indexed by their last pair. Memory is linear in the context."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, int], deque[int]] = {}  # pair -> places just behind its occurrences

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            if len(self._tokens) >= _MIN_MATCH:
                pair = (self._tokens[-2], token)
                self._ends.setdefault(pair, deque(maxlen=_MAX_OCCURRENCES)).append(len(self._tokens))

    def catch_up(self, tokens: list[int]) -> None:
        self.extend(tokens[len(self._tokens) :])

    def continuations(self, count: int, length: int) -> list[tuple[int, list[int]]]:
        """At most `count` (match length, following tokens), the longest match first, of equals the latest."""
        end = len(self._tokens)
        earlier = [e for e in self._ends.get(tuple(self._tokens[-2:]), ()) if e != end]  # type: ignore[arg-type]
        matches = sorted(((self._match_length(e), e) for e in earlier), reverse=True)
        return [(match, self._tokens[e : e + length]) for match, e in matches[:count]]

    def _match_length(self, end: int) -> int:
        tokens, here = self._tokens, len(self._tokens)
        length = _MIN_MATCH
        while length < min(end, _MAX_MATCH) and tokens[end - length - 1] == tokens[here - length - 1]:
            length += 1
        return length


class SuffixLookup:
    """Chains copied from behind earlier occurrences of the current suffix."""

    name = "suffix"
    prior = torch.linspace(0.3, 0.95, _NUM_BUCKETS)

    def __init__(self, num_chains: int = 3, depth: int = 16) -> None:
        self._num_chains = num_chains
        self._depth = depth
        self._indices: WeakKeyDictionary[History, SuffixIndex] = WeakKeyDictionary()

    def propose(self, histories: Sequence[History], roots: Tensor, max_depth: int) -> DraftTree:
        depth = min(self._depth, max_depth)
        rows = []
        for history in histories:
            row = TreeRow(history.ids[-1])
            for match, chain in self._index(history).continuations(self._num_chains, depth):
                row.add_chain(chain, [_bucket(match + i) for i in range(len(chain))])
            rows.append(row)
        return stacked(rows, depth, roots.device)

    def learn(self, verified: Verified) -> None:
        """Nothing to do: a sequence's own tokens are taken from its history."""

    def _index(self, history: History) -> SuffixIndex:
        index = self._indices.get(history)
        if index is None:
            index = self._indices[history] = SuffixIndex()
        index.catch_up(history.ids)
        return index


def _bucket(match: int) -> int:
    """A token further down is reached only if the ones before fitted: by then the match is longer."""
    return min(round(2 * math.log2(match)), _NUM_BUCKETS - 1)

"""DatastoreLookup: proposes what followed the longest match of the text's end in an index on disk."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graft.datastore.lookup import MAX_MATCH, Continuation, Datastore
from graft.spec_decode.proposers.base import History, TargetTopK
from graft.tree.candidates import Candidates, Columns

_NUM_LENGTHS = 5  # score buckets by match length: from 2, 4, 8, 16, 32 tokens
_SHARES = (0.15, 0.35, 0.6, 0.85)  # limits between score buckets by share of the occurrences


class DatastoreLookup:
    """Retriever of the commonest continuations of the longest match."""

    names: tuple[str, ...] = ("datastore",)
    common: tuple[str, ...] = names
    splits_by_noise = True
    # Measured on held-out source code (docs/datastore.md). High values are lowered, as a model is less predictable.
    prior = torch.tensor(
        [
            # share below .15, .35, .6, .85, above
            [0.04, 0.12, 0.26, 0.45, 0.75],  # matches from 2 tokens
            [0.05, 0.14, 0.42, 0.65, 0.88],  # from 4
            [0.05, 0.17, 0.70, 0.83, 0.93],  # from 8
            [0.06, 0.20, 0.80, 0.88, 0.95],  # from 16
            [0.07, 0.22, 0.85, 0.92, 0.97],  # from 32
        ]
    ).view(1, -1)
    sampled_prior = prior

    def __init__(self, datastore: Datastore, num_chains: int = 4, depth: int = 16, num_drafted: int = 4) -> None:
        """num_drafted: drafted nodes to look up, besides the root."""
        self._datastore = datastore
        self._num_chains, self._depth, self._num_drafted = num_chains, depth, num_drafted

    def propose(
        self, candidates: Candidates, histories: Sequence[History], first: int, acceptance_probs: Tensor, max_depth: int
    ) -> None:
        rows = []
        for history, places in zip(histories, candidates.places(self._num_drafted, max_depth), strict=True):
            new = _NewNodes(candidates.width, first)
            for place in places:
                context = history.ids[-MAX_MATCH:] + place.path
                depth = min(self._depth, max_depth - place.depth)
                match = self._datastore.continuations(context, self._num_chains, depth)
                for chain in match.continuations:
                    node = place.node
                    for step, bucket in enumerate(_score_buckets(match.length, match.num_read, chain), start=1):
                        node = new.add(node, chain.tokens[step - 1], place.depth + step, bucket)
            rows.append(new.columns)
        candidates.add_rows(rows, acceptance_probs)

    def learn(self, top_k: TargetTopK) -> None:
        """Nothing to do: the index is read-only."""

    def finish(self, history: History) -> None:
        """Nothing to do: the index is read-only."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to do: there is no state."""


class _NewNodes:
    """One row's proposals, numbered after its candidates."""

    def __init__(self, first: int, source: int) -> None:
        self._first, self._source = first, source
        self.columns = Columns([], [], [], [], [])
        self._numbers: dict[tuple[int, int], int] = {}  # by parent and token

    def add(self, parent: int, token: int, depth: int, score_bucket: int) -> int:
        """Add a node unless it exists; returns its number."""
        new = self._first + len(self._numbers)
        node = self._numbers.setdefault((parent, token), new)
        if node == new:
            for column, value in zip(self.columns, (token, parent, depth, self._source, score_bucket), strict=True):
                column.append(value)
        return node


def _score_buckets(match: int, num_read: int, chain: Continuation) -> list[int]:
    """The score bucket of every token of a continuation, by match length and share of occurrences."""
    buckets = []
    for depth, (reached, agree) in enumerate(zip([num_read, *chain.counts], chain.counts, strict=False)):
        # A deeper token matters only if those before it are accepted, and then the match is longer.
        length = min((match + depth).bit_length() - 2, _NUM_LENGTHS - 1)
        # One more occurrence counts as disagreeing, so that a share of few occurrences is worth less.
        share = agree / (reached + 1)
        buckets.append(length * (len(_SHARES) + 1) + bisect_right(_SHARES, share))
    return buckets

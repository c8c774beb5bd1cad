"""Datastore lookup: what followed the longest match of the text's own end in an index on disk."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from graft.index.store import Continuation, Datastore
from graft.retrieve.base import History
from graft.retrieve.rows import TreeRow, stacked
from graft.target import Verified
from graft.tree import DraftTree

_NUM_LENGTHS = 5  # classes of the match length: from 2, 4, 8, 16, 32 tokens
_SHARES = (0.15, 0.35, 0.6, 0.85)  # limits between the classes of the share


class DatastoreLookup:
    """The commonest continuations of the longest match, as one small tree."""

    name = "datastore"
    # As held-out source code had it (docs/index.md); high ones are lowered, as a model is no such text.
    prior = torch.tensor(
        [
            # share below .15, .35, .6, .85, above
            [0.04, 0.12, 0.26, 0.45, 0.75],  # matches from 2 tokens
            [0.05, 0.14, 0.42, 0.65, 0.88],  # from 4
            [0.05, 0.17, 0.70, 0.83, 0.93],  # from 8
            [0.06, 0.20, 0.80, 0.88, 0.95],  # from 16
            [0.07, 0.22, 0.85, 0.92, 0.97],  # from 32
        ]
    ).flatten()

    def __init__(self, datastore: Datastore, num_chains: int = 4, depth: int = 16) -> None:
        self._datastore = datastore
        self._num_chains = num_chains
        self._depth = depth

    def propose(self, histories: Sequence[History], roots: Tensor, max_depth: int) -> DraftTree:
        depth = min(self._depth, max_depth)
        rows = []
        for history in histories:
            row = TreeRow(history.ids[-1])
            match = self._datastore.continuations(history.ids, self._num_chains, depth)
            for chain in match.continuations:
                row.add_chain(chain.tokens, _evidence(match.length, match.num_read, chain))
            rows.append(row)
        return stacked(rows, depth, roots.device)

    def learn(self, verified: Verified) -> None:
        """Nothing to do: the index is read-only."""


def _evidence(match: int, num_read: int, chain: Continuation) -> list[int]:
    """The bucket of every token: how long the match is by then, and how many of those that got there go on so."""
    buckets = []
    for depth, (reached, agree) in enumerate(zip([num_read, *chain.counts], chain.counts, strict=False)):
        # A token further down is reached only if the ones before fitted: by then the match is longer.
        length = min((match + depth).bit_length() - 2, _NUM_LENGTHS - 1)
        # One more counts as going elsewhere: of one occurrence little is known, of sixty much.
        share = agree / (reached + 1)
        buckets.append(length * (len(_SHARES) + 1) + bisect_right(_SHARES, share))
    return buckets

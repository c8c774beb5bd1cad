"""NgramTables: proposes the target's own top-k successors of n-grams that it has verified before.

Each wave looks up the likeliest candidates, of any source, that were not looked up yet. A candidate gets the successors
of its last three tokens if the target has verified them before, else of the last two, else of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graft.spec_decode.buckets import BUCKET_PROBABILITIES
from graft.spec_decode.proposers.base import History, TargetTopK, named, part_of
from graft.spec_decode.proposers.successor_table import ISOLATED_ROWS, SuccessorTable, SuccessorTables, adjacency_table
from graft.tree.candidates import Candidates

_NAMES = {1: "adjacency", 2: "bigram", 3: "trigram"}
# Prior acceptance probability / probability of the successor in its earlier context. A longer n-gram means a more
# similar context.
_PRIOR_FACTORS = {1: 0.5, 2: 0.7, 3: 0.85}
_SAMPLED = 0.6  # factor on priors in sampled rows, measured at temperatures 0.7 and 1


class NgramTables:
    """Retriever over successor tables of several n-gram orders."""

    splits_by_noise = False

    def __init__(
        self,
        vocab_size: int,
        orders: Sequence[int] = (3, 2, 1),
        num_rows: int = 1 << 18,  # of each hashed table
        waves: int = 5,
        beam: int = 12,  # nodes to look up in a wave
        isolated: bool = False,  # texts do not learn from each other
    ) -> None:
        """orders: lengths of n-grams, longest first."""
        tables = [
            SuccessorTable(order, ISOLATED_ROWS if isolated else num_rows, isolated=isolated)
            if order > 1
            else adjacency_table(vocab_size, isolated)
            for order in orders
        ]
        self._tables = SuccessorTables(tables)
        self.names = tuple(_NAMES[order] for order in orders)
        self.common: tuple[str, ...] = () if isolated else self.names
        self.prior = torch.stack([_PRIOR_FACTORS[order] * BUCKET_PROBABILITIES for order in orders])
        self.sampled_prior = _SAMPLED * self.prior
        self._waves = waves
        self._beam = beam

    def propose(
        self, candidates: Candidates, histories: Sequence[History], first: int, acceptance_probs: Tensor, max_depth: int
    ) -> None:
        beam = min(self._beam, max(candidates.most_nodes // 4, 1))
        candidates.follow(self._tables.structs, acceptance_probs, first, self._waves, beam, max_depth)

    def learn(self, top_k: TargetTopK) -> None:
        self._tables.learn(top_k)

    def finish(self, history: History) -> None:
        """Nothing to do: every token was learned when it was verified."""

    def state(self) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for name, table in zip(self.names, self._tables.tables, strict=True):
            held |= named(name, table.state())
        return held

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, table in zip(self.names, self._tables.tables, strict=True):
            table.restore(part_of(state, name))

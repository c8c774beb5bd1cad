"""Recall: the target's own earlier judgements, hung wherever the round's pool is likeliest to be reached.

Wave by wave the best nodes not yet looked up, whoever proposed them, get the successors that the target found
likely after the same tokens: after the last three if they were ever judged, else the last two, else the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graft.learn.calibration import BUCKET_PROBABILITIES, probability_bucket
from graft.pool import Pool
from graft.retrieve.base import History, Judged, Weigh, named, part_of
from graft.retrieve.table import COLD, SuccessorTable

_NAMES = {1: "adjacency", 2: "bigram", 3: "trigram"}
# What an old opinion, in a context that is now another, is worth of its face: the more of the context is the same,
# the more.
_WORTH = {1: 0.5, 2: 0.7, 3: 0.85}


class Recall:
    """Tables of several orders, and how far they are followed."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        orders: Sequence[int] = (3, 2, 1),
        num_rows: int = 1 << 18,  # of each hashed table
        waves: int = 5,
        beam: int = 12,  # nodes looked up in a wave
    ) -> None:
        """orders: longest first."""
        self._tables = [SuccessorTable(order, vocab_size if order == 1 else num_rows, device) for order in orders]
        self.names = tuple(_NAMES[order] for order in orders)
        self.prior = torch.stack([_WORTH[order] * BUCKET_PROBABILITIES for order in orders])
        self._waves = waves
        self._beam = beam

    def propose(self, pool: Pool, histories: Sequence[History], first: int, weigh: Weigh, max_depth: int) -> None:
        done = torch.zeros_like(pool.nodes.paths, dtype=torch.bool)  # [B, N] looked up already
        for _ in range(min(self._waves, max_depth)):
            nodes = pool.nodes
            open_paths = nodes.paths.masked_fill(done | (nodes.depths >= max_depth), 0.0)
            best = open_paths.topk(min(self._beam, pool.width), dim=1).indices  # [B, F]
            looked_up, evidence, sources = self._successors(
                nodes.tokens.gather(1, best), nodes.before.gather(1, best), nodes.earlier.gather(1, best)
            )
            probabilities = (
                weigh(sources, evidence) * (looked_up != COLD) * (open_paths.gather(1, best) > 0)[:, :, None]
            )
            pool.add(
                looked_up.clamp(min=0).flatten(1),
                best.repeat_interleave(looked_up.shape[2], dim=1),
                probabilities.flatten(1),
                (sources + first).flatten(1),
                evidence.flatten(1),
            )
            done = torch.cat([done.scatter(1, best, True), torch.zeros_like(looked_up.flatten(1), dtype=torch.bool)], 1)

    def _successors(self, tokens: Tensor, before: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, evidence and source [B, F, k] of the longest n-gram known at each node [B, F]."""
        found, shares = self._tables[-1].lookup(tokens, before, earlier)
        sources = torch.full_like(found, len(self._tables) - 1)
        for source in range(len(self._tables) - 2, -1, -1):
            longer, its_shares = self._tables[source].lookup(tokens, before, earlier)
            known = longer[..., :1] != COLD
            found, shares = torch.where(known, longer, found), torch.where(known, its_shares, shares)
            sources = torch.where(known, source, sources)
        return found, probability_bucket(shares), sources

    def learn(self, judged: Judged) -> None:
        for table in self._tables:
            table.learn(judged)

    def finish(self, history: History) -> None:
        """Nothing to do: every token was learned when it was judged."""

    def state(self) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for name, table in zip(self.names, self._tables, strict=True):
            held |= named(name, table.state())
        return held

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, table in zip(self.names, self._tables, strict=True):
            table.restore(part_of(state, name))

"""Recall: the target's own earlier judgements, hung wherever the round's pool is likeliest to be reached.

Wave by wave the best nodes not yet looked up, whoever proposed them, get the successors that the target found
likely after the same tokens: after the last three if they were ever judged, else the last two, else the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from graft.learn.calibration import BUCKET_PROBABILITIES
from graft.pool import Pool
from graft.retrieve.base import History, Judged, Weigh, named, part_of
from graft.retrieve.table import COLD, ISOLATED_ROWS, SuccessorTable, adjacency_table, unpack

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
        isolated: bool = False,  # texts do not learn from each other
    ) -> None:
        """orders: longest first."""
        self._tables = [
            SuccessorTable(order, ISOLATED_ROWS if isolated else num_rows, device)
            if order > 1
            else adjacency_table(vocab_size, device, isolated)
            for order in orders
        ]
        self.names = tuple(_NAMES[order] for order in orders)
        self.prior = torch.stack([_WORTH[order] * BUCKET_PROBABILITIES for order in orders])
        self._waves = waves
        self._beam = beam

    def propose(self, pool: Pool, histories: Sequence[History], first: int, weigh: Weigh, max_depth: int) -> None:
        done = torch.zeros_like(pool.nodes.paths, dtype=torch.bool)  # [B, N] looked up already
        salts = pool.salts[:, None]
        for _ in range(min(self._waves, max_depth)):
            nodes = pool.nodes
            open_paths = nodes.paths.masked_fill(done | (nodes.depths >= max_depth), 0.0)
            reached, best = open_paths.topk(min(self._beam, pool.width), dim=1)  # [B, F]
            entries, sources = self._longest(
                nodes.tokens.gather(1, best), nodes.before.gather(1, best), nodes.earlier.gather(1, best), salts
            )
            entries = entries.masked_fill((reached <= 0)[:, :, None], COLD)  # fewer than the beam were open
            tokens, evidence = unpack(entries.flatten(1).long())
            sources = sources.expand_as(entries).flatten(1)
            pool.add(
                tokens.clamp(min=0),
                best[:, :, None].expand_as(entries).flatten(1),
                weigh(sources, evidence) * (tokens != COLD),
                sources + first,
                evidence,
            )
            done = nn.functional.pad(done.scatter(1, best, True), (0, tokens.shape[1]))

    def _longest(self, tokens: Tensor, before: Tensor, earlier: Tensor, salts: Tensor) -> tuple[Tensor, Tensor]:
        """Entries [B, F, k] of the longest n-gram known at each node [B, F], and its source [B, F, 1]."""
        entries = self._tables[-1].lookup(tokens, before, earlier, salts)
        sources = torch.full_like(tokens, len(self._tables) - 1)[:, :, None]
        for source in range(len(self._tables) - 2, -1, -1):
            longer = self._tables[source].lookup(tokens, before, earlier, salts)
            known = longer[:, :, :1] != COLD
            entries, sources = torch.where(known, longer, entries), sources.masked_fill(known, source)
        return entries, sources

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

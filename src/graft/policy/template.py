"""Templates: fixed trees of successor ranks, which the adjacency matrix fills with tokens.

The published method gives only how many nodes each depth has. Which ranks they are is ours: at every depth the
nodes with the least sum of log2(2 + rank) along their path, so the best ranks get the most children and the chain
of first ranks goes all the way down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.pool import Pool
from graft.retrieve.table import COLD, SuccessorTable, unpack
from graft.target.verified import NUM_SUCCESSORS

ENVELOPE = (8, 16, 14, 11, 8, 7, 6, 5, 5)  # the published design for retrieval alone, 80 nodes
LIKELY = 0.5  # stands for a probability: it only has to fall along a path


@dataclass(frozen=True)
class Template:
    """By depth: the parent of each node among the nodes of the depth before, and its rank among the successors."""

    parents: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]


def make_template(widths: tuple[int, ...], k: int = NUM_SUCCESSORS) -> Template:
    """The template with so many nodes at each depth."""
    parents, ranks = [], []
    costs = [0.0]
    for width in widths:
        candidates = sorted(
            (cost + math.log2(2 + rank), parent, rank) for parent, cost in enumerate(costs) for rank in range(k)
        )[:width]
        parents.append(tuple(parent for _, parent, _ in candidates))
        ranks.append(tuple(rank for _, _, rank in candidates))
        costs = [cost for cost, _, _ in candidates]
    return Template(tuple(parents), tuple(ranks))


def scaled(widths: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """The widths for another number of nodes, as near to their proportions as whole numbers allow."""
    total, taken, given = sum(widths), 0, 0
    result = []
    for width in widths:
        taken += width
        result.append(round(budget * taken / total) - given)
        given += result[-1]
    return tuple(width for width in result if width)


def fill(pool: Pool, templates: list[Template | None], table: SuccessorTable, source: int, max_depth: int) -> None:
    """Adds each row's template to the pool, below the root; what the table does not know stays empty."""
    num_rows, device = len(templates), pool.nodes.tokens.device
    above = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)  # places in the pool of the depth before
    depth = 0
    while depth < max_depth:
        rows = [(t.parents[depth], t.ranks[depth]) if t and depth < len(t.ranks) else ((), ()) for t in templates]
        width = max(len(ranks) for _, ranks in rows)
        if width == 0:
            return
        parents, ranks, real = (
            torch.tensor([[*r, *[0] * (width - len(r))] for r in column], device=device)
            for column in (*zip(*rows, strict=True), [[1] * len(r) for _, r in rows])
        )
        places = above.gather(1, parents)
        nodes = pool.nodes
        tokens = _successors(table, nodes.tokens.gather(1, places), ranks, pool.salts)
        first = pool.width
        known = (tokens != COLD) & real.bool()
        sources = torch.full_like(tokens, source)
        pool.add(tokens.clamp(min=0), places, LIKELY * known, sources, torch.zeros_like(tokens))
        above = torch.arange(first, pool.width, device=device).expand(num_rows, -1)
        depth += 1


def _successors(table: SuccessorTable, tokens: Tensor, ranks: Tensor, salts: Tensor) -> Tensor:
    """The successor of each token [B, n] at its rank [B, n]."""
    entries = table.lookup(tokens, tokens, tokens, salts[:, None])  # of order 1: what came before is not read
    return unpack(entries.gather(2, ranks[:, :, None]).squeeze(2))[0].long()

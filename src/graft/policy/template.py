"""Templates: fixed trees of successor ranks, which the adjacency matrix fills with tokens.

The published method gives only how many nodes each depth has. Which ranks they are is ours: at every depth the
nodes with the least sum of log2(2 + rank) along their path, so the best ranks get the most children and the chain
of first ranks goes all the way down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from graft.pool import Pool
from graft.retrieve.table import COLD, SuccessorTable
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


@lru_cache(maxsize=256)
def _side_by_side(templates: tuple[Template | None, ...]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of every depth the parents and ranks of all rows' templates [B, n], and which of them are real."""
    deepest = max(len(template.ranks) if template else 0 for template in templates)
    levels = []
    for depth in range(deepest):
        rows = [(t.parents[depth], t.ranks[depth]) if t and depth < len(t.ranks) else ((), ()) for t in templates]
        width = max(len(ranks) for _, ranks in rows)
        columns = (*zip(*rows, strict=True), [[1] * len(ranks) for _, ranks in rows])
        parents, ranks, real = (np.array([[*r, *[0] * (width - len(r))] for r in column]) for column in columns)
        levels.append((parents, ranks, real > 0))
    return levels


def fill(pool: Pool, templates: list[Template | None], table: SuccessorTable, source: int, max_depth: int) -> None:
    """Adds each row's template to the pool, below the root; what the table does not know stays empty."""
    # In NumPy: its operations on a few numbers take a fifth of torch's.
    salts = pool.salts[:, None].numpy()
    above = pool.nodes.tokens[:, :1].numpy()  # tokens of the depth before, at first the root's
    start, place = 0, pool.width  # where they stand, and where the next depth will
    levels = _side_by_side(tuple(templates))[:max_depth]
    columns = []
    for depth, (parents, ranks, real) in enumerate(levels, start=1):
        tokens = table.successors_of_tokens(np.take_along_axis(above, parents, axis=1), ranks, salts)
        columns.append((tokens, parents + start, np.full_like(parents, depth), (tokens != COLD) & real))
        above, start, place = np.maximum(tokens, 0), place, place + tokens.shape[1]
    if not columns:
        return
    found, below, depths, known = (
        torch.from_numpy(np.concatenate(column, axis=1)) for column in zip(*columns, strict=True)
    )
    sources, zeros = torch.full_like(found, source), torch.zeros_like(found)
    pool.add_chains(found.clamp(min=0), below, depths, len(levels), LIKELY * known, sources, zeros)

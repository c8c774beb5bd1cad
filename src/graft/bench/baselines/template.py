"""Templates: fixed trees of successor ranks, which the adjacency matrix fills with tokens.

Only the number of nodes at each depth is published. We chose the ranks: each depth has the nodes with the least product
of 2 + rank along their path. So the best ranks have the most children, and the chain of first ranks reaches the full
depth.
"""

import ctypes

from graft.bench.baselines.native import TemplateStruct
from graft.model.verified import NUM_SUCCESSORS

LIKELY = 0.5  # acceptance probability of every node, so that path probabilities fall with depth
NOTHING = TemplateStruct()


def make_template(widths: tuple[int, ...], k: int = NUM_SUCCESSORS) -> TemplateStruct:
    """The template with `widths` nodes at depths 1, 2, 3 and so on. Nodes are numbered from 1; 0 is the root.

    For each node it has the parent, the rank among the parent's k successors, and the depth.
    """
    parents: list[int] = []
    ranks: list[int] = []
    depths: list[int] = []
    above = [(1, 0)]  # (product of 2 + rank, number) of the nodes one depth up
    for depth, width in enumerate(widths, start=1):
        candidates = sorted((cost * (2 + rank), node, rank) for cost, node in above for rank in range(k))[:width]
        above = [(cost, len(parents) + place) for place, (cost, _, _) in enumerate(candidates, start=1)]
        parents += [node for _, node, _ in candidates]
        ranks += [rank for _, _, rank in candidates]
        depths += [depth] * len(candidates)
    columns = ((ctypes.c_int64 * len(column))(*column) for column in (parents, ranks, depths))
    return TemplateStruct(len(parents), *columns)


def scaled(widths: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """The widths scaled to a total of `budget` nodes, rounded to whole numbers."""
    total, taken, given = sum(widths), 0, 0
    result = []
    for width in widths:
        taken += width
        result.append(round(budget * taken / total) - given)
        given += result[-1]
    return tuple(width for width in result if width)

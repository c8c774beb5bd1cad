"""Templates: fixed trees of successor ranks, which the adjacency matrix fills with tokens.

Only the number of nodes at each depth is published. We chose the ranks: each depth has the nodes with the least product
of 2 + rank along their path. So the best ranks have the most children, and the chain of first ranks reaches the full
depth.
"""

from graft.model.verified import NUM_SUCCESSORS
from graft.tree.device.fixed import TemplateNode


def make_template(widths: tuple[int, ...], k: int = NUM_SUCCESSORS) -> list[TemplateNode]:
    """The template with `widths` nodes at depths 1, 2, 3 and so on, of the first k successors."""
    nodes: list[TemplateNode] = []
    above = [(1, 0)]  # (product of 2 + rank, number) of the nodes one depth up
    for depth, width in enumerate(widths, start=1):
        candidates = sorted((cost * (2 + rank), node, rank) for cost, node in above for rank in range(k))[:width]
        above = [(cost, len(nodes) + place) for place, (cost, _, _) in enumerate(candidates, start=1)]
        nodes += [TemplateNode(node, rank, depth) for _, node, rank in candidates]
    return nodes


def scaled(widths: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """The widths scaled to a total of `budget` nodes, rounded to whole numbers."""
    total, taken, given = sum(widths), 0, 0
    result = []
    for width in widths:
        taken += width
        result.append(round(budget * taken / total) - given)
        given += result[-1]
    return tuple(width for width in result if width)

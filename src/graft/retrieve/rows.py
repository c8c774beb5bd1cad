"""Trees put together on the host, a row a sequence, and stacked into one DraftTree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from graft.tree import PADDING, ROOT, DraftTree


class TreeRow:
    """One row's tree. A chain shares the nodes it has in common with earlier ones."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.evidence = [root], [0], [0]
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def add_chain(self, tokens: Sequence[int], evidence: Sequence[int]) -> None:
        """A chain below the root; a node that is there already keeps its evidence."""
        node = 0
        for token, bucket in zip(tokens, evidence, strict=True):
            parent, node = node, self._children.setdefault((node, token), len(self.tokens))
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(parent)
                self.evidence.append(bucket)


def stacked(rows: Sequence[TreeRow], max_depth: int, device: torch.device) -> DraftTree:
    """The rows as one batch, padded to the widest."""
    width = max(len(row.tokens) for row in rows)
    fields = [
        [values + [fill] * (width - len(values)) for values in (get(row) for row in rows)]
        for get, fill in (
            (lambda row: row.tokens, 0),
            (lambda row: row.parents, 0),
            (lambda row: [ROOT] * len(row.tokens), PADDING),
            (lambda row: row.evidence, 0),
        )
    ]
    # One array and one transfer: from nested lists, torch takes ten times as long as numpy.
    tokens, parents, sources, evidence = torch.from_numpy(np.array(fields)).to(device)
    return DraftTree(
        max_depth=min(max_depth, width - 1),
        tokens=tokens,
        parents=parents,
        probabilities=torch.ones_like(tokens, dtype=torch.float32),
        sources=sources,
        evidence=evidence,
    )

"""FixedTree: trees by fixed rules, as published methods make them, on the kernels of all rounds.

Gates stop a row's drafting, and where it stopped decides how many candidates stay and which template of successors is
attached. `stops.py` and `native/round/stops.c` are the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TemplateNode(NamedTuple):
    """A node of a template: its parent's successor of a rank. Nodes are numbered from 1; 0 is where it is attached."""

    parent: int
    rank: int
    depth: int


@dataclass(frozen=True)
class Split:
    """What is verified of a row."""

    kept: int  # the likeliest candidates stay
    deepest: int  # of these; what was drafted below, because other rows went on, is dropped
    template: Sequence[TemplateNode] = ()  # by depth, filled from the table of 1-grams


@dataclass(frozen=True)
class FixedTree:
    """Fixed rules for a round's trees. By default all candidates stay."""

    gates: tuple[int, ...] = ()  # depths after which a row stops if the path probability of its likeliest node is low
    splits: tuple[Split, ...] = ()  # by the gate that stopped the row, and one for rows that no gate stopped
    is_chain: bool = False  # one node of each depth is drafted, and templates are attached below the deepest that stays

    @property
    def most_attached(self) -> int:
        """Nodes of the largest template."""
        return max((len(split.template) for split in self.splits), default=0)

    def numbers(self) -> Tensor:
        """[splits, 3 + 3 * most_attached] int32: what stays, down to which depth, nodes of the template; then these."""
        found = torch.zeros(len(self.splits), 3 + 3 * self.most_attached, dtype=torch.int32)
        for own, split in zip(found, self.splits, strict=True):
            own[:3] = torch.tensor([split.kept, split.deepest, len(split.template)])
            if split.template:
                own[3:].view(3, -1)[:, : len(split.template)] = torch.tensor(list(split.template)).T
        return found

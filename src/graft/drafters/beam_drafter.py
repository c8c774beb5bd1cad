"""BeamDrafter: each draft pass gives one level of the trees, the children of the last level's beams.

The beams are flat buffers (`Beams`). Here the host makes the passes one by one, with a network that runs anywhere. In
CUDA graphs `eagle3/fused_head.py` does the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from graft.drafters.drafter import KEPT_OF_A_LEVEL, Passes, TreeSettings
from graft.model.noise import ComingDraws
from graft.model.verified import top_probabilities
from graft.tree.device import c_kernels
from graft.tree.device.buffers import Beams
from graft.tree.device.round import AddLevel

_FEW_ROWS, _MOST_BEAMS = 8, 128  # with more than 8 rows, there are at most 128 beams in all
_HOST = torch.device("cpu")

# Of a pass: the likeliest tokens after each of F beams and their q, [B, F, K], and features for the next pass.
Found = tuple[Tensor, Tensor, Any]


def num_beams(rows: int, topk: int, keep: int = KEPT_OF_A_LEVEL) -> int:
    """Nodes of a row that a pass expands. With many rows, each gets few verified nodes, so few are expanded."""
    topk = min(topk, keep)
    if rows <= _FEW_ROWS:
        return topk
    each = max(_MOST_BEAMS // rows, 2)
    return min(topk, 1 << (each.bit_length() - 1))  # a power of two, since kernels are compiled for each number


class Shape(NamedTuple):
    """Shape of a round's levels."""

    rows: int
    beams: int  # of a row
    keep: int  # nodes to keep of a level

    @classmethod
    def of(cls, rows: int, topk: int, keep: int) -> Self:
        return cls(rows, num_beams(rows, topk, keep), keep)

    def count(self, number: int) -> int:
        """Nodes of a row in the level of pass `number`. All levels after the first, 0, are alike."""
        return self.beams if number == 0 else min(self.keep, self.beams * self.beams)


class BeamDrafter(ABC):
    """Base of drafters by beam search."""

    settings: TreeSettings

    def knows(self, draws: ComingDraws) -> bool:
        return True

    @property
    def max_passes(self) -> int:
        return self.settings.depth + 1

    @property
    def max_depth(self) -> int:
        return self.settings.depth + 1

    @property
    def num_nodes(self) -> int:
        return self.settings.total_token

    @property
    def num_slots(self) -> int:
        return self.settings.depth * self.settings.topk

    def level_sizes(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> tuple[int, ...]:
        shape = Shape.of(num_rows, self.settings.topk, keep)
        return tuple(shape.count(number) for number in range(self.settings.depth + 1))

    def beams_of(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> int:
        return num_beams(num_rows, self.settings.topk, keep)

    @property
    def to_target(self) -> Tensor | None:
        """[V] on the host: what to add to a drafted id; None: it is the target's."""
        return None

    @abstractmethod
    def root(self, asked: Passes, topk: int) -> Found:
        """The first pass, whose only beam is the root. topk: K."""

    @abstractmethod
    def expand(self, asked: Passes, beams: Beams, number: int, features: Any) -> Found:
        """Pass `number`, from 1, of K beams. features: of the pass before, by beam."""

    @torch.no_grad()
    def run_passes(self, asked: Passes, add_level: AddLevel) -> None:
        batch, features, to_target = len(asked.state.rows), None, self.to_target
        shape = Shape.of(asked.num_rows, self.settings.topk, asked.keep)
        beams = Beams.make(batch, shape.beams, self.settings.depth + 1, _HOST)
        for number in range(asked.num_passes):
            if not int(asked.made[number]):
                return
            found = self.expand(asked, beams, number, features) if number else self.root(asked, shape.beams)
            ids, q = (part.reshape(-1, shape.beams).to(_HOST) for part in found[:2])
            features = found[2]
            level = torch.empty(3, batch, shape.count(number), dtype=torch.int32)
            c_kernels.spread(ids, q, to_target, beams, level.view(3, -1), shape.keep)
            tokens, parents, bits = (asked.flat(part) for part in level)
            add_level(number, tokens, parents, bits.view(torch.float32))


def likeliest(
    logits: Tensor,
    topk: int,
    draws: ComingDraws | None,
    depth: int,
    tokens: Tensor | None = None,
    sharpness: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The places of the `topk` likeliest tokens in a drafter's logits [B, F, V] of one depth, and their q.

    draws: what is known of the coming draws. tokens: [V] the target ids of the logits; None: equal to their places.
    sharpness: see `ComingDraws.perturbed`.
    """
    if draws is not None:
        ids = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
        logits = draws.perturbed(logits, ids, depth, sharpness)
    return top_probabilities(logits, topk)

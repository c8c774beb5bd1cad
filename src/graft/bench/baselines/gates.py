"""Gates: drafting that stops, row by row, at certain depths if the likeliest path's q is at most a threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress, islice

import torch
from torch import Tensor

from graft.request.batch import Batch
from graft.request.stats import Clock
from graft.spec_decode.proposers.drafter import Drafter
from graft.tree.candidates import Candidates, Level
from graft.tree.tree import DRAFTED

GATES = (0, 1, 5)  # the levels, from 0, after which drafting may stop
PUBLISHED = (0.135, 0.14, 0.485)  # thresholds, the middle of the published ranges
THRESHOLDS = "gates/thresholds"  # of trees, in a policy's state
CHAIN_THRESHOLDS = "gates/chain"  # of chains: a likeliest path alone is accepted less far than the tree around it
NEVER = len(GATES)  # the stop of a row that passed all gates


class Gates:
    """The gates' thresholds, as part of a policy's state."""

    def __init__(self, key: str = THRESHOLDS) -> None:
        self._key = key
        self.thresholds = torch.tensor(PUBLISHED)

    def state(self) -> dict[str, Tensor]:
        return {self._key: self.thresholds.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.thresholds = state.get(self._key, torch.tensor(PUBLISHED)).cpu().clone()


@dataclass(frozen=True)
class Drafted:
    """How far each row was drafted, and why it stopped there."""

    passes: list[int]
    depths: list[int]
    stops: list[int]  # the gate that stopped the row, or NEVER
    confidences: Tensor  # [B, gates] q of the likeliest path at each gate; 0 where the row did not come to it
    is_whole: bool  # whether the answers' ends allowed all depths


def draft_through_gates(
    drafter: Drafter,
    batch: Batch,
    candidates: Candidates,
    thresholds: Tensor | None,
    clock: Clock,
    keep: int | None = None,
) -> Drafted:
    """Adds drafted levels to the candidates, weighed by q itself, until the gates have stopped every row.

    Without thresholds no gate stops a row. Of a pass that brings many levels, a row takes those down to its gate.
    keep: nodes of a level, see `Drafter.passes`.
    """
    num_rows = len(batch.sequences)
    passes, depths, stops = [0] * num_rows, [0] * num_rows, [NEVER] * num_rows
    confidences = torch.zeros(num_rows, len(GATES))
    with clock("draft"):
        for depth, (number, level) in enumerate(_levels(drafter, batch, keep)):
            going = [stop == NEVER for stop in stops]
            candidates.add_level(level, None, DRAFTED, number, 0, going, drafter.num_beams)
            for row in compress(range(num_rows), going):
                passes[row], depths[row] = number, depth + 1
            if depth in GATES:
                gate = GATES.index(depth)
                best = level.path_probabilities.amax(dim=1).tolist()
                for row in compress(range(num_rows), going):
                    confidences[row, gate] = best[row]
                    if thresholds is not None and best[row] <= float(thresholds[gate]):
                        stops[row] = gate
                if NEVER not in stops:
                    break
    return Drafted(passes, depths, stops, confidences, batch.max_depth >= drafter.max_depth)


def _levels(drafter: Drafter, batch: Batch, keep: int | None) -> Iterator[tuple[int, Level]]:
    """Levels no deeper than the batch's `max_depth`, each with the passes made by then. A pass is made when the first
    of its levels is asked for."""
    passes = drafter.passes(batch.draft, batch.roots(), keep)
    levels = ((number, level) for number in range(1, drafter.max_passes + 1) for level in next(passes))
    return islice(levels, max(batch.max_depth, 0))

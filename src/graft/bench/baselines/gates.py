"""Gates: at certain depths, a row's drafting stops if the q of its likeliest path is at most a threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graft.model.noise import ComingDraws
from graft.request.stats import Clock
from graft.spec_decode.proposers.drafter import Drafter
from graft.tree.candidates import Candidates, Level
from graft.tree.tree import DRAFTED

if TYPE_CHECKING:
    from graft.bench.baselines.host_rounds import HostBatch

GATES = (0, 1, 5)  # the levels, from 0, after which drafting may stop
PUBLISHED = (0.135, 0.14, 0.485)  # thresholds in the middle of the published ranges
THRESHOLDS = "gates/thresholds"  # key of the thresholds for trees in a policy's state
CHAIN_THRESHOLDS = "gates/chain"  # key of the thresholds for chains, of which fewer tokens are accepted
NEVER = len(GATES)  # stands for the gate that stopped a row if the row passed all gates


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
    """How far each row was drafted, and which gate stopped it."""

    passes: list[int]
    depths: list[int]
    stops: list[int]  # the gate that stopped the row, or NEVER
    confidences: Tensor  # [B, gates] q of the likeliest path at each gate; 0 if the row did not reach it
    is_whole: bool  # whether no token limit cut the drafts short


def draft_through_gates(
    drafter: Drafter,
    batch: HostBatch,
    candidates: Candidates,
    thresholds: Tensor | None,
    clock: Clock,
    keep: int | None = None,
    draws: ComingDraws | None = None,
) -> Drafted:
    """Add drafted levels to the candidates, with q as probability, until gates have stopped every row.

    Without thresholds no gate stops a row. If a pass yields many levels, a row takes those down to its gate.
    keep, draws: see `Drafter.passes`.
    """
    num_rows = len(batch.sequences)
    passes, depths, stops = [0] * num_rows, [0] * num_rows, [NEVER] * num_rows
    confidences = torch.zeros(num_rows, len(GATES))
    with clock("draft"):
        for depth, (number, level) in enumerate(_levels(drafter, batch, keep, draws)):
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


def _levels(
    drafter: Drafter, batch: HostBatch, keep: int | None, draws: ComingDraws | None
) -> Iterator[tuple[int, Level]]:
    """Levels down to the batch's `max_depth`, each with the number of passes so far. Passes are made on demand."""
    passes = drafter.passes(batch.draft, batch.roots(), keep, draws)
    levels = ((number, level) for number in range(1, drafter.max_passes + 1) for level in next(passes))
    return islice(levels, max(batch.max_depth, 0))

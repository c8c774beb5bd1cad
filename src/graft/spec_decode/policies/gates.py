"""Gates: drafting that stops, row by row, after certain passes if the likeliest path's q is at most a threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.core.batch import Batch
from graft.spec_decode.candidates import Candidates
from graft.spec_decode.proposers.drafter import Drafter
from graft.spec_decode.tree import ROOT
from graft.stats import Clock

DRAFTED = ROOT + 1
GATES = (0, 1, 5)  # the passes after which drafting may stop
PUBLISHED = (0.135, 0.14, 0.485)  # thresholds, the middle of the published ranges
THRESHOLDS = "gates/thresholds"  # in a policy's state
NEVER = len(GATES)  # the stop of a row that passed all gates


class Gates:
    """The gates' thresholds, as part of a policy's state."""

    def __init__(self) -> None:
        self.thresholds = torch.tensor(PUBLISHED)

    def state(self) -> dict[str, Tensor]:
        return {THRESHOLDS: self.thresholds.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.thresholds = state.get(THRESHOLDS, torch.tensor(PUBLISHED)).cpu().clone()


@dataclass(frozen=True)
class Drafted:
    """How far each row was drafted, and why it stopped there."""

    passes: list[int]
    stops: list[int]  # the gate that stopped the row, or NEVER
    confidences: Tensor  # [B, gates] q of the likeliest path at each gate; 0 where the row did not come to it


def draft_through_gates(
    drafter: Drafter, batch: Batch, candidates: Candidates, thresholds: Tensor | None, clock: Clock
) -> Drafted:
    """Adds drafted levels to the candidates, weighed by q itself, until the gates have stopped every row.

    Without thresholds no gate stops a row.
    """
    num_rows = len(batch.sequences)
    most = min(drafter.settings.depth + 1, batch.max_depth)
    passes, stops = [0] * num_rows, [NEVER] * num_rows
    confidences = torch.zeros(num_rows, len(GATES))
    with clock("draft"):
        gates = () if thresholds is None else GATES
        levels = drafter.levels(batch.draft, batch.roots(), stops=gates)
        for number in range(most):
            level = next(levels)
            going = [stop == NEVER for stop in stops]
            candidates.add_level(level, None, DRAFTED, number + 1, 0, going, drafter.settings.topk)
            passes = [count + (stop == NEVER) for count, stop in zip(passes, stops, strict=True)]
            if number in GATES:
                gate = GATES.index(number)
                best = level.path_probabilities.amax(dim=1).tolist()
                for row in (row for row, stop in enumerate(stops) if stop == NEVER):
                    confidences[row, gate] = best[row]
                    if thresholds is not None and best[row] <= float(thresholds[gate]):
                        stops[row] = gate
                if all(stop != NEVER for stop in stops):
                    break
    return Drafted(passes, stops, confidences)

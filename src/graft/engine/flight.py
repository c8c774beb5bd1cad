"""Flight: a launched device round, until the host takes its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graft.model import Row, VerifyOutput
from graft.model.captures import Event
from graft.request.sequence import Sequence as TokenSequence
from graft.tree.device.round import MAX_TOKENS, RoundShape
from graft.tree.tree import PADDING, DraftTree

if TYPE_CHECKING:
    from graft.engine.adjustments import Adjusted
    from graft.engine.round_reports import Logprobs, Report


@dataclass(eq=False)
class Flight:
    """A launched device round. `results` are valid when `done` has happened."""

    sequences: list[TokenSequence]
    rows: list[Row]
    draft_rows: list[Any]  # the drafter's own rows; None without a drafter
    kinds: list[int]  # by row, see `RowDraws.kind`
    shape: RoundShape
    max_passes: int  # draft passes that could be made
    num_prefill_tokens: int
    results: dict[str, np.ndarray]
    marks: Sequence[Any]  # events: before, proposed, verified, finished
    done: Event
    is_usual: bool  # False if a graph was captured meanwhile: then its time says nothing about other rounds
    adjusted: Adjusted | None = None  # captured rounds only
    report: Report | None = None  # what some rows want to know
    # Direct rounds only: what log-probabilities come from and the drafter learns from, and its state.
    verified: VerifyOutput | None = None
    draft: Any = None
    size: int | None = None  # tokens of the trees; None: those of the shape
    reach: float | None = None  # before the first draft pass; None: the number of rows

    @property
    def num_tokens(self) -> int:
        """Tokens of the trees in the step, with padding."""
        return self.shape.tokens if self.size is None else self.size

    def logprobs(self) -> Logprobs | None:
        return self.report.logprobs(self.results["num_nodes"][: len(self.rows)]) if self.report is not None else None

    def considered(self, tree: DraftTree) -> DraftTree | None:
        """The trees, then pruned candidates, for records of the round."""
        return self.report.considered(tree) if self.report is not None else None

    def tree(self) -> DraftTree:
        """The verified trees, on the host."""
        found, num_rows = self.results, len(self.rows)
        if self.shape.is_plain:
            return DraftTree.roots(torch.from_numpy(found["step"][0, :num_rows].astype(np.int64)))
        widths = found["num_nodes"][:num_rows] + 1
        width, ends = int(widths.max()), np.cumsum(widths)
        rows = np.repeat(np.arange(num_rows), widths)
        places = np.arange(int(ends[-1])) - np.repeat(ends - widths, widths)
        columns = np.zeros((4, num_rows, width), dtype=np.int64)
        columns[2] = PADDING
        for column, values in zip(columns, (*found["step"], found["origins"]), strict=False):
            column[rows, places] = values[: len(rows)]
        tokens, parents, sources, buckets = (torch.from_numpy(part) for part in columns)
        return DraftTree(MAX_TOKENS, tokens, parents, torch.ones(num_rows, width), sources, buckets)

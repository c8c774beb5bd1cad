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
from graft.tree.device.round import RoundShape
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
        tokens, parents = (torch.from_numpy(self.padded(column)) for column in found["step"][:2])
        sources = torch.from_numpy(self.padded(found["origins"], PADDING))
        return DraftTree(tokens, parents, torch.ones(tokens.shape), sources)

    def padded(self, flat: np.ndarray, padding: int = 0) -> np.ndarray:
        """Values of the nodes, tree after tree, as [rows, N] int64."""
        widths = self.results["num_nodes"][: len(self.rows)] + 1
        values = np.full((len(widths), int(widths.max())), padding, dtype=np.int64)
        values[np.arange(values.shape[1]) < widths[:, None]] = flat[: int(widths.sum())]
        return values

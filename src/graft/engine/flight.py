"""Flight: a launched device round, until the host takes its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graft.engine.adjustments import Adjusted
from graft.engine.round_reports import Logprobs, Report
from graft.model import Row
from graft.model.captures import Event
from graft.request.sequence import Sequence as TokenSequence
from graft.tree.device.round import MAX_TOKENS, RoundShape
from graft.tree.tree import PADDING, DraftTree


@dataclass(eq=False)
class Flight:
    """A launched device round. `results` are valid when `done` has happened."""

    sequences: list[TokenSequence]
    rows: list[Row]
    draft_rows: list[Any]  # the drafter's own rows; None without a drafter
    kinds: list[int]  # by row, see `RowDraws.kind`
    shape: RoundShape
    num_prefill_tokens: int
    results: dict[str, np.ndarray]
    marks: Sequence[Any]  # events: before, proposed, verified, finished
    done: Event
    is_usual: bool  # False if a graph was captured meanwhile: then its time says nothing about other rounds
    adjusted: Adjusted
    report: Report

    def logprobs(self) -> Logprobs | None:
        return self.report.logprobs(self.results["num_nodes"][: len(self.rows)])

    def tree(self) -> DraftTree:
        """The verified trees, on the host."""
        found, num_rows = self.results, len(self.rows)
        if self.shape.is_plain:
            return DraftTree.roots(torch.zeros(num_rows, dtype=torch.int64))
        widths = found["num_nodes"][:num_rows] + 1
        width, ends = int(widths.max()), np.cumsum(widths)
        rows = np.repeat(np.arange(num_rows), widths)
        places = np.arange(int(ends[-1])) - np.repeat(ends - widths, widths)
        columns = np.zeros((5, num_rows, width), dtype=np.int64)
        columns[3] = PADDING
        flat = (*found["step"], found["origins"][0], found["origins"][1])
        for column, values in zip((0, 1, 3, 4), flat, strict=True):
            columns[column, rows, places] = values[: len(rows)]
        tokens, parents, _, sources, needs = (torch.from_numpy(part) for part in columns)
        return DraftTree(MAX_TOKENS, tokens, parents, torch.ones(num_rows, width), sources, needs)

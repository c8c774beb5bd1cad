"""Flight: a launched device round, until the host takes its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graft.model import Row, VerifyOutput
from graft.model.captures import Event
from graft.request.sequence import Sequence as TokenSequence
from graft.tree.device.round import MAX_TOKENS, DeviceRound, RoundShape
from graft.tree.tree import PADDING, DraftTree

_SHOWN = 8  # the most pruned candidates of a row that the record of a round shows


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
    # Direct rounds only: what the drafter learns from, its seconds, and what records and log-probabilities need.
    verified: VerifyOutput | None = None
    draft: Any = None  # the drafter's state
    draft_seconds: float = 0.0
    drawn: DraftTree | None = None  # the trees, then pruned candidates, if a row is recorded
    knew_noise: list[bool] | None = None  # by row

    def tree(self) -> DraftTree:
        """The verified trees, on the host."""
        found, num_rows = self.results, len(self.rows)
        if self.shape.is_plain:
            return DraftTree.roots(torch.from_numpy(found["step"][0, :num_rows].astype(np.int64)))
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


def drawn_tree(round: DeviceRound, shape: RoundShape, num_rows: int) -> DraftTree | None:
    """The trees of the round's first rows and, after each, its likeliest pruned candidates; None if it was plain."""
    if shape.is_plain:
        return None
    pool, rows = round.pool, []
    for row in range(num_rows):
        paths, parents = pool.paths[row].cpu().numpy(), pool.parents[row].cpu().numpy()
        nodes = np.argsort(-paths[1:], kind="stable") + 1
        count = min(int(round.found["num_nodes"][row]) + _SHOWN, int((paths[1:] > 0).sum()))
        nodes = np.concatenate([[0], nodes[:count]])
        place = np.zeros(len(paths), dtype=np.int64)
        place[nodes] = np.arange(len(nodes))
        own = paths[nodes] / paths[parents[nodes]]
        own[0] = 1.0
        columns = (part[row].cpu().numpy()[nodes] for part in (pool.tokens, pool.sources, pool.needs))
        rows.append((place[parents[nodes]], own, *columns))
    width = max(len(parents) for parents, *_ in rows)
    tree = np.zeros((4, num_rows, width), dtype=np.int64)
    tree[2] = PADDING
    probabilities = np.zeros((num_rows, width), dtype=np.float32)
    for row, (parents, own, tokens, sources, needs) in enumerate(rows):
        probabilities[row, : len(own)] = own
        tree[:, row, : len(own)] = tokens, parents, sources, needs
    tokens, parents, sources, needs = (torch.from_numpy(part) for part in tree)
    return DraftTree(MAX_TOKENS, tokens, parents, torch.from_numpy(probabilities), sources, needs)

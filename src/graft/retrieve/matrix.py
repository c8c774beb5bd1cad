"""AdjacencyMatrix: the table of order 1 as a source of its own, for policies that hang it by a fixed template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graft.pool import Pool
from graft.retrieve.base import History, Judged, Weigh, named, part_of
from graft.retrieve.table import adjacency_table


class AdjacencyMatrix:
    """M[vocab, k]; `table` is what a template is filled from."""

    names: tuple[str, ...] = ("adjacency",)
    prior = torch.zeros(1, 1)  # a template asks for no probability

    def __init__(self, vocab_size: int, device: torch.device, isolated: bool = False) -> None:
        self.table = adjacency_table(vocab_size, device, isolated)

    def propose(self, pool: Pool, histories: Sequence[History], first: int, weigh: Weigh, max_depth: int) -> None:
        """Nothing of its own accord."""

    def learn(self, judged: Judged) -> None:
        self.table.learn(judged)

    def finish(self, history: History) -> None:
        """Nothing to do: every token was learned when it was judged."""

    def state(self) -> dict[str, Tensor]:
        return named(self.names[0], self.table.state())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.table.restore(part_of(state, self.names[0]))

"""AdjacencyMatrix: the successor table of single tokens, for policies that fill a fixed template from it."""

from collections.abc import Mapping

from torch import Tensor

from graft.spec_decode.proposers.base import History, TargetTopK, named, part_of
from graft.spec_decode.proposers.successor_table import SuccessorTables, adjacency_table


class AdjacencyMatrix:
    """M[vocab, k]: the target's top-k successors of each token; `tables` holds this one table."""

    names: tuple[str, ...] = ("adjacency",)

    def __init__(self, vocab_size: int, isolated: bool = False) -> None:
        self.tables = SuccessorTables([adjacency_table(vocab_size, isolated)])
        self.common: tuple[str, ...] = () if isolated else self.names

    def learn(self, top_k: TargetTopK) -> None:
        self.tables.learn(top_k)

    def finish(self, history: History) -> None:
        """Nothing to do: every token was learned when it was verified."""

    def state(self) -> dict[str, Tensor]:
        return named(self.names[0], self.tables.tables[0].state())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.tables.tables[0].restore(part_of(state, self.names[0]))

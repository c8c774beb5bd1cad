"""block: one chain of a drafter's likeliest tokens, as DFlash drafts. block-paper: the published grafting on it, which
keeps the confident prefix of the chain and retrieves its tail.

Both work with any drafter. It is published only that the tail is filled by walking the adjacency matrix. We decided
this: `paper`'s gates, at the same depths, end the confident prefix, by its path probability. A gate that stops a chain
keeps the tokens down to its own depth, as in a tree. The walk starts at the last of them and takes each token's
likeliest successor. It ends when the matrix has none, or when the chain is as long as `block`'s.
"""

from graft.bench.baselines import native
from graft.bench.baselines.dense import Dense
from graft.bench.baselines.gates import CHAIN_THRESHOLDS, GATES, NEVER, Gates
from graft.bench.baselines.paper import ADJACENCY, Paper
from graft.bench.baselines.template import LIKELY
from graft.model import TargetRunner
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers.drafter import Drafter
from graft.tree.candidates import Candidates


class Block(Dense):
    """The chain of the likeliest drafts, without pruning and grafting."""

    kept_of_a_level = 1
    runs_on_device = False


class BlockPaper(Paper):
    """The chain down to the gate that stops it, then a walk in the adjacency matrix, up to the length of `Block`'s."""

    kept_of_a_level = 1

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        super().__init__(target, drafter, settings)
        assert self.drafter is not None
        self._budget = min(self._budget, self.drafter.max_depth)
        self._kept = [self._budget] * (NEVER + 1)  # all drafted nodes
        self.gates = Gates(CHAIN_THRESHOLDS)

    def _retrieve(self, candidates: Candidates, stops: list[int], max_depth: int) -> None:
        length = min(self._budget, max_depth)
        shortest = min(length if stop == NEVER else GATES[stop] + 1 for stop in stops)
        for _ in range(shortest, length):  # a chain has one leaf, which is extended until the chain is long enough
            native.extend_leaf(candidates, self._matrix.tables.structs, LIKELY, ADJACENCY, length)

"""block: one chain of a drafter's likeliest tokens, as DFlash drafts. block-paper: the published grafting on it, which
keeps the confident prefix of the chain and retrieves its tail.

Both work with any drafter. It is published only that the tail is filled by walking the adjacency matrix. We decided
this: `paper`'s gates, at the same depths, end the confident prefix, by its path probability. A gate that stops a chain
keeps the tokens down to its own depth, as in a tree. The walk starts at the last of them and takes each token's
likeliest successor. It ends when the matrix has none, or when the chain is as long as `block`'s.
"""

from graft.bench.baselines.dense import Dense
from graft.bench.baselines.gates import ALL_DEPTHS, CHAIN_THRESHOLDS, GATES
from graft.bench.baselines.paper import Paper
from graft.bench.baselines.template import make_template
from graft.drafters.drafter import Drafter
from graft.spec_decode.policy_settings import MAX_BUDGET, PolicySettings
from graft.tree.device.fixed import FixedTree, Split


class Block(Dense):
    """The chain of the likeliest drafts, without pruning and grafting."""

    def _budget(self, drafter: Drafter, settings: PolicySettings) -> int:
        return min(settings.budget or MAX_BUDGET, drafter.max_depth)

    def _rules(self, drafter: Drafter) -> FixedTree:
        return FixedTree(is_chain=True)


class BlockPaper(Paper):
    """The chain down to the gate that stops it, then a walk in the adjacency matrix, up to the length of `Block`'s."""

    thresholds_key = CHAIN_THRESHOLDS
    _budget = Block._budget

    def _rules(self, drafter: Drafter) -> FixedTree:
        tails = (make_template((1,) * (self.budget - depth)) for depth in GATES)
        splits = (
            Split(self.budget, depth, tail) for depth, tail in zip((*GATES, ALL_DEPTHS), (*tails, ()), strict=True)
        )
        return FixedTree(GATES, tuple(splits), is_chain=True)

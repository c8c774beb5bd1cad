"""RoundRecord: one round of one answer in plain lists, to be shown in a terminal or a page.

It is made only for a sequence that `is_recorded`, and holds no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "model"  # the origin of a token that was not in the tree


@dataclass(frozen=True)
class RoundRecord:
    """The verified tree and its accepted path. Node 0 is the root: the last token before the round.

    Pruned candidates may follow the verified nodes. Rejected nodes that may be other users' text are left out, together
    with all nodes below them.
    """

    tokens: list[int]
    parents: list[int]  # each node comes after its parent; the root is its own parent
    probabilities: list[float]  # acceptance probability: P(the target accepts the node | it accepted the parent)
    sources: list[str]  # who proposed the node
    accepted: list[int]  # the nodes on the accepted path, without the root
    new_tokens: list[int]  # tokens of the accepted nodes, then the model's own, unless the answer ended before it

    num_pruned: int = 0  # nodes at the end that were not verified
    num_hidden: int = 0  # nodes that are left out
    knew_noise: bool = False  # whether the tree was made with the noise of the coming draws

    @property
    def num_verified(self) -> int:
        """Nodes in the record that were verified, the root included."""
        return len(self.tokens) - self.num_pruned

    @property
    def origins(self) -> list[str]:
        """The source of each new token, or MODEL."""
        own = len(self.new_tokens) - len(self.accepted)
        return [self.sources[node] for node in self.accepted] + [MODEL] * own

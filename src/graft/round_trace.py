"""RoundRecord: one round of one answer in plain lists, for whoever watches: a terminal, a page, a test.

It is made only for a sequence that `is_recorded`, and knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "model"  # the origin of a token that no tree held


@dataclass(frozen=True)
class RoundRecord:
    """The tree that was verified and what came of it. Node 0 is the root, the last token known before the round.

    Behind the verified nodes may stand some that were proposed and pruned. Nodes that may be others' text are not in it
    unless they were accepted, as then they are the answer's own; nor is what hangs below them.
    """

    tokens: list[int]
    parents: list[int]  # each stands before its children; the root is its own
    probabilities: list[float]  # P(the target accepts the node | it accepted the parent), as expected
    sources: list[str]  # who proposed the node
    accepted: list[int]  # the nodes on the accepted path, without the root
    new_tokens: list[int]  # those of the accepted nodes and then, unless the answer ended before, the model's own

    num_pruned: int = 0  # the last nodes, which were not worth verifying
    num_hidden: int = 0  # nodes that are left out

    @property
    def num_verified(self) -> int:
        """Nodes shown that the target judged, the root included."""
        return len(self.tokens) - self.num_pruned

    @property
    def origins(self) -> list[str]:
        """Who proposed each of the new tokens."""
        own = len(self.new_tokens) - len(self.accepted)
        return [self.sources[node] for node in self.accepted] + [MODEL] * own

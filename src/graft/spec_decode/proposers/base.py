"""The retriever contract: hang proposals on the round's pool, then learn what the target said.

A new retriever is a new file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from graft.model import VerifyOutput
from graft.spec_decode.candidates import NO_TOKEN, Candidates, before_roots
from graft.spec_decode.tree import DraftTree


class History(Protocol):
    """A sequence as retrievers see it: its tokens so far, the root last. Hashable, and gone when it is done."""

    ids: list[int]
    number: int  # its own; no other text has it or will have it
    owner: int | None  # whose it is: where texts are isolated, one owner's still learn from each other; None: nobody's

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class TargetTopK:
    """What the target thinks follows every node of some trees, or every token of a chunk of a prompt."""

    tokens: Tensor  # [B, W]
    parents: Tensor  # [B, W]
    sources: Tensor  # [B, W] of which only matters what is padding: it was judged, but in no context of its own
    successors: Tensor  # [B, W, k] int32, likeliest first; the rows may be parts of longer ones
    logits: Tensor  # [B, W, k] of them, float32
    before: Sequence[int]  # [B] the token before each root
    earlier: Sequence[int]  # [B] and the one before that
    salts: Sequence[int]  # [B] whose text each is part of, or 0: what stands under one salt is no use under another
    is_text: bool = False  # whether later tokens are more recent, and not less likely to be reached

    @classmethod
    def of_chunk(cls, verified: VerifyOutput, preceding: Sequence[int], salt: int = 0) -> TargetTopK:
        """A chunk of one prompt, and at least the two tokens before it, where there are two."""
        chain = DraftTree.chain(verified.tokens)
        columns = (chain.tokens, chain.parents, chain.sources, *verified.likeliest())
        return cls(*columns, *before_roots([[*preceding, NO_TOKEN]]), salts=[salt], is_text=True)

    @classmethod
    def of_trees(
        cls, verified: VerifyOutput, tree: DraftTree, histories: Sequence[Sequence[int]], salts: Sequence[int]
    ) -> TargetTopK:
        """Every node of every tree, under texts whose last tokens are the roots."""
        columns = (tree.tokens, tree.parents, tree.sources, *verified.likeliest())
        return cls(*columns, *before_roots(histories), salts=salts)


class Learner(Protocol):
    """What the target said, kept for later: all that is asked of a retriever that others look into."""

    names: tuple[str, ...]  # of its sources, which it numbers from 0
    common: tuple[str, ...]  # those of them that may propose what is neither the text's own nor its owner's

    def learn(self, judged: TargetTopK) -> None:
        """Takes in the target's judgement of a prompt chunk or of verified trees, accepted or not."""
        ...

    def finish(self, history: History) -> None:
        """Takes in a finished text."""
        ...

    def state(self) -> dict[str, Tensor]:
        """A copy of what was learned, under the names of its own sources: "adjacency/rows"."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes on what `state` once gave, among other things; what is missing there starts anew."""
        ...


class Retriever(Learner, Protocol):
    """A source of nodes, or several."""

    prior: Tensor  # [sources, buckets] P(accepted | parent accepted) of each score bucket before any is observed

    def propose(
        self, candidates: Candidates, histories: Sequence[History], first: int, chances: Tensor, max_depth: int
    ) -> None:
        """Adds its proposals to the pool, at most `max_depth` deep; its source 0 has the number `first` there.

        chances: P(accepted | parent) by agreement, source number in the pool, and score bucket.
        """
        ...


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """What a state holds under `name`."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}


def named(name: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part of a state under `name`."""
    return {f"{name}/{key}": value for key, value in part.items()}

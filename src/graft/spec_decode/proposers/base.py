"""The retriever contract: propose candidates for the round, then learn from the target's output.

A new retriever is a new file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from graft.tree.candidates import NO_TOKEN, Candidates, before_roots
from graft.tree.tree import DraftTree

if TYPE_CHECKING:
    from graft.model.verified import VerifyOutput


class History(Protocol):
    """A sequence as retrievers see it: its tokens so far, the root last. They keep weak references to it only."""

    ids: list[int]
    number: int  # unique among all texts, ever
    owner: int | None  # where texts are isolated, one owner's still learn from each other; None: nobody's
    group: int | None  # answers to one prompt that one request asked for are a group; None: it is the only one
    num_prompt_tokens: int

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class TargetTopK:
    """The target's top-k successors of every node of verified trees, or of every token of a prefilled chunk."""

    tokens: Tensor  # [B, W]
    parents: Tensor  # [B, W]
    sources: Tensor  # [B, W]; only whether it is PADDING matters
    successors: Tensor  # [B, W, k] int32, likeliest first; the rows may be slices of longer ones
    logits: Tensor  # [B, W, k] float32, of the successors
    before: Sequence[int]  # [B] the token before each root
    earlier: Sequence[int]  # [B] the token before that
    salts: Sequence[int]  # [B] whose text each row is, or 0: what is learned under one salt is not found under another
    is_text: bool = False  # whether it is a chunk, whose later tokens are more recent; a tree's are less likely

    @classmethod
    def of_chunk(cls, verified: VerifyOutput, preceding: Sequence[int], salt: int = 0) -> TargetTopK:
        """Of a prefilled chunk of one prompt. preceding: the tokens before it, at least two where there are as many."""
        chain = DraftTree.chain(verified.tokens)
        columns = (chain.tokens, chain.parents, chain.sources, *verified.likeliest())
        return cls(*columns, *before_roots([[*preceding, NO_TOKEN]]), salts=[salt], is_text=True)

    @classmethod
    def of_trees(
        cls, verified: VerifyOutput, tree: DraftTree, histories: Sequence[Sequence[int]], salts: Sequence[int]
    ) -> TargetTopK:
        """Of every node of verified trees. histories: the texts, whose last tokens are the roots."""
        columns = (tree.tokens, tree.parents, tree.sources, *verified.likeliest())
        return cls(*columns, *before_roots(histories), salts=salts)


class Learner(Protocol):
    """A store that learns from the target's output; a retriever is one that proposes as well."""

    names: tuple[str, ...]  # of its sources, which it numbers from 0
    common: tuple[str, ...]  # those of them that may propose other owners' text

    def learn(self, top_k: TargetTopK) -> None:
        """Learns from a prefilled chunk or from verified trees, whether or not their nodes were accepted."""
        ...

    def finish(self, history: History) -> None:
        """Learns from a finished text."""
        ...

    def state(self) -> dict[str, Tensor]:
        """A copy of what was learned, by names that begin with its sources': "adjacency/rows"."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Replaces what was learned by its part of what `state` once gave; what is missing there starts anew."""
        ...


class Retriever(Learner, Protocol):
    """A proposer that runs no model: it adds candidates of one or several sources."""

    prior: Tensor  # [sources, buckets] P(accepted | parent accepted) of each score bucket before any is observed

    def propose(
        self, candidates: Candidates, histories: Sequence[History], first: int, chances: Tensor, max_depth: int
    ) -> None:
        """Adds its proposals to the candidates, at most `max_depth` deep.

        first: the number of its source 0 among all sources. chances: `Calibration.acceptance_probs`.
        """
        ...


def salt_of(history: History, isolated: bool) -> int:
    """The salt of a text's entries in the tables: 0 for those of all, else its owner's number or its own."""
    if not isolated:
        return 0
    return history.number if history.owner is None else history.owner


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The entries of a state whose names begin with `name`, without that prefix."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}


def named(name: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries with `name` as a prefix, as part of a larger state."""
    return {f"{name}/{key}": value for key, value in part.items()}

"""The retriever contract: propose candidates for a round, then learn from the target's output."""

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
    """A sequence as retrievers see it. Its last token is the root. Retrievers keep only weak references to it."""

    ids: list[int]
    number: int  # unique among all texts
    owner: int | None  # isolated texts of one owner learn from each other; None: no owner
    group: int | None  # common to several answers to one request; None: a single answer
    num_prompt_tokens: int

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class TargetTopK:
    """The target's top-k successors of every node of verified trees, or of every token of a prefilled chunk."""

    tokens: Tensor  # [B, W]
    parents: Tensor  # [B, W]
    sources: Tensor  # [B, W]; used only to tell PADDING
    successors: Tensor  # [B, W, k] int32, likeliest first; rows may be slices
    logits: Tensor  # [B, W, k] float32, of the successors
    before: Sequence[int]  # [B] the token before each root
    earlier: Sequence[int]  # [B] the token before that
    salts: Sequence[int]  # [B] of the owner or text, whose lookups find the entries; 0: found by all
    is_text: bool = False  # whether it is a chunk: of equal n-grams, the last one counts; in a tree, the first

    @classmethod
    def of_chunk(cls, verified: VerifyOutput, preceding: Sequence[int], salt: int = 0) -> TargetTopK:
        """Successors in a prefilled chunk of a prompt. preceding: the tokens before it, of which two are used."""
        chain = DraftTree.chain(verified.tokens)
        columns = (chain.tokens, chain.parents, chain.sources, *verified.likeliest())
        return cls(*columns, *before_roots([[*preceding, NO_TOKEN]]), salts=[salt], is_text=True)

    @classmethod
    def of_trees(
        cls, verified: VerifyOutput, tree: DraftTree, histories: Sequence[Sequence[int]], salts: Sequence[int]
    ) -> TargetTopK:
        """Successors in verified trees. histories: the texts, whose last tokens are the roots."""
        columns = (tree.tokens, tree.parents, tree.sources, *verified.likeliest())
        return cls(*columns, *before_roots(histories), salts=salts)


class Learner(Protocol):
    """A store that learns from the target's output."""

    names: tuple[str, ...]  # of its sources, numbered from 0
    common: tuple[str, ...]  # sources that may propose other owners' text

    def learn(self, top_k: TargetTopK) -> None:
        """Learn from a prefilled chunk or from verified trees, whether or not their nodes were accepted."""

    def finish(self, history: History) -> None:
        """Learn from a finished text."""

    def state(self) -> dict[str, Tensor]:
        """A copy of what was learned. Names begin with the source: "adjacency/rows"."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was learned by the output of `state`; sources that are missing there start empty."""


class Retriever(Learner, Protocol):
    """A proposer that runs no model."""

    prior: Tensor  # [sources, buckets] P(accepted | parent accepted) before any observation
    sampled_prior: Tensor  # the same in sampled rows, whose text repeats earlier text less often
    splits_by_noise: bool  # whether buckets of sampled rows are split by noise; False: the score includes the noise

    def propose(
        self, candidates: Candidates, histories: Sequence[History], first: int, acceptance_probs: Tensor, max_depth: int
    ) -> None:
        """Add candidates, at most `max_depth` deep.

        first: the number of its source 0 among all sources. acceptance_probs: `Calibration.acceptance_probs`.
        """


def salt_of(history: History, isolated: bool) -> int:
    """The salt of a text's table entries: 0 if all texts share them, else its owner or its own number."""
    if not isolated:
        return 0
    return history.number if history.owner is None else history.owner


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The entries of a state whose names begin with `name`, without that prefix."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}


def named(name: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries with `name` as a prefix, as part of a larger state."""
    return {f"{name}/{key}": value for key, value in part.items()}

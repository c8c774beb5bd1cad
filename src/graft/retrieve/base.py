"""The retriever contract: hang proposals on the round's pool, then learn what the target said.

A new retriever is a new file.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from graft.kernels import available, kernels, plain
from graft.pool import NO_TOKEN, Pool, before_roots, last_before_roots
from graft.target import Verified
from graft.tree import DraftTree


class History(Protocol):
    """A sequence as retrievers see it: its tokens so far, the root last. Hashable, and gone when it is done."""

    ids: list[int]
    number: int  # its own; no other text has it or will have it
    owner: int | None  # whose it is: where texts are isolated, one owner's still learn from each other; None: nobody's

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Judged:
    """What the target thinks follows each of R tokens: nodes of verified trees, or a chunk of a prompt."""

    tokens: Tensor  # [R]
    before: Tensor  # [R] the token before each
    earlier: Tensor  # [R] and the one before that
    successors: Tensor  # [R, k] likeliest first
    shares: Tensor  # [R, k] of each among these, as the target sees it
    salts: Tensor  # [R] whose text each is part of, or 0: rows of tables under one salt are of no use under another

    @classmethod
    def of_chunk(cls, verified: Verified, preceding: Sequence[int], salt: int = 0) -> Judged:
        """A chunk of one prompt, and at least the two tokens before it, where there are two."""
        tokens = verified.tokens[0]
        text = torch.cat([torch.tensor(([NO_TOKEN] * 2 + list(preceding[-2:]))[-2:]), tokens])
        successors, shares = verified.likeliest()
        return cls(tokens, text[1:-1], text[:-2], successors[0], shares[0], torch.full_like(tokens, salt))

    @classmethod
    def of_trees(
        cls, verified: Verified, tree: DraftTree, histories: Sequence[Sequence[int]], salts: Tensor | None = None
    ) -> Judged:
        """Every node of every tree, the likeliest last: later judgements of a token replace earlier ones.

        Padding was judged as well, but in no context of its own: it passes for the root, whose judgement comes last.
        """
        order = nodes_in_context if available() else nodes_in_context_by_torch
        return cls(*order(tree, histories, salts, *(column.flatten(0, 1) for column in verified.likeliest())))


@dataclass(frozen=True)
class JudgedTrees:
    """A round's judgement as it came, for who can learn from it directly; `all` is what others learn from."""

    verified: Verified
    tree: DraftTree
    histories: Sequence[Sequence[int]]
    salts: Tensor | None

    @cached_property
    def all(self) -> Judged:
        return Judged.of_trees(self.verified, self.tree, self.histories, self.salts)


def nodes_in_context(
    tree: DraftTree, histories: Sequence[Sequence[int]], salts: Tensor | None, successors: Tensor, shares: Tensor
) -> tuple[Tensor, ...]:
    """The fields of `Judged`, in every row from the last node to the root; successors and shares come root first."""
    library: Any = kernels()
    before, earlier = (array("q", column) for column in last_before_roots(histories))
    whole = [plain(column) for column in (tree.tokens, tree.parents, tree.sources, successors)]
    shares = plain(shares, torch.float32)
    whose = None if salts is None else plain(salts)
    nodes = torch.empty(4, tree.tokens.numel(), dtype=torch.int64)
    said, chances = successors.new_empty(successors.shape), shares.new_empty(shares.shape)
    library.graft_nodes_in_context(
        *tree.tokens.shape,
        successors.shape[1],
        *(column.data_ptr() for column in whole),
        shares.data_ptr(),
        before.buffer_info()[0],
        earlier.buffer_info()[0],
        None if whose is None else whose.data_ptr(),
        *(column.data_ptr() for column in (nodes, said, chances)),
    )
    tokens, first_before, second_before, owners = nodes.unbind()
    return tokens, first_before, second_before, said, chances, owners


def nodes_in_context_by_torch(
    tree: DraftTree, histories: Sequence[Sequence[int]], salts: Tensor | None, successors: Tensor, shares: Tensor
) -> tuple[Tensor, ...]:
    before, earlier = before_roots(histories)
    text = torch.cat([earlier[:, None], before[:, None], tree.tokens], dim=1)  # nodes stand two places further
    parents = tree.parents + 2
    parents[:, 0] = 1
    above = torch.cat([parents.new_zeros(len(parents), 2), parents], dim=1).gather(1, parents)
    fields = (tree.tokens, text.gather(1, parents), text.gather(1, above))
    nodes = (torch.where(tree.valid, field, field[:, :1]).flip(1).flatten() for field in fields)
    said = (column.view(*tree.tokens.shape, -1).flip(1).flatten(0, 1) for column in (successors, shares))
    whose = (torch.zeros_like(before) if salts is None else salts).repeat_interleave(tree.width)
    return (*nodes, *said, whose)


class Learner(Protocol):
    """What the target said, kept for later: all that is asked of a retriever that others look into."""

    names: tuple[str, ...]  # of its sources, which it numbers from 0
    common: tuple[str, ...]  # those of them that may propose what is neither the text's own nor its owner's

    def learn(self, judged: Judged | JudgedTrees) -> None:
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

    prior: Tensor  # [sources, buckets] P(accepted | parent accepted) of each evidence bucket before any is observed

    def propose(self, pool: Pool, histories: Sequence[History], first: int, chances: Tensor, max_depth: int) -> None:
        """Adds its proposals to the pool, at most `max_depth` deep; its source 0 has the number `first` there.

        chances: P(accepted | parent) by standing, source number in the pool, and evidence.
        """
        ...


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """What a state holds under `name`."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}


def named(name: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part of a state under `name`."""
    return {f"{name}/{key}": value for key, value in part.items()}

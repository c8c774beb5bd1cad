"""DraftTree: a batch of token trees, ready to be verified, as plain tensors.

Rounds describe what they verified by them, and `model.runner` verifies those of the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

PADDING = -1  # source of a place without a node
ROOT = 0  # source of the root; proposers are numbered from 1


def _of_chains(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Parents, probabilities and sources of trees with one path each. Read-only."""
    parents = (torch.arange(shape[1], device=device) - 1).clamp(min=0).expand(shape).contiguous()
    return parents, torch.ones(shape, device=device), torch.zeros(shape, dtype=torch.int64, device=device)


_of_host_chains = lru_cache(maxsize=64)(_of_chains)  # host only: a CUDA graph must not read an evicted entry


@dataclass(frozen=True)
class DraftTree:
    """B trees of N nodes. Node 0 is the root: the last known token, whose keys and values are not cached yet.

    Invariants: a node comes after its parent, the root is its own parent, and a row's padding comes last.
    """

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64
    probabilities: Tensor  # [B, N] float, P(the target accepts the node | it accepted the parent)
    sources: Tensor  # [B, N] int64, who proposed the node

    @classmethod
    def roots(cls, tokens: Tensor) -> DraftTree:
        """Trees [B, 1] of only roots, as in plain decoding."""
        return cls.chain(tokens.unsqueeze(1))

    @classmethod
    def chain(cls, tokens: Tensor) -> DraftTree:
        """Trees with one path each: tokens [B, N], the first being the root."""
        rest = _of_host_chains if tokens.device.type == "cpu" else _of_chains
        return cls(tokens, *rest(tokens.shape, tokens.device))

    @property
    def valid(self) -> Tensor:
        """[B, N] bool, False where a place is padding."""
        return self.sources != PADDING

    @cached_property
    def source_lists(self) -> list[list[int]]:
        """`sources` by row."""
        return self.sources.tolist()

    @cached_property
    def counts_by_source(self) -> list[list[int]]:
        """By row: the number of nodes of each source, the root first."""
        numbers = range(int(self.sources.max()) + 1)
        return [[row.count(number) for number in numbers] for row in self.source_lists]

    @cached_property
    def num_nodes(self) -> list[int]:
        """By row: the number of nodes, the root not counted."""
        if self.width == 1:
            return [0] * len(self.tokens)
        return [sum(counts[ROOT + 1 :]) for counts in self.counts_by_source]

    @cached_property
    def num_tokens(self) -> int:
        """The number of nodes of all rows, roots included."""
        return len(self.tokens) if self.width == 1 else int(self.valid.sum())

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


def ancestors(parents: Tensor, max_depth: int) -> Tensor:
    """[..., n, n] bool, [i, j] when j is i or an ancestor of i, in trees with these parents [..., n].

    A root is its own parent, and no node is deeper than `max_depth`.
    """
    node = torch.arange(parents.shape[-1], device=parents.device).expand_as(parents)
    seen = torch.eye(parents.shape[-1], dtype=torch.bool, device=parents.device).repeat(*parents.shape[:-1], 1, 1)
    for _ in range(max_depth):
        node = parents.gather(-1, node)
        seen.scatter_(-1, node[..., None], True)
    return seen

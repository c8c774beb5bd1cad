"""DraftTree: a batch of token trees, ready to be verified, as plain tensors.

Every operation is a slice or a pointer doubling over all nodes at once, on any device. Trees are made from `candidates`
by the `policies`, and verified by `model.runner`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from graft.spec_decode.native import native, plain

PADDING = -1  # source of a place that holds no node
ROOT = 0  # source of the root; proposers are numbered from 1


def _of_chains(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Parents, probabilities, sources and score buckets of trees with one path each; not to be written to."""
    parents = (torch.arange(shape[1], device=device) - 1).clamp(min=0).expand(shape)
    zeros = torch.zeros(shape, dtype=torch.int64, device=device)
    return parents, torch.ones(shape, device=device), zeros, zeros


_of_host_chains = lru_cache(maxsize=64)(_of_chains)  # the host's only: a CUDA graph must not read an evicted entry


@dataclass(frozen=True)
class DraftTree:
    """B trees of N nodes. Node 0 is the root: the last known token, whose keys and values are not cached yet.

    Invariant: a node stands after its parent, the root is its own parent, and a row's padding comes last.
    """

    max_depth: int  # no node is deeper

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64
    probabilities: Tensor  # [B, N] float, P(the target accepts the node | it accepted the parent)
    sources: Tensor  # [B, N] int64, who proposed the node
    score_bucket: Tensor  # [B, N] int64, the proposer's score bucket, from which the probability was calibrated

    @classmethod
    def roots(cls, tokens: Tensor) -> DraftTree:
        """Trees [B, 1] of a root each: what plain decoding verifies."""
        return cls.chain(tokens.unsqueeze(1))

    @classmethod
    def chain(cls, tokens: Tensor) -> DraftTree:
        """Trees with one path each: tokens [B, N], the first being the root."""
        rest = _of_host_chains if tokens.device.type == "cpu" else _of_chains
        return cls(tokens.shape[1] - 1, tokens, *rest(tokens.shape, tokens.device))

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
        """By row: how many nodes each source has, the root's first."""
        sources, library = plain(self.sources), native()
        num_sources = int(sources.max()) + 1
        counts = torch.empty(sources.shape[0], num_sources, dtype=torch.int64)
        library.graft_count_sources(*sources.shape, sources.data_ptr(), num_sources, counts.data_ptr())
        return counts.tolist()

    @cached_property
    def depth_lists(self) -> list[list[int]]:
        """`depths` by row."""
        rows = []
        for parents in self.parents.tolist():
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
            rows.append(depths)
        return rows

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def depths(self) -> Tensor:
        """[B, N] int64, the root at depth 0."""
        steps = torch.ones_like(self.parents)
        steps[:, 0] = 0
        return self.fold_to_root(steps, torch.add)

    def positions(self, lengths: Tensor) -> Tensor:
        """[B, N] position of each node's token in its sequence when `lengths` [B] tokens are cached."""
        return lengths.unsqueeze(1) + self.depths()

    def ancestors(self) -> Tensor:
        """[B, N, N] bool, [b, i, j] when j is i or an ancestor of i: the tree's attention mask."""
        batch, width = self.tokens.shape
        itself = torch.eye(width, dtype=torch.bool, device=self.tokens.device).expand(batch, -1, -1)
        return self.fold_to_root(itself, torch.logical_or)

    def paths(self) -> Tensor:
        """[B, N, max_depth + 1] int64, the nodes from the root to each node itself, in order; 0 behind it."""
        batch, width = self.tokens.shape
        nodes = torch.arange(width, device=self.tokens.device).expand(batch, width, width)
        # Nodes that are no ancestors are scattered into one column more, which is cut off.
        steps = torch.where(self.ancestors(), self.depths()[:, None, :], self.max_depth + 1)
        return nodes.new_zeros(batch, width, self.max_depth + 2).scatter_(2, steps, nodes)[:, :, :-1]

    def to(self, device: torch.device) -> DraftTree:
        """The same trees on a device."""
        if self.tokens.device == device:
            return self
        names = [field.name for field in fields(self) if field.name != "max_depth"]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def trimmed(self) -> DraftTree:
        """Without the places at the end that hold no node in any row."""
        return self.first(int(self.valid.sum(dim=1).max()))

    def first(self, width: int) -> DraftTree:
        """The trees of the first `width` nodes."""
        if width >= self.width:
            return self
        columns = (self.tokens, self.parents, self.probabilities, self.sources, self.score_bucket)
        return DraftTree(self.max_depth, *(column.narrow(1, 0, width) for column in columns))

    def fold_to_root(self, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Combines each node's value with those of all its ancestors, in log2(depth) pointer doublings.

        values [B, N, ...].

        The root is its own parent, so its value must leave others unchanged however often it is combined.
        """
        jump = self.parents
        for _ in range(self.max_depth.bit_length()):
            index = jump if values.dim() == 2 else jump[:, :, None].expand_as(values)
            values = combine(values, values.gather(1, index))
            jump = jump.gather(1, jump)
        return values

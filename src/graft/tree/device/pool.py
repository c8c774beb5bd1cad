"""The pool of candidate nodes on the device: its memory, its segments, and the small functions that all kernels share.

A row of the pool has segments of fixed size, in the order in which candidates are added: the root, copies of earlier
text below the root, drafted levels, copies below drafted nodes, and successors from the tables. Unfilled places are
padding, with path probability 0. The C code adds candidates in the same order, so both break ties in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

ALONE, OPPOSED, AGREED = (tl.constexpr(value) for value in range(3))  # agreement of a node's proposers
NUM_BUCKETS = 16  # of probabilities, two per halving
NUM_SUCCESSORS = 8  # per table row
NO_TOKEN = -1  # stands where a text has no earlier token

_SURE = tl.constexpr(0.999)  # the highest acceptance probability, so that a node always ranks after its parent
_LEAST = tl.constexpr(1e-30)  # a path less likely than this is padding


@dataclass(frozen=True)
class PoolShape:
    """How many candidates each source may add to a row. One captured graph serves one shape."""

    num_rows: int
    copy_nodes: int  # copied nodes below one node, from each of own and finished texts
    num_places: int  # drafted nodes to look up copies for
    levels: tuple[int, ...]  # nodes of each draft pass: one level, or a whole tree
    num_waves: int  # waves of table lookups
    beam: int  # nodes looked up in a wave

    @cached_property
    def first_level(self) -> int:
        return 1 + 2 * self.copy_nodes

    @cached_property
    def first_copy(self) -> int:
        return self.first_level + sum(self.levels)

    @cached_property
    def first_wave(self) -> int:
        return self.first_copy + 2 * self.copy_nodes * self.num_places

    @cached_property
    def width(self) -> int:
        """Nodes of a row, padding included."""
        return self.first_wave + self.num_waves * self.beam * NUM_SUCCESSORS

    def level_start(self, number: int) -> int:
        return self.first_level + sum(self.levels[:number])


@dataclass(frozen=True)
class Draws:
    """What is known before the verify about each row's next sampling draws; see `noise`."""

    kinds: Tensor  # [R] int32 rows of a kind share their acceptance probabilities; 0: greedy
    seeds: Tensor  # [R] int64
    powers: Tensor  # [R, NUM_BUCKETS] float64, 2^(-b / 2T): how much less likely a token b buckets lower is drawn


class Pool:
    """Memory for the candidates of up to `num_rows` rows."""

    def __init__(self, num_rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        numbers = torch.zeros(7, num_rows, capacity, dtype=torch.int32, device=device)
        # Needs: number of draft passes without which the node would not be proposed. Buckets: of the proposer's score.
        self.tokens, self.parents, self.depths, self.needs, self.sources, self.buckets, self.agreement = numbers
        self.keys = torch.zeros(num_rows, capacity, dtype=torch.int64, device=device)  # the hash of the node's path
        self.paths = torch.zeros(num_rows, capacity, device=device)  # P(the target accepts the path); 0 is padding
        self.open = torch.zeros_like(self.paths)  # the same for nodes not looked up in the tables yet
        self.before = torch.zeros(2, num_rows, dtype=torch.int32, device=device)  # the two tokens before the root


@triton.jit
def path_of(above: tl.tensor, prob: tl.tensor) -> tl.tensor:
    """The path probability of a node, given its parent's and its own acceptance probability."""
    path = above * tl.minimum(prob, _SURE)
    return tl.where(path < _LEAST, 0.0, path)


@triton.jit
def key_of(above: tl.tensor, token: tl.tensor, depth: tl.tensor, factors: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """The key of a node's path: its parent's key plus the token times the depth's hash factor."""
    factor = tl.load(factors + depth, mask=mask, other=0)
    return above + (token.to(tl.int64) + 1) * factor


@triton.jit
def bucket_of(probability: tl.tensor, starts: tl.tensor, NUM_BUCKETS: tl.constexpr) -> tl.tensor:
    """The buckets of probabilities. starts: [NUM_BUCKETS] where each bucket begins, descending, in the same dtype."""
    bucket = tl.zeros_like(probability).to(tl.int32)
    for number in tl.static_range(1, NUM_BUCKETS):
        bucket += (probability <= tl.load(starts + number)).to(tl.int32)
    return bucket


@triton.jit
def prob_of(
    acceptance_probs: tl.tensor,
    agreement: tl.tensor,
    source: tl.tensor,
    bucket: tl.tensor,
    num_sources: int,
    num_buckets: int,
    mask: tl.tensor,
) -> tl.tensor:
    """P(accepted | parent accepted) from the calibration table [agreements, sources, buckets] of the row's kind."""
    return tl.load(acceptance_probs + (agreement * num_sources + source) * num_buckets + bucket, mask=mask, other=0.0)


@triton.jit
def probs_of_kind(acceptance_probs: tl.tensor, kind: tl.tensor, num_sources: int, num_buckets: int) -> tl.tensor:
    """The part [agreements, sources, buckets] of a calibration table for rows of this kind."""
    return acceptance_probs + kind * (3 * num_sources * num_buckets)


def bucket_starts(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where buckets begin: 2^(-b/2), rounded down, so that comparisons in `dtype` agree with those in float64."""
    half = 0.70710678118654752440
    exact = torch.tensor([(half if b % 2 else 1.0) / 2 ** (b // 2) for b in range(NUM_BUCKETS)], dtype=torch.float64)
    starts = exact.to(dtype)
    too_high = starts.double() > exact
    down = torch.nextafter(starts, torch.zeros_like(starts))
    return torch.where(too_high, down, starts).to(device)

"""What the Triton kernels share: small functions over the candidates of `buffers.Pool`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device import buffers
from graft.tree.device.buffers import Draws

ALONE, OPPOSED, AGREED = map(tl.constexpr, (buffers.ALONE, buffers.OPPOSED, buffers.AGREED))
_SURE = tl.constexpr(0.999)  # the highest acceptance probability, so that a node always ranks after its parent
_LEAST = tl.constexpr(1e-30)  # a path less likely than this is padding


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


def barred_of(draws: Draws) -> tuple[Tensor, int]:
    """The arguments `barred` and `room` of `can_be_drawn`."""
    return (draws.kinds, 0) if draws.barred is None else (draws.barred, draws.barred.shape[1])


@triton.jit
def can_be_drawn(token: tl.tensor, depth: tl.tensor, barred: tl.tensor, row: tl.tensor, room: int) -> tl.tensor:
    """Whether the row's draws at these depths may give these tokens. barred: see `Draws.barred`. room: its columns."""
    can = token == token
    if room > 0:
        own = barred + row * room
        num_banned, num_endings, num_unending = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        for number in range(tl.minimum(num_banned + num_endings, room - 3)):
            is_barred = (number < num_banned) | (depth <= num_unending)
            can = can & ((token != tl.load(own + 3 + number)) | (is_barred == 0))
    return can


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

"""The noise of coming draws on the device: what `tree/native/draws.c` computes, in the same order of operations.

A sampled token is the argmax of log p / T + g, with noise g of (seed, position, token) alone. E = exp(-g) is an
exponential number: among tokens of probability p the one with the least E / p^(1/T) is drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.pool import NUM_BUCKETS, bucket_of

NUM_NOISES = tl.constexpr(8)  # buckets of E
_NUM_BUCKETS = tl.constexpr(NUM_BUCKETS)
_BLOCK = 1024

# The constants of `hashing.mix64`.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mixed(x: tl.tensor) -> tl.tensor:
    """`hashing.mix64` of uint64."""
    x = x + GOLDEN
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def uniform_of(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The random number between 0 and 1 of a token in a draw, float64."""
    key = mixed(mixed(seed.to(tl.uint64)) + position.to(tl.uint64))
    bits = mixed(key + token.to(tl.uint64) * GOLDEN)
    return ((bits >> 11).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)


@triton.jit
def draw_time(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """E of tokens in a draw, float64: -log(u), by a series that gives the same bits everywhere."""
    u = uniform_of(seed, position, token)
    bits = u.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)  # from 1 to 2
    is_high = m > 1.41421356237309505
    m = tl.where(is_high, m * 0.5, m)
    exponent = tl.where(is_high, exponent + 1, exponent)
    z = (m - 1.0) / (m + 1.0)
    square = z * z
    total = tl.zeros_like(z)
    for number in tl.static_range(12):
        total += 1.0 / (25 - 2 * number)
        total *= square
    total += 1.0
    own = 2.0 * z * total
    whole = exponent.to(tl.float64) * 0.693147180559945309
    return -(whole + own)


@triton.jit
def copied_bucket(
    bucket: tl.tensor, kind: tl.tensor, seed: tl.tensor, position: tl.tensor, token: tl.tensor
) -> tl.tensor:
    """The score bucket of a copied token: in a sampled row (kind above 0) it says, too, how its noise speaks for it."""
    time = draw_time(seed, position, token)
    noise = (time >= 0.05).to(tl.int32)
    noise += (time >= 0.15).to(tl.int32)
    noise += (time >= 0.35).to(tl.int32)
    noise += (time >= 0.7).to(tl.int32)
    noise += (time >= 1.3).to(tl.int32)
    noise += (time >= 2.2).to(tl.int32)
    noise += (time >= 3.5).to(tl.int32)
    return tl.where(kind > 0, bucket * NUM_NOISES + noise, bucket)


@triton.jit
def successor_buckets(
    bucket: tl.tensor,  # [nodes, K] of each successor's own probability, the likeliest first
    is_new: tl.tensor,
    kind: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,  # [nodes, K]
    token: tl.tensor,
    powers: tl.tensor,  # [NUM_BUCKETS] float64 of the row: how much less likely to be drawn so many buckets down is
    starts: tl.tensor,  # [NUM_BUCKETS] float64, see `bucket_starts`
) -> tl.tensor:
    """In a sampled row, the buckets of the probability that each successor is drawn, by probability and noise."""
    K: tl.constexpr = bucket.shape[1]
    rank = tl.arange(0, K)[None, :]
    first = tl.sum(tl.where(rank == 0, bucket, 0), axis=1)[:, None]
    below = bucket - first
    is_weighed = is_new & (below >= 0)
    power = tl.load(powers + tl.where(is_weighed, below, 0))
    weight = tl.where(is_weighed, power / draw_time(seed, position, token), 0.0)
    # Summed one by one, as the C code does.
    total = tl.zeros_like(tl.sum(weight, axis=1))
    for number in tl.static_range(K):
        total += tl.sum(tl.where(rank == number, weight, 0.0), axis=1)
    share = weight / tl.where(total > 0, total, 1.0)[:, None]
    drawn = bucket_of(share, starts, _NUM_BUCKETS)
    return tl.where((kind > 0) & (total > 0)[:, None] & is_new, drawn, bucket)


def draft_noise(
    seeds: Tensor,  # [R] int64
    ends: Tensor,  # [R] int32 tokens of each text: the position of its next draw
    temperatures: Tensor,  # [R] float32; 0: greedy, without noise
    depth: int,  # 1 is the next draw
    to_target: Tensor,  # [V] int64, to add to a draft id
    out: Tensor,  # [R, V] float32, written
    flag: Tensor | None = None,
) -> None:
    """The noise that a drafter adds to its logits / T."""
    num_rows, vocab_size = out.shape
    _noise_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
        seeds, ends, temperatures, to_target, out, depth, vocab_size, BLOCK=_BLOCK, flag=flag
    )


@triton.jit(do_not_specialize=["depth"])
def _noise_kernel(
    seeds: tl.tensor,
    ends: tl.tensor,
    temperatures: tl.tensor,
    to_target: tl.tensor,
    out: tl.tensor,
    depth: int,
    vocab_size: int,
    BLOCK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """A block of a row's draft vocabulary."""
    if flag is not None:  # noqa: SIM102 - known when the kernel is compiled
        if tl.load(flag) == 0:
            return
    row = tl.program_id(0)
    draft_id = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = draft_id < vocab_size
    at = out + row.to(tl.int64) * vocab_size + draft_id
    if tl.load(temperatures + row) > 0:
        token = draft_id + tl.load(to_target + draft_id, mask=inside, other=0)
        position = tl.load(ends + row).to(tl.int64) + depth - 1
        u = uniform_of(tl.load(seeds + row), position, token)
        tl.store(at, (-tl.log(-tl.log(u))).to(tl.float32), mask=inside)
    else:
        tl.store(at, tl.zeros([BLOCK], tl.float32), mask=inside)

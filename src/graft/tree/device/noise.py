"""The noise of coming draws on the device: what `tree/native/arithmetic.c` computes, in the same order.

A sampled token is the argmax of log p / T + g, where the Gumbel noise g depends only on (seed, position, token).
E = exp(-g) is exponentially distributed, and the token with the least E / p^(1/T) is drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.tree.device.buffers import NUM_BUCKETS
from graft.tree.device.pool import bucket_of

NUM_NOISES = tl.constexpr(8)  # buckets of E
# E falls as the random bits grow. These are the greatest bits whose E is at least 0.05, 0.15, 0.35, 0.7, 1.3, 2.2, 3.5.
_ENDS = tl.constexpr(
    (
        *(8567912963450532, 7752568243805406, 6347266036539248, 4472842778225312),
        *(2454748163109184, 998026125424161, 271993849456634),
    )
)
_NUM_BUCKETS = tl.constexpr(NUM_BUCKETS)

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
def random_bits(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The 53 random bits of a token in a draw, as an integer."""
    key = mixed(mixed(seed.to(tl.uint64)) + position.to(tl.uint64))
    return (mixed(key + token.to(tl.uint64) * GOLDEN) >> 11).to(tl.int64)


@triton.jit
def draw_time(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """E of tokens in a draw, float64."""
    return time_of(random_bits(seed, position, token))


@triton.jit
def time_of(random: tl.tensor) -> tl.tensor:
    """E of random bits: -log(u), by a series that gives the same bits everywhere."""
    u = (random.to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)
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
    """The score bucket of a copied token. In a sampled row (kind > 0) it is split by the bucket of the token's E."""
    noise = noise_bucket_of(random_bits(seed, position, token))
    return tl.where(kind > 0, bucket * NUM_NOISES + noise, bucket)


@triton.jit
def noise_bucket_of(random: tl.tensor) -> tl.tensor:
    """The bucket of the E of random bits, without computing it, since logarithms take long."""
    noise = tl.zeros_like(random).to(tl.int32)
    for number in tl.static_range(NUM_NOISES - 1):
        noise += (random <= _ENDS[number]).to(tl.int32)
    return noise


@triton.jit
def successor_buckets(
    bucket: tl.tensor,  # [nodes, K] of each successor's own probability, the likeliest first
    is_new: tl.tensor,
    is_drawable: tl.tensor,  # is_new, and the draw may give the token
    kind: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,  # [nodes, K]
    token: tl.tensor,
    powers: tl.tensor,  # [NUM_BUCKETS] float64 of the row, see `Draws.powers`
    starts: tl.tensor,  # [NUM_BUCKETS] float64, see `bucket_starts`
) -> tl.tensor:
    """In a sampled row, the bucket of the probability that each successor is drawn, given its probability and noise."""
    K: tl.constexpr = bucket.shape[1]
    rank = tl.arange(0, K)[None, :]
    if kind > 0:
        first = tl.sum(tl.where(rank == 0, bucket, 0), axis=1)[:, None]
        below = bucket - first
        is_weighed = is_drawable & (below >= 0)
        power = tl.load(powers + tl.where(is_weighed, below, 0))
        weight = tl.where(is_weighed, power / draw_time(seed, position, token), 0.0)
        # Summed one by one, in the order of the C code.
        total = tl.zeros_like(tl.sum(weight, axis=1))
        for number in tl.static_range(K):
            total += tl.sum(tl.where(rank == number, weight, 0.0), axis=1)
        share = weight / tl.where(total > 0, total, 1.0)[:, None]
        drawn = bucket_of(share, starts, _NUM_BUCKETS)
        bucket = tl.where((total > 0)[:, None] & is_new, drawn, bucket)
    return bucket


@triton.jit
def draft_noise(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The noise of tokens in a draw, float32. Drafts need no more; the sampler itself uses float64."""
    others = 9007199254740991 - random_bits(seed, position, token)
    v = (others.to(tl.float32) + 0.5) * (1.0 / 9007199254740992.0)
    # E = -log(1 - v). It must be precise for small v, where the noise is highest.
    rest = tl.maximum(1.0 - v, 5.0e-8)
    is_tiny = rest == 1.0
    time = tl.where(is_tiny, v, tl.log(rest) * v / tl.where(is_tiny, 1.0, rest - 1.0))
    return -tl.log(time)

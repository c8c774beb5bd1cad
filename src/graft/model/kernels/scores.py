"""Functions that the kernels of `draw` share: logits and their noise, and weights of scores as integers."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from graft.model.sampler import EXP_BITS as SAMPLER_EXP_BITS
from graft.model.sampler import EXP_TERMS, WEIGHT_BITS
from graft.tree.device.noise import GOLDEN, mixed

_ID_BITS = tl.constexpr(19)  # a vocabulary has fewer than 2^19 tokens
ID_MASK = tl.constexpr((1 << 19) - 1)
# A token this far below the highest is never drawn, whatever its noise, which lies between -3.63 and 36.05: 53 random
# bits give u from 2^-54 to 1 - 2^-52. (All bits set would round u to 1, and the noise to infinity: once in 10^16.)
REACH = tl.constexpr(44.0)
# A weight halves over 64 bins, and from 2^-21 of the highest weight on over 16 coarse ones. The last bin has all tokens
# out of reach. Far tokens begin at 2^-16 of the highest weight.
NUM_BINS = tl.constexpr(2048)
FIRST_FAR_BIN = tl.constexpr(1024)
BINS_PER_HALVING, COARSE_BINS_PER_HALVING = tl.constexpr(64), tl.constexpr(16)
COARSE_OFFSET = tl.constexpr(21 * 64 - 21 * 16)  # the coarse bins continue the others
INFINITY = tl.constexpr(float("inf"))
NO_TOKEN = tl.constexpr(0x7FFFFFFF)

# The constants of `sampler.weights`.
EXP_BITS = tl.constexpr(SAMPLER_EXP_BITS)
_BIN_SHIFT, _COARSE_BIN_SHIFT = tl.constexpr(SAMPLER_EXP_BITS - 6), tl.constexpr(SAMPLER_EXP_BITS - 4)
_FULL_WEIGHT = tl.constexpr(2.0**WEIGHT_BITS)
_EXP_TERMS = tl.constexpr(EXP_TERMS)
_NUM_TERMS = tl.constexpr(len(EXP_TERMS))
_HALVINGS_PER_UNIT = tl.constexpr(3098164009)  # log2(e) in parts of 2^31
_HALVINGS_OF_REACH = tl.constexpr(int(REACH.value * 2**26) * _HALVINGS_PER_UNIT.value >> 32)
# A weight is a mantissa of 26 bits, shifted.
MANTISSA_SHIFT = tl.constexpr(WEIGHT_BITS - 26)


class Given(NamedTuple):
    """A step's logits, its tokens' rows and the rows' settings, see `draw`: one argument of each kernel."""

    logits: Tensor
    token_stride: int
    bias: Tensor
    rows: Tensor
    depths: Tensor
    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    num_rows: int
    vocab_size: int


@triton.jit
def is_truncated(given: Given, row: tl.tensor) -> tl.tensor:
    k = tl.load(given.top_k + row)
    is_cut = (k > 0) & (k < given.vocab_size)
    is_cut = is_cut | (tl.load(given.top_p + row) < 1) | (tl.load(given.min_p + row) > 0)
    return is_cut & (tl.load(given.temperatures + row) > 0)


@triton.jit
def load_logits(given: Given, token: tl.tensor, row: tl.tensor, ids: tl.tensor, HAS_BIAS: tl.constexpr) -> tl.tensor:
    """Logits of one token, as float32; minus infinity beyond the vocabulary."""
    inside = ids < given.vocab_size
    x = tl.load(given.logits + token.to(tl.int64) * given.token_stride + ids, mask=inside, other=-INFINITY)
    x = x.to(tl.float32)
    if HAS_BIAS:
        x += tl.load(given.bias + row.to(tl.int64) * given.vocab_size + ids, mask=inside, other=0.0)
    return x


@triton.jit
def scaled_by(x: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.div_rn(x, tl.maximum(temperature, 1e-6))  # rounded as in PyTorch, which samples in host rounds


@triton.jit
def key_of(given: Given, token: tl.tensor, row: tl.tensor) -> tl.tensor:
    """The key of the noise at one token."""
    position = tl.load(given.positions + row) + tl.load(given.depths + token)
    return mixed(mixed(tl.load(given.seeds + row).to(tl.uint64)) + position.to(tl.uint64))


@triton.jit
def with_noise(score: tl.tensor, ids: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Scores plus `noise.gumbel_noise`, in float64."""
    bits = mixed(key + ids.to(tl.uint64) * GOLDEN)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)
    return score.to(tl.float64) - tl.log(-tl.log(uniform))


@triton.jit
def best_of(score: tl.tensor, ids: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The highest score and its token; among equals, the first token."""
    value = tl.max(score, axis=0)
    return value, tl.min(tl.where(score == value, ids, NO_TOKEN), axis=0)


@triton.jit
def store_choice(out: tl.tensor, value: tl.tensor, token: tl.tensor) -> None:
    """Store the chosen token; 0 if all scores are minus infinity or one is NaN."""
    is_real = (value > -INFINITY) & (token != NO_TOKEN)
    tl.store(out, tl.where(is_real, token, 0).to(tl.int64))


@triton.jit
def halvings_of(score: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """How many times a weight is half of the highest, in units of 2^-25: first part of `sampler.weights`.

    The sampler stops at `sampler.LOWEST`, which is nearer than REACH. All weights beyond it are 0.
    """
    below = tl.where(score == highest, 0.0, highest - score)  # infinities are equal to themselves
    below = tl.minimum(below, REACH)
    units = (below * 67108864.0).to(tl.uint32)  # in parts of 2^26: too many for int32
    return tl.umulhi(units, _HALVINGS_PER_UNIT).to(tl.int32)


@triton.jit
def mantissa_of(halvings: tl.tensor) -> tl.tensor:
    """2^-f of the halvings' fraction f, in units of 2^-26."""
    fraction = (halvings << (32 - EXP_BITS)).to(tl.uint32, bitcast=True)
    power = tl.zeros_like(fraction)
    for term in tl.static_range(_NUM_TERMS):
        power = _EXP_TERMS[_NUM_TERMS - 1 - term] - tl.umulhi(power, fraction)
    return (power >> 4).to(tl.int64)


@triton.jit
def weights_of(halvings: tl.tensor) -> tl.tensor:
    """Second part of `sampler.weights`."""
    return (mantissa_of(halvings) << MANTISSA_SHIFT) >> (halvings >> EXP_BITS).to(tl.int64)


@triton.jit
def bins_of(halvings: tl.tensor) -> tl.tensor:
    fine, coarse = halvings >> _BIN_SHIFT, (halvings >> _COARSE_BIN_SHIFT) + COARSE_OFFSET
    return tl.where(halvings < _HALVINGS_OF_REACH, tl.minimum(fine, coarse), NUM_BINS - 1)


@triton.jit
def is_likely(weight: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Whether min-p keeps tokens of these weights."""
    return weight.to(tl.float64) >= min_p.to(tl.float64) * _FULL_WEIGHT


@triton.jit
def share_of(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The weight at which top-p ends."""
    return tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def order_of(score: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Integers in the order of the tokens: by score; among equals, the first token is the greatest."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0: they are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << _ID_BITS) | (ids ^ ID_MASK).to(tl.int64)


@triton.jit
def id_of(order: tl.tensor) -> tl.tensor:
    return ((order & ID_MASK) ^ ID_MASK).to(tl.int32)


@triton.jit
def score_of(order: tl.tensor) -> tl.tensor:
    ordered = (order >> _ID_BITS).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# The first kernel

"""Top-k and sampling over logits as Triton kernels. Importing this module needs Triton.

A row of logits is split into chunks, which are searched in parallel and compared afterwards. Of equal logits the first
token wins, so a row's choice does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # logits that one warp ranks without synchronization
_FEW = tl.constexpr(16)  # up to so many are taken one by one; sorting is faster for more

# The constants of `hashing.mix64`.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


def highest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k of logits [R, V], best first: tokens [R, k] int32 and logits [R, k] float32, and the logsumexp [R].

    V must be at least k.
    """
    num_rows, vocab_size = logits.shape
    num_chunks, kept = triton.cdiv(vocab_size, _CHUNK), triton.next_power_of_2(k)
    found = logits.new_empty(num_rows, num_chunks, k, dtype=torch.int32)
    values = logits.new_empty(num_rows, num_chunks, k, dtype=torch.float32)
    sums = values.new_empty(2, num_rows, num_chunks)
    tokens, best = found.new_empty(num_rows, k), values.new_empty(num_rows, k)
    total = values.new_empty(num_rows)
    _chunk_topk_kernel[(num_rows, num_chunks)](
        logits, logits.stride(0), found, values, *sums, vocab_size, K=k, KEPT=kept, CHUNK=_CHUNK, num_warps=1
    )
    num_found = triton.next_power_of_2(num_chunks * k)
    _rank_kernel[(num_rows,)](
        *(found, values, *sums),
        *(tokens, best, total),
        num_chunks,
        K=k,
        KEPT=kept,
        NUM_FOUND=num_found,
        NUM_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=min(max(num_found // 1024, 4), 16),
    )
    return tokens, best, total


def draw(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    """Sample a token after each token of a step: [T] int64. Temperature 0 takes the highest logit.

    logits [T, V]; seeds, positions (of the sampled tokens) and temperatures [T]. The noise is `noise.gumbel_noise`.
    """
    num_tokens, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    scores = logits.new_empty(num_tokens, num_chunks, dtype=torch.float64)
    found = torch.empty_like(scores, dtype=torch.int64)
    _draw_kernel[(num_tokens, num_chunks)](
        logits,
        logits.stride(0),
        *(seeds.contiguous(), positions.contiguous(), temperatures.contiguous()),
        scores,
        found,
        vocab_size,
        CHUNK=_CHUNK,
        num_warps=1,
    )
    return found.gather(1, scores.argmax(dim=1, keepdim=True)).flatten()


@triton.jit
def _store_highest(
    x: tl.tensor, ids: tl.tensor, tokens: tl.tensor, values: tl.tensor, K: tl.constexpr, KEPT: tl.constexpr
) -> None:
    """Store the K highest logits and their ids, best first. KEPT: K rounded up to a power of two."""
    # Integers in the order of the logits, which a warp compares quickly. -0.0 becomes 0.0: they are equal.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if K <= _FEW:
        for rank in tl.static_range(K):
            value = tl.max(ordered, axis=0)
            token = tl.min(tl.where(ordered == value, ids, 0x7FFFFFFF), axis=0)
            tl.store(tokens + rank, token)
            tl.store(values + rank, _logit_of(value))
            ordered = tl.where(ids == token, -0x80000000, ordered)  # below all logits
    else:
        # Logit and id as one number: of equal logits, the first id gives the greater number.
        keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        sorted_keys, rank = tl.topk(keys, KEPT), tl.arange(0, KEPT)
        tl.store(tokens + rank, 0x7FFFFFFF - (sorted_keys & 0xFFFFFFFF).to(tl.int32), mask=rank < K)
        tl.store(values + rank, _logit_of((sorted_keys >> 32).to(tl.int32)), mask=rank < K)


@triton.jit
def _logit_of(ordered: tl.tensor) -> tl.tensor:
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _chunk_topk_kernel(
    logits: tl.tensor,
    row_stride: tl.int64,
    found: tl.tensor,
    values: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    vocab_size: int,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Top-k of one chunk, and its sum of exponentials."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(1) + chunk
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    greatest = tl.max(x, axis=0)
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    tl.store(maxima + place, greatest)
    tl.store(totals + place, tl.sum(tl.exp(x - base), axis=0))
    _store_highest(x, tokens, found + place * K, values + place * K, K, KEPT)


@triton.jit
def _rank_kernel(
    found: tl.tensor,
    values: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    tokens: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    num_chunks: int,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    NUM_FOUND: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
) -> None:
    """Top-k of a row, from those of its chunks."""
    row = tl.program_id(0)
    place = tl.arange(0, NUM_FOUND)
    real = place < num_chunks * K
    first = row * num_chunks * K
    x = tl.load(values + first + place, mask=real, other=float("-inf"))
    ids = tl.load(found + first + place, mask=real, other=0x7FFFFFFF)
    _store_highest(x, ids, tokens + row * K, best + row * K, K, KEPT)
    chunk = tl.arange(0, NUM_CHUNKS)
    maximum = tl.load(maxima + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    greatest = tl.max(maximum, axis=0)
    part = tl.load(totals + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    tl.store(total + row, greatest + tl.log(tl.sum(part * tl.exp(maximum - greatest), axis=0)))


@triton.jit
def _mixed(x: tl.tensor) -> tl.tensor:
    """`hashing.mix64` of uint64."""
    x = x + _GOLDEN
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _draw_kernel(
    logits: tl.tensor,
    token_stride: tl.int64,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    scores: tl.tensor,
    found: tl.tensor,
    vocab_size: int,
    CHUNK: tl.constexpr,
) -> None:
    """The sampled token of one chunk: the highest logit plus Gumbel noise."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab_size
    x = tl.load(logits + row * token_stride + tokens, mask=inside, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    score = x.to(tl.float64)
    if temperature > 0:
        key = _mixed(tl.load(seeds + row).to(tl.uint64)) + tl.load(positions + row).to(tl.uint64)
        bits = _mixed(_mixed(key) + tokens.to(tl.uint64) * _GOLDEN)
        uniform = ((bits >> 11).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)
        warm = tl.div_rn(x, tl.maximum(temperature, 1e-6))  # rounded as in PyTorch, which draws the other rows
        score = warm.to(tl.float64) - tl.log(-tl.log(uniform))
        score = tl.where(inside, score, float("-inf"))
    value = tl.max(score, axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(scores + place, value)
    tl.store(found + place, tl.min(tl.where(score == value, tokens, CHUNK * tl.num_programs(1)), axis=0).to(tl.int64))

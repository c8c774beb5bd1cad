"""Top-k and sampling over logits as Triton kernels. Importing this module needs Triton.

A row of logits is split into chunks that are searched in parallel, and their results are compared afterwards. Of equal
logits the first token wins, so a row's choice does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # what one warp ranks without waiting for others
_UNROLLED = tl.constexpr(16)  # ranks up to which a loop over them is unrolled: more code than that is slow to fetch

# The constants of `hashing.mix64`.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


def highest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k of logits [R, V], best first: tokens [R, k] int32 and logits [R, k] float32, and the logsumexp [R].

    V must be at least k.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    found = logits.new_empty(num_rows, num_chunks, k, dtype=torch.int32)
    values = logits.new_empty(num_rows, num_chunks, k, dtype=torch.float32)
    sums = logits.new_empty(2, num_rows, num_chunks, dtype=torch.float32)
    tokens, best = found.new_empty(num_rows, k), values.new_empty(num_rows, k)
    total = values.new_empty(num_rows)
    _chunk_topk_kernel[(num_rows, num_chunks)](
        logits, logits.stride(0), found, values, *sums, vocab_size, K=k, CHUNK=_CHUNK, num_warps=1
    )
    num_found = triton.next_power_of_2(num_chunks * k)
    _rank_kernel[(num_rows,)](
        found,
        values,
        *sums,
        tokens,
        best,
        total,
        num_chunks,
        K=k,
        NUM_FOUND=num_found,
        NUM_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=min(max(num_found // 1024, 4), 16),
    )
    return tokens, best, total


def draw(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    """Sampled tokens [T] int64 after each token of a step; temperature 0 takes the highest logit.

    logits [T, V]; seeds, positions of the tokens to choose, and temperatures, all [T]. The noise is that of
    `sampler.gumbel_noise`.
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
def _chunk_topk_kernel(
    logits: tl.tensor,
    row_stride: tl.int64,
    found: tl.tensor,
    values: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    vocab_size: int,
    K: tl.constexpr,
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
    found += place * K
    values += place * K
    if K <= _UNROLLED:
        for rank in tl.static_range(K):
            x = _take_token(x, tokens, found + rank, values + rank, vocab_size)
    else:
        for rank in range(K):
            x = _take_token(x, tokens, found + rank, values + rank, vocab_size)


@triton.jit
def _take_token(x: tl.tensor, tokens: tl.tensor, found: tl.tensor, values: tl.tensor, vocab_size: int) -> tl.tensor:
    """Stores the highest of a chunk, and returns the others."""
    value = tl.max(x, axis=0)
    token = tl.min(tl.where(x == value, tokens, vocab_size - 1), axis=0)  # of NaN, which equals nothing, the last
    tl.store(found, token)
    tl.store(values, value)
    return tl.where(tokens == token, float("-inf"), x)


@triton.jit
def _take_place(
    x: tl.tensor, place: tl.tensor, found: tl.tensor, tokens: tl.tensor, best: tl.tensor, num_found: int
) -> tl.tensor:
    """Stores the highest of all chunks' highest, and returns the others."""
    value = tl.max(x, axis=0)
    # Chunks stand in order, and within a chunk equal ones do: the first place is the first token.
    at = tl.min(tl.where(x == value, place, num_found - 1), axis=0)
    tl.store(tokens, tl.load(found + at))
    tl.store(best, value)
    return tl.where(place == at, float("-inf"), x)


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
    NUM_FOUND: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
) -> None:
    """Top-k of a row, from those of its chunks."""
    row = tl.program_id(0)
    place = tl.arange(0, NUM_FOUND)
    real = place < num_chunks * K
    x = tl.load(values + row * num_chunks * K + place, mask=real, other=float("-inf"))
    found += row * num_chunks * K
    tokens += row * K
    best += row * K
    if K <= _UNROLLED:
        for rank in tl.static_range(K):
            x = _take_place(x, place, found, tokens + rank, best + rank, num_chunks * K)
    else:
        for rank in range(K):
            x = _take_place(x, place, found, tokens + rank, best + rank, num_chunks * K)
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
        warm = tl.div_rn(x, tl.maximum(temperature, 1e-6))  # rounded as PyTorch does, which draws where this cannot
        score = warm.to(tl.float64) - tl.log(-tl.log(uniform))
        score = tl.where(inside, score, float("-inf"))
    value = tl.max(score, axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(scores + place, value)
    tl.store(found + place, tl.min(tl.where(score == value, tokens, CHUNK * tl.num_programs(1)), axis=0).to(tl.int64))

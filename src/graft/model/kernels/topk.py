"""Top-k over logits as Triton kernels. Importing this module needs Triton.

A row of logits is split into chunks, which are searched in parallel and then merged. Among equal logits the first token
wins, so a row's choice does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate
from graft.model.kernels.gate import is_shut
from graft.tree.device.buffers import DraftDraws
from graft.tree.device.noise import draft_noise

_CHUNK = 1024  # logits that one warp ranks without synchronization
_FEW = tl.constexpr(16)  # up to this k, the highest are taken one by one; above, sorting is faster


def highest(
    logits: Tensor, k: int, draws: DraftDraws | None = None, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k of logits [R, V], best first: tokens [R, k] int32 and logits [R, k] float32, and the logsumexp [R].

    V must be at least k. draws: of S texts, where R is a multiple of S. With them, sampled texts are ranked by
    logits / T + noise. The kernel computes the noise itself, which would take as much memory as the logits if stored.
    wanted: [R] int32 0 for rows whose results are left unwritten.
    """
    num_rows, vocab_size = logits.shape
    num_chunks, kept = triton.cdiv(vocab_size, _CHUNK), triton.next_power_of_2(k)
    found = logits.new_empty(num_rows, num_chunks, k, dtype=torch.int32)
    values = logits.new_empty(num_rows, num_chunks, k, dtype=torch.float32)
    sums = values.new_empty(2, num_rows, num_chunks)
    tokens, best = found.new_empty(num_rows, k), values.new_empty(num_rows, k)
    total = values.new_empty(num_rows)
    _chunk_topk_kernel[(num_rows, num_chunks)](
        logits,
        logits.stride(0),
        *(found, values, *sums),
        vocab_size,
        *(draws or (None,) * len(DraftDraws._fields)),
        num_rows // len(draws.seeds) if draws is not None else 1,
        wanted,
        K=k,
        KEPT=kept,
        CHUNK=_CHUNK,
        num_warps=1,
        **gate.options(),
    )
    num_found = triton.next_power_of_2(num_chunks * k)
    _rank_kernel[(num_rows,)](
        *(found, values, *sums),
        *(tokens, best, total),
        num_chunks,
        wanted,
        K=k,
        KEPT=kept,
        NUM_FOUND=num_found,
        NUM_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=min(max(num_found // 1024, 4), 16),
        **gate.options(),
    )
    return tokens, best, total


@triton.jit
def _is_skipped(wanted: tl.tensor | None, row: tl.tensor) -> tl.tensor | tl.constexpr:
    if wanted is None:
        return False
    else:
        return tl.load(wanted + row) == 0


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
        # Logit and id as one number, which is greater for the first of equal logits.
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
    seeds: tl.tensor | None,
    temperatures: tl.tensor | None,
    positions: tl.tensor | None,
    to_target: tl.tensor | None,
    num_passes: tl.tensor | None,
    group: int,
    wanted: tl.tensor | None,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Top-k of one chunk, and its sum of exponentials."""
    if is_shut(flag):
        return
    row, chunk = tl.program_id(0), tl.program_id(1)
    if _is_skipped(wanted, row):
        return
    place = row * tl.num_programs(1) + chunk
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    if seeds is not None:
        text = row // group
        temperature = tl.load(temperatures + text)
        if temperature > 0:
            target_ids = tokens + tl.load(to_target + tokens, mask=tokens < vocab_size, other=0)
            position = tl.load(positions + text).to(tl.int64) + 1
            if num_passes is not None:
                position += tl.load(num_passes + text)
            x = x / temperature + draft_noise(tl.load(seeds + text), position, target_ids)
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
    wanted: tl.tensor | None,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    NUM_FOUND: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Top-k of a row, from those of its chunks."""
    if is_shut(flag):
        return
    row = tl.program_id(0)
    if _is_skipped(wanted, row):
        return
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

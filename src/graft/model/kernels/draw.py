"""Sampling as Triton kernels: temperature, bias, top-k, top-p, min-p, keyed noise and argmax.

Importing this module needs Triton. The result is that of `sampler.truncated` and `noise.gumbel_noise`. Nothing is
sorted, and the choice after a token does not depend on the other tokens of a step. Kernels read the logits once each,
and the last one reads their results:

1. By chunk: the highest score. Rows without truncation are drawn here.
2. A histogram of the scores below the highest, with the number and the weight of the tokens in each bin. The last
   program of a token finds the bins in which the truncation can end, see `_find_range`. Most tokens are far below the
   highest and share a bin, because an addition for each of them would be slow. The kernel runs once more for those
   rows in which the truncation ends among them: a flat distribution, or a top-k where one token is nearly certain.
   The last bin then holds tokens that are never drawn: see REACH.
3. By chunk: tokens inside this range are collected. Those before it are kept, and drawn at once.
4. By token: the exact cut among the collected tokens, the draw among them, and the best of all.

All sums are sums of integers, so they do not depend on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels.scores import (
    BINS_PER_HALVING,
    COARSE_BINS_PER_HALVING,
    COARSE_OFFSET,
    EXP_BITS,
    FIRST_FAR_BIN,
    ID_MASK,
    INFINITY,
    MANTISSA_SHIFT,
    NO_TOKEN,
    NUM_BINS,
    Given,
    best_of,
    bins_of,
    halvings_of,
    id_of,
    is_likely,
    is_truncated,
    key_of,
    load_logits,
    mantissa_of,
    order_of,
    scaled_by,
    score_of,
    share_of,
    store_choice,
    weights_of,
    with_noise,
)

_CHUNK = 1024  # logits of one program in the first kernel, which has one warp
_WIDE_CHUNK = 2048  # in the others, which have eight warps: few registers each, so that more programs run at once
_ROOM = 2048  # tokens in the range of the cut that can be collected
_TOO_MANY, _TOO_MANY_FAR = tl.constexpr(-1), tl.constexpr(-2)  # in place of the range's first bin
_BEYOND = tl.constexpr(1 << 52)  # above every number of `order_of`
# A bin holds the sum of its mantissas, and above it the number of tokens.
_COUNT_SHIFT = tl.constexpr(45)
_ONE_TOKEN = tl.constexpr(1 << 45)
_SUM_MASK = tl.constexpr((1 << 45) - 1)
_COUNT_MASK = tl.constexpr((1 << 19) - 1)


def draw(
    logits: Tensor,  # [T, V]
    rows: Tensor,  # [T] int32 or int64 each token's row; a row that does not exist marks padding
    depths: Tensor,  # [T] int32 or int64
    seeds: Tensor,  # [R] int64
    positions: Tensor,  # [R] int64 of the token chosen after a token of depth 0
    temperatures: Tensor,  # [R] float32; 0 takes the highest logit
    top_k: Tensor,  # [R] int64; 0 is off
    top_p: Tensor,  # [R] float32
    min_p: Tensor,  # [R] float32
    out: Tensor,  # [T] int64, written except at padding
    bias: Tensor | None = None,  # [R, V] float32, added to the logits
    truncates: bool = True,  # False if no row has a top_k, top_p or min_p: then one kernel replaces the last three
) -> None:
    """Choose a token after each token of a step: the highest logit, or a sample of the truncated distribution.

    Nothing waits for the device, and what is launched depends only on shapes, so a CUDA graph can capture it.
    """
    num_tokens, vocab_size = logits.shape
    if truncates and vocab_size > ID_MASK.value:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is too large to truncate: at most {ID_MASK.value}")
    if not num_tokens:
        return
    num_chunks, num_wide = triton.cdiv(vocab_size, _CHUNK), triton.cdiv(vocab_size, _WIDE_CHUNK)
    scores = logits.new_empty(num_tokens, num_chunks, dtype=torch.float64)
    found = logits.new_empty(num_tokens, num_chunks, dtype=torch.int32)
    given = Given(
        *(logits, logits.stride(0), logits if bias is None else bias, rows, depths, seeds, positions),
        *(temperatures, top_k, top_p, min_p, len(seeds), vocab_size),
    )
    has_bias = bias is not None
    num_bins = NUM_BINS.value if truncates else 1
    histogram = logits.new_empty(num_tokens, num_bins, dtype=torch.int64)
    counters = logits.new_empty(num_tokens, 2, dtype=torch.int32)
    _chunk_kernel[(num_tokens, num_chunks)](
        given,
        *(scores, found, histogram, counters),
        HAS_BIAS=has_bias,
        TRUNCATES=truncates,
        CLEARED=triton.next_power_of_2(triton.cdiv(num_bins, num_chunks)),
        CHUNK=_CHUNK,
        num_warps=1,
    )
    all_chunks = triton.next_power_of_2(num_chunks)
    if not truncates:
        _finish_kernel[(num_tokens,)](scores, found, rows, len(seeds), num_chunks, out, CHUNKS=all_chunks, num_warps=1)
        return
    highest = logits.new_empty(num_tokens, dtype=torch.float32)
    ranges = logits.new_empty(num_tokens, 6, dtype=torch.int64)
    for is_second in (False, True):
        _histogram_kernel[(num_tokens, num_wide)](
            given,
            *(scores, found, num_chunks, histogram, counters, highest, ranges, out),
            HAS_BIAS=has_bias,
            CHUNKS=all_chunks,
            ROOM=_ROOM,
            IS_SECOND=is_second,
            CHUNK=_WIDE_CHUNK,
            num_warps=8,
        )
    collected = logits.new_empty(num_tokens, _ROOM, dtype=torch.int64)
    _collect_kernel[(num_tokens, num_wide)](
        given,
        *(scores, found, counters, highest, ranges, collected),
        HAS_BIAS=has_bias,
        ROOM=_ROOM,
        CHUNK=_WIDE_CHUNK,
        num_warps=8,
    )
    _cut_kernel[(num_tokens,)](
        given,
        *(scores, found, num_wide, counters, highest, ranges, collected, out),
        HAS_BIAS=has_bias,
        CHUNKS=triton.next_power_of_2(num_wide),
        ROOM=_ROOM,
        CHUNK=_WIDE_CHUNK,
        num_warps=8,
    )


# Scores, noise and weights


@triton.jit
def _chunk_kernel(
    given: Given,
    scores: tl.tensor,
    found: tl.tensor,
    histogram: tl.tensor,
    counters: tl.tensor,
    HAS_BIAS: tl.constexpr,
    TRUNCATES: tl.constexpr,
    CLEARED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Choose from one chunk, or find its highest logit if the row truncates. Clears what the next kernels add to."""
    token, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(given.rows + token)
    if (row < 0) | (row >= given.num_rows):
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(given, token, row, ids, HAS_BIAS)
    temperature = tl.load(given.temperatures + row)
    place = token * tl.num_programs(1) + chunk
    if is_truncated(given, row) & TRUNCATES:
        tl.store(scores + place, tl.max(x, axis=0).to(tl.float64))
        bins = chunk * CLEARED + tl.arange(0, CLEARED)
        tl.store(histogram + token * NUM_BINS + bins, tl.zeros([CLEARED], tl.int64), mask=bins < NUM_BINS)
        if chunk == 0:
            for number in tl.static_range(2):
                tl.store(counters + token * 2 + number, 0)
    else:
        score = x.to(tl.float64)
        if temperature > 0:
            score = with_noise(scaled_by(x, temperature), ids, key_of(given, token, row))
        value, choice = best_of(tl.where(ids < given.vocab_size, score, -INFINITY), ids)
        tl.store(scores + place, value)
        tl.store(found + place, choice)


@triton.jit
def _finish_kernel(
    scores: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    num_rows: int,
    num_chunks: int,
    out: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    """The best of one token's chunks."""
    token = tl.program_id(0)
    row = tl.load(rows + token)
    if (row >= 0) & (row < num_rows):
        _choose_among_chunks(scores, found, token, num_chunks, out, CHUNKS)


@triton.jit
def _choose_among_chunks(
    scores: tl.tensor, found: tl.tensor, token: tl.tensor, num_chunks: tl.tensor, out: tl.tensor, CHUNKS: tl.constexpr
) -> None:
    chunk = tl.arange(0, CHUNKS)
    place = token * num_chunks + chunk
    score = tl.load(scores + place, mask=chunk < num_chunks, other=-INFINITY)
    ids = tl.load(found + place, mask=chunk < num_chunks, other=NO_TOKEN)
    value, choice = best_of(score, ids)
    store_choice(out + token, value, choice)


# The second kernel


@triton.jit
def _histogram_kernel(
    given: Given,
    scores: tl.tensor,
    found: tl.tensor,
    num_chunks: int,
    histogram: tl.tensor,
    counters: tl.tensor,
    highest_scores: tl.tensor,
    ranges: tl.tensor,
    out: tl.tensor,
    HAS_BIAS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
    IS_SECOND: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add one chunk to its token's histogram. The last program of a token finds the range of the cut.

    IS_SECOND: add far tokens, each to its bin, if the first launch found the cut among too many of them.
    """
    token, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(given.rows + token)
    if (row < 0) | (row >= given.num_rows):
        return
    if not is_truncated(given, row):
        if (chunk == 0) & (not IS_SECOND):
            _choose_among_chunks(scores, found, token, num_chunks, out, CHUNKS)
        return
    if IS_SECOND and tl.load(ranges + token * 6) != _TOO_MANY_FAR:
        return
    temperature = tl.load(given.temperatures + row)
    each = tl.arange(0, CHUNKS)
    highest = tl.load(scores + token * num_chunks + each, mask=each < num_chunks, other=-INFINITY)
    highest = scaled_by(tl.max(highest, axis=0).to(tl.float32), temperature)

    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < given.vocab_size
    x = load_logits(given, token, row, ids, HAS_BIAS)
    halvings = halvings_of(scaled_by(x, temperature), highest)
    bins = bins_of(halvings)
    # Right shifts of the mantissa, which lose low bits, happen here; left shifts when the histogram is read.
    shift = tl.maximum((halvings >> EXP_BITS) - MANTISSA_SHIFT, 0).to(tl.int64)
    entry = (mantissa_of(halvings) >> shift) + _ONE_TOKEN
    begin, end = (FIRST_FAR_BIN, NUM_BINS - 1) if IS_SECOND else (0, FIRST_FAR_BIN)
    own = histogram + token * NUM_BINS
    tl.atomic_add(own + bins, entry, mask=inside & (bins >= begin) & (bins < end), sem="relaxed")
    rest = tl.sum(tl.where(inside & (bins >= end), entry, 0), axis=0)
    tl.atomic_add(own + NUM_BINS - 1, rest, sem="relaxed")

    tl.debug_barrier()  # all threads' additions precede this one
    if tl.atomic_add(counters + token * 2, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(highest_scores + token, highest)
        k, p, least = tl.load(given.top_k + row), tl.load(given.top_p + row), tl.load(given.min_p + row)
        _find_range(own, k, p, least, counters + token * 2, ranges + token * 6, given.vocab_size, ROOM, IS_SECOND)


@triton.jit
def _find_range(
    histogram: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    counter: tl.tensor,
    found: tl.tensor,
    vocab_size: tl.tensor,
    ROOM: tl.constexpr,
    IS_SECOND: tl.constexpr,
) -> None:
    """Find the range of bins in which the cut can be. Tokens before the range are kept, those after it are not.

    Stores the first and the last bin, the number and the weight of the tokens before them, the weight of all tokens,
    and whether there is a cut. The range begins at bin 0 if all tokens up to its end can be collected. Its first bin is
    negative if it contains too many.
    """
    bins = tl.arange(0, NUM_BINS)
    entry = tl.load(histogram + bins, cache_modifier=".cg")  # other programs wrote it, so bypass the L1 cache
    count = (entry >> _COUNT_SHIFT) & _COUNT_MASK
    shift = tl.maximum(-(bins // BINS_PER_HALVING - MANTISSA_SHIFT), 0).to(tl.int64)
    weight = (entry & _SUM_MASK) << shift
    counts, weights = tl.cumsum(count, axis=0), tl.cumsum(weight, axis=0)

    has_k, has_p = (top_k > 0) & (top_k < vocab_size), top_p < 1
    k_bin = tl.min(tl.where((counts >= top_k) & has_k, bins, NUM_BINS - 1), axis=0)
    # A lower bound of the weight that remains after top-k; exact without a top-k.
    remaining = tl.sum(tl.where((bins < k_bin) | (has_k == 0), weight, 0), axis=0)
    p_bin = tl.min(tl.where(weights >= share_of(top_p, remaining), bins, k_bin), axis=0)
    p_bin = tl.where(has_p, p_bin, k_bin)
    first, last = p_bin, tl.where(has_k, k_bin, p_bin)

    # The bin of min-p as in `bins_of`, and one more, because the logarithm is rounded.
    halvings = -tl.log2(tl.maximum(min_p, 1e-30))
    min_bin = tl.minimum(halvings * BINS_PER_HALVING, halvings * COARSE_BINS_PER_HALVING + COARSE_OFFSET) + 1
    min_bin = tl.where(min_p > 0, min_bin, NUM_BINS).to(tl.int32)
    if IS_SECOND:  # tokens out of reach are in the last bin: they are never drawn and have no weight
        min_bin, last = tl.minimum(min_bin, NUM_BINS - 2), tl.minimum(last, NUM_BINS - 2)
    else:  # far tokens are in the last bin
        min_bin = tl.where(min_bin < FIRST_FAR_BIN, min_bin, NUM_BINS - 1)
        first = tl.minimum(first, FIRST_FAR_BIN)
    has_cut = (has_k | has_p) & (min_bin >= first)
    first, last = tl.where(has_cut, first, min_bin + 1), tl.where(has_cut, last, min_bin)

    through = tl.sum(tl.where(bins <= last, count, 0), axis=0)
    first = tl.where(through <= ROOM, 0, first)
    count_before = tl.sum(tl.where(bins < first, count, 0), axis=0)
    weight_before = tl.sum(tl.where(bins < first, weight, 0), axis=0)
    if through - count_before > ROOM:
        first = tl.full([], _TOO_MANY, tl.int32)
        if (last == NUM_BINS - 1) & (not IS_SECOND):  # the histogram and its counter are prepared for the second launch
            first = tl.full([], _TOO_MANY_FAR, tl.int32)
            tl.store(histogram + NUM_BINS - 1, 0)
            tl.store(counter, 0)
    tl.store(found, first.to(tl.int64))
    tl.store(found + 1, last.to(tl.int64))
    tl.store(found + 2, count_before)
    tl.store(found + 3, weight_before)
    tl.store(found + 4, tl.sum(weight, axis=0))
    tl.store(found + 5, has_cut.to(tl.int64))


# The third kernel


@triton.jit
def _collect_kernel(
    given: Given,
    scores: tl.tensor,
    found: tl.tensor,
    counters: tl.tensor,
    highest_scores: tl.tensor,
    ranges: tl.tensor,
    collected: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Draw among the tokens of one chunk that are certainly kept, and collect those in the range of the cut."""
    token, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(given.rows + token)
    if (row < 0) | (row >= given.num_rows):
        return
    if not is_truncated(given, row):
        return
    own = ranges + token * 6
    first, last = tl.load(own).to(tl.int32), tl.load(own + 1).to(tl.int32)
    if first < 0:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < given.vocab_size
    x = load_logits(given, token, row, ids, HAS_BIAS)
    score = scaled_by(x, tl.load(given.temperatures + row))
    halvings = halvings_of(score, tl.load(highest_scores + token))
    bins = bins_of(halvings)
    is_kept = inside & (bins < first)
    place = token * tl.num_programs(1) + chunk
    if tl.max(is_kept.to(tl.int32), axis=0) > 0:
        is_kept = is_kept & is_likely(weights_of(halvings), tl.load(given.min_p + row))
        drawn = with_noise(score, ids, key_of(given, token, row))
        value, choice = best_of(tl.where(is_kept, drawn, -INFINITY), ids)
        tl.store(scores + place, value)
        tl.store(found + place, choice)
    else:
        tl.store(scores + place, tl.full([], -INFINITY, tl.float64))
    is_inside = (inside & (bins >= first) & (bins <= last)).to(tl.int32)
    number = tl.sum(is_inside, axis=0)
    if number > 0:
        start = tl.atomic_add(counters + token * 2 + 1, number, sem="relaxed")
        there = collected + token * ROOM + start + tl.cumsum(is_inside, axis=0) - 1
        tl.store(there, order_of(score, ids), mask=is_inside > 0)


# The fourth kernel


@triton.jit
def _cut_kernel(
    given: Given,
    scores: tl.tensor,
    found: tl.tensor,
    num_chunks: int,
    counters: tl.tensor,
    highest_scores: tl.tensor,
    ranges: tl.tensor,
    collected: tl.tensor,
    out: tl.tensor,
    HAS_BIAS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Find the cut of one token, draw among its collected tokens, and take the best of all draws."""
    token = tl.program_id(0)
    row = tl.load(given.rows + token)
    if (row < 0) | (row >= given.num_rows):
        return
    if not is_truncated(given, row):
        return
    temperature, highest = tl.load(given.temperatures + row), tl.load(highest_scores + token)
    k, p, least = tl.load(given.top_k + row), tl.load(given.top_p + row), tl.load(given.min_p + row)
    key = key_of(given, token, row)
    own = ranges + token * 6
    if tl.load(own) < 0:
        _draw_row(given, token, row, temperature, highest, key, k, p, least, out, HAS_BIAS, CHUNK)
        return
    number = tl.load(counters + token * 2 + 1)
    at = tl.arange(0, ROOM)
    is_real = at < number
    order = tl.load(collected + token * ROOM + at, mask=is_real, other=0)
    score, ids = score_of(order), id_of(order)
    weight = tl.where(is_real, weights_of(halvings_of(score, highest)), 0)
    if tl.load(own + 5) > 0:
        before, weight_before, total = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4)
        lowest = _cut(order, weight, is_real, k, p, before, weight_before, total, given.vocab_size)
        is_real = is_real & (order >= lowest)
    is_kept = is_real & is_likely(weight, least)
    value, choice = best_of(tl.where(is_kept, with_noise(score, ids, key), -INFINITY), ids)
    # The previous kernel has drawn among the tokens before the range, by chunk.
    chunk = tl.arange(0, CHUNKS)
    place = token * num_chunks + chunk
    kept_value = tl.load(scores + place, mask=chunk < num_chunks, other=-INFINITY)
    kept_value, kept_choice = best_of(kept_value, tl.load(found + place, mask=chunk < num_chunks, other=NO_TOKEN))
    is_better = (kept_value > value) | ((kept_value == value) & (kept_choice < choice))
    store_choice(out + token, tl.where(is_better, kept_value, value), tl.where(is_better, kept_choice, choice))


@triton.jit
def _cut(
    order: tl.tensor,
    weight: tl.tensor,
    is_real: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    count_before: tl.tensor,
    weight_before: tl.tensor,
    total: tl.tensor,
    vocab_size: tl.tensor,
) -> tl.tensor:
    """The lowest token that top-k and top-p keep. total: the weight of all tokens, including those not collected."""
    lowest = tl.min(tl.where(is_real, order, _BEYOND), axis=0)
    highest = tl.max(tl.where(is_real, order, -_BEYOND), axis=0)
    if (top_k > 0) & (top_k < vocab_size):
        lowest = _last_of(order, is_real.to(tl.int64), top_k - count_before, lowest, highest)
        total = weight_before + tl.sum(tl.where(order >= lowest, weight, 0), axis=0)
    if top_p < 1:
        lowest = _last_of(order, weight, share_of(top_p, total) - weight_before, lowest, highest)
    return lowest


@triton.jit
def _last_of(order: tl.tensor, amount: tl.tensor, goal: tl.tensor, lowest: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """The greatest number n such that the amounts of orders >= n reach the goal, by bisection. `lowest` must do so."""
    beyond = highest + 1
    while beyond - lowest > 1:
        middle = lowest + (beyond - lowest) // 2
        is_reached = tl.sum(tl.where(order >= middle, amount, 0), axis=0) >= goal
        lowest, beyond = tl.where(is_reached, middle, lowest), tl.where(is_reached, beyond, middle)
    return lowest


@triton.jit
def _draw_row(
    given: Given,
    token: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    highest: tl.tensor,
    key: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    out: tl.tensor,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Draw one token in one program, which reads the logits about fifty times. Used when thousands share a bin."""
    lowest = tl.full([], -_BEYOND, tl.int64)
    if (top_k > 0) & (top_k < given.vocab_size):
        lowest = _last_of_row(given, token, row, temperature, highest, top_k, lowest, True, HAS_BIAS, CHUNK)
    if top_p < 1:
        total = _amount_from(given, token, row, temperature, highest, lowest, False, HAS_BIAS, CHUNK)
        lowest = _last_of_row(
            given, token, row, temperature, highest, share_of(top_p, total), lowest, False, HAS_BIAS, CHUNK
        )
    best, choice = tl.full([], -INFINITY, tl.float64), tl.full([], NO_TOKEN, tl.int32)
    for start in range(0, given.vocab_size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = load_logits(given, token, row, ids, HAS_BIAS)
        score = scaled_by(x, temperature)
        is_kept = (ids < given.vocab_size) & (order_of(score, ids) >= lowest)
        is_kept = is_kept & is_likely(weights_of(halvings_of(score, highest)), min_p)
        if tl.max(is_kept.to(tl.int32), axis=0) > 0:
            value, found = best_of(tl.where(is_kept, with_noise(score, ids, key), -INFINITY), ids)
            choice = tl.where(value > best, found, choice)
            best = tl.maximum(value, best)
    store_choice(out + token, best, choice)


@triton.jit
def _last_of_row(
    given: Given,
    token: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    highest: tl.tensor,
    goal: tl.tensor,
    lowest: tl.tensor,
    BY_COUNT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """`_last_of` over a whole row."""
    beyond = tl.full([], _BEYOND, tl.int64)
    while beyond - lowest > 1:
        middle = lowest + (beyond - lowest) // 2
        is_reached = _amount_from(given, token, row, temperature, highest, middle, BY_COUNT, HAS_BIAS, CHUNK) >= goal
        lowest, beyond = tl.where(is_reached, middle, lowest), tl.where(is_reached, beyond, middle)
    return lowest


@triton.jit
def _amount_from(
    given: Given,
    token: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    highest: tl.tensor,
    lowest: tl.tensor,
    BY_COUNT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """The number or the weight of a row's tokens whose order is at least `lowest`."""
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(0, given.vocab_size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = load_logits(given, token, row, ids, HAS_BIAS)
        score = scaled_by(x, temperature)
        is_counted = (ids < given.vocab_size) & (order_of(score, ids) >= lowest)
        if BY_COUNT:
            total += is_counted.to(tl.int64)
        else:
            total += tl.where(is_counted, weights_of(halvings_of(score, highest)), 0)
    return tl.sum(total, axis=0)

"""Triton kernels of the EAGLE-3 head, except matrix products: inputs and beams. Importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate
from graft.model.kernels.eight_bits import fitted
from graft.model.kernels.gate import is_shut
from graft.model.kernels.layer import rms_normed
from graft.tree.device.buffers import Beams


def enter(
    tokens: Tensor,  # [T] int32
    embedding: Tensor,  # [vocab, H]
    hidden: Tensor,  # [F, H]
    origins: Tensor | None,  # [T] int32: whose hidden state each takes; its own if None
    norms: tuple[Tensor, Tensor],  # of embeddings and of hidden states, [H]
    eps: float,
    keeps_normed: bool,
    dtype: torch.dtype,  # of the inputs
) -> tuple[Tensor, Tensor]:
    """The layer's inputs [T, 2H] (normed embeddings, then normed hidden states), and its residual [T, H]."""
    num_tokens, size = len(tokens), hidden.shape[1]
    both, residual = hidden.new_empty(num_tokens, 2 * size, dtype=dtype), hidden.new_empty(num_tokens, size)
    block = triton.next_power_of_2(size)
    _enter_kernel[(num_tokens, 2)](
        tokens,
        embedding,
        hidden,
        tokens if origins is None else origins,
        *norms,
        both,
        residual,
        eps,
        BRANCHES=origins is not None,
        KEEPS_NORMED=keeps_normed,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **gate.options(),
    )
    return both, residual


def keep_last(outputs: Tensor, begins: Tensor, counts: Tensor, table_rows: Tensor, root: Tensor) -> None:
    """Write the output [E, H] at each row's last entry to `root` [table_rows, H]. Rows without entries keep theirs.

    begins, counts: [R] int32, each row's first entry and number of entries. table_rows: rows of the block tables.
    """
    size = outputs.shape[1]
    block = triton.next_power_of_2(size)
    _keep_last_kernel[(len(counts),)](
        *(outputs, begins, counts, table_rows, root),
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **gate.options(),
    )


def take_roots(root: Tensor, table_rows: Tensor, hidden: Tensor, topk: int) -> Tensor:
    """The features [R, H] of rows in `root` [table_rows, H]. They are also copied to `hidden` at beam row * topk.

    table_rows: [R] int32.
    """
    num_rows, size = len(table_rows), root.shape[1]
    taken, block = root.new_empty(num_rows, size), triton.next_power_of_2(size)
    _take_roots_kernel[(num_rows,)](
        *(root, table_rows, taken, hidden),
        topk,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **gate.options(),
    )
    return taken


def spread(
    draft_ids: Tensor,  # [B * F, K] int32, likeliest first
    logits: Tensor,  # [B * F, K] float32
    totals: Tensor,  # [B * F] logsumexp
    to_target: Tensor,  # [draft vocabulary] int64, to add to a draft id
    beams: Beams,
    level: Tensor,  # [3, B * n] int32, written: tokens, parents and the bits of q
    keep: int,
    is_first: bool,
) -> None:
    """Write the likeliest children of the F beams as the next level, and make the first of them the new beams.

    keep: nodes n of a row in the level, if there are so many, and in later ones. is_first: the only beam is the root.
    """
    batch, topk = beams.tokens.shape
    num_beams = 1 if is_first else topk
    _spread_kernel[(batch,)](
        draft_ids,
        logits,
        totals,
        to_target,
        beams.tokens,
        beams.origins,
        beams.paths,
        beams.places,
        beams.entries,
        beams.depths,
        beams.cache_places,
        beams.num_passes,
        *level[:2],
        level[2].view(torch.float32),
        beams.entries.shape[2],
        F=num_beams,
        K=topk,
        COUNT=min(keep, num_beams * topk),
        LATER=min(keep, topk * topk),
        IS_FIRST=is_first,
        BLOCK=max(triton.next_power_of_2(num_beams * topk), 16),
        BLOCK_P=triton.next_power_of_2(beams.entries.shape[2]),
        **gate.options(),
    )


@triton.jit
def _keep_last_kernel(
    outputs: tl.tensor,
    begins: tl.tensor,
    counts: tl.tensor,
    table_rows: tl.tensor,
    root: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """A program is one row."""
    if is_shut(flag):
        return
    row = tl.program_id(0)
    count = tl.load(counts + row)
    last = tl.load(begins + row) + count - 1
    table_row = tl.load(table_rows + row)
    columns = tl.arange(0, BLOCK)
    inside = (columns < SIZE) & (count > 0)
    newest = tl.load(outputs + last.to(tl.int64) * SIZE + columns, mask=inside)
    tl.store(root + table_row.to(tl.int64) * SIZE + columns, newest, mask=inside)


@triton.jit(do_not_specialize=["topk"])
def _take_roots_kernel(
    root: tl.tensor,
    table_rows: tl.tensor,
    taken: tl.tensor,
    hidden: tl.tensor,
    topk: int,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """A program is one row."""
    if is_shut(flag):
        return
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    own = tl.load(root + tl.load(table_rows + row).to(tl.int64) * SIZE + columns, mask=inside)
    tl.store(taken + row * SIZE + columns, own, mask=inside)
    tl.store(hidden + row * topk * SIZE + columns, own, mask=inside)


@triton.jit
def _enter_kernel(
    tokens: tl.tensor,
    embedding: tl.tensor,
    hidden: tl.tensor,
    origins: tl.tensor,
    token_norm: tl.tensor,
    hidden_norm: tl.tensor,
    both: tl.tensor,
    residual: tl.tensor,
    eps: float,
    BRANCHES: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """A program is one half of an entry's inputs."""
    if is_shut(flag):
        return
    entry, half = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    if half == 0:
        token = tl.load(tokens + entry).to(tl.int64)
        x = tl.load(embedding + token * SIZE + columns, mask=inside, other=0.0)
        weight = tl.load(token_norm + columns, mask=inside, other=0.0)
    else:
        place = entry
        if BRANCHES:
            place = tl.load(origins + entry)
        x = tl.load(hidden + place.to(tl.int64) * SIZE + columns, mask=inside, other=0.0)
        weight = tl.load(hidden_norm + columns, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    normed = rms_normed(x, weight, tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps))
    at = entry.to(tl.int64) * 2 * SIZE + half * SIZE + columns
    tl.store(both + at, fitted(normed, both.dtype.element_ty), mask=inside)
    if half == 1:
        kept = normed if KEEPS_NORMED else x
        tl.store(residual + entry.to(tl.int64) * SIZE + columns, kept, mask=inside)


@triton.jit
def _spread_kernel(
    draft_ids: tl.tensor,
    logits: tl.tensor,
    totals: tl.tensor,
    to_target: tl.tensor,
    beam_tokens: tl.tensor,
    origins: tl.tensor,
    beam_paths: tl.tensor,
    beam_places: tl.tensor,
    entries: tl.tensor,
    depths: tl.tensor,
    cache_places: tl.tensor,
    num_passes: tl.tensor,
    level_tokens: tl.tensor,
    level_parents: tl.tensor,
    level_q: tl.tensor,
    max_depth: int,
    F: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    LATER: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """A program is one row."""
    if is_shut(flag):
        return
    row = tl.program_id(0)
    child = tl.arange(0, BLOCK)
    real = child < F * K
    beam = child // K
    number = 0
    path = tl.full([BLOCK], 1.0, tl.float32)
    parent = tl.zeros([BLOCK], tl.int32)
    steps = tl.arange(0, BLOCK_P)[None, :]
    trail = tl.zeros([BLOCK, BLOCK_P], tl.int32)
    if not IS_FIRST:
        number = tl.minimum(tl.load(num_passes + row), max_depth - 1)  # a surplus pass overwrites the last
        path = tl.load(beam_paths + row * K + beam, mask=real, other=0.0)
        parent = tl.load(beam_places + row * K + beam, mask=real, other=0)
        trail = tl.load(
            entries + (row * K + beam[:, None]) * max_depth + steps, mask=real[:, None] & (steps < number), other=0
        )
    logit = tl.load(logits + row * F * K + child, mask=real, other=float("-inf"))
    q = tl.exp(logit - tl.load(totals + row * F + beam, mask=real, other=0.0))
    draft_id = tl.load(draft_ids + row * F * K + child, mask=real, other=0)
    token = draft_id + tl.load(to_target + draft_id, mask=real, other=0)
    path_prob = tl.where(real, path * q, -1.0)
    is_better = path_prob[None, :] > path_prob[:, None]
    is_tied_before = (path_prob[None, :] == path_prob[:, None]) & (child[None, :] < child[:, None])
    rank = tl.sum((is_better | is_tied_before).to(tl.int32), axis=1)

    listed = real & (rank < COUNT)
    tl.store(level_tokens + row * COUNT + rank, token.to(tl.int32), mask=listed)
    tl.store(level_parents + row * COUNT + rank, parent, mask=listed)
    tl.store(level_q + row * COUNT + rank, q, mask=listed)

    tl.debug_barrier()  # the beams read above are overwritten now
    chosen = real & (rank < K)
    start = 1 if IS_FIRST else 1 + K + (number - 1) * LATER  # the level's first place in the tree
    at = row * K + rank
    tl.store(beam_tokens + at, token, mask=chosen)
    tl.store(origins + at, row * K + beam, mask=chosen)
    tl.store(beam_paths + at, path_prob, mask=chosen)
    tl.store(beam_places + at, start + rank, mask=chosen)
    tl.store(depths + at, number, mask=chosen)
    tl.store(cache_places + at, number * K + rank, mask=chosen)
    trail = tl.where(steps == number, number * K + rank[:, None], trail)
    tl.store(entries + at[:, None] * max_depth + steps, trail, mask=chosen[:, None] & (steps <= number))
    tl.store(num_passes + row, number + 1)

"""What the Triton kernels share: small functions over the candidates of `buffers.Pool`."""

from __future__ import annotations

import triton
import triton.language as tl

from graft.tree.device import buffers
from graft.tree.device.buffers import Nodes, TableRows

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
    kind: tl.tensor,
    agreement: tl.tensor,
    source: tl.tensor,
    bucket: tl.tensor,
    num_sources: int,
    num_buckets: int,
    mask: tl.tensor,
) -> tl.tensor:
    """P(accepted | parent accepted) from the calibration table [kinds * agreements, sources, buckets]."""
    cell = ((kind * 3 + agreement) * num_sources + source) * num_buckets + bucket
    return tl.load(acceptance_probs + cell, mask=mask, other=0.0)


@triton.jit
def write_nodes(
    pool: Nodes,
    at: tl.tensor,
    token: tl.tensor,
    parent: tl.tensor,
    depth: tl.tensor,
    need: tl.tensor,
    source: tl.tensor,
    bucket: tl.tensor,
    key: tl.tensor,
    path: tl.tensor,
    mask: tl.tensor,
) -> None:
    """Write candidates, all but their agreement, which a merge computes."""
    tl.store(pool.tokens + at, token, mask=mask)
    tl.store(pool.parents + at, parent, mask=mask)
    tl.store(pool.depths + at, depth, mask=mask)
    tl.store(pool.needs + at, need, mask=mask)
    tl.store(pool.sources + at, source, mask=mask)
    tl.store(pool.buckets + at, bucket, mask=mask)
    tl.store(pool.keys + at, key, mask=mask)
    tl.store(pool.paths + at, path, mask=mask)


@triton.jit
def row_of(
    number: tl.tensor,
    token: tl.tensor,
    before: tl.tensor,
    earlier: tl.tensor,
    salt: tl.tensor,
    tables: TableRows,
) -> tuple[tl.tensor, tl.tensor]:
    """The rows of n-grams in a table, and their hashes. number: of the table; 0 is that of 3-grams."""
    key = salt * tl.load(tables.factors + 3) + token.to(tl.int64) * tl.load(tables.factors)
    key += tl.where(number < 2, before.to(tl.int64) * tl.load(tables.factors + 1), 0)
    key += tl.where(number < 1, earlier.to(tl.int64) * tl.load(tables.factors + 2), 0)
    bits = tl.load(tables.row_bits + number)
    hashed = (key.to(tl.uint64, bitcast=True) >> (64 - tl.maximum(bits, 1)).to(tl.uint64)).to(tl.int64)
    return tl.load(tables.starts + number) + tl.where(bits > 0, hashed, token.to(tl.int64)), key


@triton.jit
def look_up(
    tables: TableRows,
    number: tl.tensor,
    token: tl.tensor,
    before: tl.tensor,
    earlier: tl.tensor,
    salt: tl.tensor,
    is_open: tl.tensor,
    K: tl.constexpr,
    IS_ISOLATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Whether a table knows n-grams, and their rows: under the text's own salt, or else under the shared one."""
    known, rows = token != token, tl.zeros_like(token).to(tl.int64)
    for turn in tl.static_range(2 if IS_ISOLATED else 1):
        own_salt = salt if turn == 0 else salt * 0
        found, tag = row_of(number, token, before, earlier, own_salt, tables)
        its = tl.load(tables.tags + found, mask=is_open, other=0) == tag
        is_its = its | (tl.load(tables.row_bits + number) == 0)
        is_known = is_open & is_its & (tl.load(tables.entries + found * K, mask=is_open, other=-1) >= 0)
        rows = tl.where(known | (is_known == 0), rows, found)
        known = known | is_known
    return known, rows

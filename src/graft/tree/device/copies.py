"""Prompt lookup on the device: proposes what followed earlier occurrences of a text's last tokens.

There is no index. A kernel scans the row's own text and the finished texts for the last two tokens; each program takes
one block of text. The latest occurrences are compared further back, and the continuations of the longest matches
become a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.buffers import MAX_LENGTH, MAX_MATCH, MAX_OCCURRENCES, Draws, Others, Pool, PoolShape, Texts
from graft.tree.device.noise import copied_bucket
from graft.tree.device.pool import ALONE, Nodes, can_be_drawn, key_of, path_of, prob_of, write_nodes

_BLOCK = 1024  # tokens of text that one program scans
_SPANS = tl.constexpr(16)  # MAX_OCCURRENCES, rounded up to a power of two
_NUM_SHARES = tl.constexpr(4)  # buckets of the share of occurrences with the same next token: from 0, 0.3, 0.6 and 0.9


@dataclass(frozen=True)
class Found:
    """The latest occurrences of each place's last two tokens."""

    counts: Tensor  # [R, places, blocks] int32
    positions: Tensor  # [R, places, blocks, MAX_OCCURRENCES] int64 of the token after the pair, the latest first

    @classmethod
    def make(cls, num_rows: int, num_places: int, num_tokens: int, device: torch.device) -> Found:
        shape = (num_rows, num_places, triton.cdiv(num_tokens, _BLOCK))
        counts = torch.empty(shape, dtype=torch.int32, device=device)
        return cls(counts, torch.empty(*shape, MAX_OCCURRENCES, dtype=torch.int64, device=device))


def lookup_bytes(num_rows: int, num_places: int, num_tokens: int) -> int:
    """Memory of `add_copies`, by the tokens that it searches."""
    found = Found.make(num_rows, num_places, num_tokens, torch.device("meta"))
    return found.counts.nbytes + found.positions.nbytes


def begin(pool: Pool, shape: PoolShape, texts: Texts, table_rows: Tensor) -> None:
    """Reset the pool to the roots: the last tokens of the texts at `table_rows` [R]. All other places are padding."""
    _begin_kernel[(shape.num_rows, triton.cdiv(pool.capacity, _BLOCK))](
        pool.nodes,
        pool.before,
        texts.own,
        texts.lengths,
        table_rows,
        texts.own.shape[1],
        pool.before.shape[1],
        BLOCK=_BLOCK,
    )


def choose_places(pool: Pool, shape: PoolShape, made: Tensor, places: Tensor, max_depths: Tensor) -> None:
    """Write the likeliest nodes below the roots to `places` [R, num_places]; -1 where there is none.

    made: [passes] int32 whether each draft pass was made; without the first, all places are -1.
    max_depths: [R] int32; nodes this deep get no children.
    """
    _choose_places_kernel[(shape.num_rows,)](
        pool.nodes,
        made,
        places,
        max_depths,
        shape.first_copy,
        NUM_PLACES=shape.num_places,
        PLACES=triton.next_power_of_2(shape.num_places),
        BLOCK=triton.next_power_of_2(shape.first_copy),
    )


def add_copies(
    pool: Pool,
    shape: PoolShape,
    texts: Texts,
    table_rows: Tensor,  # [R] int32 of the rows' texts
    others: Others,
    places: Tensor,  # [R, P] int32 nodes of the pool, -1 for none
    acceptance_probs: Tensor,
    max_depths: Tensor,  # [R] int32
    draws: Draws,
    source: int,  # of copies of the row's own text; copies of finished texts have the next number
    first: int,  # where the copies of the first place begin in the pool
    max_context: int,  # an upper bound of a text's tokens
) -> None:
    """Add what followed the last two tokens of every place's path in the row's own text and in finished texts.

    The latest occurrences count, and of these the longest matches. If there are none, nothing is added.
    """
    (num_rows, num_places), device = places.shape, pool.paths.device
    own_size, past_size = min(max_context, texts.own.shape[1]), len(texts.past)
    own, past = (Found.make(num_rows, num_places, size, device) for size in (own_size, past_size))
    for found, size, is_past in ((own, own_size, False), (past, past_size, True)):
        _find_kernel[(triton.cdiv(size, _BLOCK), num_rows)](
            pool.nodes,
            pool.before,
            texts.past if is_past else texts.own,
            texts.owners,
            texts.past_end,
            texts.lengths,
            table_rows,
            others.owners,
            places,
            found.counts,
            found.positions,
            texts.own.shape[1],
            len(texts.past) - 1,
            found.counts.shape[2],
            num_places,
            IS_PAST=is_past,
            MOST=MAX_OCCURRENCES,
            BLOCK=_BLOCK,
        )
    _attach_kernel[(num_rows, num_places)](
        pool.nodes,
        texts.own,
        texts.past,
        texts.lengths,
        table_rows,
        places,
        own.counts,
        own.positions,
        past.counts,
        past.positions,
        acceptance_probs,
        pool.factors,
        max_depths,
        draws.kinds,
        draws.seeds,
        *draws.barred_and_room,
        source,
        *acceptance_probs.shape[1:],
        first,
        texts.own.shape[1],
        len(texts.past) - 1,
        own.counts.shape[2],
        past.counts.shape[2],
        NUM_NODES=shape.copy_nodes,
        MOST=MAX_OCCURRENCES,
        MAX_MATCH=MAX_MATCH,
        MAX_LENGTH=MAX_LENGTH,
        OWN_BLOCKS=triton.next_power_of_2(own.counts.shape[2]),
        PAST_BLOCKS=triton.next_power_of_2(past.counts.shape[2]),
        num_warps=1,
        enable_fp_fusion=False,  # the same bits as the C code
    )


@triton.jit
def _begin_kernel(
    pool: Nodes,
    before: tl.tensor,
    texts: tl.tensor,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    context: tl.int64,
    num_rows: int,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one block of a row."""
    row, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    node = row.to(tl.int64) * pool.capacity + place
    tl.store(pool.paths + node, tl.where(place == 0, 1.0, 0.0), mask=place < pool.capacity)
    if block == 0:
        table_row = tl.load(table_rows + row)
        end = tl.load(lengths + table_row)
        text = texts + table_row.to(tl.int64) * context
        root = row.to(tl.int64) * pool.capacity
        tl.store(pool.tokens + root, tl.load(text + end - 1, mask=end > 0, other=0))
        tl.store(before + row, tl.load(text + end - 2, mask=end > 1, other=-1))
        tl.store(before + num_rows + row, tl.load(text + end - 3, mask=end > 2, other=-1))
        tl.store(pool.parents + root, 0)
        tl.store(pool.depths + root, 0)
        tl.store(pool.needs + root, 0)
        tl.store(pool.sources + root, 0)
        tl.store(pool.buckets + root, 0)
        tl.store(pool.keys + root, tl.zeros([], tl.int64))


@triton.jit
def _choose_places_kernel(
    pool: Nodes,
    made: tl.tensor,
    places: tl.tensor,
    max_depths: tl.tensor,
    width: int,
    NUM_PLACES: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one row."""
    row = tl.program_id(0)
    is_drafted = tl.load(made) != 0
    max_depth = tl.load(max_depths + row)
    place = tl.arange(0, BLOCK)
    first = row.to(tl.int64) * pool.capacity
    path = tl.load(pool.paths + first + place, mask=(place > 0) & (place < width), other=0.0)
    count = 0
    for _ in range(NUM_PLACES):
        best = tl.max(path, axis=0)
        node = tl.min(tl.where(path == best, place, BLOCK), axis=0)  # among equals, the first
        path = tl.where(place == node, -1.0, path)
        is_place = is_drafted & (best > 0) & (tl.load(pool.depths + first + node) < max_depth)
        tl.store(places + row * NUM_PLACES + count, node, mask=is_place)
        count += is_place.to(tl.int32)
    rest = tl.arange(0, PLACES)
    tl.store(places + row * NUM_PLACES + rest, -1, mask=(rest >= count) & (rest < NUM_PLACES))


@triton.jit
def _find_kernel(
    pool: Nodes,
    before_roots: tl.tensor,
    texts: tl.tensor,
    text_owners: tl.tensor,
    past_end: tl.tensor,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    owners: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    positions: tl.tensor,
    context: tl.int64,
    ring: tl.int64,
    num_blocks: int,
    num_places: int,
    IS_PAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one block of text, for all places of a row. Blocks are counted back from the latest token."""
    block, row = tl.program_id(0), tl.program_id(1)
    back = block * BLOCK + tl.arange(0, BLOCK)  # how many tokens come later
    if IS_PAST:
        written, dropped = tl.load(past_end), tl.load(past_end + 1)
        at = written - 1 - back
        is_text = at > dropped  # so the token before is not dropped either
        text = texts
        owner = tl.load(owners + row)
        token = tl.load(text + (at & ring), mask=is_text, other=-1)
        prior = tl.load(text + ((at - 1) & ring), mask=is_text, other=-1)
    else:
        table_row = tl.load(table_rows + row)
        at = tl.load(lengths + table_row).to(tl.int64) - 1 - back
        is_text = at > 0
        text = texts + table_row.to(tl.int64) * context
        owner = 0
        token = tl.load(text + at, mask=is_text, other=-1)
        prior = tl.load(text + at - 1, mask=is_text, other=-1)
    first = row.to(tl.int64) * pool.capacity
    for number in range(num_places):
        node = tl.load(places + row * num_places + number)
        where = (row * num_places + number) * num_blocks + block
        count = 0
        if node >= 0:
            wanted = tl.load(pool.tokens + first + node)
            parent = tl.load(pool.parents + first + node)
            wanted_prior = tl.load(before_roots + row)
            if node > 0:
                wanted_prior = tl.load(pool.tokens + first + parent)
            is_match = is_text & (token == wanted) & (prior == wanted_prior) & (wanted_prior >= 0)
            if IS_PAST:
                is_match = is_match & (tl.load(text_owners + (at & ring), mask=is_match, other=-1) == owner)
            count = tl.sum(is_match.to(tl.int32), axis=0)
            left = tl.where(is_match, back, 0x7FFFFFFF)
            for rank in range(tl.minimum(count, MOST)):
                latest = tl.min(left, axis=0)
                behind = tl.sum(tl.where(left == latest, at + 1, 0), axis=0)
                tl.store(positions + where.to(tl.int64) * MOST + rank, behind)
                left = tl.where(left == latest, 0x7FFFFFFF, left)
        tl.store(counts + where, count)


@triton.jit
def _latest(
    counts: tl.tensor,
    positions: tl.tensor,
    where: tl.tensor,
    num_blocks: int,
    MOST: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """The latest positions of one place over all blocks, [_SPANS] int64: the oldest first, then -1."""
    block = tl.arange(0, BLOCKS)
    count = tl.load(counts + where * num_blocks + block, mask=block < num_blocks, other=0)
    before = tl.cumsum(count, axis=0) - count
    total = tl.minimum(tl.sum(count, axis=0), MOST)
    span = tl.arange(0, _SPANS)
    rank = total - 1 - span  # the oldest first
    holds = (before[None, :] <= rank[:, None]) & (rank[:, None] < (before + count)[None, :]) & (rank[:, None] >= 0)
    own_block = tl.sum(tl.where(holds, block[None, :], 0), axis=1)
    earlier = tl.sum(tl.where(holds, before[None, :], 0), axis=1)
    place = (where * num_blocks + own_block).to(tl.int64) * MOST + rank - earlier
    return tl.load(positions + place, mask=span < total, other=-1)


@triton.jit
def _match_bucket(match: tl.tensor, size: tl.tensor, members: tl.tensor) -> tl.tensor:
    """The score bucket of a copied token, by match length and by the share of occurrences with this next token."""
    length = (match >= 3).to(tl.int32)  # a match has at least two tokens
    length += (match >= 4).to(tl.int32)
    length += (match >= 6).to(tl.int32)
    length += (match >= 9).to(tl.int32)
    length += (match >= 13).to(tl.int32)
    length += (match >= 18).to(tl.int32)
    length += (match >= 24).to(tl.int32)
    share = (10 * size >= 3 * members).to(tl.int32)
    share += (10 * size >= 6 * members).to(tl.int32)
    share += (10 * size >= 9 * members).to(tl.int32)
    return length * _NUM_SHARES + share


@triton.jit
def _at_leader(value: tl.tensor, leader: tl.tensor) -> tl.tensor:
    """The value [_SPANS] at the leader of each occurrence's group."""
    span = tl.arange(0, _SPANS)
    return tl.sum(tl.where(leader[:, None] == span[None, :], value[None, :], 0), axis=1)


@triton.jit
def _grouped(
    active: tl.tensor, token: tl.tensor, branch: tl.tensor, order: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Group occurrences [_SPANS] of the same branch by their next token. A group's leader is its first occurrence.

    Returns for each occurrence: whether it has a next token, whether it is a leader, its leader, the size of its group,
    and the group's rank. Groups are ranked by the order of their branches, then by size, then by first appearance.
    """
    span = tl.arange(0, _SPANS)
    goes_on = active & (token >= 0)
    is_same = goes_on[:, None] & goes_on[None, :]
    is_same = is_same & (branch[:, None] == branch[None, :]) & (token[:, None] == token[None, :])
    leader = tl.min(tl.where(is_same, span[None, :], _SPANS), axis=1)
    size = tl.sum(is_same.to(tl.int32), axis=1)
    is_leader = goes_on & (leader == span)
    is_larger = (size[None, :] > size[:, None]) | ((size[None, :] == size[:, None]) & (span[None, :] < span[:, None]))
    is_before = (order[None, :] < order[:, None]) | ((order[None, :] == order[:, None]) & is_larger)
    rank = tl.sum((is_leader[None, :] & is_before).to(tl.int32), axis=1)
    return goes_on, is_leader, leader, size, rank


@triton.jit
def _attach_kernel(
    pool: Nodes,
    own_texts: tl.tensor,
    past: tl.tensor,
    lengths: tl.tensor,
    table_rows: tl.tensor,
    places: tl.tensor,
    own_counts: tl.tensor,
    own_positions: tl.tensor,
    past_counts: tl.tensor,
    past_positions: tl.tensor,
    acceptance_probs: tl.tensor,
    factors: tl.tensor,
    max_depths: tl.tensor,
    kinds: tl.tensor,
    seeds: tl.tensor,
    barred: tl.tensor,
    barred_room: int,
    source: int,
    num_sources: int,
    num_buckets: int,
    first_copy: int,
    context: tl.int64,
    ring: tl.int64,
    own_blocks: int,
    past_blocks: int,
    NUM_NODES: tl.constexpr,
    MOST: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    MAX_LENGTH: tl.constexpr,
    OWN_BLOCKS: tl.constexpr,
    PAST_BLOCKS: tl.constexpr,
) -> None:
    """A program is one place. It makes a tree of continuations in the row's own text, and one of finished texts."""
    row, number = tl.program_id(0), tl.program_id(1)
    where = row * tl.num_programs(1) + number
    node = tl.load(places + where)
    if node < 0:
        return
    first = row.to(tl.int64) * pool.capacity
    table_row = tl.load(table_rows + row)
    end = tl.load(lengths + table_row).to(tl.int64)
    text = own_texts + table_row.to(tl.int64) * context
    kind, seed = tl.load(kinds + row), tl.load(seeds + row)
    top = tl.load(pool.depths + first + node)
    need = tl.load(pool.needs + first + node)
    limit = tl.minimum(MAX_LENGTH, tl.load(max_depths + row) - top)

    # The last tokens of the text and the path down to the node, in reverse order.
    back = tl.arange(0, MAX_LENGTH)
    suffix = tl.load(text + end - 1 - (back - top), mask=(back >= top) & (back - top < end), other=-2)
    above = node
    for step in range(tl.minimum(top, MAX_LENGTH)):
        suffix = tl.where(back == step, tl.load(pool.tokens + first + above), suffix)
        above = tl.load(pool.parents + first + above)

    own_at = _latest(own_counts, own_positions, where, own_blocks, MOST, OWN_BLOCKS)
    past_at = _latest(past_counts, past_positions, where, past_blocks, MOST, PAST_BLOCKS)
    own_seen = own_at[:, None] - 1 - back[None, :]
    past_seen = past_at[:, None] - 1 - back[None, :]
    own_token = tl.load(text + own_seen, mask=(own_at[:, None] >= 0) & (own_seen >= 0), other=-3)
    past_token = tl.load(past + (past_seen & ring), mask=past_at[:, None] >= 0, other=-3)
    differs = back[None, :] >= MAX_MATCH
    own_match = tl.min(tl.where(differs | (own_token != suffix[None, :]), back[None, :], MAX_LENGTH), axis=1)
    past_match = tl.min(tl.where(differs | (past_token != suffix[None, :]), back[None, :], MAX_LENGTH), axis=1)
    # Leave out occurrences at the end of a text, which nothing follows.
    own_follows = (own_at >= 0) & (own_at < end)
    past_follows = (past_at >= 0) & (tl.load(past + (past_at & ring), mask=past_at >= 0, other=-1) >= 0)
    own_match = tl.where(own_follows, own_match, 0)
    past_match = tl.where(past_follows, past_match, 0)
    own_longest, past_longest = tl.max(own_match, axis=0), tl.max(past_match, axis=0)
    # Matches at most half as long as the longest are left out: they would only take nodes from it.
    own_active = own_follows & (2 * own_match > own_longest)
    past_active = past_follows & (2 * past_match > past_longest)

    nothing = tl.zeros([_SPANS], tl.int32)
    own_branch, own_order, past_branch, past_order = nothing, nothing, nothing, nothing
    own_members = nothing + tl.sum(own_active.to(tl.int32), axis=0)
    past_members = nothing + tl.sum(past_active.to(tl.int32), axis=0)
    own_node, past_node = nothing + node, nothing + node
    own_path = tl.zeros([_SPANS], tl.float32) + tl.load(pool.paths + first + node)
    past_path = own_path
    own_key = tl.zeros([_SPANS], tl.int64) + tl.load(pool.keys + first + node)
    past_key = own_key
    own_first = first_copy + number * 2 * NUM_NODES
    past_first = own_first + NUM_NODES
    num_own, num_past, num_new = 0, 0, 0  # nodes so far: of each tree, and those of finished texts alone
    step = 0
    goes_on = tl.sum((own_active | past_active).to(tl.int32), axis=0) > 0
    while (step < limit) & goes_on:
        depth = top + step + 1
        own_next = tl.load(text + own_at + step, mask=own_active & (own_at + step < end), other=-1)
        past_next = tl.load(past + ((past_at + step) & ring), mask=past_active, other=-1)

        own_active, is_first, leader, size, rank = _grouped(own_active, own_next, own_branch, own_order)
        is_made = is_first & (num_own + rank < NUM_NODES)
        made_at = own_first + num_own + rank
        bucket = _match_bucket(own_longest + step, size, own_members)
        bucket = copied_bucket(bucket, kind, seed, end + depth - 1, own_next)
        prob = prob_of(acceptance_probs, kind, ALONE, source, bucket, num_sources, num_buckets, is_made)
        path = path_of(own_path, prob)
        path = tl.where(can_be_drawn(own_next, depth, barred, row, barred_room), path, 0.0)
        key = key_of(own_key, own_next, nothing + depth, factors, is_made)
        write_nodes(pool, first + made_at, own_next, own_node, depth, need, source, bucket, key, path, is_made)

        past_active, is_past_first, past_leader, past_size, past_rank = _grouped(
            past_active, past_next, past_branch, past_order
        )
        is_past_made = is_past_first & (num_past + past_rank < NUM_NODES)
        # If both texts propose a token, they share the node of the row's own text.
        is_known = is_past_made[:, None] & is_made[None, :] & (past_node[:, None] == own_node[None, :])
        is_known = is_known & (past_next[:, None] == own_next[None, :])
        has_node = tl.sum(is_known.to(tl.int32), axis=1) > 0
        is_new = is_past_made & (has_node == 0)
        past_bucket = _match_bucket(past_longest + step, past_size, past_members)
        past_bucket = copied_bucket(past_bucket, kind, seed, end + depth - 1, past_next)
        past_prob = prob_of(acceptance_probs, kind, ALONE, source + 1, past_bucket, num_sources, num_buckets, is_new)
        new_path = path_of(past_path, past_prob)
        new_path = tl.where(can_be_drawn(past_next, depth, barred, row, barred_room), new_path, 0.0)
        new_key = key_of(past_key, past_next, nothing + depth, factors, is_new)
        is_earlier = is_new[None, :] & (past_rank[None, :] < past_rank[:, None])
        new_at = past_first + num_new + tl.sum(is_earlier.to(tl.int32), axis=1)
        write_nodes(
            pool, first + new_at, past_next, past_node, depth, need, source + 1, past_bucket, new_key, new_path, is_new
        )
        new_at = tl.where(has_node, tl.sum(tl.where(is_known, made_at[None, :], 0), axis=1), new_at)
        new_path = tl.where(has_node, tl.sum(tl.where(is_known, path[None, :], 0.0), axis=1), new_path)
        new_key = tl.where(has_node, tl.sum(tl.where(is_known, key[None, :], 0), axis=1), new_key)

        own_active = own_active & (_at_leader(is_made.to(tl.int32), leader) > 0)
        own_branch, own_order, own_members = leader, _at_leader(rank, leader), size
        own_node, own_path, own_key = (
            _at_leader(made_at, leader),
            _at_leader(path, leader),
            _at_leader(key, leader),
        )
        past_active = past_active & (_at_leader(is_past_made.to(tl.int32), past_leader) > 0)
        past_branch, past_order, past_members = past_leader, _at_leader(past_rank, past_leader), past_size
        past_node, past_path, past_key = (
            _at_leader(new_at, past_leader),
            _at_leader(new_path, past_leader),
            _at_leader(new_key, past_leader),
        )
        num_own += tl.sum(is_made.to(tl.int32), axis=0)
        num_past += tl.sum(is_past_made.to(tl.int32), axis=0)
        num_new += tl.sum(is_new.to(tl.int32), axis=0)
        step += 1
        goes_on = tl.sum((own_active | past_active).to(tl.int32), axis=0) > 0

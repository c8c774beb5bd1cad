"""The memory of a round, as its kernels read and write it: candidates, texts, tables and what is known of draws.

Nothing here needs Triton or the C library. `kernels.py` says who works on this memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graft.model.hashing import mix64

NUM_BUCKETS = 16  # of probabilities, two per halving
NUM_SUCCESSORS = 8  # per table row
NUM_TABLES = 3  # of 3-grams, 2-grams and 1-grams
ALONE, OPPOSED, AGREED = range(3)  # agreement of a node's proposers; see `ranking.merge`
NO_TOKEN = -1  # stands where a text has no earlier token
MAX_OCCURRENCES = 12  # the latest occurrences of a pair of tokens, which are compared further back
MAX_MATCH = 24  # the longest match, in tokens
MAX_LENGTH = 32  # the longest copy, in tokens
MAX_BARRED = 61  # tokens of a row that its draws cannot give; more are not known to the kernels

# A path's key is a hash: the sum of its tokens, each times an odd random factor of its depth.
DEPTH_FACTORS = mix64(torch.arange(4096)) | 1  # no tree is deeper

# The Taylor series of 2^-f for f from 0 to 1, in units of 2^-30. Integers give the same exponentials everywhere.
_TERMS = (1073741824, 744261118, 257941248, 59597083, 10327387, 1431680, 165394, 16377, 1419, 109, 8)


@dataclass(frozen=True)
class PoolShape:
    """How many candidates each source may add to a row. One captured graph serves one shape.

    A row of the pool has segments of fixed size, in the order in which candidates are added: the root, copies of
    earlier text below the root, drafted levels, copies below drafted nodes, and successors from the tables. Unfilled
    places are padding, with path probability 0.
    """

    num_rows: int
    copy_nodes: int  # copied nodes below one node, from each of own and finished texts
    num_places: int  # drafted nodes to look up copies for
    levels: tuple[int, ...]  # nodes of each draft pass: one level, or a whole tree
    num_waves: int  # waves of table lookups
    beam: int  # nodes looked up in a wave

    @cached_property
    def first_level(self) -> int:
        return 1 + 2 * self.copy_nodes

    @cached_property
    def first_copy(self) -> int:
        return self.first_level + sum(self.levels)

    @cached_property
    def first_wave(self) -> int:
        return self.first_copy + 2 * self.copy_nodes * self.num_places

    @cached_property
    def width(self) -> int:
        """Nodes of a row, padding included."""
        return self.first_wave + self.num_waves * self.beam * NUM_SUCCESSORS

    def level_start(self, number: int) -> int:
        return self.first_level + sum(self.levels[:number])


@dataclass(frozen=True)
class Draws:
    """What is known before the verify about each row's next sampling draws; see `noise`."""

    kinds: Tensor  # [R] int32 rows of a kind share their acceptance probabilities; 0: greedy
    seeds: Tensor  # [R] int64
    powers: Tensor  # [R, NUM_BUCKETS] float64, 2^(-b / 2T): how much less likely a token b buckets lower is drawn
    # [R, 3 + n] int32 tokens that draws cannot give: the number of banned tokens, the number of endings, and how many
    # draws cannot give those; then the banned tokens and the endings. None: all tokens can be drawn.
    barred: Tensor | None = None
    # By row, E of all tokens by depth, [V] float32, where the noise is not keyed; deeper noise is unknown. None: it is
    # keyed. An empty list: so it is in all rows. Only on a CPU.
    times: list[Sequence[Tensor] | None] = field(default_factory=list)

    @property
    def barred_and_room(self) -> tuple[Tensor, int]:
        """What the Triton kernels' `can_be_drawn` takes."""
        return (self.kinds, 0) if self.barred is None else (self.barred, self.barred.shape[1])


class Others(NamedTuple):
    """Texts that a row may copy besides its own. On a GPU, groups are not read."""

    owners: Tensor  # [R] int64 whose finished texts
    groups: Tensor  # [R] int32 rows of a group, answers to one prompt, see each other after the prompt; 0: no group
    num_prompt_tokens: Tensor  # [R] int32


def barred_numbers(banned: Sequence[int], endings: Sequence[int], num_unending: int) -> list[int]:
    """A row of `Draws.barred`, without what does not fit. Drafts only guess, so they may propose such tokens."""
    banned, endings = banned[:MAX_BARRED], endings if num_unending else ()
    tokens = [*banned, *endings][:MAX_BARRED]
    return [len(banned), len(tokens) - len(banned), num_unending, *tokens, *[0] * (MAX_BARRED - len(tokens))]


class DraftDraws(NamedTuple):
    """What a drafter knows of the texts' next draws. `topk.highest` adds their noise to the drafter's logits / T."""

    seeds: Tensor  # [S] int64
    temperatures: Tensor  # [S] float32; 0: greedy, without noise
    positions: Tensor  # [S] int32 of each text's last token; the next draw is at the next position
    to_target: Tensor  # [V] int64 target id minus draft id
    num_passes: Tensor | None = None  # [S] int32 earlier draft passes of the round; each was one draw further


class Nodes(NamedTuple):
    """The columns [R, capacity] of a pool's candidates, which Triton's kernels take as one argument."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    needs: Tensor  # number of draft passes without which the node would not be proposed
    sources: Tensor
    buckets: Tensor  # of the proposer's score
    agreement: Tensor
    keys: Tensor  # int64 the hash of the node's path
    paths: Tensor  # P(the target accepts the path); 0 is padding
    capacity: int


class Pool:
    """Memory for the candidates of up to `num_rows` rows, and constants that kernels read."""

    def __init__(self, num_rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        numbers = torch.zeros(10, num_rows, capacity, dtype=torch.int32, device=device)
        self.tokens, self.parents, self.depths, self.needs, self.sources, self.buckets, self.agreement = numbers[:7]
        self.keys = torch.zeros(num_rows, capacity, dtype=torch.int64, device=device)
        self.paths = torch.zeros(num_rows, capacity, device=device)
        self.nodes = Nodes._make([*numbers[:7], self.keys, self.paths, capacity])
        self.open = torch.zeros_like(self.paths)  # the same for nodes not looked up in the tables yet
        self.before = torch.zeros(2, num_rows, dtype=torch.int32, device=device)  # the two tokens before the root
        # Of a merge. By node: the likeliest copy of its path. By such a copy: whether several sources proposed it, and
        # whether the drafter proposed a child of it.
        self.kept, self.is_agreed, self.spoke = numbers[7:]
        # Of a draft pass. By row: P(one of the next beams is accepted). And how many programs have finished.
        self.reach = torch.zeros(num_rows, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.factors = DEPTH_FACTORS.to(device)
        self.bucket_starts = bucket_starts(torch.float32, device)


class Texts:
    """Token ids on the device: the rows' own texts, by row of the block tables, and finished texts in a ring.

    Each finished text is followed by NO_TOKEN, so that nothing is matched or copied across its end.
    """

    def __init__(self, num_table_rows: int, context: int, past: int, device: torch.device) -> None:
        """past: the ring's size in tokens, a power of two."""
        self.own = torch.zeros(num_table_rows, context, dtype=torch.int32, device=device)
        # Tokens of each text, including the root.
        self.lengths = torch.zeros(num_table_rows, dtype=torch.int32, device=device)
        self.past = torch.full((past,), NO_TOKEN, dtype=torch.int32, device=device)
        self.owners = torch.zeros(past, dtype=torch.int64, device=device)  # a row copies only its own owner's
        self.past_end = torch.zeros(2, dtype=torch.int64, device=device)  # tokens ever written, and ever dropped


class TableRows(NamedTuple):
    """What Triton's kernels take of `Tables` as one argument."""

    entries: Tensor
    tags: Tensor
    starts: Tensor
    row_bits: Tensor
    factors: Tensor


@dataclass(frozen=True)
class Tables:
    """Successor tables of n-grams, the longest first, one after the other in the same tensors.

    A row holds the target's likeliest tokens after an n-gram when it was last verified, each with the bucket of its
    probability. Rows of hashed tables store the hash as a tag, which detects collisions.
    """

    entries: Tensor  # [rows of all, NUM_SUCCESSORS] int32: a token times NUM_BUCKETS plus its bucket; -1: none
    tags: Tensor  # [rows of all] int64 the hash of each row's n-gram; not read in a table without hashes
    starts: Tensor  # [NUM_TABLES] int64 each table's first row
    row_bits: Tensor  # [NUM_TABLES] int32 high bits of a hash that give the row; 0: no hash, the row is the token
    factors: Tensor  # [4] int64 hash factors of the last token, the one before, the one before that, and the salt
    isolated: bool  # whether to look up entries under a text's own salt before the shared ones under salt 0
    learned: tuple[int, int]  # the first table that learns, and the one after the last; others stay empty
    bucket_starts: Tensor  # [NUM_BUCKETS] float64
    terms: Tensor  # int64, see `_TERMS`

    @cached_property
    def parts(self) -> TableRows:
        return TableRows(self.entries, self.tags, self.starts, self.row_bits, self.factors)

    @classmethod
    def make(
        cls,
        sizes: Sequence[int],
        hashed: Sequence[bool],
        factors: Tensor,
        isolated: bool,
        device: torch.device,
        learned: tuple[int, int] = (0, NUM_TABLES),
    ) -> Tables:
        """sizes: rows of each table, 3-grams first; powers of two for hashed tables."""
        total = sum(sizes)
        starts = torch.tensor([sum(sizes[:number]) for number in range(NUM_TABLES)])
        bits = [size.bit_length() - 1 if is_hashed else 0 for size, is_hashed in zip(sizes, hashed, strict=True)]
        return cls(
            torch.full((total, NUM_SUCCESSORS), -1, dtype=torch.int32, device=device),
            torch.zeros(total, dtype=torch.int64, device=device),
            starts.to(device),
            torch.tensor(bits, dtype=torch.int32, device=device),
            factors.to(device),
            isolated,
            learned,
            bucket_starts(torch.float64, device),
            torch.tensor(_TERMS, device=device),
        )


@dataclass(frozen=True)
class Ranked:
    """The likeliest nodes of each row, best first."""

    nodes: Tensor  # [R, cap] int32 places in the pool
    paths: Tensor  # [R, cap] float32 path probabilities; 0 after the last node
    needs: Tensor  # [R, cap] int32 draft passes that each needed; undefined after the last node
    counts: Tensor  # [R] int32 how many of them are verified; -1 in an unused row


@dataclass(frozen=True)
class Entries:
    """The new tokens of all rows in one flat list, for a drafter. Fields are [E], or [R + 1] if by row."""

    rows: Tensor
    places: Tensor  # among the row's new tokens
    tokens: Tensor
    nodes: Tensor  # the step's token after which each was chosen
    begins: Tensor  # by row: its first entry
    counts: Tensor  # by row
    lengths: Tensor  # by row: committed tokens before the round
    table_rows: Tensor  # by row


@dataclass(frozen=True)
class Beams:
    """The beams: the K nodes of each row that the next draft pass expands. The first pass expands the root alone."""

    tokens: Tensor  # [B, K] int32 target ids
    origins: Tensor  # [B, K] int32 the parent beam, as row * K + beam; the root is row * K
    paths: Tensor  # [B, K] float32 path probabilities
    places: Tensor  # [B, K] int32 their numbers in the tree
    entries: Tensor  # [B, K, depth] int32 their paths in a KV store, as places after the text's entries
    depths: Tensor  # [B, K] int32 the last place of `entries` in use, their own
    cache_places: Tensor  # [B, K] int32 the places of their own entries, after those of earlier passes
    num_passes: Tensor  # [B] int32

    def first(self, rows: int, topk: int | None = None) -> Beams:
        """The first rows, or the same memory laid out for fewer beams a row."""

        def part_of(part: Tensor) -> Tensor:
            shape = (rows, *(() if part.dim() == 1 else (topk or part.shape[1],)), *part.shape[2:])
            return part.flatten()[: math.prod(shape)].view(shape)

        return Beams(*(part_of(getattr(self, field.name)) for field in fields(self)))

    @classmethod
    def make(cls, rows: int, topk: int, depth: int, device: torch.device) -> Beams:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            tokens=zeros(rows, topk),
            origins=zeros(rows, topk),
            paths=zeros(rows, topk, dtype=torch.float32),
            places=zeros(rows, topk),
            entries=zeros(rows, topk, depth),
            depths=zeros(rows, topk),
            cache_places=zeros(rows, topk),
            num_passes=zeros(rows),
        )


@dataclass(frozen=True)
class Trees:
    """Trees of n nodes per row, without the root: depth by depth, likeliest first, then padding."""

    numbers: Tensor  # [5, R, n] int32: tokens, parents, depths, and the bits of probabilities and paths

    @property
    def tokens(self) -> Tensor:
        return self.numbers[0]

    @property
    def parents(self) -> Tensor:
        """Parents as node numbers from 1; 0 is the root."""
        return self.numbers[1]

    @property
    def depths(self) -> Tensor:
        """Depths; a child of the root has depth 1."""
        return self.numbers[2]

    @property
    def probabilities(self) -> Tensor:
        """P(token | parent); 0 is padding."""
        return self.numbers[3].view(torch.float32)

    @property
    def paths(self) -> Tensor:
        """Path probabilities: the product along the path."""
        return self.numbers[4].view(torch.float32)


def bucket_starts(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where buckets begin: 2^(-b/2), rounded down, so that comparisons in `dtype` agree with those in float64."""
    half = 0.70710678118654752440
    exact = torch.tensor([(half if b % 2 else 1.0) / 2 ** (b // 2) for b in range(NUM_BUCKETS)], dtype=torch.float64)
    starts = exact.to(dtype)
    too_high = starts.double() > exact
    down = torch.nextafter(starts, torch.zeros_like(starts))
    return torch.where(too_high, down, starts).to(device)

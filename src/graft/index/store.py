"""Datastore: looks up, in an index on disk, what followed the longest match of a context's end.

The arrays are mapped into memory read-only: opening reads a few blocks, and processes share one copy. Needs numpy.
"""

from __future__ import annotations

import heapq
import mmap
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graft.index.layout import (
    FENCE_BYTES,
    FENCE_STRIDE,
    DatastoreError,
    Header,
    check_parts,
    damaged,
    fingerprint,
    part_path,
    read_header,
)

MIN_MATCH = 2
MAX_MATCH = 32
_MAX_SAMPLE = 64  # occurrences that are read; a share is then known to a few percent

_CODES = {2: "H", 4: "I"}  # of struct, by the bytes of a token

Row = tuple[int, ...]  # what followed one occurrence


class Continuation(NamedTuple):
    """Tokens that followed, and of each, how many of the occurrences read agree up to and with it."""

    tokens: list[int]
    counts: list[int]


class Match(NamedTuple):
    """The longest match of a context's end: its length, how often it occurs, and how many of these were read."""

    length: int
    num_occurrences: int
    num_read: int
    continuations: list[Continuation]


NO_MATCH = Match(0, 0, 0, [])


class Datastore:
    """An index made by `graft index build`."""

    def __init__(self, folder: str | Path, tokenizer: Any | None = None) -> None:
        """Opens an index; with a `tokenizer`, refuses one whose ids mean something else."""
        self.folder = Path(folder)
        self.header: Header = read_header(self.folder)
        if tokenizer is not None and fingerprint(tokenizer) != self.header.tokenizer:
            raise DatastoreError(
                f"{folder} was built with another tokenizer, so its ids mean other text: build one for this model"
            )
        check_parts(self.folder, self.header)
        self._shards = [_Shard(self.folder, self.header, number) for number in range(len(self.header.shards))]

    def __len__(self) -> int:
        """Tokens in it."""
        return self.header.tokens

    def continuations(self, suffix: Sequence[int], count: int, length: int) -> Match:
        """At most `count` distinct continuations, the most frequent first, of the longest match that any follows.

        Matches of 2 to 32 tokens count, and continuations have at most `length` tokens; they end where their
        document does. Of very many occurrences, an even sample is read.
        """
        context = self._packed(suffix)
        width = self.header.token_bytes
        lengths = [shard.longest_match(context) for shard in self._shards]
        longest = max(lengths)
        if longest < MIN_MATCH:
            return NO_MATCH
        prefix = context[: longest * width]
        ranges = [
            (shard, *shard.range_of(prefix)) for shard, n in zip(self._shards, lengths, strict=True) if n == longest
        ]
        total = sum(right - left for _, left, right in ranges)
        rows: list[Row] = []
        for shard, left, right in ranges:
            # Every shard is read by its share of the occurrences, and at least once.
            num_read = min(right - left, max(_MAX_SAMPLE * (right - left) // total, 1))
            rows += shard.following(left, right, num_read, length)
        return Match(longest, total, len(rows), _most_frequent(rows, count))

    def _packed(self, suffix: Sequence[int]) -> bytes:
        """The context's end, backwards, as the index stores it; it stops at an id the index cannot hold."""
        tokens = suffix[-MAX_MATCH:][::-1]
        vocab_size = self.header.vocab_size
        stop = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab_size), len(tokens))
        return struct.pack(f">{stop}{_CODES[self.header.token_bytes]}", *[token + 1 for token in tokens[:stop]])


class _Shard:
    """One suffix array, sorted by contexts read backwards: a longer match is a longer common beginning."""

    def __init__(self, folder: Path, header: Header, number: int) -> None:
        self._width = header.token_bytes
        self._code = _CODES[header.token_bytes]
        self._vocab_size = header.vocab_size
        self._tokens = _mapped(part_path(folder, number, "tokens"))
        # A cast view gives plain ints, which is several times faster than scalars of a numpy array.
        self._suffixes = memoryview(_mapped(part_path(folder, number, "suffixes"))).cast("I")
        self._fences = np.frombuffer(_mapped(part_path(folder, number, "fences")), dtype=f"S{FENCE_BYTES}")

    def longest_match(self, context: bytes) -> int:
        """Tokens in common with the suffix most like the context: one of the two it would stand between."""
        read = self._reader(len(context))
        place = bisect_left(self._suffixes, context, *self._bounds(context), key=read)
        return max(self._common(context, read(i)) for i in self._suffixes[max(place - 1, 0) : place + 1])

    def range_of(self, prefix: bytes) -> tuple[int, int]:
        """The suffixes that begin with `prefix`."""
        low, high = self._bounds(prefix)
        read = self._reader(len(prefix))
        left = bisect_left(self._suffixes, prefix, low, high, key=read)
        return left, bisect_right(self._suffixes, prefix, left, high, key=read)

    def following(self, left: int, right: int, num_read: int, length: int) -> list[Row]:
        """What follows `num_read` of the suffixes from `left` to `right`, evenly spread."""
        return [self._row(self._suffixes[left + i * (right - left) // num_read], length) for i in range(num_read)]

    def _row(self, place: int, length: int) -> Row:
        first = max(place - length, 0)
        row = struct.unpack(f">{place - first}{self._code}", self._tokens[first * self._width : place * self._width])
        tokens = [token - 1 for token in reversed(row)]
        # A document ends at -1; past the vocabulary is only damage that opening did not see.
        end = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))
        return tuple(tokens[:end])

    def _bounds(self, prefix: bytes) -> tuple[int, int]:
        """Between which fences `prefix` and all that begins with it lies: a few steps remain to be searched."""
        head = prefix[:FENCE_BYTES]
        low = int(self._fences.searchsorted(head)) - 1
        high = int(self._fences.searchsorted(head.ljust(FENCE_BYTES, b"\xff"), "right"))
        return max(low, 0) * FENCE_STRIDE, min(high * FENCE_STRIDE, len(self._suffixes))

    def _reader(self, num_bytes: int) -> Callable[[int], bytes]:
        tokens, width = self._tokens, self._width
        return lambda place: tokens[place * width : place * width + num_bytes]

    def _common(self, first: bytes, second: bytes) -> int:
        size = min(len(first), len(second))
        differing = int.from_bytes(first[:size], "big") ^ int.from_bytes(second[:size], "big")
        return (8 * size - differing.bit_length()) // (8 * self._width)


def _most_frequent(rows: list[Row], count: int) -> list[Continuation]:
    """The `count` heaviest paths through the tree of the rows: at each fork the commonest token is followed first."""
    found: list[Continuation] = []
    whole = list(Counter(rows).items())
    # Branches not taken yet: weight, a number to break ties, the path into it, the rows that go that way.
    branches: list[tuple[int, int, Continuation, list[tuple[Row, int]]]] = [(0, 0, Continuation([], []), whole)]
    num_branches = 1
    while branches and len(found) < count:
        _, _, path, through = heapq.heappop(branches)
        tokens, counts = path
        while len(through) > 1 and (forks := _forks(through, len(tokens))):
            for weight, token, rest in forks[1:count]:
                branch = Continuation([*tokens, token], [*counts, weight])
                heapq.heappush(branches, (-weight, num_branches, branch, rest))
                num_branches += 1
            weight, token, through = forks[0]
            tokens, counts = [*tokens, token], [*counts, weight]
        if len(through) == 1:
            row, times = through[0]
            rest_of_row = row[len(tokens) :]
            tokens, counts = [*tokens, *rest_of_row], [*counts, *[times] * len(rest_of_row)]
        found.append(Continuation(tokens, counts))
    return found


def _forks(through: list[tuple[Row, int]], depth: int) -> list[tuple[int, int, list[tuple[Row, int]]]]:
    """The ways on: weight, token and rows of each, the heaviest first. Rows that end here go none."""
    ways: dict[int, list[tuple[Row, int]]] = {}
    for item in through:
        if len(item[0]) > depth:
            ways.setdefault(item[0][depth], []).append(item)
    weighed = [(sum(times for _, times in rows), token, rows) for token, rows in ways.items()]
    return sorted(weighed, key=lambda way: -way[0])


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be mapped ({error})") from error

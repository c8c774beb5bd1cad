"""Lookup in an index: find the longest match of a context's last tokens, and the text that followed it.

The arrays are memory-mapped read-only. Opening reads only a few blocks, and processes share one copy.
"""

from __future__ import annotations

import heapq
import mmap
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graft.datastore.format import (
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
_MAX_SAMPLE = 32  # occurrences read per lookup; this estimates a continuation's share to within a tenth

_CODES = {2: "H", 4: "I"}  # struct format by bytes per token

Row = tuple[int, ...]  # the stored tokens after one occurrence: ids plus one


class Continuation(NamedTuple):
    """The tokens of a continuation, and for each the number of occurrences read that agree up to it."""

    tokens: list[int]
    counts: list[int]


class Match(NamedTuple):
    """The longest match: its length, its number of occurrences, and how many of them were read."""

    length: int
    num_occurrences: int
    num_read: int
    continuations: list[Continuation]


NO_MATCH = Match(0, 0, 0, [])


class Datastore:
    """An index made by `graft index build`."""

    def __init__(self, folder: str | Path, tokenizer: Any | None = None) -> None:
        """Open an index. tokenizer: if given, it must be the one that the index was built with."""
        self.folder = Path(folder)
        self.header: Header = read_header(self.folder)
        if tokenizer is not None and fingerprint(tokenizer) != self.header.tokenizer:
            raise DatastoreError(f"{folder} was built with another tokenizer: build an index for this model")
        check_parts(self.folder, self.header)
        self._code = _CODES[self.header.token_bytes]
        self._shards = [_Shard(self.folder, self.header, number) for number in range(len(self.header.shards))]

    def __len__(self) -> int:
        """Number of tokens indexed."""
        return self.header.tokens

    def continuations(self, suffix: Sequence[int], count: int, length: int) -> Match:
        """At most `count` distinct continuations of the longest match, the most frequent first.

        Matches have 2 to 32 tokens. Continuations have at most `length` tokens and stop at the end of their document.
        If the match occurs very often, an even sample of its occurrences is read.
        """
        context = self._packed(suffix)
        found = [(shard, *shard.longest_match(context)) for shard in self._shards]
        longest = max(match for _, match, _, _ in found)
        ranges = [(shard, left, right) for shard, match, left, right in found if match == longest and left < right]
        if not ranges:
            return NO_MATCH
        total = sum(right - left for _, left, right in ranges)
        rows: list[Row] = []
        for shard, left, right in ranges:
            # Each shard contributes in proportion to its occurrences, and at least one.
            num_read = min(right - left, max(_MAX_SAMPLE * (right - left) // total, 1))
            rows += shard.following(left, right, num_read, length)
        chains = [self._unpacked(row, counts) for row, counts in _heaviest_paths(rows, count)]
        return Match(longest, total, len(rows), chains)

    def _packed(self, suffix: Sequence[int]) -> bytes:
        """The last tokens of the context, reversed as in the index, up to an id outside its vocabulary."""
        tokens = suffix[-MAX_MATCH:][::-1]
        vocab_size = self.header.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            tokens = tokens[: next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)]
        return struct.pack(f">{len(tokens)}{self._code}", *[token + 1 for token in tokens])

    def _unpacked(self, row: Row, counts: list[int]) -> Continuation:
        if row and max(row) > self.header.vocab_size:  # damage that the samples at opening missed
            row = row[: next(i for i, token in enumerate(row) if token > self.header.vocab_size)]
        return Continuation([token - 1 for token in row], counts[: len(row)])


class _Shard:
    """One suffix array of the reversed text: a longer match is a longer common prefix."""

    def __init__(self, folder: Path, header: Header, number: int) -> None:
        self._width = header.token_bytes
        self._code = _CODES[header.token_bytes]
        self._tokens = _mapped(part_path(folder, number, "tokens"))
        # A cast memoryview yields plain ints, several times faster than numpy scalars.
        self._suffixes = memoryview(_mapped(part_path(folder, number, "suffixes"))).cast("I")
        self._fences = np.frombuffer(_mapped(part_path(folder, number, "fences")), dtype=f"S{FENCE_BYTES}")

    def longest_match(self, context: bytes) -> tuple[int, int, int]:
        """Length of the longest match in tokens, and the range of suffixes that start with it."""
        low, high = self._bounds(context)
        read = self._reader(len(context))
        place = bisect_left(self._suffixes, context, low, high, key=read)
        # The best match is one of the two neighbours of the insertion point.
        length = max(self._common(context, read(i)) for i in self._suffixes[max(place - 1, 0) : place + 1])
        if length < MIN_MATCH:
            return 0, 0, 0
        prefix = context[: length * self._width]
        if len(prefix) < FENCE_BYTES:
            low, high = self._bounds(prefix)
        read = self._reader(len(prefix))
        left = bisect_left(self._suffixes, prefix, low, place, key=read)
        return length, left, bisect_right(self._suffixes, prefix, place, high, key=read)

    def following(self, left: int, right: int, num_read: int, length: int) -> list[Row]:
        """Continuations of `num_read` suffixes, evenly spread between `left` and `right`."""
        tokens, width, size = self._tokens, self._width, length * self._width
        unpack = struct.Struct(f">{length}{self._code}").unpack
        rows = []
        for i in range(num_read):
            end = self._suffixes[left + i * (right - left) // num_read] * width
            row = unpack(tokens[max(end - size, 0) : end].rjust(size, b"\0"))[::-1]
            rows.append(row[: row.index(0)] if 0 in row else row)  # 0 ends the document
        return rows

    def _bounds(self, prefix: bytes) -> tuple[int, int]:
        """Range of suffixes between the fences around `prefix`."""
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


def _heaviest_paths(rows: list[Row], count: int) -> list[tuple[Row, list[int]]]:
    """The `count` most frequent paths through the trie of the rows, following the most frequent token at each fork.

    Each path comes with the number of rows that agree up to each of its tokens.
    """
    rows.sort()  # rows of a path are then adjacent, and their common prefix is that of the first and the last
    found: list[tuple[Row, list[int]]] = []
    # Branches still to follow: negative weight, a tie-breaker, the counts up to there, the range of rows.
    branches: list[tuple[int, int, list[int], int, int]] = [(-len(rows), 0, [], 0, len(rows))]
    num_branches = 1
    while branches and len(found) < count:
        _, _, counts, start, stop = heapq.heappop(branches)
        while (row := rows[start]) != (last := rows[stop - 1]):
            depth = len(counts)
            if depth == len(row):
                start += 1  # this row ends here, the others continue
            elif row[depth] == last[depth]:
                counts.append(stop - start)
            else:
                heaviest, *others = _branches(rows, depth, start, stop)
                for weight, begin, end in others[: count - 1]:
                    heapq.heappush(branches, (weight, num_branches, [*counts, -weight], begin, end))
                    num_branches += 1
                weight, start, stop = heaviest
                counts.append(-weight)
        found.append((row, counts + [stop - start] * (len(row) - len(counts))))
    return found


def _branches(rows: list[Row], depth: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Ranges of rows with the same token at `depth`, the largest first, as (negative size, start, stop)."""
    branches = []
    token, begin = rows[start][depth], start
    for place in range(start, stop):
        if (other := rows[place][depth]) != token:
            branches.append((begin - place, begin, place))
            token, begin = other, place
    return sorted([*branches, (begin - stop, begin, stop)])


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be mapped ({error})") from error

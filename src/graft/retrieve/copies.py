"""Copies: the tree of what followed earlier occurrences of a text's end. `kernels.c` makes the same."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from graft.kernels import ScaleStruct
from graft.pool import Columns
from graft.retrieve.rows import Twig

MAX_MATCH = 24
MATCHES = (2, 3, 4, 6, 9, 13, 18, MAX_MATCH)  # least lengths of the evidence buckets
SHARES = (0.0, 0.3, 0.6, 0.9)  # least shares, among the occurrences that came as far
SCALE = ScaleStruct(
    MAX_MATCH,
    len(MATCHES),
    len(SHARES),
    (ctypes.c_int64 * len(MATCHES))(*MATCHES),
    (ctypes.c_double * len(SHARES))(*SHARES),
)


class Occurrences(NamedTuple):
    """Where in texts the last tokens of another occur, with something behind them."""

    tokens: array[int]  # of all texts, one behind the other
    spans: list[int]  # of each: where its text starts, where the occurrence ends, where its text stops


def copies(found: Sequence[Occurrences], suffix: list[int], length: int, num_nodes: int) -> Columns:
    """A tree of what followed the occurrences that match the suffix longest, breadth first.

    It has at most `num_nodes` of each of the `found`, whose numbers are the sources, and is at most `length` deep.
    """
    twig = Twig()
    for source, occurrences in enumerate(found):
        _grow(twig, source, continuations(occurrences, suffix, length), num_nodes)
    return twig.columns


def continuations(found: Occurrences, suffix: list[int], length: int) -> list[tuple[int, list[int]]]:
    """Of every occurrence how far back it matches, and up to `length` tokens behind it."""
    tokens, spans = found
    result = []
    for start, end, stop in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        match, most = 0, min(end - start, len(suffix), MAX_MATCH)
        while match < most and tokens[end - match - 1] == suffix[-match - 1]:
            match += 1
        result.append((match, tokens[end : min(end + length, stop)].tolist()))
    return result


def _grow(twig: Twig, source: int, found: list[tuple[int, list[int]]], num_nodes: int) -> None:
    longest = max((match for match, _ in found), default=0)
    # Shorter matches than half the longest only spread the same few places thinner.
    branches = deque([(0, 0, [chain for match, chain in found if 2 * match > longest])])
    left = num_nodes
    while branches and left > 0:
        parent, depth, branch = branches.popleft()
        following: dict[int, list[list[int]]] = {}
        for chain in branch:
            if len(chain) > depth:
                following.setdefault(chain[depth], []).append(chain)
        for token, chains in sorted(following.items(), key=lambda item: -len(item[1]))[:left]:
            # A token further down is reached only if the ones before fitted: by then the match is longer.
            evidence = _evidence(longest + depth, len(chains) / len(branch))
            branches.append((twig.add(parent, token, depth + 1, source, evidence), depth + 1, chains))
            left -= 1


def _evidence(match: int, share: float) -> int:
    length = bisect_right(MATCHES, match) - 1
    return length * len(SHARES) + bisect_right(SHARES, share) - 1

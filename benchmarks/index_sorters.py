"""Benchmark of suffix sorters: the one in use, another library, and two ways with numpy alone.

    python bench/index_sorters.py INDEX --tokens 10000000      # an index with 2-byte tokens, as long at least

tokengrams takes part if it is installed. One process a sorter, so that each has its own peak of memory. All orders
are compared, to the depth of 32 tokens that a lookup can see.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graft.datastore.build import sorted_suffixes
from graft.datastore.format import part_path

DEPTH = 32
Tokens = NDArray[np.uint16]


def in_use(tokens: Tokens) -> NDArray[np.uint32]:
    return np.concatenate(list(sorted_suffixes(tokens)))


def tokengrams(tokens: Tokens) -> NDArray[np.uint64]:
    from tokengrams import MemmapIndex

    with tempfile.TemporaryDirectory() as folder:
        text, index = Path(folder, "text"), Path(folder, "index")
        tokens.tofile(text)
        MemmapIndex.build(str(text), str(index), vocab=1 << 16)
        return np.fromfile(index, dtype=np.uint64)


def numpy_doubling(tokens: Tokens) -> NDArray[np.int64]:
    """Ranks by 1, 2, 4 ... tokens, each from two ranks of half the depth."""
    size, depth, rank = len(tokens), 1, tokens.astype(np.int64)
    while True:
        key = rank * (size + (1 << 16))
        key[: size - depth] += rank[depth:] + 1
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        groups = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
        rank[order] = groups
        depth *= 2
        if groups[-1] == size - 1 or depth >= DEPTH:
            return order


def numpy_refining(tokens: Tokens) -> NDArray[np.int64]:
    """Sorted by four tokens at once; then, four by four, only what is still equal."""
    size = len(tokens)
    padded = np.concatenate([tokens.astype(np.uint64), np.zeros(DEPTH + 4, np.uint64)])

    def four(places: NDArray[np.int64]) -> NDArray[np.uint64]:
        key = np.zeros(len(places), np.uint64)
        for i in range(4):
            key = (key << np.uint64(16)) | padded[places + i]
        return key

    key = four(np.arange(size))
    order = np.argsort(key)
    starts = np.concatenate([[True], key[order][1:] != key[order][:-1]])  # of groups of equals
    for depth in range(4, DEPTH, 4):
        tied = ~starts
        tied[:-1] |= ~starts[1:]
        where = np.flatnonzero(tied)
        if not len(where):
            break
        group, places = np.cumsum(starts)[where], order[where]
        key = four(places + depth)
        within = np.lexsort((key, group))
        order[where], key = places[within], key[within]
        starts[where[1:]] |= (key[1:] != key[:-1]) | (group[1:] != group[:-1])
    return order


SORTERS: dict[str, Callable[[Tokens], NDArray]] = {
    sorter.__name__: sorter for sorter in (in_use, tokengrams, numpy_refining, numpy_doubling)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--sorter", choices=SORTERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sorter is None:
        for name in SORTERS:
            subprocess.run([sys.executable, *sys.argv, "--sorter", name], check=False)
        return

    tokens = np.fromfile(part_path(options.index, 0, "tokens"), dtype=">u2", count=options.tokens).astype(np.uint16)
    try:
        start = time.perf_counter()
        order = SORTERS[options.sorter](tokens).astype(np.int64)
        seconds = time.perf_counter() - start
    except ImportError as error:
        print(f"{options.sorter}: {error}")
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # kB on Linux
    padded = np.concatenate([tokens, np.zeros(DEPTH, np.uint16)])
    pairs = np.random.default_rng(0).integers(0, len(order) - 1, 20_000)
    sorted_right = all(
        tuple(padded[order[i] : order[i] + DEPTH]) <= tuple(padded[order[i + 1] : order[i + 1] + DEPTH]) for i in pairs
    )
    rate = f"{len(tokens) / seconds / 1e6:.2f} M tokens/s"
    print(f"{options.sorter}: {seconds:.1f} s, {rate}, peak {peak:.2f} GB, sorted: {sorted_right}")


if __name__ == "__main__":
    main()

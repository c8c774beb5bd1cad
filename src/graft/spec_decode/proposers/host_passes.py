"""Draft passes that the host makes one by one: what a drafter yields becomes levels of a round's pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from graft.tree.device.buffers import Level
from graft.tree.device.round import AddLevel


def add_passes(
    passes: Iterator[Sequence[Level]],
    made: Tensor,
    sizes: Sequence[int],
    num_rows: int,
    max_depth: int,
    add_level: AddLevel,
) -> None:
    """Make draft passes while their flags are set, and add their nodes to the pool.

    passes: each `next` makes a pass. made: [> passes] int32 flags; `add_level` sets that of the next pass. sizes: by
    pass, a row's places in the pool; nodes beyond them are dropped. num_rows: with padding. max_depth: of the levels.
    """
    depth, first = 0, 1
    known: np.ndarray | None = None  # [B, n] the number in the pool of the drafter's nodes so far, -1 for padding
    for number, size in enumerate(sizes):
        if depth >= max_depth:
            made[number:] = 0
        if not int(made[number]):
            return
        tokens, parents = np.zeros((2, num_rows, size), dtype=np.int32)
        probabilities = np.zeros((num_rows, size), dtype=np.float32)
        for level in next(passes)[: max_depth - depth]:
            depth += 1
            new, above, q = (part.numpy() for part in (level.tokens, level.parents, level.probabilities))
            if known is None:
                known, counts = np.zeros((len(new), 1), dtype=np.int64), np.zeros((len(new), 1), dtype=np.int64)
            parent = np.take_along_axis(known, above, axis=1)
            is_node = (q > 0) & (parent >= 0)
            place = counts + is_node.cumsum(axis=1) - 1
            is_node &= place < size
            rows, columns = np.nonzero(is_node)
            at = rows, place[rows, columns]
            tokens[at], parents[at] = new[rows, columns], parent[rows, columns]
            probabilities[at] = q[rows, columns]
            known = np.concatenate([known, np.where(is_node, first + place, -1)], axis=1)
            counts += is_node.sum(axis=1, keepdims=True)
        flat = (torch.from_numpy(part.reshape(-1)).to(made.device) for part in (tokens, parents, probabilities))
        add_level(number, *flat)
        counts[:] = 0
        first += size

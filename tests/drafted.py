"""What drafters propose, by depth."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graft.drafters.drafter import Passes
from graft.model.captures import context_for

ALL = 4096  # nodes to keep of a level


@dataclass(frozen=True)
class Level:
    """Drafted nodes of one depth. Parents are numbers of nodes, counted over all levels with padding; the root is 0."""

    tokens: Tensor  # [B, n]
    parents: Tensor  # [B, n]
    probabilities: Tensor  # [B, n] q(token | parent); 0 is padding
    path_probabilities: Tensor  # [B, n] their product along the path


def drafts(drafter, state, roots, keep=None, count=None, draws=None):
    """The levels of the trees that `count` passes propose below roots [B]. keep: nodes of a level; None: all."""
    pool = state.pool
    rows = [getattr(own, "row", None) or own.target for own in state.rows]
    longest = max(row.length for row in rows)
    scratch = Passes.scratch(pool, state, rows, min(count or drafter.max_passes, drafter.max_passes))
    for row in rows if drafter.is_captured else ():  # as a round does
        needed, most = row.length + drafter.num_slots, pool.max_slots
        pool.ensure(row, needed if most is None else min(needed, most))
    lengths = scratch.text_lengths[:0].new_zeros(pool.num_table_rows)
    lengths[scratch.table_rows.long()] = torch.tensor([row.length + 1 for row in rows], dtype=torch.int32).to(lengths)
    asked = replace(
        scratch,
        text_lengths=lengths,
        roots=torch.as_tensor(roots).to(lengths),
        context=context_for(longest, getattr(drafter, "contexts", (longest,))),
        draws=draws,
        keep=keep or ALL,
    )
    passes = []
    drafter.run_passes(
        asked, lambda number, *parts: passes.append([part.reshape(len(rows), -1).cpu().clone() for part in parts])
    )
    return levels_of(*(torch.cat(parts, dim=1) for parts in zip(*passes, strict=True)))


def levels_of(tokens, parents, q):
    """The levels of flat trees [B, n] without their roots; parents are numbers of nodes, the first of which is 1."""
    rows = [[(0, 0, 1.0)] for _ in tokens]  # by node: its depth, its number in the levels, and its path probability
    levels, num_before = [], 1
    for row, *columns in zip(rows, parents.tolist(), q.tolist(), strict=True):
        for parent, own in zip(*columns, strict=True):
            row.append((row[parent][0] + 1 if own > 0 else 0, None, row[parent][2] * own))
    for depth in range(1, 1 + max(own[0] for row in rows for own in row)):
        nodes = [[at for at, own in enumerate(row) if own[0] == depth] for row in rows]
        shape = (2, len(rows), max(map(len, nodes)))
        level = [*torch.zeros(shape, dtype=torch.int64), *torch.zeros(shape)]
        for number, (row, own) in enumerate(zip(rows, nodes, strict=True)):
            for place, at in enumerate(own):
                parent = int(parents[number, at - 1])
                values = (tokens[number, at - 1], row[parent][1], q[number, at - 1], row[at][2])
                for part, value in zip(level, values, strict=True):
                    part[number, place] = value
                row[at] = (depth, num_before + place, row[at][2])
        levels.append(Level(*level))
        num_before += level[0].shape[1]
    return levels

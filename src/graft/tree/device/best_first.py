"""Best-first trees on the device.

Nodes that may come next are open. The likeliest open node is taken, and opens its next sibling and its first child. So
there is at most one more open node than taken ones.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.tree.device.buffers import Trees


def grow(
    tokens: Tensor,  # [R, E, m] int32
    probabilities: Tensor,  # [R, E, m] float32, in descending order
    entries: Tensor,  # [R, E, m] int32: the entry with each token's children; -1: none
    num_levels: int,
    trees: Trees,
) -> None:
    """Write the trees of the likeliest paths, at most `num_levels` deep. The root's children are in entry 0."""
    num_rows, num_entries, num_children = tokens.shape
    num_nodes = trees.numbers.shape[2]
    _grow_kernel[(num_rows,)](
        *(part.contiguous() for part in (tokens, probabilities, entries)),
        *(trees.tokens, trees.parents, trees.depths, trees.probabilities, trees.paths),
        num_entries,
        num_children,
        num_levels,
        num_nodes,
        BLOCK=triton.next_power_of_2(num_nodes + 1),
        num_warps=1,
    )


@triton.jit
def _worth_of(path: tl.tensor, order: int) -> tl.tensor:
    """A sort key: higher for likelier paths and, among equals, for those found earlier; 0: no node."""
    worth = (path.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - order)
    return tl.where(path > 0, worth, 0)


@triton.jit(do_not_specialize=["num_entries", "num_children", "num_levels", "num_nodes"])
def _grow_kernel(
    tokens: tl.tensor,
    probabilities: tl.tensor,
    entries: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_depths: tl.tensor,
    out_probabilities: tl.tensor,
    out_paths: tl.tensor,
    num_entries: int,
    num_children: int,
    num_levels: int,
    num_nodes: int,
    BLOCK: tl.constexpr,
) -> None:
    """A program is one row. A taken node's sibling takes its place among the open nodes, and node n's child n + 1."""
    row = tl.program_id(0)
    table = row.to(tl.int64) * num_entries * num_children
    place = tl.arange(0, BLOCK)
    # Open nodes: worth, index in the table, depth, the parent's place among the taken nodes of its depth and its path.
    worth = tl.where(place == 0, _worth_of(tl.load(probabilities + table), 0), 0)
    index = tl.zeros([BLOCK], tl.int32)
    depth = tl.full([BLOCK], 1, tl.int32)
    parent = tl.zeros([BLOCK], tl.int32)
    above = tl.full([BLOCK], 1.0, tl.float32)
    # Taken nodes, in their order: index, depth, own and parent's place among those of their depth, and path.
    taken_index = tl.zeros([BLOCK], tl.int32)
    taken_depth = tl.zeros([BLOCK], tl.int32)
    taken_order = tl.zeros([BLOCK], tl.int32)
    taken_parent = tl.zeros([BLOCK], tl.int32)
    taken_path = tl.zeros([BLOCK], tl.float32)
    for number in range(num_nodes):
        best = tl.max(worth, axis=0)
        is_node = best > 0
        is_it = (worth == best) & is_node
        own_index = tl.sum(tl.where(is_it, index, 0), axis=0)
        own_depth = tl.sum(tl.where(is_it, depth, 0), axis=0)
        own_parent = tl.sum(tl.where(is_it, parent, 0), axis=0)
        own_above = tl.sum(tl.where(is_it, above, 0.0), axis=0)
        path = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        order = tl.sum((taken_depth == own_depth).to(tl.int32), axis=0)
        is_here = (place == number) & is_node
        taken_index = tl.where(is_here, own_index, taken_index)
        taken_depth = tl.where(is_here, own_depth, taken_depth)
        taken_order = tl.where(is_here, order, taken_order)
        taken_parent = tl.where(is_here, own_parent, taken_parent)
        taken_path = tl.where(is_here, path, taken_path)

        sibling = own_index + 1
        has_sibling = is_node & (sibling % num_children != 0)
        own = tl.load(probabilities + table + sibling, mask=has_sibling, other=0.0)
        worth = tl.where(is_it, _worth_of(own_above * own, 2 * number + 1), worth)
        index = tl.where(is_it, sibling, index)

        entry = tl.load(entries + table + own_index, mask=is_node, other=-1)
        has_child = (entry >= 0) & (entry < num_entries) & (own_depth < num_levels)
        own = tl.load(probabilities + table + entry * num_children, mask=has_child, other=0.0)
        is_child = place == number + 1
        worth = tl.where(is_child, _worth_of(path * own, 2 * number + 2), worth)
        index = tl.where(is_child, entry * num_children, index)
        depth = tl.where(is_child, own_depth + 1, depth)
        parent = tl.where(is_child, order, parent)
        above = tl.where(is_child, path, above)

    # The output is depth by depth: a node comes after all less deep ones, in its order among those of its depth.
    start = tl.zeros([BLOCK], tl.int32)
    start_above = tl.zeros([BLOCK], tl.int32)
    before, end = 0, 0
    for level in range(1, num_levels + 1):
        is_level = taken_depth == level
        start = tl.where(is_level, end, start)
        start_above = tl.where(is_level, before, start_above)
        before = end
        end += tl.sum(is_level.to(tl.int32), axis=0)
    is_taken = taken_depth > 0
    out = row.to(tl.int64) * num_nodes + tl.where(is_taken, start + taken_order, place)
    is_written = place < num_nodes
    at = tl.where(is_taken, table + taken_index, 0)
    tl.store(out_tokens + out, tl.load(tokens + at, mask=is_taken, other=0), mask=is_written)
    tl.store(out_parents + out, tl.where(taken_depth > 1, 1 + start_above + taken_parent, 0), mask=is_written)
    tl.store(out_depths + out, taken_depth, mask=is_written)
    tl.store(out_probabilities + out, tl.load(probabilities + at, mask=is_taken, other=0.0), mask=is_written)
    tl.store(out_paths + out, taken_path, mask=is_written)

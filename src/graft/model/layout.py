"""Layout: a flat step on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """T tokens of R rows: which keys each token sees, and where its own keys and values are stored.

    A row's tokens are consecutive, each after its parent. Depths are less than max(T, P). Padding tokens have depth ==
    place, and belong to a row whose entry in `table_rows` is 0 and whose pages are all 0. Tokens beyond their row's
    count get zeros as attention output.
    """

    rows: Tensor  # [T] int32 the token's row: an index into the [R] tensors
    places: Tensor  # [T] int32 keys and values are stored at position length + place of the row
    depths: Tensor  # [T] int32 position in the text minus the row's length
    paths: Tensor  # [T, P] int32 places of its ancestors and itself, by depth; not read where depth == place
    starts: Tensor  # [R] int32 the row's first token in the step
    counts: Tensor  # [R] int32 the row's tokens in the step; 0 for unused rows
    lengths: Tensor  # [R] int32 committed tokens of each row
    table_rows: Tensor  # [R] int32 the row's index in the block tables
    tables: Tensor  # [table rows, max_pages] int32 block tables
    max_context: int  # upper bound of the lengths: sizes a launch, never changes a result
    # [T] int32 the token's number, from 1, in its strip: a run of tokens down one path. The last one's is negative.
    # None: each token is a strip of its own. In a row with longer strips, the step has all places of the row in order.
    strips: Tensor | None = None
    only_chains: bool = False  # whether every row is known to be a chain: then the kernel for trees is not needed


def bidirectional_columns(
    width: int, num_blocks: int, tile: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Places, depths and paths of a `Layout` for blocks of `width` tokens in which every token sees the whole block.

    To the kernels every token looks like the deepest one, with the others as its ancestors. (Positions stay correct,
    since queries and keys are rotated before.) tile: tokens in a tile of query rows. A block that fits into a tile ends
    with its highest place, so the kernels take it for a chain: its tokens see the same keys, each up to its own depth.
    A larger block must not look like a chain, so its places are numbered from its end.
    """
    places = torch.arange(width)
    if width > tile:
        places = places.flip(0)
    others = torch.stack([places[places != place] for place in places])
    paths = torch.cat([others, places[:, None]], dim=1)
    columns = (places.repeat(num_blocks), torch.full((num_blocks * width,), width - 1), paths.repeat(num_blocks, 1))
    places, depths, paths = (part.int().to(device) for part in columns)
    return places, depths, paths

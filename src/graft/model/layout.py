"""The layout of a flat step on the device: which keys each token sees, and where its own keys and values go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """A flat step on the device: T tokens of R rows, which keys each sees, and where its own go.

    A row's tokens stand together, each after its parent; depths are less than the greater of T and P. Padding belongs
    to a row of line 0, whose pages are all 0, with depth == place. What stands behind its row's count gets zeros.
    """

    rows: Tensor  # [T] int32 the row of each token, an index into the [R] tensors
    places: Tensor  # [T] int32 its slot is that of position length + place in its row
    depths: Tensor  # [T] int32 its position in the text, less the row's length
    paths: Tensor  # [T, P] int32 places of its ancestors and itself, by depth; not read where depth == place
    starts: Tensor  # [R] int32 the row's first token in the step
    counts: Tensor  # [R] int32 the row's tokens in the step; 0 for rows not in use
    lengths: Tensor  # [R] int32 committed tokens of each row
    lines: Tensor  # [R] int32 the row's line in the block tables
    tables: Tensor  # [lines, max_pages] int32 block tables
    max_context: int  # upper bound of the lengths: sizes a launch, never changes a result
    # [T] int32 each token's number, from 1, in its strip, a run of tokens down one path; negative for the last of it.
    # None: each token is a strip of its own. A row with longer ones has all its places in the step, in order.
    strips: Tensor | None = None
    only_chains: bool = False  # whether each row's tokens are sure to be a chain, which needs no kernel for trees


def two_way_columns(width: int, num_blocks: int, tile: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Places, depths and paths of a `Layout` for blocks of `width` tokens, each of which sees its whole block.

    To the kernels every token is the deepest, and the others are its ancestors. (Its position is its own all the same:
    queries and keys are rotated before.) tile: tokens of a tile of query rows. A block that fits is taken at once: as
    its last token stands last, it looks like a chain, whose tokens see one piece of text, each up to its own depth. One
    that does not fit must not look so, and is numbered from its end.
    """
    places = torch.arange(width)
    if width > tile:
        places = places.flip(0)
    others = torch.stack([places[places != place] for place in places])
    paths = torch.cat([others, places[:, None]], dim=1)
    columns = (places.repeat(num_blocks), torch.full((num_blocks * width,), width - 1), paths.repeat(num_blocks, 1))
    places, depths, paths = (part.int().to(device) for part in columns)
    return places, depths, paths

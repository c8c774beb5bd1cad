"""Which kind of draft head a folder holds, by its config.json."""

from __future__ import annotations

from pathlib import Path

from graft.errors import GraftError
from graft.spec_decode.proposers.block import layouts as block
from graft.spec_decode.proposers.checkpoints import architecture_of, read_config, said_of
from graft.spec_decode.proposers.eagle3 import layouts as eagle3


def kind_of(folder: Path) -> str:
    """eagle3 or block; a GraftError if it is neither."""
    config = read_config(folder)
    if block.is_block_head(config):
        return "block"
    known = [name for layout in eagle3.LAYOUTS.values() for name in layout.architectures]
    if architecture_of(config) in known:
        return "eagle3"
    known += [name for layout in block.LAYOUTS.values() for name in layout.architectures]
    with said_of(folder / "config.json"):
        raise GraftError(
            f"architecture {architecture_of(config)} is not that of a draft head; known are {', '.join(known)}"
        )

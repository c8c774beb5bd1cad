"""Block heads (DFlash, DSpark, JetSpec, TreeFlash), which draft a block in one pass, and their checkpoints."""

from graft.spec_decode.proposers.block.checkpoint import Recognised, inspect_head, load_head, save_head
from graft.spec_decode.proposers.block.config import BlockConfig, default_target_layers
from graft.spec_decode.proposers.block.head import BlockHead, KeyValue

__all__ = [
    "BlockConfig",
    "BlockHead",
    "KeyValue",
    "Recognised",
    "default_target_layers",
    "inspect_head",
    "load_head",
    "save_head",
]

"""Block heads (DFlash, DSpark, JetSpec, TreeFlash), which draft a block in one pass, and their checkpoints."""

from graft.drafters.block.checkpoint import Recognised, inspect_head, load_head, save_head
from graft.drafters.block.config import BlockConfig, default_target_layers
from graft.drafters.block.head import BlockHead, KeyValue

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

"""EAGLE-3: a one-layer draft head on the target's hidden states, its checkpoints and its drafters."""

from graft.drafters.eagle3.checkpoint import Recognised, inspect_head, load_head, save_head
from graft.drafters.eagle3.head import Eagle3Config, Eagle3Head, KeyValue, default_target_layers

__all__ = [
    "Eagle3Config",
    "Eagle3Head",
    "KeyValue",
    "Recognised",
    "default_target_layers",
    "inspect_head",
    "load_head",
    "save_head",
]

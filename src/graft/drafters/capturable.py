"""Which draft heads can run in CUDA graphs."""

from __future__ import annotations

from graft.drafters.draft_head import DraftHead
from graft.model.families import DTYPES, MAX_HEAD_DIM, MAX_HIDDEN, STEADY_ROPES
from graft.model.plain_modules import changed_module


def why_not(head: DraftHead) -> str | None:
    """The reason why a head cannot be captured; None if it can."""
    if (touched := changed_module(head)) is not None:
        return f"{touched} has a hook or a forward of its own"
    config, weight = head.config, head.fc.weight
    if weight.dtype not in DTYPES:
        return f"its weights are {weight.dtype}"
    if config.rope["rope_type"] not in STEADY_ROPES:
        return f"its rotary positions are of type {config.rope['rope_type']}"
    if config.head_dim > MAX_HEAD_DIM or config.hidden_size > MAX_HIDDEN:
        return "its heads or hidden states are of an unusual size"
    return None

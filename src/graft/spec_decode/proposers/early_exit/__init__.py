"""Early exit (LayerSkip): the target's own first layers as drafter, and the choice of the exit layer."""

from graft.spec_decode.proposers.early_exit.drafter import EarlyExitDrafter
from graft.spec_decode.proposers.early_exit.exit_layer import (
    EARLY_EXIT,
    choose_exit_layer,
    named_layer,
    usual_prompts,
)

__all__ = ["EARLY_EXIT", "EarlyExitDrafter", "choose_exit_layer", "named_layer", "usual_prompts"]

"""Early exit (LayerSkip): the target's own first layers as drafter, and the choice of the exit layer."""

from graft.drafters.early_exit.drafter import EarlyExitDrafter
from graft.drafters.early_exit.exit_layer import (
    choose_exit_layer,
    usual_prompts,
)

__all__ = ["EarlyExitDrafter", "choose_exit_layer", "usual_prompts"]

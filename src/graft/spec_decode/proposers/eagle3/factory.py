"""Chooses the drafter of a head: `CapturedEagle3Drafter` with CUDA graphs on a GPU, else `Eagle3Drafter`."""

from __future__ import annotations

import warnings

from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.eagle3.head import Eagle3Head


def drafter_for(head: Eagle3Head, settings: TreeSettings | None = None) -> Eagle3Drafter:
    """The drafter for a head's device: on a GPU, one whose passes are CUDA graphs."""
    if head.fc.weight.device.type == "cuda":
        try:
            from graft.spec_decode.proposers.captured import why_not
            from graft.spec_decode.proposers.eagle3.cuda_graphs import CapturedEagle3Drafter
        except ImportError:  # the target's runner says that Triton is missing
            return Eagle3Drafter(head, settings)
        if (reason := why_not(head)) is None:
            return CapturedEagle3Drafter(head, settings)
        warnings.warn(f"draft passes are not captured, so they are slower: {reason}", stacklevel=2)
    return Eagle3Drafter(head, settings)

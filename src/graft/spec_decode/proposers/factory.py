"""The drafter for a head: by CUDA graphs on a GPU, else eager."""

from __future__ import annotations

import warnings
from typing import Any

from graft.spec_decode.proposers.block.drafter import BlockDrafter, BlockTreeSettings
from graft.spec_decode.proposers.block.head import BlockHead
from graft.spec_decode.proposers.drafter import Drafter, TreeSettings
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.eagle3.head import Eagle3Head
from graft.spec_decode.proposers.mtp.drafter import MtpDrafter
from graft.spec_decode.proposers.small_model import SmallModelDrafter


def drafter_for(
    head: Eagle3Head | BlockHead, settings: TreeSettings | BlockTreeSettings | None = None
) -> Eagle3Drafter | BlockDrafter:
    """The drafter for a head on its device. settings: of the head's kind."""
    kind: Any = BlockDrafter if isinstance(head, BlockHead) else Eagle3Drafter
    if head.fc.weight.device.type == "cuda":
        try:
            captured, reason = _captured(head)
        except ImportError:  # no Triton: the target's runner warns about it
            captured, reason = kind, None
        if reason is not None:
            warnings.warn(f"draft passes are not captured, so they are slower: {reason}", stacklevel=2)
        kind = captured if reason is None else kind
    drafter: Eagle3Drafter | BlockDrafter = kind(head, settings)
    return drafter


def with_tree(drafter: Drafter, settings: TreeSettings) -> Drafter:
    """A drafter of the same network with other tree settings. Block drafters have settings of their own and stay."""
    if isinstance(drafter, SmallModelDrafter):
        return drafter.with_settings(settings)
    if isinstance(drafter, MtpDrafter):
        return MtpDrafter(drafter.head, settings)
    return drafter_for(drafter.head, settings) if isinstance(drafter, Eagle3Drafter) else drafter


def _captured(head: Eagle3Head | BlockHead) -> tuple[Any, str | None]:
    """The captured drafter of a head's kind, and the reason why it cannot be used, if any."""
    if isinstance(head, BlockHead):
        from graft.spec_decode.proposers.block.cuda_graphs import CapturedBlockDrafter
        from graft.spec_decode.proposers.block.fused_head import why_not

        return CapturedBlockDrafter, why_not(head)
    from graft.spec_decode.proposers import capturable
    from graft.spec_decode.proposers.eagle3.cuda_graphs import CapturedEagle3Drafter

    return CapturedEagle3Drafter, capturable.why_not(head)

"""The drafter for a head: with its kernels on a GPU that has them."""

from __future__ import annotations

import warnings
from typing import Any

from graft.drafters.block.drafter import BlockDrafter, BlockTreeSettings
from graft.drafters.block.head import BlockHead
from graft.drafters.drafter import Drafter, TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.drafters.eagle3.head import Eagle3Head
from graft.drafters.mtp.drafter import MtpDrafter
from graft.drafters.small_model import SmallModelDrafter


def drafter_for(
    head: Eagle3Head | BlockHead, settings: TreeSettings | BlockTreeSettings | None = None
) -> Eagle3Drafter | BlockDrafter:
    """The drafter for a head on its device. settings: of the head's kind."""
    fast: Any = None
    kind: Any = BlockDrafter if isinstance(head, BlockHead) else Eagle3Drafter
    if head.fc.weight.device.type == "cuda":
        try:
            fast, reason = fused_for(head, settings)
        except ImportError:  # no Triton: the target's runner warns about it
            reason = None
        if reason is not None:
            warnings.warn(f"draft passes are not captured, so they are slower: {reason}", stacklevel=2)
    drafter: Eagle3Drafter | BlockDrafter = kind(head, settings, fast)
    return drafter


def with_tree(drafter: Drafter, settings: TreeSettings) -> Drafter:
    """A drafter of the same network with other tree settings. Block drafters have settings of their own and stay."""
    if isinstance(drafter, SmallModelDrafter):
        return drafter.with_settings(settings)
    if isinstance(drafter, MtpDrafter):
        return MtpDrafter(drafter.head, settings)
    return drafter_for(drafter.head, settings) if isinstance(drafter, Eagle3Drafter) else drafter


def fused_for(head: Eagle3Head | BlockHead, settings: Any = None) -> tuple[Any, str | None]:
    """The head's functions in Triton, or None and the reason why it has none."""
    if isinstance(head, BlockHead):
        from graft.drafters.block import fused_head as block

        reason = block.why_not(head)
        return (block.FastBlock(head, settings or BlockTreeSettings()) if reason is None else None), reason
    from graft.drafters import capturable
    from graft.drafters.eagle3.fused_head import FastHead

    reason = capturable.why_not(head)
    return (FastHead(head, settings or TreeSettings()) if reason is None else None), reason

"""off: plain decoding, by the same engine with trees of one node."""

from __future__ import annotations

from graft.drafters.drafter import Drafter
from graft.model import TargetRunner
from graft.spec_decode.policies.base import Policy
from graft.spec_decode.policy_settings import PolicySettings


class Off(Policy):
    """Verifies only roots."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings) -> None:
        pass

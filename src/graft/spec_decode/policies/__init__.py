"""Policies by name: they choose the tree of each round.

Users choose between `off`, plain decoding, and `graft`. Importing `graft.bench.baselines` adds more.
"""

from __future__ import annotations

from graft.drafters.drafter import Drafter
from graft.errors import GraftError
from graft.model import TargetRunner
from graft.settings import require_known
from graft.spec_decode.policies.base import Policy
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.policies.off import Off
from graft.spec_decode.policy_settings import DEFAULT_POLICY, MAX_BUDGET, POLICY_NAMES, PolicySettings

POLICIES: dict[str, type[Policy]] = dict(zip(POLICY_NAMES, (Off, Graft), strict=True))


def make_policy(
    name: str,
    target: TargetRunner,
    drafter: Drafter | None = None,
    budget: int | None = None,
    pass_cost: float | None = None,
    isolated: bool = False,
) -> Policy:
    """Make the policy of that name for one target, with nothing learned yet.

    budget: nodes per row and round, without the root; None: measured costs decide (`graft`), or 60.
    pass_cost: cost of a draft pass, in verify steps; None: measured.
    isolated: texts learn only from themselves and from texts of the same owner (`Sequence.owner`).
    """
    return policy_with(PolicySettings(budget, pass_cost, isolated), name, target, drafter)


def policy_with(settings: PolicySettings, name: str, target: TargetRunner, drafter: Drafter | None = None) -> Policy:
    """`make_policy` from settings."""
    require_known("policy", name, POLICIES)
    if POLICIES[name].drafts and drafter is None:
        raise GraftError(f"policy {name!r} needs a drafter: name one with draft=")
    return POLICIES[name](target, drafter, settings)


__all__ = [
    "DEFAULT_POLICY",
    "MAX_BUDGET",
    "POLICIES",
    "Policy",
    "PolicySettings",
    "make_policy",
    "policy_with",
]

"""Policies: what a round's tree is, chosen by name.

Users choose between plain decoding, `off`, and `graft`. The methods that these are compared with register themselves
when the benchmark's package `graft.bench.baselines` is imported.
"""

from __future__ import annotations

from graft.datastore.lookup import Datastore
from graft.errors import GraftError
from graft.model import TargetRunner
from graft.settings import require_known
from graft.spec_decode.policies.base import DraftResult, Policy
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.policies.off import Off
from graft.spec_decode.policy_settings import MAX_BUDGET, PolicySettings
from graft.spec_decode.proposers.drafter import Drafter

POLICIES: dict[str, type[Policy]] = {"off": Off, "graft": Graft}
DEFAULT_POLICY = "graft"


def register_policy(name: str, policy: type[Policy]) -> None:
    """Makes a policy known by name, in this process, wherever `policy=` is taken."""
    if POLICIES.setdefault(name, policy) is not policy:
        raise ValueError(f"policy {name!r} is registered already")


def make_policy(
    name: str,
    target: TargetRunner,
    drafter: Drafter | None = None,
    budget: int | None = None,
    pass_cost: float | None = None,
    isolated: bool = False,
    datastore: Datastore | None = None,
) -> Policy:
    """The policy of that name for one target, with nothing learned yet.

    budget: how many nodes a round verifies beside the root; None lets measured costs decide (`graft`), or is 60.
    pass_cost: the cost of a draft pass, in verifies; None measures it.
    isolated: texts learn from themselves and from those of the same owner (`Sequence.owner`) only.
    datastore: an index on disk that `graft` retrieves from too.
    """
    return policy_with(PolicySettings(budget, pass_cost, isolated, datastore), name, target, drafter)


def policy_with(settings: PolicySettings, name: str, target: TargetRunner, drafter: Drafter | None = None) -> Policy:
    """`make_policy` from settings."""
    require_known("policy", name, POLICIES)
    if POLICIES[name].drafts and drafter is None:
        raise GraftError(f"policy {name!r} drafts with a head: name one with draft=")
    return POLICIES[name](target, drafter, settings)


__all__ = [
    "DEFAULT_POLICY",
    "MAX_BUDGET",
    "POLICIES",
    "DraftResult",
    "Policy",
    "PolicySettings",
    "make_policy",
    "policy_with",
    "register_policy",
]

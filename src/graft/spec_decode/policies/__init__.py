"""Policies: what a round's tree is. One small file each, chosen by name."""

from __future__ import annotations

from collections.abc import Mapping

from graft.datastore.lookup import Datastore
from graft.errors import GraftError
from graft.model import TargetRunner
from graft.settings import require_known
from graft.spec_decode.policies.base import DraftResult, Policy
from graft.spec_decode.policies.block import Block, BlockPaper
from graft.spec_decode.policies.dense import Dense, Prune
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.policies.lookup import Lookup
from graft.spec_decode.policies.off import Off
from graft.spec_decode.policies.paper import Paper, Recycle, Root, Tail
from graft.spec_decode.policy_settings import MAX_BUDGET, PolicySettings
from graft.spec_decode.proposers.drafter import Drafter

POLICIES: dict[str, type[Policy]] = {
    "off": Off,
    "lookup": Lookup,
    "recycle": Recycle,
    "dense": Dense,
    "prune": Prune,
    "root": Root,
    "tail": Tail,
    "paper": Paper,
    "block": Block,
    "block-paper": BlockPaper,
    "graft": Graft,
}
DEFAULT_POLICY = "graft"


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


def policy_with(
    settings: PolicySettings,
    name: str,
    target: TargetRunner,
    drafter: Drafter | None = None,
    known: Mapping[str, type[Policy]] = POLICIES,
) -> Policy:
    """`make_policy` from settings; `known` may hold more than the policies that users choose from."""
    require_known("policy", name, known)
    if known[name].drafts and drafter is None:
        raise GraftError(f"policy {name!r} drafts with a head: name one with draft=")
    return known[name](target, drafter, settings)


__all__ = [
    "DEFAULT_POLICY",
    "MAX_BUDGET",
    "POLICIES",
    "DraftResult",
    "Policy",
    "PolicySettings",
    "make_policy",
    "policy_with",
]

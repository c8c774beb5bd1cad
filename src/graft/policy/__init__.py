"""Policies: what a round's tree is. One small file each, chosen by name."""

from __future__ import annotations

import difflib

from graft.draft.base import Drafter
from graft.errors import GraftError
from graft.policy.base import MAX_BUDGET, Grown, Policy
from graft.policy.dense import Dense
from graft.policy.graft import Graft
from graft.policy.off import Off
from graft.settings import require
from graft.target import TargetRunner

POLICIES: dict[str, type[Policy]] = {"off": Off, "dense": Dense, "graft": Graft}
DEFAULT_POLICY = "graft"


def make_policy(name: str, target: TargetRunner, drafter: Drafter | None = None, budget: int | None = None) -> Policy:
    """The policy of that name for one target, with nothing learned yet.

    budget: how many nodes a round verifies beside the root; None lets measured costs decide.
    """
    require(budget is None or 1 <= budget <= MAX_BUDGET, f"budget must be between 1 and {MAX_BUDGET}, not {budget}")
    if name not in POLICIES:
        close = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(POLICIES)}"
        raise GraftError(f"unknown policy {name!r}: {hint}")
    return POLICIES[name](target, drafter, budget)


__all__ = ["DEFAULT_POLICY", "MAX_BUDGET", "POLICIES", "Grown", "Policy", "make_policy"]

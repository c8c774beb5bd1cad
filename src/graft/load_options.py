"""Checks of `load`'s options that need neither torch nor the model, so that a mistake shows at once."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from graft.datastore.format import read_header
from graft.hub.registry import check_model_name
from graft.settings import require, require_known
from graft.spec_decode.policy_settings import DEFAULT_POLICY, POLICY_NAMES, PolicySettings


def check_load_options(
    model: str,
    policy: str = DEFAULT_POLICY,
    budget: int | None = None,
    datastore: str | Path | None = None,
    policies: Collection[str] = POLICY_NAMES,
) -> None:
    """Raise a GraftError for a model, policy, budget or datastore that `load` could not use."""
    require_known("policy", policy, policies)
    PolicySettings(budget)  # checks the budget
    require(datastore is None or policy == DEFAULT_POLICY, f"policy {policy!r} uses no datastore: leave it out")
    if datastore is not None:
        read_header(Path(datastore))
    check_model_name(model)

"""Makes the methods of a benchmark from their names; all share one model."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from graft.bench.baselines import ABLATIONS
from graft.bench.baselines.ablations import EIGHT_BITS
from graft.bench.methods import Method, PolicyMethod
from graft.bench.peers import make_peer
from graft.bench.settings import PEERS, check_names
from graft.drafters.drafter import Drafter
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.drafters.factory import with_tree
from graft.loading import tree_settings
from graft.spec_decode.policies import DEFAULT_POLICY, PolicySettings

_USUAL = PolicySettings()


def make_methods(
    names: Sequence[str],
    model: PreTrainedModel,
    drafter: Drafter | None = None,
    settings: PolicySettings = _USUAL,
    assistant: PreTrainedModel | None = None,
    rows: int = 1,
    exact: bool = False,
) -> list[Method]:
    """The methods with these names. rows: prompts that decode together and learn nothing from each other."""
    check_names(names, rows, assistant is not None)
    settings = replace(settings, isolated=rows > 1)
    methods: list[Method] = []
    for name in names:
        if name in PEERS:
            methods.append(make_peer(name, model, assistant))
        else:
            own = _drafter_for(name, drafter, settings.budget, model.device)
            methods.append(PolicyMethod(name, model, own, settings, exact))
    return methods


def _drafter_for(policy: str, drafter: Drafter | None, budget: int | None, device: torch.device) -> Drafter | None:
    """The drafter of a policy, with the same tree for all under a common budget, else with the policy's own tree."""
    tree = tree_settings(DEFAULT_POLICY if policy in ABLATIONS else policy, device) if budget is None else None
    if isinstance(drafter, Eagle3Drafter) and policy == EIGHT_BITS:
        tree = replace(tree or drafter.settings, eight_bits=False)
    return drafter if drafter is None or tree is None else with_tree(drafter, tree)

"""Makes the methods of a benchmark from their names; all share one model."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from graft.bench.baselines import ABLATIONS, POLICY_METHODS
from graft.bench.baselines.ablations import WithoutEightBits
from graft.bench.methods import Method, PolicyMethod
from graft.bench.peers import PEERS, make_peer
from graft.loading import tree_settings
from graft.settings import require, require_known
from graft.spec_decode.policies import DEFAULT_POLICY, PolicySettings
from graft.spec_decode.proposers.drafter import Drafter
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.factory import with_tree

_USUAL = PolicySettings()


def check_names(names: Sequence[str], known: Sequence[str] = (*POLICY_METHODS, *PEERS)) -> None:
    """Raise unless every name is known and given once."""
    require(bool(names), f"no method is named; known: {', '.join(known)}")
    for name in names:
        require_known("method", name, known)
        require(names.count(name) == 1, f"method {name!r} is named twice; once is enough")


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
    check_names(names)
    settings = replace(settings, isolated=rows > 1)
    methods: list[Method] = []
    for name in names:
        if name in PEERS:
            methods.append(make_peer(name, model, assistant))
        else:
            own = _drafter_for(name, drafter, settings.budget, model.device)
            methods.append(PolicyMethod(name, model, own, settings, exact))
    for method in methods:
        one_by_one = f"method {method.name!r} decodes one prompt at a time: leave out --rows, or the method"
        require(rows == 1 or method.is_batched, one_by_one)
    return methods


def _drafter_for(policy: str, drafter: Drafter | None, budget: int | None, device: torch.device) -> Drafter | None:
    """The drafter of a policy, with the same tree for all under a common budget, else with the policy's own tree."""
    tree = tree_settings(DEFAULT_POLICY if policy in ABLATIONS else policy, device) if budget is None else None
    if isinstance(drafter, Eagle3Drafter) and ABLATIONS.get(policy) is WithoutEightBits:
        tree = replace(tree or drafter.settings, eight_bits=False)
    return drafter if drafter is None or tree is None else with_tree(drafter, tree)

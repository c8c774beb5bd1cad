"""Calibration of the gates: thresholds learned from warm-up prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from graft.bench.baselines.block import Block
from graft.bench.baselines.dense import Dense
from graft.bench.baselines.gates import CHAIN_THRESHOLDS, GATES, PUBLISHED, THRESHOLDS
from graft.drafters.drafter import Drafter
from graft.engine import Engine
from graft.model import target_for
from graft.model.sampler import SamplingSettings
from graft.spec_decode.planner import Outcome, Planner
from graft.spec_decode.policy_settings import USUAL_BUDGET, USUAL_PASS_COST, PolicySettings
from graft.tree.device.fixed import FixedTree

_ENOUGH = 10  # rounds worth stopping, and rounds worth continuing, that are needed to change a published threshold

Seen = list[tuple[list[float], int]]  # for each round, confidences at the gates and the number of accepted nodes
Groups = Sequence[Sequence[Sequence[int]]]  # batches of prompts


def calibrated_gates(
    state: Mapping[str, Tensor],
    model: PreTrainedModel,
    drafter: Drafter | None,
    groups: Groups,
    settings: SamplingSettings,
) -> dict[str, Tensor]:
    """New thresholds for the gates in a method's state, learned from the prompts. Empty if it has no gates."""
    if drafter is None:
        return {}
    found: dict[str, Tensor] = {}
    if THRESHOLDS in state:
        seen = watch_gates(model, drafter, groups, settings)
        found[THRESHOLDS] = torch.tensor(thresholds(seen, drafter.max_passes))
    if CHAIN_THRESHOLDS in state:
        seen = watch_gates(model, drafter, groups, settings, chain=True)
        found[CHAIN_THRESHOLDS] = torch.tensor(chain_thresholds(seen))
    return found


class _Watcher(Planner):
    """Plans like its base, and records each round's confidences at the gates and its number of accepted nodes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: Seen = []

    def learn(self, outcome: Outcome) -> None:
        if outcome.is_plain or outcome.confidences is None:
            return
        for own, nodes in zip(outcome.confidences.tolist(), outcome.nodes, strict=True):
            if own[-1] > 0:  # no token limit cut the drafts short
                reached = own[:-1]
                self.seen.append(([*reached, *[0.0] * (len(GATES) - len(reached))], len(nodes)))


class GateWatch(Dense):
    """`dense` whose gates stop no row; the last one is at the greatest depth."""

    planner_class = _Watcher
    planner: _Watcher

    def _rules(self, drafter: Drafter) -> FixedTree:
        gates = (*(depth for depth in GATES if depth <= drafter.max_depth), drafter.max_depth)
        self.thresholds = [-1.0] * len(gates)
        return FixedTree(gates)


class ChainWatch(GateWatch):
    """The same with `block`."""

    _budget = Block._budget

    def _rules(self, drafter: Drafter) -> FixedTree:
        return replace(super()._rules(drafter), is_chain=True)


def watch_gates(
    model: PreTrainedModel, drafter: Drafter, groups: Groups, settings: SamplingSettings, chain: bool = False
) -> Seen:
    """Confidences at the gates and accepted nodes of every round in which `dense` answers the prompts.

    chain: `block` answers them instead.
    """
    kind = ChainWatch if chain else GateWatch
    watch = kind(target_for(model, drafter.hidden_layers), drafter, PolicySettings(USUAL_BUDGET))
    engine = Engine(model, policy=watch, drafter=drafter)
    for prompts in groups:
        engine.generate_batch([list(prompt) for prompt in prompts], **vars(settings))
    return watch.planner.seen


def thresholds(seen: Seen, max_passes: int) -> list[float]:
    """For each gate, the highest confidence at which stopping was better than further drafting.

    Stopping a round loses the tokens that it accepted below the depth drafted so far. It saves the remaining passes,
    each worth the tokens that plain rounds yield in its time. The tokens that retrieval would add instead are not
    counted, so gates tend to stop too late. A gate sees only the rounds that passed the gates before it.

    max_passes: the drafter's. A drafter with a single pass saves none and keeps the published thresholds.
    """
    cost = USUAL_PASS_COST * (1 + sum(depth for _, depth in seen) / max(len(seen), 1))  # of a pass, in tokens
    return _with_least_regret(seen, lambda left, depth: max(depth - left, 0) - cost * max(max_passes - left, 0))


def chain_thresholds(seen: Seen) -> list[float]:
    """For each gate, the confidence that best separates chains accepted beyond its depth from the others.

    As published, it does not count the tokens that a stopped chain loses, or those that it gets instead.
    """
    return _with_least_regret(seen, lambda left, depth: 1.0 if depth > left else -1.0)


def _with_least_regret(seen: Seen, regret: Callable[[int, int], float]) -> list[float]:
    """The best threshold of each gate.

    regret: the regret of stopping a round, from the depth that is kept and the number of accepted nodes.
    """
    chosen = []
    for gate, kept in enumerate(GATES):
        confidences = np.array([own[gate] for own, _ in seen])
        regrets = np.array([regret(kept, depth) for _, depth in seen])
        found = best_threshold(confidences, regrets)
        chosen.append(PUBLISHED[gate] if found is None else found)
        seen = [(own, depth) for own, depth in seen if own[gate] > chosen[-1]]
    return chosen


def best_threshold(confidences: NDArray[np.float64], regrets: NDArray[np.float64]) -> float | None:
    """The threshold with the least sum of regrets over the rounds that it stops, whose confidence is below it.

    None if too few rounds are worth stopping, or too few worth continuing. Of equal thresholds, the lowest.
    """
    if min(np.sum(regrets < 0), np.sum(regrets > 0)) < _ENOUGH:
        return None
    order = confidences.argsort(kind="stable")
    values = np.append(0.0, confidences[order])
    stopped = np.append(0.0, np.cumsum(regrets[order]))  # the regret if all rounds up to here are stopped
    is_last = np.append(values[1:] > values[:-1], False)  # no threshold separates equal confidences
    if not is_last[1:].any():
        return None
    place = int(np.where(is_last, stopped, np.inf).argmin())
    return float((values[place] + values[place + 1]) / 2)

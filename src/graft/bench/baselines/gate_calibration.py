"""Calibration of the gates: thresholds from warm-up prompts, for the methods that have gates."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from graft.bench.baselines.dense import Dense
from graft.bench.baselines.gates import CHAIN_THRESHOLDS, GATES, PUBLISHED, THRESHOLDS
from graft.engine import Engine
from graft.model import TargetRunner, target_for
from graft.model.sampler import SamplingSettings
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.policy_settings import USUAL_BUDGET, USUAL_PASS_COST, PolicySettings
from graft.spec_decode.proposers.drafter import Drafter
from graft.tree.tree import DraftTree

_ENOUGH = 10  # a gate keeps its published threshold unless so many rounds are worth stopping, and so many going on

Seen = list[tuple[list[float], int]]  # by round: confidences at the gates, and how many nodes were accepted
Groups = Sequence[Sequence[Sequence[int]]]  # batches of prompts


def calibrated_gates(
    state: Mapping[str, Tensor],
    model: PreTrainedModel,
    drafter: Drafter | None,
    groups: Groups,
    settings: SamplingSettings,
) -> dict[str, Tensor]:
    """New thresholds for the gates that a method's state has, learned from the prompts; none if it has no gates."""
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


class GateWatch(Dense):
    """`dense` or `block`, recording each round's confidences at the gates and how many nodes were accepted."""

    def __init__(
        self, target: TargetRunner, drafter: Drafter | None, settings: PolicySettings, chain: bool = False
    ) -> None:
        super().__init__(target, drafter, settings)
        self.kept_of_a_level = 1 if chain else None
        self.seen: Seen = []

    def learn_accepted(self, tree: DraftTree, accepted: Accepted, seconds: float) -> None:
        assert self.drafter is not None and self.drafted is not None
        if self.drafted.is_whole:
            for confidences, nodes in zip(self.drafted.confidences.tolist(), accepted.nodes, strict=True):
                self.seen.append((confidences, len(nodes)))


def watch_gates(
    model: PreTrainedModel, drafter: Drafter, groups: Groups, settings: SamplingSettings, chain: bool = False
) -> Seen:
    """Confidences at the gates and accepted nodes of every round while `dense` answers the prompts, group by group.

    chain: `block` answers them instead.
    """
    watch = GateWatch(target_for(model, drafter.hidden_layers), drafter, PolicySettings(USUAL_BUDGET), chain)
    engine = Engine(model, policy=watch, drafter=drafter)
    for prompts in groups:
        engine.generate_batch([list(prompt) for prompt in prompts], **vars(settings))
    return watch.seen


def thresholds(seen: Seen, max_passes: int) -> list[float]:
    """For each gate, the highest confidence at which stopping was better than drafting on.

    Stopping a round loses the tokens it accepted below the depth drafted so far. It saves the passes still to come,
    each worth the tokens that plain rounds yield in its time. What retrieval would add instead is not counted, so the
    gates err on the side of drafting on. A gate sees only the rounds that the gates before it let through.

    max_passes: the drafter's. A drafter that makes a single pass saves none: its thresholds stay the published ones.
    """
    cost = USUAL_PASS_COST * (1 + sum(depth for _, depth in seen) / max(len(seen), 1))  # of a pass, in tokens
    return _with_least_regret(seen, lambda left, depth: max(depth - left, 0) - cost * max(max_passes - left, 0))


def chain_thresholds(seen: Seen) -> list[float]:
    """For each gate, the confidence that best separates chains accepted beyond its depth from the others.

    As published: how much a stopped chain loses, and what it gets instead, does not count.
    """
    return _with_least_regret(seen, lambda left, depth: 1.0 if depth > left else -1.0)


def _with_least_regret(seen: Seen, regret: Callable[[int, int], float]) -> list[float]:
    """The gates' best thresholds.

    regret: of stopping a round, from the passes made so far (the depth that is left) and its accepted nodes.
    """
    chosen = []
    for gate, number in enumerate(GATES):
        confidences = np.array([own[gate] for own, _ in seen])
        regrets = np.array([regret(number + 1, depth) for _, depth in seen])
        found = best_threshold(confidences, regrets)
        chosen.append(PUBLISHED[gate] if found is None else found)
        seen = [(own, depth) for own, depth in seen if own[gate] > chosen[-1]]
    return chosen


def best_threshold(confidences: NDArray[np.float64], regrets: NDArray[np.float64]) -> float | None:
    """The threshold with the least sum of regrets over the rounds that it stops: those whose confidence is below it.

    None where too few rounds are worth stopping, or too few worth going on. Of equal thresholds the lowest.
    """
    if min(np.sum(regrets < 0), np.sum(regrets > 0)) < _ENOUGH:
        return None
    order = confidences.argsort(kind="stable")
    values = np.append(0.0, confidences[order])
    stopped = np.append(0.0, np.cumsum(regrets[order]))  # the regret when all rounds up to here are stopped
    is_last = np.append(values[1:] > values[:-1], False)  # no threshold separates equal confidences
    if not is_last[1:].any():
        return None
    place = int(np.where(is_last, stopped, np.inf).argmin())
    return float((values[place] + values[place + 1]) / 2)

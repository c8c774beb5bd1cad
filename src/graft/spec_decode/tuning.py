"""Tuning: a profile from warm-up prompts, with the state that `graft` learns, gates' thresholds and measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from graft.engine import Engine
from graft.model import TargetRunner, target_for
from graft.model.sampler import SamplingSettings
from graft.progress import Report
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.policies import DEFAULT_POLICY, PolicySettings, make_policy, policy_with
from graft.spec_decode.policies.dense import Dense
from graft.spec_decode.policies.gates import GATES, PUBLISHED, THRESHOLDS
from graft.spec_decode.policy_settings import USUAL_BUDGET, USUAL_PASS_COST
from graft.spec_decode.profile import About, Profile
from graft.spec_decode.proposers.drafter import Drafter, TreeSettings
from graft.spec_decode.proposers.factory import with_tree
from graft.spec_decode.tree import DraftTree

_ENOUGH = 10  # rounds worth stopping, and worth going on, below which a gate keeps its published threshold
_PORTABLE = ("calibration/", "prospect/", "gates/", "adjacency/")
_MAX_ROWS = 8192  # of the adjacency matrix in a portable profile

Progress = Callable[[Report], None]
Seen = list[tuple[list[float], int]]  # by round: confidences at the gates, and how many nodes were accepted


def tune(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_new_tokens: int = 64,
    portable: bool = False,
    progress: Progress = lambda report: None,
) -> Profile:
    """The profile of an engine whose policy is `graft`, learned from the prompts while it answers them.

    portable: small and for any machine: learned at the usual budget with all draft passes, whatever pays here; without
    costs, n-gram tables and past texts.
    """
    about, drafter = About.of(engine), engine.drafter
    if drafter is not None:  # an engine on a CPU drafts narrower trees than the default ones
        drafter = with_tree(drafter, TreeSettings())
    if portable:
        engine = _engine(engine, drafter, PolicySettings(USUAL_BUDGET, pass_cost=0.0))
    counts = torch.zeros(engine.target.vocab_size, dtype=torch.int64)
    for number, prompt in enumerate(prompts, start=1):
        answer = engine.generate(prompt, max_new_tokens=max_new_tokens)
        counts += torch.bincount(torch.tensor(prompt + answer.ids), minlength=len(counts))
        progress(Report("learning", number, len(prompts), f"accepted {answer.stats.mean_accepted:.2f}"))
    state = engine.policy.state()
    if drafter is not None:
        settings = SamplingSettings(max_new_tokens=max_new_tokens, stop_token_ids=tuple(engine.eos_token_ids))
        seen = watch_gates(engine.target.model, drafter, [[prompt] for prompt in prompts], settings, progress)
        state[THRESHOLDS] = torch.tensor(thresholds(seen, drafter.max_passes))
    if portable:
        state = {key: value for key, value in state.items() if key.startswith(_PORTABLE)}
        return Profile(About(about.model, about.head, None, None), _most_seen(state, counts), {})
    return Profile(about, state, _measured(engine))


class GateWatch(Dense):
    """dense, or block, which records each round's confidences at the gates and how many nodes were accepted."""

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


def thresholds(seen: Seen, max_passes: int) -> list[float]:
    """For each gate, the highest confidence at which stopping was better than drafting on.

    Stopping a round loses the tokens it accepted below the depth drafted so far, and saves the passes that were to
    come, each worth the tokens that its time brings otherwise. What retrieval would put in their place is not counted,
    so gates rather let a round go on. A gate sees only the rounds that the gates before it let through.

    max_passes: of the drafter. One that makes a single pass saves none: its thresholds stay the published ones.
    """
    cost = USUAL_PASS_COST * (1 + sum(depth for _, depth in seen) / max(len(seen), 1))  # of a pass, in tokens
    return _with_least_regret(seen, lambda left, depth: max(depth - left, 0) - cost * max(max_passes - left, 0))


def chain_thresholds(seen: Seen) -> list[float]:
    """For each gate, the confidence that best separates chains accepted beyond its depth from those that were not.

    As it was published: how much a stopped chain loses, and what it gets instead, does not count.
    """
    return _with_least_regret(seen, lambda left, depth: 1.0 if depth > left else -1.0)


def _with_least_regret(seen: Seen, regret: Callable[[int, int], float]) -> list[float]:
    """The gates' best thresholds.

    regret: of stopping a round, from the passes made so far, which is the depth that is left, and its accepted nodes.
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


def watch_gates(
    model: PreTrainedModel,
    drafter: Drafter,
    groups: Sequence[Sequence[Sequence[int]]],
    settings: SamplingSettings,
    progress: Progress = lambda report: None,
    chain: bool = False,
) -> Seen:
    """Confidences at the gates and accepted nodes of every round while `dense` answers the prompts, group by group.

    chain: `block` does.
    """
    watch = GateWatch(target_for(model, drafter.hidden_layers), drafter, PolicySettings(USUAL_BUDGET), chain)
    engine = Engine(model, policy=watch, drafter=drafter)
    for number, prompts in enumerate(groups, start=1):
        engine.generate_batch([list(prompt) for prompt in prompts], **vars(settings))
        progress(Report("gates", number, len(groups), f"{len(watch.seen)} rounds"))
    return watch.seen


def _measured(engine: Engine) -> dict[str, Tensor]:
    """Costs as a new policy measures them in this warm process; what only rounds can tell, from the rounds so far."""
    policy = make_policy("graft", engine.target, engine.drafter)
    policy.measure()
    return engine.policy.costs() | policy.costs()


def _most_seen(state: dict[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
    """The state with only those adjacency rows whose tokens were the most frequent; `counts` by token."""
    rows = state["adjacency/rows"].cpu()
    kept = counts[rows].argsort(descending=True, stable=True)[:_MAX_ROWS].sort().values
    fields = {key: value.cpu()[kept] for key, value in state.items() if key.startswith("adjacency/")}
    return state | fields


def _engine(engine: Engine, drafter: Drafter | None, settings: PolicySettings) -> Engine:
    target = target_for(engine.target.model, drafter.hidden_layers if drafter is not None else ())
    policy = policy_with(settings, DEFAULT_POLICY, target, drafter)
    return Engine(engine.target.model, engine.tokenizer, policy=policy, drafter=drafter)

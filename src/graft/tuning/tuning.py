"""`tune`: makes a profile from the state that policy `graft` learns on warm-up prompts, and from measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graft.drafters.drafter import TreeSettings
from graft.drafters.factory import with_tree
from graft.engine import Engine
from graft.model import target_for
from graft.progress import Report
from graft.spec_decode.policies import DEFAULT_POLICY, PolicySettings, make_policy, policy_with
from graft.spec_decode.policy_settings import USUAL_BUDGET
from graft.tuning.profile import About, Profile

_PORTABLE = ("calibration/", "adjacency/")
MAX_ROWS = 8192  # of the adjacency matrix in a portable profile

Progress = Callable[[Report], None]


def tune(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_new_tokens: int = 64,
    portable: bool = False,
    progress: Progress = lambda report: None,
    temperatures: Sequence[float] = (0.0,),
) -> Profile:
    """The profile of an engine with policy `graft`, learned from the prompts while it answers them.

    temperatures: each prompt is answered once at each of them, because acceptance is counted by temperature.
    portable: a small profile for any machine. It is learned at the usual budget with all draft passes, even if they do
    not pay here, and has no costs, n-gram tables or past texts.
    """
    about = About.of(engine)
    if portable:
        engine = _engine_with_whole_trees(engine)
    counts = torch.zeros(engine.target.vocab_size, dtype=torch.int64)
    lessons = [(prompt, temperature) for prompt in prompts for temperature in temperatures]
    for number, (prompt, temperature) in enumerate(lessons, start=1):
        answer = engine.generate(prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=number)
        counts += torch.bincount(torch.tensor(prompt + answer.ids), minlength=len(counts))
        progress(Report("learning", number, len(lessons), f"accepted {answer.stats.mean_accepted:.2f}"))
    state = engine.policy.state()
    if portable:
        state = {key: value for key, value in state.items() if key.startswith(_PORTABLE)}
        return Profile(About(about.model, about.head, None, None), _most_seen(state, counts), {})
    return Profile(about, state, _measured(engine))


def _measured(engine: Engine) -> dict[str, Tensor]:
    """The engine's costs. Those that can be measured directly are measured again in this warm process."""
    policy = make_policy("graft", engine.target, engine.drafter)
    policy.measure()
    return engine.policy.costs() | policy.costs()


def _most_seen(state: dict[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
    """The state with the adjacency rows of the most frequent tokens alone. counts: by token."""
    rows = state["adjacency/rows"].cpu()
    kept = counts[rows].argsort(descending=True, stable=True)[:MAX_ROWS].sort().values
    fields = {key: value.cpu()[kept] for key, value in state.items() if key.startswith("adjacency/")}
    return state | fields


def _engine_with_whole_trees(engine: Engine) -> Engine:
    """The same model and drafter, with trees of the default size and every draft pass, whatever the machine."""
    drafter = engine.drafter
    if drafter is not None:  # the engine drafts narrower trees on a CPU
        drafter = with_tree(drafter, TreeSettings())
    target = target_for(engine.target.model, drafter.hidden_layers if drafter is not None else ())
    policy = policy_with(PolicySettings(USUAL_BUDGET, pass_cost=0.0), DEFAULT_POLICY, target, drafter)
    return Engine(engine.target.model, engine.tokenizer, policy=policy, drafter=drafter)

"""How many tokens are accepted, by budget and draft passes? Makes the curves that `graft plan` reads.

    graft bench --record traces --limit 5 --rows 5 --max-new-tokens 96
    python benchmarks/acceptance_curve.py traces --out src/graft/plan/acceptance.json

It replays recorded answers. A point is the policy `graft` with a fixed budget. Either the number of passes is fixed, as
in a batch, where a pass is made for all rows. Or each round decides by itself when to stop drafting, given the cost of
a pass, which only a single row can do. `dense` is EAGLE-3's tree. Learning continues from prompt to prompt. Shares are
means over tasks, each with the same weight.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from common import command_line
from torch import Tensor

from graft.bench.replay import ReplayedDrafter, replay, replayed_target
from graft.bench.replayed import Recorded, read_recorded
from graft.spec_decode.policies import PolicySettings, policy_with
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.tree.candidates import Level

# With the root, the sizes to which a GPU's steps are padded.
BUDGETS = (1, 3, 7, 15, 31, 47, 63, 95, 127)
PASSES = (0, 1, 2, 3, 4, 6, 9)
PASS_COSTS = (0.03, 0.1)
DENSE_NODES = 60


class _FewPasses(ReplayedDrafter):
    """A replayed drafter with a limit on its passes."""

    def __init__(self, settings: TreeSettings, num_passes: int) -> None:
        super().__init__(settings)
        self._num_passes = num_passes

    @property
    def max_passes(self) -> int:
        return min(self._num_passes, super().max_passes)

    def levels(self, state: Any, roots: Tensor, keep: int | None = None, draws: Any = None) -> Iterator[Level]:
        return islice(super().levels(state, roots, keep, draws), self._num_passes)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("traces", type=Path, help="what graft bench --record wrote")
    parser.add_argument("--out", required=True, type=Path, help="a JSON file")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="nodes of a round")
    options = parser.parse_args()

    recorded = read_recorded([options.traces])
    points = []
    for budget in options.budgets:
        counts = [count for count in PASSES if count <= budget]  # further levels would have no node
        points += [_point(recorded, "graft-without-pruning", budget, num_passes=count) for count in counts]
        points += [_point(recorded, "graft", budget, pass_cost=cost) for cost in PASS_COSTS]
    source = {name: recorded.about[name] for name in ("model", "draft", "max_new_tokens")}
    source["tasks"] = {task: len(questions) for task, questions in recorded.tasks.items()}
    dense = _point(recorded, "dense", DENSE_NODES)
    lines = ",\n".join(f"  {json.dumps(point)}" for point in points)
    text = f'{{\n "source": {json.dumps(source)},\n "dense": {json.dumps(dense)},\n "points": [\n{lines}\n ]\n}}\n'
    options.out.write_text(text, encoding="utf-8")


def _point(
    recorded: Recorded, method: str, budget: int, num_passes: int | None = None, pass_cost: float = 0.03
) -> dict[str, Any]:
    """Passes and the share of rounds that accept at least 1, 2 ... tokens, with one budget."""
    tree = TreeSettings(depth=recorded.about["depth"], topk=recorded.about["topk"])
    drafter = ReplayedDrafter(tree) if num_passes is None else _FewPasses(tree, num_passes)
    settings, target = PolicySettings(budget, pass_cost), replayed_target(recorded.about)
    policy = policy_with(settings, method, target, None if num_passes == 0 else drafter)
    reached: Counter[int] = Counter()  # by depth
    passes = 0.0
    for questions in recorded.tasks.values():
        traces = [recorded.traces[tuple(question.ids)] for question in questions]
        every = [replay(policy, trace, recorded.about.get("max_new_tokens")) for trace in traces]
        rounds = len(recorded.tasks) * sum(stats.rounds for stats in every)
        passes += sum(stats.draft_passes for stats in every) / rounds
        for stats in every:
            reached.update({depth: count / rounds for depth, count in stats.accepted_by_depth.items()})
    print(f"{method:22s} {budget:4d} nodes  {passes:5.2f} passes  {1 + reached.total():5.2f} accepted", flush=True)
    shares = [round(reached[depth], 4) for depth in range(1, max(reached, default=0) + 1)]
    return {"nodes": budget, "passes": round(passes, 2), "adapts": method == "graft", "reached": shares}


if __name__ == "__main__":
    main()

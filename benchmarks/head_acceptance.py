"""How many tokens of a drafter are accepted, by task and method, and are texts plain decoding's?

    python benchmarks/head_acceptance.py --draft HEAD --policy dense,block,graft --data gsm8k.jsonl --compare

HEAD is an EAGLE-3 head, a block head, a small model and so on; with none, `graft` has what it retrieves. `dense` is a
drafter's whole tree of 60 nodes by cumulative probability, `block` its chain; docs/measuring.md has the others.

Prompts of a task decode together in one batch and learn nothing from each other, so each gets the text it would get
alone. On a GPU, EAGLE-3 has fewer beams the more rows there are: `--rows 1` shows its whole tree. Times are not
measured here: `graft bench` does that. `modelled` is the speed over plain decoding if a step took as long as plain
decoding's, whatever its width, and a draft pass `--pass-cost` of that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import command_line
from transformers import PreTrainedModel

from graft.bench.methods import PLAIN, Answer, PolicyMethod
from graft.bench.runs import OURS, check_names
from graft.bench.tasks import questions, read_tasks
from graft.errors import GraftError
from graft.loading import load, load_drafter
from graft.model.sampler import SamplingSettings
from graft.spec_decode.policies import PolicySettings
from graft.spec_decode.policy_settings import USUAL_BUDGET, USUAL_PASS_COST
from graft.spec_decode.proposers.drafter import Drafter, TreeSettings
from graft.tuning.drafters import NONE

_TREE = TreeSettings()
_AVERAGED = ("mean_accepted", "passes", "modelled")


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the target")
    parser.add_argument("--draft", required=True, help="what --draft of graft generate takes, but auto; or none")
    parser.add_argument("--data", action="append", required=True, type=Path, help="prompts; may be repeated")
    parser.add_argument("--policy", default="dense", help="dense, block, block-paper, graft ...; a comma between them")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--depth", type=int, help=f"EAGLE-3: draft passes behind the first; {_TREE.depth}")
    parser.add_argument(
        "--topk", type=int, help=f"EAGLE-3: beams, {_TREE.topk}; block: a slot's tokens that have children, 16"
    )
    parser.add_argument("--total-token", type=int, default=USUAL_BUDGET, help="nodes a round verifies at most")
    parser.add_argument("--pass-cost", type=float, default=USUAL_PASS_COST, help="graft: of a draft pass, in verifies")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--rows", type=int, default=40, help="prompts that decode together")
    parser.add_argument("--compare", action="store_true", help="also decode plainly and compare the texts")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    return parser.parse_args()


def main() -> None:
    options = parse()
    names = options.policy.split(",")
    check_names(names, OURS)
    engine = load(options.model, policy=PLAIN, draft=None, dtype=options.dtype)
    model = engine.target.model
    assert isinstance(model, PreTrainedModel)
    tree = TreeSettings(options.depth or _TREE.depth, options.topk or _TREE.topk)
    drafter = None
    if options.draft != NONE:
        drafter = load_drafter(options.draft, model, tree if options.depth or options.topk else None, engine.tokenizer)
    settings = PolicySettings(options.total_token, options.pass_cost, isolated=True)
    sampling = SamplingSettings(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=0,
        stop_token_ids=tuple(engine.eos_token_ids),
    )
    tasks = {
        task.name: [question.ids for question in questions(task, engine, options.max_new_tokens)]
        for task in read_tasks(options.data, options.limit)
    }
    expected: dict[str, list[list[int]]] = {}
    if options.compare:
        plain = PolicyMethod(PLAIN, model)
        expected = {task: [a.ids for a in answers(plain, own, options.rows, sampling)] for task, own in tasks.items()}

    results: dict[str, Any] = {}
    for name in names:
        print(f"{name:16s} accepted  passes  modelled  share of rounds that reached depth 1, 2, ...", flush=True)
        results[name] = by_task(name, model, drafter, settings, tasks, expected, options.rows, sampling)
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    print(f"({device}, {options.dtype}, temperature {options.temperature:g})")
    if options.out is not None:
        options.out.write_text(json.dumps({"draft": Path(options.draft).name, "policies": results}, indent=1))


def by_task(
    name: str,
    model: PreTrainedModel,
    drafter: Drafter | None,
    settings: PolicySettings,
    tasks: dict[str, list[list[int]]],
    expected: dict[str, list[list[int]]],
    rows: int,
    sampling: SamplingSettings,
) -> dict[str, Any]:
    """A policy's results on each task, which it begins with nothing learned, and their average; prints them."""
    results: dict[str, Any] = {}
    for task, prompts in tasks.items():
        given = answers(PolicyMethod(name, model, drafter, settings), prompts, rows, sampling)
        own = results[task] = summary(given, settings.pass_cost or 0.0)
        line = f"  {task:14s} {own['mean_accepted']:8.2f} {own['passes']:7.2f} {own['modelled']:9.2f}  "
        line += " ".join(f"{share:.2f}" for share in own["reached_depth"])
        if expected:
            own["differ"] = sum(one.ids != ids for one, ids in zip(given, expected[task], strict=True))
            line += f"  {own['differ']} of {len(given)} texts differ"
        print(line, flush=True)
    average = {key: sum(own[key] for own in results.values()) / len(results) for key in _AVERAGED}
    line = f"  {'average':14s} {average['mean_accepted']:8.2f} {average['passes']:7.2f} {average['modelled']:9.2f}"
    print(line, flush=True)
    return {"average": average, "tasks": results}


def summary(given: Sequence[Answer], pass_cost: float) -> dict[str, Any]:
    all_stats = [answer.stats for answer in given]
    rounds = sum(stats.rounds for stats in all_stats)
    deepest = max((max(stats.accepted_by_depth, default=0) for stats in all_stats), default=0)
    reached = [sum(stats.accepted_by_depth[depth] for stats in all_stats) for depth in range(1, deepest + 1)]
    mean_accepted = 1 + sum(stats.accepted for stats in all_stats) / rounds
    passes = sum(stats.draft_passes for stats in all_stats) / rounds
    return {
        "mean_accepted": mean_accepted,
        "passes": passes,
        "modelled": mean_accepted / (1 + pass_cost * passes),
        "nodes": sum(stats.nodes for stats in all_stats) / rounds,
        "reached_depth": [count / rounds for count in reached],
        "rounds": rounds,
        "prompts": len(given),
    }


def answers(method: PolicyMethod, prompts: Sequence[list[int]], rows: int, sampling: SamplingSettings) -> list[Answer]:
    groups = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
    return [answer for group in groups for answer in method.answer(group, sampling)]


if __name__ == "__main__":
    try:
        main()
    except GraftError as error:
        sys.exit(f"error: {error}")

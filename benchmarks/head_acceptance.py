"""How many tokens of a drafter are accepted, by task and method, and are texts plain decoding's?

    python benchmarks/head_acceptance.py --draft HEAD --policy dense,block,graft --prompts gsm8k.jsonl --compare
    python benchmarks/head_acceptance.py --draft HEAD --policy graft-without-noise,graft --temperature 1 --rows 8 ...

HEAD is an EAGLE-3 head, a block head, a small model or another drafter; with none, `graft` only retrieves. `dense` is
the drafter's tree of the 60 likeliest nodes, `block` its likeliest chain; docs/measuring.md has the others.

Prompts of a task decode together in one batch and learn nothing from each other. With `--compare` each is also decoded
plainly and alone, and the exit status is 1 if a text differs. On a GPU, EAGLE-3 has fewer beams the more rows there
are; `--rows 1` shows its whole tree. No times are measured here: use `graft bench` for that. `modelled` is the speed
over plain decoding if every verify step took as long as a plain one, and a draft pass `--pass-cost` of that.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import add_prompts, command_line, device_name, write_json
from transformers import PreTrainedModel

from graft.bench.methods import PLAIN, Answer, PolicyMethod
from graft.bench.settings import POLICY_METHODS, check_names
from graft.bench.tasks import questions, read_tasks
from graft.drafters.drafter import TreeSettings
from graft.errors import GraftError
from graft.hub.draft_names import NONE
from graft.loading import load, load_drafter
from graft.model.sampler import SamplingSettings
from graft.spec_decode.policies import PolicySettings
from graft.spec_decode.policy_settings import USUAL_BUDGET, USUAL_PASS_COST

_TREE = TreeSettings()


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the target")
    parser.add_argument("--draft", required=True, help="what --draft of graft generate takes, except auto")
    parser.add_argument("--policy", default="dense", help="methods, such as dense,block,block-paper,graft")
    add_prompts(parser, limit=40, max_new_tokens=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, help=f"EAGLE-3: draft passes after the first; {_TREE.depth}")
    parser.add_argument(
        "--topk", type=int, help=f"EAGLE-3: beams, {_TREE.topk}; block: tokens of a slot that have children, 16"
    )
    parser.add_argument("--total-token", type=int, default=USUAL_BUDGET, help="most nodes verified in a round")
    parser.add_argument("--pass-cost", type=float, default=USUAL_PASS_COST, help="of a draft pass, in verify steps")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--rows", type=int, default=40, help="prompts that decode together")
    parser.add_argument("--compare", action="store_true", help="also decode plainly and alone, and compare the texts")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    return parser.parse_args()


def main() -> None:
    options = parse()
    names = options.policy.split(",")
    check_names(names, known=POLICY_METHODS)
    engine = load(options.model, policy=PLAIN, draft=None, device=options.device, dtype=options.dtype)
    model = engine.target.model
    assert isinstance(model, PreTrainedModel)
    drafter = None
    if options.draft != NONE:
        tree = TreeSettings(options.depth or _TREE.depth, options.topk or _TREE.topk)
        drafter = load_drafter(options.draft, model, tree if options.depth or options.topk else None, engine.tokenizer)
    settings = PolicySettings(options.total_token, options.pass_cost, isolated=True)
    sampling = SamplingSettings(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop_token_ids=tuple(engine.eos_token_ids),
    )
    tasks = {
        task.name: [question.ids for question in questions(task, engine, options.max_new_tokens)]
        for task in read_tasks(options.prompts, options.limit)
    }

    def answers(method: PolicyMethod, task: str) -> list[Answer]:
        prompts, rows = tasks[task], options.rows
        groups = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
        return [answer for group in groups for answer in method.answer(group, sampling)]

    expected: dict[str, list[list[int]]] = {}
    if options.compare:
        plain = PolicyMethod(PLAIN, model)
        expected = {task: [plain.answer([own], sampling)[0].ids for own in tasks[task]] for task in tasks}

    policies: dict[str, Any] = {}
    for name in names:
        print(f"{name:16s} accepted  passes  modelled  share of rounds that reached depth 1, 2, ...", flush=True)
        results = {}
        for task in tasks:
            given = answers(PolicyMethod(name, model, drafter, settings), task)  # starts with nothing learned
            own = results[task] = summary(given, options.pass_cost)
            tail = " ".join(f"{share:.2f}" for share in own["reached_depth"])
            if options.compare:
                own["differ"] = sum(one.ids != ids for one, ids in zip(given, expected[task], strict=True))
                tail += f"  {own['differ']} of {len(given)} texts differ"
            print_line(task, own, tail)
        averaged = ("mean_accepted", "passes", "modelled")
        average = {key: sum(own[key] for own in results.values()) / len(results) for key in averaged}
        print_line("average", average)
        policies[name] = {"average": average, "tasks": results}
    print(f"({device_name()}, {options.dtype}, temperature {options.temperature:g})")
    write_json(options.out, {"draft": Path(options.draft).name, "policies": policies})
    if options.compare:
        compared = [own for policy in policies.values() for own in policy["tasks"].values()]
        num_different = sum(own["differ"] for own in compared)
        print(f"{num_different} of {sum(own['prompts'] for own in compared)} texts differ from plain decoding alone")
        if num_different:
            sys.exit(1)


def print_line(task: str, own: dict[str, Any], tail: str = "") -> None:
    print(f"  {task:14s} {own['mean_accepted']:8.2f} {own['passes']:7.2f} {own['modelled']:9.2f}  {tail}", flush=True)


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


if __name__ == "__main__":
    try:
        main()
    except GraftError as error:
        sys.exit(f"error: {error}")

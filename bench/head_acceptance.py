"""Mean accepted length of a drafter, dense tree, by task; and whether its text is that of plain decoding.

    python bench/head_acceptance.py --model smollm2-135m --draft HEAD --data humaneval.jsonl --data gsm8k.jsonl

HEAD is a draft head or a small model with the same vocabulary.

All prompts of a task decode together in one batch (each gets the text it would get alone), so a GPU does in
seconds what takes minutes one by one. Times are not measured here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from graft.data import read_prompts, user_message
from graft.engine import Engine
from graft.loading import load, load_drafter
from graft.spec_decode.proposers.drafter import TreeSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", action="append", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--topk", type=int, default=10)
    parser.add_argument("--total-token", type=int, default=60)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--rows", type=int, default=40, help="prompts that decode together")
    parser.add_argument("--policy", default="dense", help="dense, or graft to combine it with retrieval")
    parser.add_argument("--compare", action="store_true", help="also decode plainly and compare the texts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    plain = load(options.model, policy="off", dtype=options.dtype)
    model = plain.target.model
    tree = TreeSettings(options.depth, options.topk, options.total_token)
    drafter = load_drafter(options.draft, model, tree, plain.tokenizer)
    engine = Engine(model, plain.tokenizer, policy=options.policy, drafter=drafter, budget=options.total_token)

    sampling = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "seed": 0}
    results = {}
    for path in options.data:
        prompts = [user_message(prompt.text, plain.tokenizer) for prompt in read_prompts(path, options.limit)]
        groups = [prompts[i : i + options.rows] for i in range(0, len(prompts), options.rows)]
        answers = [g for group in groups for g in engine.generate_batch(group, **sampling)]
        rounds = sum(g.stats.rounds for g in answers)
        accepted = sum(g.stats.accepted for g in answers)
        depths = [sum(g.stats.accepted_by_depth[d] for g in answers) / rounds for d in range(1, options.depth + 2)]
        results[path.stem] = {"mean_accepted": 1 + accepted / rounds, "rounds": rounds, "reached_depth": depths}
        line = f"{path.stem:12s} {1 + accepted / rounds:5.2f}  by depth " + " ".join(f"{d:.2f}" for d in depths)
        if options.compare:
            texts = [g.ids for group in groups for g in plain.generate_batch(group, **sampling)]
            differ = sum(a != b.ids for a, b in zip(texts, answers, strict=True))
            results[path.stem] |= {"prompts": len(prompts), "differ": differ}
            line += f"  {differ} of {len(prompts)} texts differ"
        print(line, flush=True)
    average = sum(r["mean_accepted"] for r in results.values()) / len(results)
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    print(f"{'average':12s} {average:5.2f}   ({device})")
    if options.out is not None:
        options.out.write_text(json.dumps({"average": average, "tasks": results}, indent=1))


if __name__ == "__main__":
    main()

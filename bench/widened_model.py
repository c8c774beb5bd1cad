"""Writes a model as dear as a large one, its head and prompts as token ids, for another engine to load.

    python bench/widened_model.py --shape llama-8b --data gsm8k.jsonl --data alpaca.jsonl --out DIR

`DIR/model` and `DIR/head` are what `bench/batched_serving.py --as-cost-of` runs, in the usual file formats, and
`DIR/ids.json` the prompts it asks, in its order (see docs/measuring.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from graft.bench.cost_emulation import widen, widen_head
from graft.bench.shapes import Shape
from graft.bench.tasks import questions, read_tasks
from graft.errors import GraftError
from graft.hub.registry import DEFAULT_MODEL
from graft.loading import load, load_drafter, tree_settings
from graft.spec_decode.proposers import block, eagle3
from graft.spec_decode.proposers.block.drafter import BlockDrafter
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter

NUM_WARMUP = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", default=DEFAULT_MODEL)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--data", type=Path, action="append", required=True, help="a file of prompts; may be repeated")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-prompt-tokens", type=int, default=1200)
    parser.add_argument("--warmup", type=Path, help="a file of other prompts, written as DIR/warmup.json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    plain, shape = load(options.model, draft=None, policy="off"), Shape.named(options.shape)

    def prompts(paths: list[Path], limit: int) -> list[list[int]]:
        by_task = [
            questions(task, plain, options.max_new_tokens, options.max_prompt_tokens)
            for task in read_tasks(paths, limit)
        ]
        return [task[place].ids for place in range(limit) for task in by_task if place < len(task)]

    ids = prompts(options.data, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ids.json").write_text(json.dumps(ids))
    if options.warmup is not None:
        (options.out / "warmup.json").write_text(json.dumps(prompts([options.warmup], NUM_WARMUP)))
    small = plain.target.model
    drafter = load_drafter(options.draft, small, tree_settings("graft", small.device))
    if not isinstance(drafter, Eagle3Drafter | BlockDrafter):
        raise GraftError(f"{options.draft} is neither an EAGLE-3 nor a block head: it cannot be widened")
    model = widen(small, shape)
    head = widen_head(drafter.head, shape, model)
    if isinstance(head, block.BlockHead):
        block.save_head(head, options.out / "head")
    else:
        eagle3.save_head(head, options.out / "head")
    model.save_pretrained(options.out / "model")
    plain.tokenizer.save_pretrained(options.out / "model")
    print(f"{len(ids)} prompts of {sum(map(len, ids)) / len(ids):.0f} tokens on average")


if __name__ == "__main__":
    main()

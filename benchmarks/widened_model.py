"""Writes a model as expensive as a large one, its head and prompts as token ids, for another engine to load.

    python benchmarks/widened_model.py --shape llama-8b --data gsm8k.jsonl --data alpaca.jsonl --out DIR

`DIR/model` and `DIR/head` are what `batched_serving.py --as-cost-of` runs, in the usual file formats, and
`DIR/ids.json` the prompts it asks, in its order (see docs/measuring.md). `engine_closed_loop.py` reads them.
"""

from __future__ import annotations

import json
from pathlib import Path

from common import command_line, mixed_questions

from graft.bench.cost_emulation import widen, widen_head
from graft.bench.shapes import Shape
from graft.errors import GraftError
from graft.hub.registry import DEFAULT_MODEL
from graft.loading import load, load_drafter, tree_settings
from graft.spec_decode.proposers import block, eagle3
from graft.spec_decode.proposers.block.drafter import BlockDrafter
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter

NUM_WARMUP = 64


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the small model")
    parser.add_argument("--draft", default=DEFAULT_MODEL, help="its EAGLE-3 or block head")
    parser.add_argument("--shape", default="llama-8b", help="the model whose cost it gets")
    parser.add_argument("--data", type=Path, action="append", required=True, help="a file of prompts; may be repeated")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-prompt-tokens", type=int, default=1200)
    parser.add_argument("--warmup", type=Path, help="a file of other prompts, written as DIR/warmup.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    plain, shape = load(options.model, draft=None, policy="off"), Shape.named(options.shape)

    def prompts(paths: list[Path], limit: int) -> list[list[int]]:
        asked = mixed_questions(paths, plain, options.max_new_tokens, limit, options.max_prompt_tokens)
        return [question.ids for question in asked]

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

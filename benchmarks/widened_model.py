"""Writes a model as expensive as a large one, its head, and prompts as token ids, for another engine to load.

    python benchmarks/widened_model.py --shape llama-8b --prompts gsm8k.jsonl --prompts alpaca.jsonl --out DIR

`DIR/model` and `DIR/head` are what `batched_serving.py --as-cost-of` runs, in the usual file formats. `DIR/ids.json`
has the prompts that it asks, in its order (see docs/measuring.md). `engine_closed_loop.py` reads them.
"""

import json
from pathlib import Path

from common import add_model, add_prompts, command_line, load_pair, mixed_questions

from graft.bench.cost_emulation import widen, widen_head
from graft.bench.shapes import ModelShape
from graft.drafters import block, eagle3
from graft.drafters.block.drafter import BlockDrafter
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.errors import GraftError

NUM_WARMUP = 64


def main() -> None:
    parser = command_line(__doc__)
    add_model(parser)
    add_prompts(parser, limit=8, max_new_tokens=96)
    parser.add_argument("--shape", default="llama-8b", help="the model whose cost it gets")
    parser.add_argument("--max-prompt-tokens", type=int, default=1200)
    parser.add_argument("--warmup", type=Path, help="a file of other prompts, written as DIR/warmup.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    shape = ModelShape.named(options.shape)
    plain, drafter = load_pair(options)
    if not isinstance(drafter, Eagle3Drafter | BlockDrafter):
        raise GraftError(f"{options.draft} is neither an EAGLE-3 nor a block head: it cannot be widened")

    def prompts(paths: list[Path], limit: int) -> list[list[int]]:
        asked = mixed_questions(paths, plain, options.max_new_tokens, limit, options.max_prompt_tokens)
        return [question.ids for question in asked]

    ids = prompts(options.prompts, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ids.json").write_text(json.dumps(ids))
    if options.warmup is not None:
        (options.out / "warmup.json").write_text(json.dumps(prompts([options.warmup], NUM_WARMUP)))
    model = widen(plain.target.model, shape)
    head = widen_head(drafter.head, plain.target.model, shape, model)
    (block if isinstance(head, block.BlockHead) else eagle3).save_head(head, options.out / "head")
    model.save_pretrained(options.out / "model")
    plain.tokenizer.save_pretrained(options.out / "model")
    print(f"{len(ids)} prompts of {sum(map(len, ids)) / len(ids):.0f} tokens on average")


if __name__ == "__main__":
    main()

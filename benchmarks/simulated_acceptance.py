"""Mean accepted length of a block head on known answers, simulated without an engine, by task and kind of tree.

    python bench/simulated_acceptance.py --draft HEAD --data humaneval.jsonl --data gsm8k.jsonl
    python bench/simulated_acceptance.py --draft HEAD --answers HEAD/work/answers

Of prompts the model's answers are made first, greedily unless a temperature is given, in batches. Of a folder of
answers that `graft train` left, those to held-back prompts are taken, by temperature. Times are not measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from graft.data import read_prompts, user_message
from graft.engine import Engine
from graft.loading import load
from graft.spec_decode.proposers.block import load_head
from graft.spec_decode.proposers.block.drafter import BlockTreeSettings
from graft.train.generate_data import Answered, AnswerSettings, read_answers, spread, write_answers
from graft.train.simulate import simulate
from graft.train.trainer import split_by_prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--slots", help="in-place or shifted, for a head whose config does not say")
    parser.add_argument("--data", action="append", default=[], type=Path)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--held-back", type=float, default=0.01, help="of --answers: as the head was trained with")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each file, or answers of each temperature")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--width", type=int, default=16, help="of the conditional table: tokens that have children")
    parser.add_argument("--children", type=int, default=8, help="of each")
    parser.add_argument("--shortlist", type=int, default=64, help="tokens that are looked at as children")
    parser.add_argument("--rows", type=int, default=64, help="texts simulated together")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if bool(options.data) == (options.answers is not None):
        parser.error("give either --data or --answers")

    engine = load(options.model, policy="off", dtype=options.dtype)
    model = engine.target.model
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    head = load_head(options.draft, model.config, model.dtype, model.device, embedding, output, options.slots)
    settings = BlockTreeSettings(options.width, options.children, options.shortlist, options.nodes)
    results: dict[str, dict[str, dict[str, object]]] = {}
    for name, answers in _tasks(engine, options):
        found = simulate(head.eval(), model, answers, settings, options.rows)
        results[name] = {
            kind: {"mean_accepted": each.mean_accepted, "rounds": each.rounds, "reached_depth": each.reached}
            for kind, each in found.items()
        }
        for kind, each in found.items():
            depths = " ".join(f"{share:.2f}" for share in each.reached)
            print(f"{name:16s} {kind:12s} {each.mean_accepted:5.2f}  by depth {depths}", flush=True)
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    for kind in next(iter(results.values())):
        mean = sum(float(task[kind]["mean_accepted"]) for task in results.values()) / len(results)  # type: ignore[arg-type]
        print(f"{'average':16s} {kind:12s} {mean:5.2f}   ({device})")
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))


def _tasks(engine: Engine, options: argparse.Namespace) -> Iterator[tuple[str, list[Answered]]]:
    """Answers by name: of each file of prompts, or of each temperature in a folder."""
    if options.answers is not None:
        every, _ = split_by_prompt(list(read_answers(options.answers)), options.held_back)
        for temperature in sorted({answer.temperature for answer in every}):
            chosen = [answer for answer in every if answer.temperature == temperature]
            yield f"temperature {temperature:g}", spread(chosen, options.limit)
        return
    answering = AnswerSettings(
        max_new_tokens=options.max_new_tokens,
        temperatures=(options.temperature,),
        num_rows=options.rows,
        max_prompt_tokens=sys.maxsize,  # as many as the model has positions for
    )
    for path in options.data:
        texts = [user_message(prompt.text, engine.tokenizer) for prompt in read_prompts(path, options.limit)]
        with tempfile.TemporaryDirectory() as folder:
            encoded = [engine.encode(text) for text in texts]
            write_answers(engine.target, encoded, engine.eos_token_ids, answering, Path(folder))
            yield path.stem, list(read_answers(Path(folder)))


if __name__ == "__main__":
    main()

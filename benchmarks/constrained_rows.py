"""Do requests with a penalty, log-probabilities, a JSON schema or a forced tool slow a round of many requests?

    python benchmarks/constrained_rows.py --prompts gsm8k.jsonl --as-cost-of llama-8b
    python benchmarks/constrained_rows.py --prompts gsm8k.jsonl --as-cost-of llama-8b --kinds json,tool --repeat 2

The same `--rows` prompts are decoded together: all free, all of one kind, and half of one kind beside free ones. Every
tree has `--budget` nodes, so a round of any kind has the same step. Kinds take turns, and the medians over all rounds
count in which no request joined or ended and no graph was captured. `x free` is a round's time over that of free rows,
and `late` how much longer than theirs it lasts after its step, where it waits for masks. In the mixture, `free ids`
says whether the free rows had the texts that they had among themselves, which fp32 promises.

Grammars ask for more text than is decoded, so no answer ends early. `--kinds` measures some kinds only. A dry run
decodes a few tokens of two prompts; without a GPU the host makes the rounds, and the times say nothing.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from batched_serving import make_engine
from common import add_model, add_prompts, command_line, mixed_questions, parse_with_dry_run, write_json

from graft.bench.results import environment
from graft.engine import Engine
from graft.model.sampler import SamplingSettings
from graft.request.sequence import Sequence
from graft.server.grammar import Grammars, GrammarSpec
from graft.server.tool_formats import FORMATS, Function, call_grammar
from graft.spec_decode.policies import DEFAULT_POLICY, PolicySettings, policy_with

FREE = "free"
OPTIONS: dict[str, dict[str, Any]] = {
    FREE: {},
    "repetition": {"repetition_penalty": 1.1},
    "penalties": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {5: -2.0},
    },
    "min_tokens": {"min_tokens": 4},
    "logprobs": {"logprobs": 0},
    "top_logprobs": {"logprobs": 20},
    "json": {},
    "tool": {},
    "watched": {},
    "json+logprobs": {"logprobs": 5, "frequency_penalty": 0.1},
}
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer"},
        "used": {"type": "boolean"},
    },
    "required": ["name", "count", "used"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "minItems": 100, "items": _ITEM}},
    "required": ["items"],
    "additionalProperties": False,
}


@dataclass
class Measured:
    """All turns of one kind of batch."""

    rounds: list[float] = field(default_factory=list)  # seconds of each round that counts
    tokens: int = 0  # in these rounds
    sequences: list[Sequence] = field(default_factory=list)  # of the last turn

    def figures(self) -> dict[str, float]:
        stats = [sequence.stats for sequence in self.sequences]
        rounds = sum(each.rounds for each in stats)
        return {
            "milliseconds": 1e3 * median(self.rounds),
            "tokens_per_second": self.tokens / sum(self.rounds),
            "nodes_per_round": sum(each.nodes for each in stats) / rounds,
            "mean_accepted": 1 + sum(each.accepted for each in stats) / rounds,
            "rounds": len(self.rounds),
            **{
                f"{phase}_milliseconds": 1e3
                * mean(each.seconds_by_phase.get(phase, 0.0) / each.rounds for each in stats)
                for phase in ("propose", "verify", "accept")
            },
        }


def main() -> None:
    options = parse()
    engine = with_budget(make_engine(options), options.budget)
    grammars = grammars_of(engine)
    count = min(options.rows, len(options.asked(engine)))
    prompts = options.asked(engine)[:count]
    half = count // 2
    kinds = [kind for kind in options.kinds if kind != FREE]
    batches = {FREE: [FREE] * count}
    for kind in kinds:
        batches |= {kind: [kind] * count, f"{FREE} + {kind}": [FREE] * half + [kind] * (count - half)}
    measured = {name: Measured() for name in batches}
    for turn in range(options.repeat + 1):  # the first one compiles and captures
        for name, row_kinds in batches.items():
            run_turn(engine, prompts, row_kinds, grammars, options, measured[name], counts=turn > 0)
    if empty := [name for name, own in measured.items() if not own.rounds]:
        sys.exit(f"no round counts of {', '.join(empty)}: ask for more tokens")
    free_texts = [sequence.new_ids for sequence in measured[FREE].sequences]
    free, results = measured[FREE].figures(), {}
    for name, own in measured.items():
        same = [
            s.new_ids == text
            for s, kind, text in zip(own.sequences, batches[name], free_texts, strict=True)
            if kind == FREE
        ]
        figures = own.figures()
        results[name] = figures | {
            "ratio": figures["milliseconds"] / free["milliseconds"],
            "milliseconds_late": figures["accept_milliseconds"] - free["accept_milliseconds"],
            "same_free_ids": all(same) if same else None,
        }
        print(line_of(name, results[name]), flush=True)
    given = {key: str(value) for key, value in vars(options).items() if key != "asked"}
    write_json(options.out, {"settings": given, "environment": environment(engine.target.device), "results": results})


def with_budget(engine: Engine, budget: int) -> Engine:
    policy = policy_with(PolicySettings(budget=budget), DEFAULT_POLICY, engine.target, engine.drafter)
    return Engine(engine.target.model, engine.tokenizer, policy=policy, drafter=engine.drafter)


def grammars_of(engine: Engine) -> dict[str, Any]:
    """By kind, a function that makes the constraint of an answer, compiled by itself as that of each request."""
    grammars = Grammars(engine.tokenizer, engine.target.vocab_size, engine.eos_token_ids)
    functions = [Function("store_items", SCHEMA)]
    call = call_grammar(
        FORMATS["hermes"], functions, is_forced=True, max_calls=1, thinks=None, answer=None, marker_ids={}
    )
    schema, tool = GrammarSpec.schema(SCHEMA), GrammarSpec("grammar", call, "tools")
    specs = {"json": schema, "json+logprobs": schema, "tool": tool}
    return {
        kind: lambda spec=spec: grammars.constraint(asyncio.run(grammars.compile(spec))) for kind, spec in specs.items()
    }


def run_turn(
    engine: Engine,
    prompts: list[list[int]],
    kinds: list[str],
    grammars: dict[str, Any],
    options: argparse.Namespace,
    measured: Measured,
    counts: bool,
) -> None:
    """Decode all prompts together once."""
    sequences = []
    for prompt, kind in zip(prompts, kinds, strict=True):
        usual = {
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "seed": 0,
            "ignore_eos": True,
        }
        [sequence] = engine.new_sequences(prompt, SamplingSettings(**usual | OPTIONS[kind]))
        sequence.constraint = grammars[kind]() if kind in grammars else None
        sequence.is_recorded = kind == "watched"
        sequences.append(sequence)
    before, setups = time.perf_counter(), engine.num_setups
    lengths = [0] * len(sequences)
    for _ in engine.rounds(sequences):
        now, new = time.perf_counter(), [sequence.num_new for sequence in sequences]
        is_open = all(lengths) and all(sequence.finish_reason is None for sequence in sequences)
        if counts and is_open and engine.num_setups == setups:
            measured.rounds.append(now - before)
            measured.tokens += sum(new) - sum(lengths)
        before, setups, lengths = now, engine.num_setups, new
        for sequence in sequences:
            sequence.take_records()
    measured.sequences = sequences


def line_of(name: str, found: dict[str, Any]) -> str:
    same = {True: "  free ids the same", False: "  FREE IDS DIFFER", None: ""}[found["same_free_ids"]]
    device = "/".join(f"{found[f'{phase}_milliseconds']:.2f}" for phase in ("propose", "verify", "accept"))
    return (
        f"{name:22} {found['milliseconds']:8.2f} ms a round  {found['ratio']:6.3f} x free  device {device} ms  "
        f"late {found['milliseconds_late']:5.2f} ms  "
        f"{found['tokens_per_second']:9.1f} tokens/s  {found['nodes_per_round']:5.1f} nodes  "
        f"{found['mean_accepted']:5.2f} accepted  {found['rounds']} rounds{same}"
    )


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_model(parser)
    add_prompts(parser, limit=None, max_new_tokens=96)
    parser.add_argument("--as-cost-of", metavar="SHAPE", help="widen the model to this shape, such as llama-8b")
    parser.add_argument("--rows", type=int, default=16, help="requests decoded together")
    parser.add_argument("--budget", type=int, default=7, help="nodes of every tree")
    parser.add_argument(
        "--kinds", default=list(OPTIONS), type=lambda text: text.split(","), help="such as json,logprobs"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-prompt-tokens", type=int, help="cut longer prompts in the middle")
    parser.add_argument("--repeat", type=int, default=3, help="turns of each kind")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parse_with_dry_run(parser)
    if unknown := sorted(set(options.kinds) - set(OPTIONS)):
        parser.error(f"there is no kind {', '.join(unknown)}: choose from {', '.join(OPTIONS)}")
    if options.dry_run:
        options.rows, options.max_new_tokens, options.repeat = min(options.rows, 2), 20, 1
    options.asked = lambda engine: [
        question.ids
        for question in mixed_questions(
            options.prompts, engine, options.max_new_tokens, options.limit, options.max_prompt_tokens
        )
    ]
    return options


if __name__ == "__main__":
    main()

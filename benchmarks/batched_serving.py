"""What is speculation worth as the batch grows? Throughput of the scheduler, plain and with Graft.

    python benchmarks/batched_serving.py --data gsm8k.jsonl --data alpaca.jsonl --limit 4 --warmup train.jsonl

The scheduler of `graft serve` runs in this process, without HTTP. At each concurrency the same prompts are asked in a
closed loop, one starting when one has ended, plainly and with Graft in turns, and the medians of the turns count.
`--fixed-budgets 1,3,7` adds Graft with so many nodes in every row's tree, whatever they cost, to compare with the
budget that it chooses itself. No text is kept from turn to turn: the prefix cache is empty, and Graft's tables start
each turn as the warm-up left them. The cost model goes on learning, as in a server.

`--as-cost-of` makes the model as expensive as a large one (see docs/measuring.md). In fp32 all texts must be equal.
On a machine that others use too, `--processor-time` with OMP_NUM_THREADS=1 counts what this process itself took.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from common import command_line, mixed_questions, numbers

from graft.bench.cost_emulation import widen, widen_head
from graft.bench.results import environment
from graft.bench.shapes import Shape
from graft.bench.tasks import Question
from graft.engine import Engine
from graft.engine.jobs import Failure, Job, SchedulerSettings, Update
from graft.engine.scheduler import Scheduler
from graft.hub.registry import DEFAULT_MODEL
from graft.loading import load, load_drafter, packaged_head, tree_settings
from graft.model.sampler import SamplingSettings
from graft.spec_decode.proposers.block.drafter import BlockDrafter
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.factory import drafter_for
from graft.tuning.profile import equip

PLAIN, GRAFT = "plain", "graft"


@dataclass(frozen=True)
class Method:
    """One way to answer: the engine that does it, and whether its rows may have trees."""

    name: str
    engine: Engine
    scheduler: Scheduler
    speculates: bool = True


@dataclass(eq=False)
class Asked:
    """A request as its user sees it; times in seconds since it was made."""

    job: Job
    start: float
    first: float = 0.0  # when the first tokens came
    num_first: int = 0
    last: float = 0.0

    @property
    def ids(self) -> list[int]:
        return self.job.sequences[0].new_ids

    @property
    def per_token(self) -> float:
        """After the first tokens, of which speculation may bring several at once."""
        return (self.last - self.first) / max(len(self.ids) - self.num_first, 1)


@dataclass
class Turn:
    """All prompts asked once."""

    seconds: float
    answers: list[Asked] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(len(answer.ids) for answer in self.answers) / self.seconds

    def figures(self) -> dict[str, Any]:
        stats = [answer.job.sequences[0].stats for answer in self.answers]
        rounds = sum(each.rounds for each in stats)
        return {
            "tokens_per_second": self.rate,
            "time_to_first_token": spread([answer.first for answer in self.answers]),
            "time_per_token": spread([answer.per_token for answer in self.answers]),
            "mean_accepted": 1 + sum(each.accepted for each in stats) / rounds,
            "plain_rounds": sum(each.plain_rounds for each in stats) / rounds,
            "passes_per_round": sum(each.draft_passes for each in stats) / rounds,
            "nodes_per_round": sum(each.nodes for each in stats) / rounds,
        }


def main() -> None:
    arguments = parsed()
    engine = make_engine(arguments)
    limits = (arguments.max_new_tokens, arguments.limit, arguments.max_prompt_tokens)
    asked, lessons = mixed_questions(arguments.data, engine, *limits), []
    if arguments.warmup is not None:
        limits = (arguments.max_new_tokens, arguments.warmup_limit, arguments.max_prompt_tokens)
        lessons = mixed_questions([arguments.warmup], engine, *limits)
    rows = max(arguments.max_rows, *arguments.concurrency)
    room = max(len(question.ids) for question in [*asked, *lessons]) + arguments.max_new_tokens + 256
    settings = SchedulerSettings(
        max_rows=rows,
        max_waiting=rows,
        max_batched_tokens=arguments.max_batched_tokens,
        max_cache_tokens=rows * room,
        prefix_cache_tokens=0,
    )
    methods = all_methods(engine, settings, arguments.fixed_budgets)
    fp32 = engine.target.model.dtype == torch.float32
    results = []
    knowing = {method.name: method.engine.policy.state() for method in methods}
    for concurrency in arguments.concurrency:
        learned = dict(knowing)
        for method in methods:
            # Learns what the machine's steps cost, too, and captures those of a GPU.
            for _ in range(arguments.warmup_turns if method.speculates else 1):
                method.engine.policy.restore(knowing[method.name])
                take_turn(method, lessons or asked[:concurrency], concurrency, arguments)
            if lessons:
                learned[method.name] = method.engine.policy.state()
        turns: dict[str, list[Turn]] = {method.name: [] for method in methods}
        for _ in range(arguments.repeat):
            for method in methods:
                method.engine.policy.restore(learned[method.name])
                turns[method.name].append(take_turn(method, asked, concurrency, arguments))
        result = compared(concurrency, turns)
        results.append(result)
        print(line_of(result), flush=True)
        if arguments.out is not None:
            settings_of = {key: str(value) for key, value in vars(arguments).items()}
            facts = {"settings": settings_of, "environment": environment(engine.target.device), "results": results}
            arguments.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for scheduler in {method.scheduler for method in methods}:
        scheduler.close()
    if fp32 and any(result["different_texts"] for result in results):
        sys.exit("texts differ")


def all_methods(engine: Engine, settings: SchedulerSettings, budgets: list[int]) -> list[Method]:
    """Plain decoding, Graft, and Graft with fixed budgets, each with a scheduler of its own over the same weights."""
    scheduler = Scheduler(engine, settings)
    scheduler.is_ready.wait()
    methods = [Method(PLAIN, engine, scheduler, speculates=False), Method(GRAFT, engine, scheduler)]
    for budget in (budget for budget in budgets if budget > 0):  # none is plain decoding
        old = engine.drafter
        drafter = drafter_for(old.head, old.settings) if isinstance(old, Eagle3Drafter | BlockDrafter) else old
        fixed = Engine(engine.target.model, engine.tokenizer, policy="graft", drafter=drafter, budget=budget)
        equip(fixed, "auto")
        methods.append(Method(f"budget {budget}", fixed, Scheduler(fixed, settings)))
        methods[-1].scheduler.is_ready.wait()
    return methods


def make_engine(arguments: argparse.Namespace) -> Engine:
    """The engine of `graft serve` for this model, as dear as another if wanted."""
    plain = load(arguments.model, draft=None, policy="off", device=arguments.device, dtype=arguments.dtype)
    model = plain.target.model
    name = arguments.draft or (arguments.model if packaged_head(arguments.model) is not None else None)
    tree = tree_settings("graft", model.device)
    drafter = load_drafter(name, model, tree, plain.tokenizer) if name not in (None, "none") else None
    if arguments.as_cost_of is not None:
        shape = Shape.named(arguments.as_cost_of)
        model = widen(model, shape)
        if isinstance(drafter, Eagle3Drafter | BlockDrafter):  # a small model stays what it is beside a large one
            drafter = drafter_for(widen_head(drafter.head, shape, model), drafter.settings)
    engine = Engine(model, plain.tokenizer, policy="graft", drafter=drafter)
    equip(engine, "auto")
    return engine


def take_turn(method: Method, asked: list[Question], concurrency: int, arguments: argparse.Namespace) -> Turn:
    """Asks everything once, `concurrency` at a time."""
    done: queue.Queue[Asked] = queue.Queue()
    clock = time.process_time if arguments.processor_time else time.perf_counter
    start = clock()
    answers: list[Asked] = []
    for number, question in enumerate(asked):
        if number >= concurrency:
            done.get()
        answers.append(ask(method, question, arguments, done))
    for _ in range(min(concurrency, len(asked))):
        done.get()
    return Turn(clock() - start, answers)


def ask(method: Method, question: Question, arguments: argparse.Namespace, done: queue.Queue[Asked]) -> Asked:
    options = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature, "seed": 0}
    sequences = method.engine.new_sequences(question.ids, SamplingSettings.of(options))
    for sequence in sequences:
        sequence.speculates = method.speculates

    def listen(news: Update | Failure) -> None:
        asked.last = time.perf_counter() - asked.start
        if isinstance(news, Failure):
            print(f"{question.id}: {news.message}", file=sys.stderr)
            done.put(asked)
            return
        if not asked.first:
            asked.first, asked.num_first = asked.last, len(news.ids)
        if news.finish_reason is not None:
            done.put(asked)

    asked = Asked(Job(sequences, listen), time.perf_counter())
    method.scheduler.submit(asked.job)
    return asked


def compared(concurrency: int, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    texts = [[answer.ids for answer in turn.answers] for both in turns.values() for turn in both]
    different = sum(any(text != same[0] for text in same) for same in zip(*texts, strict=True))
    rates = {method: [turn.rate for turn in its] for method, its in turns.items()}
    middle = {method: sorted(its, key=lambda turn: turn.rate)[len(its) // 2] for method, its in turns.items()}
    return {
        "concurrency": concurrency,
        "requests": len(texts[0]),
        "ratio": median(rates[GRAFT]) / median(rates[PLAIN]),
        "ratios": {method: median(its) / median(rates[PLAIN]) for method, its in rates.items()},
        "different_texts": different,
        "rates": rates,
        **{method: turn.figures() | {"tokens_per_second": median(rates[method])} for method, turn in middle.items()},
    }


def line_of(result: dict[str, Any]) -> str:
    def part(method: str) -> str:
        its = result[method]
        first, token = (
            "/".join(f"{1e3 * its[name][key]:.0f}" for key in ("mean", "p50", "p95"))
            for name in ("time_to_first_token", "time_per_token")
        )
        runs = ", ".join(f"{rate:.1f}" for rate in result["rates"][method])
        return (
            f"  {method:10} {result['ratios'][method]:6.3f} {its['tokens_per_second']:8.1f} tokens/s ({runs})  "
            f"first {first} ms  a token {token} ms  accepted {its['mean_accepted']:.2f} a round, "
            f"{its['nodes_per_round']:.1f} nodes, {its['passes_per_round']:.2f} draft passes, "
            f"{its['plain_rounds']:.0%} plain"
        )

    head = (
        f"concurrency {result['concurrency']}: graft is {result['ratio']:.3f} of plain, "
        f"{result['different_texts']} of {result['requests']} texts differ"
    )
    return "\n".join([head, *map(part, result["rates"])])


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] for p in (50, 95)}
    return {"mean": mean(ordered), **ranks}


def parsed() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", help="an EAGLE-3 head, or none; the packaged one of the model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--as-cost-of", metavar="SHAPE", help="llama-8b, ...")
    parser.add_argument("--data", type=Path, action="append", required=True, help="prompts; may be repeated")
    parser.add_argument("--limit", type=int, help="take so many prompts of each file")
    parser.add_argument("--max-prompt-tokens", type=int, help="cut longer prompts in the middle")
    parser.add_argument("--warmup", type=Path, help="prompts to learn from that do not count")
    parser.add_argument("--warmup-limit", type=int, default=16, help="best as many as the most requests at once")
    parser.add_argument("--warmup-turns", type=int, default=5, help="as it takes to find out for how many trees pay")
    parser.add_argument("--concurrency", default=[1, 4, 16], type=numbers, help="requests at once, as in 1,16,128")
    parser.add_argument("--fixed-budgets", default=[], type=numbers, metavar="N,N", help="nodes, as in 1,3,7,15")
    parser.add_argument("--max-batched-tokens", type=int, help="tokens of a step, in place of the usual")
    parser.add_argument("--max-rows", type=int, default=1, help="answers decoded together; at least the concurrency")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=2, help="turns of each")
    parser.add_argument("--processor-time", action="store_true", help="count tokens a second of the processor's time")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()

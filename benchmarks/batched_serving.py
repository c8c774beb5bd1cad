"""What is speculation worth as the batch grows? Throughput of the scheduler, plain and with Graft.

    python benchmarks/batched_serving.py --prompts gsm8k.jsonl --prompts alpaca.jsonl --limit 4 --warmup train.jsonl

The scheduler of `graft serve` runs in this process, without HTTP. At each concurrency the same prompts are asked in a
closed loop: a request starts when another has ended. Plain decoding and Graft take turns, and the medians of the turns
count. `--fixed-budgets 1,3,7` adds Graft with that many nodes in every row's tree, and `--fixed-passes 2,4` Graft with
that many draft passes in every round, to compare with what Graft chooses. No text is kept between turns: the prefix
cache is empty, and Graft's tables are reset to what the warm-up taught. The cost model continues to learn, as in a
server.

`--as-cost-of` makes the model as expensive as a large one (see docs/measuring.md). In fp32 all texts must be equal.
"""

import argparse
import queue
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from common import add_model, add_prompts, command_line, load_pair, mixed_questions, numbers, write_json

from graft.bench.cost_emulation import widen, widen_head
from graft.bench.results import environment
from graft.bench.shapes import ModelShape
from graft.bench.tasks import Question
from graft.drafters.block.drafter import BlockDrafter
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.drafters.factory import drafter_for
from graft.engine import Engine
from graft.engine.jobs import Failure, Job, Update
from graft.engine.scheduler import Scheduler
from graft.engine.settings import SchedulerSettings
from graft.model.sampler import SamplingSettings
from graft.spec_decode.policies import DEFAULT_POLICY, PolicySettings, policy_with
from graft.tuning.learned import equip

PLAIN, GRAFT = "plain", "graft"


@dataclass(frozen=True)
class Method:
    """A decoding method: its engine and scheduler, and whether its requests speculate."""

    name: str
    engine: Engine
    scheduler: Scheduler
    speculates: bool = True


@dataclass(eq=False)
class Asked:
    """One request. Times are in seconds since it was made."""

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
        """Time per token after the first tokens, of which a round may bring several."""
        return (self.last - self.first) / max(len(self.ids) - self.num_first, 1)


@dataclass
class Turn:
    """All prompts asked once."""

    seconds: float
    num_captured: int  # CUDA graphs; more than none make the turn slower
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
    options = parse()
    engine = make_engine(options)

    def prompts(paths: list[Path], limit: int | None) -> list[Question]:
        return mixed_questions(paths, engine, options.max_new_tokens, limit, options.max_prompt_tokens)

    asked = prompts(options.prompts, options.limit)
    lessons = prompts([options.warmup], options.warmup_limit) if options.warmup is not None else []
    rows = max(options.concurrency)
    room = max(len(question.ids) for question in [*asked, *lessons]) + options.max_new_tokens + 256
    settings = SchedulerSettings(
        max_rows=rows,
        max_waiting=rows,
        max_cache_tokens=rows * room,
        prefix_cache_tokens=0,
    )
    # A budget of 0 is plain decoding.
    fixed = {f"budget {count}": PolicySettings(budget=count) for count in options.fixed_budgets if count}
    fixed |= {f"{count} passes": PolicySettings(passes=count) for count in options.fixed_passes}
    methods = all_methods(engine, settings, fixed)
    results = []
    initial = {method.name: method.engine.policy.state() for method in methods}
    for concurrency in options.concurrency:
        learned = dict(initial)
        for method in methods:
            # The warm-up also measures step times, and on a GPU captures graphs.
            for _ in range(options.warmup_turns if method.speculates else 1):
                method.engine.policy.restore(initial[method.name])
                take_turn(method, lessons or asked[:concurrency], concurrency, options)
            if lessons:
                learned[method.name] = method.engine.policy.state()
        turns: dict[str, list[Turn]] = {method.name: [] for method in methods}
        for _ in range(options.repeat):
            for method in methods:
                method.engine.policy.restore(learned[method.name])
                turns[method.name].append(take_turn(method, asked, concurrency, options))
        results.append(compare(concurrency, turns))
        print(line_of(results[-1]), flush=True)
        given = {key: str(value) for key, value in vars(options).items()}
        facts = {"settings": given, "environment": environment(engine.target.device), "results": results}
        write_json(options.out, facts)
    for scheduler in {method.scheduler for method in methods}:
        scheduler.close()
    if engine.target.model.dtype == torch.float32 and any(result["different_texts"] for result in results):
        sys.exit("texts differ")


def make_engine(options: argparse.Namespace, max_positions: int = 0) -> Engine:
    """The engine of `graft serve` for this model, widened if asked for, with at least this context."""
    plain, drafter = load_pair(options)
    model = plain.target.model
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, max_positions)
    if options.as_cost_of is not None:
        shape = ModelShape.named(options.as_cost_of)
        model = widen(model, shape)
        if isinstance(drafter, Eagle3Drafter | BlockDrafter):  # a small draft model is not widened
            drafter = drafter_for(widen_head(drafter.head, plain.target.model, shape, model), drafter.settings)
    engine = Engine(model, plain.tokenizer, policy="graft", drafter=drafter)
    equip(engine, "auto")
    return engine


def all_methods(engine: Engine, settings: SchedulerSettings, fixed: dict[str, PolicySettings]) -> list[Method]:
    """Plain decoding, Graft, and Graft with fixed sizes by name, whose engines and schedulers share the weights."""
    scheduler = Scheduler(engine, settings)
    methods = [Method(PLAIN, engine, scheduler, speculates=False), Method(GRAFT, engine, scheduler)]
    for name, sizes in fixed.items():
        old = engine.drafter
        drafter = drafter_for(old.head, old.settings) if isinstance(old, Eagle3Drafter | BlockDrafter) else old
        policy = policy_with(sizes, DEFAULT_POLICY, engine.target, drafter)
        other = Engine(engine.target.model, engine.tokenizer, policy=policy, drafter=drafter)
        equip(other, "auto")
        methods.append(Method(name, other, Scheduler(other, settings)))
    for method in methods:
        method.scheduler.is_ready.wait()
    return methods


def take_turn(method: Method, asked: list[Question], concurrency: int, options: argparse.Namespace) -> Turn:
    """Asks everything once, `concurrency` requests at a time."""
    done: queue.Queue[Asked] = queue.Queue()
    start, num_setups = time.perf_counter(), method.engine.num_setups
    answers: list[Asked] = []
    for number, question in enumerate(asked):
        if number >= concurrency:
            done.get()
        answers.append(ask(method, question, options, done))
    for _ in range(min(concurrency, len(asked))):
        done.get()
    return Turn(time.perf_counter() - start, method.engine.num_setups - num_setups, answers)


def ask(method: Method, question: Question, options: argparse.Namespace, done: queue.Queue[Asked]) -> Asked:
    sampling = SamplingSettings(max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=0)
    sequences = method.engine.new_sequences(question.ids, sampling)
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


def compare(concurrency: int, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """The figures of all methods at one concurrency; detailed ones are those of each method's median turn."""
    texts = [[answer.ids for answer in turn.answers] for own in turns.values() for turn in own]
    rates = {method: [turn.rate for turn in own] for method, own in turns.items()}
    middle = {method: sorted(own, key=lambda turn: turn.rate)[len(own) // 2] for method, own in turns.items()}
    ratios = {method: median(own) / median(rates[PLAIN]) for method, own in rates.items()}
    return {
        "concurrency": concurrency,
        "requests": len(texts[0]),
        "ratio": ratios[GRAFT],
        "ratios": ratios,
        "different_texts": sum(any(text != same[0] for text in same) for same in zip(*texts, strict=True)),
        "rates": rates,
        "captured": {method: [turn.num_captured for turn in own] for method, own in turns.items()},
        **{method: turn.figures() | {"tokens_per_second": median(rates[method])} for method, turn in middle.items()},
    }


def line_of(result: dict[str, Any]) -> str:
    lines = [
        f"concurrency {result['concurrency']}: graft is {result['ratio']:.3f} of plain, "
        f"{result['different_texts']} of {result['requests']} texts differ"
    ]
    for method, rates in result["rates"].items():
        own = result[method]
        first, token = (
            "/".join(f"{1e3 * own[name][key]:.0f}" for key in ("mean", "p50", "p95"))
            for name in ("time_to_first_token", "time_per_token")
        )
        lines.append(
            f"  {method:10} {result['ratios'][method]:6.3f} {own['tokens_per_second']:8.1f} tokens/s "
            f"({', '.join(f'{rate:.1f}' for rate in rates)})  first {first} ms  per token {token} ms  "
            f"accepted {own['mean_accepted']:.2f} a round, {own['nodes_per_round']:.1f} nodes, "
            f"{own['passes_per_round']:.2f} draft passes, {own['plain_rounds']:.0%} plain, "
            f"{sum(result['captured'][method])} graphs captured"
        )
    return "\n".join(lines)


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] for p in (50, 95)}
    return {"mean": mean(ordered), **ranks}


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_model(parser)
    add_prompts(parser, limit=None, max_new_tokens=64)
    parser.add_argument("--as-cost-of", metavar="SHAPE", help="widen the model to this shape, such as llama-8b")
    parser.add_argument("--max-prompt-tokens", type=int, help="cut longer prompts in the middle")
    parser.add_argument("--warmup", type=Path, help="prompts to learn from, which do not count")
    parser.add_argument("--warmup-limit", type=int, default=16, help="best at least the highest concurrency")
    parser.add_argument("--warmup-turns", type=int, default=5, help="turns to learn at which batch sizes trees pay")
    parser.add_argument("--concurrency", default=[1, 4, 16], type=numbers, help="requests at once, such as 1,16,128")
    parser.add_argument("--fixed-budgets", default=[], type=numbers, metavar="N,N", help="nodes, such as 1,3,7,15")
    parser.add_argument("--fixed-passes", default=[], type=numbers, metavar="N,N", help="draft passes, such as 2,4,6")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=2, help="turns of each method")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()

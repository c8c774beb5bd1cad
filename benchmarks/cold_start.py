"""Is Graft ever slower than plain decoding when it has learned nothing yet?

    python benchmarks/cold_start.py --model MODEL --draft none
    python benchmarks/cold_start.py --draft none --from process --limit 5 --max-new-tokens 1
    python benchmarks/cold_start.py --beside 1

A ratio is the seconds of `off` over those of `graft` for the same answer, with prompt and set-up. Below 1, Graft is
slower. Each prompt is answered by off, graft and off again, so that both meet the same machine. `noise` is the first
off over the second, which would be 1 on a quiet machine. `cpu` is the ratio of CPU seconds of all threads, which other
processes disturb less.

`--from engine` gives every prompt a new engine. `session` uses one engine for all prompts, which learns from earlier
ones. `process` starts a new process for each answer and loads the model before the clock starts. `--beside N` keeps N
other processes busy.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import NamedTuple

from common import command_line

from graft import Engine, load
from graft.bench.tasks import built_in_tasks
from graft.prompt_files import user_message

BUSY = "import time\nwhile True:\n    sum(range(100000))"


class Call(NamedTuple):
    """Seconds of an answer, and its tokens."""

    wall: float
    cpu: float
    ids: list[int]


def timed(engine: Engine, prompt: str, max_new_tokens: int) -> Call:
    ids = engine.encode(user_message(prompt, engine.tokenizer))
    cpu, start = time.process_time(), time.perf_counter()
    new = engine.generate(ids, max_new_tokens=max_new_tokens).ids
    return Call(time.perf_counter() - start, time.process_time() - cpu, new)


@contextmanager
def busy(count: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def make_caller(args: argparse.Namespace) -> Callable[[str, str], Call]:
    """A function that answers a prompt under a policy."""

    def in_process(policy: str, prompt: str) -> Call:
        command = [sys.executable, __file__, *sys.argv[1:], "--answer", policy]
        result = subprocess.run(command, input=prompt, capture_output=True, text=True, check=True)
        return Call(*json.loads(result.stdout))

    if args.start == "process":
        return in_process
    engines = {"off": make_engine(args, "off")}
    timed(engines["off"], "Hello", 2)  # one-time work of torch, which any method would pay

    def in_engine(policy: str, prompt: str) -> Call:
        if policy != "off" and (args.start == "engine" or policy not in engines):
            engines[policy] = make_engine(args, policy, engines["off"])
        return timed(engines[policy], prompt, args.max_new_tokens)

    return in_engine


def make_engine(args: argparse.Namespace, policy: str, like: Engine | None = None) -> Engine:
    """A new engine. like: an engine of the same model, which is then not loaded again."""
    return load(
        args.model if like is None else like.target.model,
        tokenizer=None if like is None else like.tokenizer,
        policy=policy,
        draft=None if policy == "off" or args.draft == "none" else args.draft,
        profile=None if args.profile == "none" else args.profile,
        prefix_cache=False,
        keep_learned=False,
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the target")
    parser.add_argument("--draft", default="none", help="a drafter, or none")
    parser.add_argument("--profile", default="none", help="a profile, auto, or none")
    parser.add_argument("--limit", type=int, default=20, help="use only this many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--from", dest="start", choices=("engine", "session", "process"), default="engine")
    parser.add_argument("--beside", type=int, default=0, help="busy processes beside this one")
    parser.add_argument("--answer", help=argparse.SUPPRESS)  # the policy, in a process of `--from process`
    args = parser.parse_args()
    if args.answer:
        print(json.dumps(timed(make_engine(args, args.answer), sys.stdin.read(), args.max_new_tokens)))
        return

    print(f"{args.model}, draft {args.draft}, {args.max_new_tokens} tokens, {args.beside} busy beside, ", end="")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    by_task = [[prompt.text for prompt in task.prompts] for task in built_in_tasks()]
    prompts = islice(chain.from_iterable(zip(*by_task, strict=True)), args.limit)  # of all tasks in turn
    call, ratios, totals = make_caller(args), [], [0.0, 0.0]
    with busy(args.beside):
        for number, prompt in enumerate(prompts, start=1):
            before, graft, after = (call(policy, prompt) for policy in ("off", "graft", "off"))
            assert before.ids == graft.ids == after.ids, f"prompt {number}: texts differ"
            off, cpu = (before.wall + after.wall) / 2, (before.cpu + after.cpu) / 2 / graft.cpu
            ratios.append(off / graft.wall)
            totals = [totals[0] + off, totals[1] + graft.wall]
            print(f"prompt {number:2}: {off:6.2f} s {graft.wall:6.2f} s  ratio {ratios[-1]:.3f}  ", end="")
            print(f"cpu {cpu:.3f}  noise {before.wall / after.wall:.3f}", flush=True)
    below = sum(ratio < 0.97 for ratio in ratios)
    print(f"all: {totals[0] / totals[1]:.3f}, worst {min(ratios):.3f}, {below} of {len(ratios)} below 0.97")


if __name__ == "__main__":
    main()

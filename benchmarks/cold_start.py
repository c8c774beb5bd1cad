"""Is Graft ever slower than plain decoding when it has learned nothing yet?

    python benchmarks/cold_start.py --model qwen2.5-coder-0.5b --draft none
    python benchmarks/cold_start.py --draft none --from process --prompts 5 --max-new-tokens 1
    python benchmarks/cold_start.py --beside 1

A ratio is the seconds of `off` over those of `graft` for the same answer, prompt and set-up included: below 1, Graft is
slower. Each prompt is answered by off, graft and off again, so that both meet the same machine; `noise` is the first
off over the second, which would be 1 on a quiet machine. `cpu` is the ratio of CPU seconds of all threads, which other
processes disturb less than the clock.

`--from engine` gives every prompt an engine that knows nothing, `session` one engine for all prompts, which learns from
the earlier ones, and `process` a new process for each call, whose model is loaded before the clock starts. `--beside N`
keeps N other processes busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from graft.data import user_message

BUSY = "import time\nwhile True:\n    sum(range(100000))"


class Call(NamedTuple):
    """What an answer took, and the answer."""

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


def prompts(count: int) -> list[str]:
    """Of all built-in tasks, in turn."""
    by_task = [[prompt.text for prompt in task.prompts] for task in built_in_tasks()]
    return list(islice(chain.from_iterable(zip(*by_task, strict=True)), count))


def caller(args: argparse.Namespace) -> Callable[[str, str], Call]:
    """A function that answers a prompt under a policy."""
    if args.start == "process":

        def in_process(policy: str, prompt: str) -> Call:
            command = [sys.executable, __file__, *sys.argv[1:], "--answer", policy]
            result = subprocess.run(command, input=prompt, capture_output=True, text=True, check=True)
            return Call(*json.loads(result.stdout))

        return in_process
    off = engine_of(args, "off")
    timed(off, "Hello", 2)  # one-time work of torch, which either would pay
    engines = {"off": off}

    def in_engine(policy: str, prompt: str) -> Call:
        if policy != "off" and (args.start == "engine" or policy not in engines):
            engines[policy] = engine_of(args, policy, off)
        return timed(engines[policy], prompt, args.max_new_tokens)

    return in_engine


def engine_of(args: argparse.Namespace, policy: str, like: Engine | None = None) -> Engine:
    """like: an engine of the same model, which is then not loaded again."""
    model = args.model if like is None else like.target.model
    draft, profile = None if policy == "off" or args.draft == "none" else args.draft, args.profile
    tokenizer = None if like is None else like.tokenizer
    profile = None if profile == "none" else profile
    return load(
        model,
        tokenizer=tokenizer,
        policy=policy,
        draft=draft,
        profile=profile,
        prefix_cache=False,
        keep_learned=args.kept,
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="what answers")
    parser.add_argument("--draft", default="none", help="a drafter, or none")
    parser.add_argument("--profile", default="none", help="a profile, auto, or none")
    parser.add_argument("--policy", default="graft", help="compared with off")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=1, help="turns for each prompt; the medians count")
    parser.add_argument("--from", dest="start", choices=("engine", "session", "process"), default="engine")
    parser.add_argument("--beside", type=int, default=0, help="busy processes beside")
    parser.add_argument("--kept", action="store_true", help="keep what is learned; with --profile auto")
    parser.add_argument("--answer", help=argparse.SUPPRESS)  # in a process of its own: the policy
    args = parser.parse_args()
    if args.answer:
        print(json.dumps(timed(engine_of(args, args.answer), sys.stdin.read(), args.max_new_tokens)))
        return

    print(f"{args.model}, draft {args.draft}, {args.max_new_tokens} tokens, {args.beside} busy beside, ", end="")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    call, ratios, totals = caller(args), [], [0.0, 0.0]
    with busy(args.beside):
        for number, prompt in enumerate(prompts(args.prompts), start=1):
            turns = [[call(policy, prompt) for policy in ("off", args.policy, "off")] for _ in range(args.repeats)]
            for before, ours, after in turns:
                assert before.ids == ours.ids == after.ids, f"prompt {number}: texts differ"
            off = statistics.median(chain.from_iterable((before.wall, after.wall) for before, _, after in turns))
            ours = statistics.median(ours.wall for _, ours, _ in turns)
            cpu = statistics.median((a.cpu + b.cpu) / 2 / ours.cpu for a, ours, b in turns)
            noise = statistics.median(before.wall / after.wall for before, _, after in turns)
            ratios.append(off / ours)
            totals = [totals[0] + off, totals[1] + ours]
            print(f"prompt {number:2}: {off:6.2f} s {ours:6.2f} s  ratio {off / ours:.3f}  ", end="")
            print(f"cpu {cpu:.3f}  noise {noise:.3f}", flush=True)
    below = sum(ratio < 0.97 for ratio in ratios)
    print(f"all: {totals[0] / totals[1]:.3f}, worst {min(ratios):.3f}, {below} of {len(ratios)} below 0.97")


if __name__ == "__main__":
    main()

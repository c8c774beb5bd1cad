"""Does a loaded scheduler give each request the text it would get alone, keep to its memory, and free every page?

    python benchmarks/scheduler_load.py --requests 64
    python benchmarks/scheduler_load.py --requests 500 --shape llama-8b --memory 0.5 --at-once 128 --no-repeat

The scheduler of `graft serve` runs in this process, without HTTP. Requests differ in prompt, length, temperature, seed,
penalties, number of answers and whether they speculate. They arrive at random times, and every eighth is cancelled
before its end. Then each is asked again alone. In fp32 all its tokens must be the same; for a cancelled request, the
tokens that it got. At the end no page may be in use. On a GPU the memory in use on the whole device is sampled, and
must stay below `--memory`.

Rounds are plain where trees do not pay; `--budget` forces trees. With a small `--max-cache-tokens`, requests are
preempted and read again. `--shape` uses a model with random weights and random prompts, one of 16,000 tokens. The exit
status is 1 if anything is wrong.
"""

import argparse
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, MODELS, all_prompts, command_line, make_model

from graft.engine import Engine
from graft.engine.jobs import Failure, Job, Update
from graft.engine.scheduler import Scheduler
from graft.engine.settings import SchedulerSettings
from graft.hub.registry import DEFAULT_MODEL
from graft.loading import load
from graft.model.sampler import SamplingSettings

LONGEST_ANSWER = 72
LONGEST_PROMPT = 16_000  # of random tokens


class Letters:
    """A tokenizer for random tokens, which decodes each to a letter."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


def watch_memory(used: list[int]) -> None:
    """Keeps the most memory in use on the GPU, by all processes, in `used`."""
    while True:
        free, total = torch.cuda.mem_get_info(DEVICE)
        used[0] = max(used[0], total - free)
        time.sleep(0.01)


@dataclass
class Request:
    """A request, and after how many tokens it is cancelled."""

    prompt: list[int]
    options: dict[str, Any]
    speculates: bool
    cancelled_after: int | None
    ended: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None

    def ask(self, engine: Engine, scheduler: Scheduler, cancels: bool, room: threading.Semaphore) -> Job:
        """Submits it. `ended` is set when it has finished, failed or been cancelled."""
        room.acquire()
        self.ended.clear()
        sequences = engine.new_sequences(self.prompt, SamplingSettings.of(self.options))
        for sequence in sequences:
            sequence.speculates = self.speculates
        left = set(range(len(sequences)))
        limit = self.cancelled_after if cancels else None

        def listen(news: Update | Failure) -> None:
            if isinstance(news, Failure):
                self.failure = news.message
                left.clear()
            elif news.finish_reason is not None:
                left.discard(news.index)
            if left and limit is not None and sequences[0].stats.tokens >= limit:
                scheduler.cancel(job)
                left.clear()
            if not left and not self.ended.is_set():
                self.ended.set()
                room.release()

        job = Job(sequences, listen)
        scheduler.submit(job)
        return job


def main() -> None:
    arguments = parse()
    rng = random.Random(arguments.seed)
    engine, prompts = make_engine(arguments, rng)
    requests = [request_of(number, prompts, rng) for number in range(arguments.requests)]
    settings = SchedulerSettings(
        max_rows=arguments.at_once,
        max_waiting=len(requests),
        max_cache_tokens=arguments.max_cache_tokens,
        memory=arguments.memory,
    )
    used = [0]
    if DEVICE.type == "cuda":
        threading.Thread(target=watch_memory, args=(used,), daemon=True).start()
    scheduler = Scheduler(engine, settings)
    scheduler.is_ready.wait()
    room = threading.Semaphore(2 * arguments.at_once)
    start, together = time.perf_counter(), []
    for request in requests:
        together.append(request.ask(engine, scheduler, True, room))
        time.sleep(rng.expovariate(1 / arguments.gap))
    for request in requests:
        request.ended.wait()
    stats = [sequence.stats for job in together for sequence in job.sequences]
    rounds, tokens = sum(own.rounds for own in stats), sum(own.tokens for own in stats)
    mean = 1 + sum(own.accepted for own in stats) / rounds
    print(f"together: {tokens} tokens in {time.perf_counter() - start:.1f} s, {mean:.2f} a round", flush=True)

    num_failed = sum(request.failure is not None for request in requests)
    num_different = 0 if arguments.no_repeat else count_different(requests, together, engine, scheduler, room)
    while scheduler.num_running:
        time.sleep(0.01)
    pool = scheduler.pool
    scheduler.close()
    pool.evict(0)  # the prefix cache's pages
    num_lost = pool.num_pages - pool.num_free
    print(f"{num_failed} requests failed, {num_different} differ; {num_lost} of {pool.num_pages} pages are not free")
    is_over_limit = False
    if DEVICE.type == "cuda":
        total = torch.cuda.mem_get_info(DEVICE)[1]
        is_over_limit = arguments.memory is not None and used[0] > arguments.memory * total
        print(f"{used[0] / 2**30:.1f} GiB of {total / 2**30:.1f} were in use at most, {used[0] / total:.3f}")
    sys.exit(bool(num_failed or num_different or num_lost or is_over_limit))


def count_different(
    requests: list[Request], together: list[Job], engine: Engine, scheduler: Scheduler, room: threading.Semaphore
) -> int:
    """Asks each request again alone, and counts those that get other tokens."""
    num_different = 0
    for number, (request, job) in enumerate(zip(requests, together, strict=True)):
        alone = request.ask(engine, scheduler, False, room)
        request.ended.wait()
        same = request.failure is None and all(
            few.new_ids == whole.new_ids[: len(few.new_ids)]
            and (request.cancelled_after is not None or few.finish_reason == whole.finish_reason is not None)
            for few, whole in zip(job.sequences, alone.sequences, strict=True)
        )
        if not same:
            num_different += 1
            print(f"{number}: {request.options} {request.failure or 'differs'}", flush=True)
    return num_different


def make_engine(arguments: argparse.Namespace, rng: random.Random) -> tuple[Engine, list[list[int]]]:
    """The engine, and prompts to choose from."""
    if arguments.shape is not None:
        shape, vocab = MODELS[arguments.shape]
        engine = Engine(make_model(shape, vocab, LONGEST_PROMPT + 1024), Letters(), budget=arguments.budget)
        lengths = [LONGEST_PROMPT, *(int(4 * 2 ** rng.uniform(0, 9)) for _ in range(arguments.requests))]
        return engine, [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    engine = load(arguments.model, device=arguments.device, dtype="fp32", budget=arguments.budget, keep_learned=False)
    prompts = all_prompts(arguments.prompts, engine, LONGEST_ANSWER)
    rng.shuffle(prompts)
    return engine, prompts


def request_of(number: int, prompts: list[list[int]], rng: random.Random) -> Request:
    longest = rng.randint(4, LONGEST_ANSWER)
    options: dict[str, Any] = {"max_new_tokens": longest, "temperature": 0.0, "seed": rng.randrange(10**9)}
    if number % 2:
        options |= {"temperature": rng.uniform(0.5, 1.3), "top_p": rng.choice([1.0, 0.9])}
    if number % 5 == 1:
        options |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    if number % 7 == 3:
        options |= {"n": 2, "top_k": 40}
    cancelled_after = rng.randint(1, longest) if number % 8 == 4 else None
    return Request(prompts[number % len(prompts)], options, number % 6 != 5, cancelled_after)


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what answers")
    parser.add_argument("--shape", choices=MODELS, help="use a model of this shape with random weights instead")
    parser.add_argument("--budget", type=int, help="nodes of every tree; as many as pay if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, action="append", help="prompts; the built-in ones if not given")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=64, help="answers decoded together")
    parser.add_argument("--max-cache-tokens", type=int, help="size of the KV cache; what memory allows if not given")
    parser.add_argument("--memory", type=float, help="share of the GPU's memory that the process may use")
    parser.add_argument("--gap", type=float, default=0.3, help="seconds between two requests, on average")
    parser.add_argument("--no-repeat", action="store_true", help="do not ask each request again alone")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

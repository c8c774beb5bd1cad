"""Checks that a request's text is the same alone and in a batch: mixed requests at random times, some cancelled.

    python bench/batched_exactness.py --requests 64

The scheduler of `graft serve` runs in this process. Requests differ in prompt, length, temperature, seed, penalties,
number of answers and whether they speculate; they join at random times, and every eighth is cancelled on its way.
Then each is asked again with nobody beside it. In fp32 all tokens must be equal, of a cancelled one all it had.
Where trees do not pay rounds are plain; with `--budget` they have trees all the same. With a small `--max-cache-tokens`
requests are put back and read again.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.bench.tasks import Question, built_in_tasks, questions, read_tasks
from graft.core.scheduler import Failure, Job, Scheduler, SchedulerSettings, Update
from graft.engine import Engine
from graft.hub.registry import DEFAULT_MODEL
from graft.loading import load
from graft.model.sampler import SamplingSettings

LONGEST = 72  # tokens of an answer


@dataclass
class Request:
    """What is asked, and where it is cancelled, if it is."""

    question: Question
    options: dict[str, Any]
    speculates: bool
    cancelled_after: int | None
    ended: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None

    def ask(self, engine: Engine, scheduler: Scheduler, cancels: bool) -> Job:
        """Hands it in; `ended` is set when it has ended, one way or the other."""
        self.ended.clear()
        sequences = engine.new_sequences(self.question.ids, SamplingSettings.of(self.options))
        for sequence in sequences:
            sequence.speculates = self.speculates
        left = set(range(len(sequences)))

        def listen(news: Update | Failure) -> None:
            if isinstance(news, Failure):
                self.failure = news.message
                self.ended.set()
                return
            if news.finish_reason is not None:
                left.discard(news.index)
            if cancels and self.cancelled_after is not None and sequences[0].stats.tokens >= self.cancelled_after:
                scheduler.cancel(job)
                self.ended.set()
            if not left:
                self.ended.set()

        job = Job(sequences, listen)
        scheduler.submit(job)
        return job


def main() -> None:
    arguments = parsed()
    engine = load(arguments.model, device=arguments.device, dtype="fp32", budget=arguments.budget, keep_learned=False)
    requests = made(engine, arguments.requests, arguments.data, random.Random(arguments.seed))
    settings = SchedulerSettings(
        max_rows=arguments.max_rows, max_waiting=len(requests), max_cache_tokens=arguments.max_cache_tokens
    )
    scheduler = Scheduler(engine, settings)
    start = time.perf_counter()
    together = []
    chance = random.Random(arguments.seed + 1)
    for request in requests:
        together.append(request.ask(engine, scheduler, cancels=True))
        time.sleep(chance.expovariate(1 / arguments.gap))
    for request in requests:
        request.ended.wait()
    seconds = time.perf_counter() - start
    accepted, rounds = (
        sum(getattr(sequence.stats, what) for job in together for sequence in job.sequences)
        for what in ("accepted", "rounds")
    )
    num_tokens = sum(len(sequence.new_ids) for job in together for sequence in job.sequences)
    print(f"together: {num_tokens} tokens in {seconds:.1f} s, {1 + accepted / rounds:.2f} a round", flush=True)

    different = 0
    start = time.perf_counter()
    for number, (request, job) in enumerate(zip(requests, together, strict=True)):
        alone = request.ask(engine, scheduler, cancels=False)
        request.ended.wait()
        same = request.failure is None and all(
            few.new_ids == whole.new_ids[: len(few.new_ids)]
            and (request.cancelled_after is not None or few.finish_reason == whole.finish_reason is not None)
            for few, whole in zip(job.sequences, alone.sequences, strict=True)
        )
        if not same:
            different += 1
            print(f"{number}: {request.question.id} {request.options} {request.failure or 'differs'}", flush=True)
    print(f"alone: {time.perf_counter() - start:.1f} s; {different} of {len(requests)} requests differ")
    scheduler.close()
    sys.exit(different > 0)


def made(engine: Engine, count: int, data: list[Path] | None, chance: random.Random) -> list[Request]:
    tasks = read_tasks(data) if data else built_in_tasks()
    asked = [question for task in tasks for question in questions(task, engine, LONGEST)]
    chance.shuffle(asked)
    requests = []
    for number in range(count):
        longest = chance.randint(4, LONGEST)
        options: dict[str, Any] = {"max_new_tokens": longest, "temperature": 0.0, "seed": chance.randrange(10**9)}
        if number % 2:
            options |= {"temperature": chance.uniform(0.5, 1.3), "top_p": chance.choice([1.0, 0.9])}
        if number % 5 == 1:
            options |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
        if number % 7 == 3:
            options |= {"n": 2, "top_k": 40}
        requests.append(
            Request(
                asked[number % len(asked)],
                options,
                speculates=number % 6 != 5,
                cancelled_after=chance.randint(1, longest) if number % 8 == 4 else None,
            )
        )
    return requests


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--budget", type=int, help="nodes of every tree, whatever they cost; else as many as pay")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path, action="append", help="prompts; else those that come with the package")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-rows", type=int, default=64, help="answers decoded together")
    parser.add_argument("--max-cache-tokens", type=int, help="of the KV cache; else what memory allows")
    parser.add_argument("--gap", type=float, default=0.3, help="seconds between two requests, on average")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Memory of a scheduler under load: whether `memory` is kept to, and whether all pages come back.

    python bench/memory_limit.py --shape llama-8b --memory 0.5 --requests 500

A model of random weights answers prompts of random tokens and mixed lengths, one of them of 16K, so many at a time; a
fifth of the requests are cancelled at random times. The memory of the whole device is sampled all the while; on a CPU,
where `memory` limits the cache alone, only the pages are looked at. At the end no page may be in use but those of kept
texts, and none at all once these are forgotten; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time

import torch
from step_time import DEVICE, MODELS, TINY, make_model

from graft.core.scheduler import Failure, Job, Scheduler, SchedulerSettings, Update
from graft.engine import Engine
from graft.model.sampler import SamplingSettings

LONG = 16_000  # tokens of the longest prompt


class Letters:
    """A tokenizer for random tokens: each is a letter."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


class Watch(threading.Thread):
    """Samples the memory of the device that is in use, whoever uses it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            free, total = torch.cuda.mem_get_info(DEVICE)
            self.most = max(self.most, total - free)


def main() -> None:
    options = parsed()
    chance, longest = random.Random(options.seed), LONG if options.shape else 300
    shape, vocab = MODELS[options.shape] if options.shape else (TINY, 64)
    engine = Engine(make_model(shape, vocab, longest + 1024), Letters())
    watch = Watch()
    if DEVICE.type == "cuda":
        watch.start()
    settings = SchedulerSettings(max_rows=options.at_once, max_waiting=options.at_once, memory=options.memory)
    scheduler = Scheduler(engine, settings)
    scheduler.is_ready.wait()
    print(f"{scheduler.pool.num_pages} pages of 64 tokens", flush=True)
    room, start, counts = threading.Semaphore(options.at_once), time.perf_counter(), {"ended": 0, "failed": 0}
    num_cancelled = 0
    for number in range(options.requests):
        room.acquire()
        length = longest if number == options.requests // 3 else int(4 * 2 ** chance.uniform(0, options.spread))
        job = ask(engine, [chance.randrange(vocab) for _ in range(min(length, longest))], room, counts, chance)
        scheduler.submit(job)
        if number % 5 == 4:
            num_cancelled += 1
            threading.Timer(chance.uniform(0, 1), cancel, (scheduler, job, room)).start()
    for _ in range(options.at_once):
        room.acquire()
    while scheduler.num_running:
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    print(f"{options.requests} requests in {seconds:.1f} s: {counts}, {num_cancelled} were to be cancelled")
    pool = scheduler.pool
    scheduler.close()
    pool.forget(0)
    lost = pool.num_pages - pool.num_free
    print(f"{lost} pages are not free")
    is_over = False
    if DEVICE.type == "cuda":
        watch.ended.set()
        total = torch.cuda.mem_get_info(DEVICE)[1]
        is_over = watch.most > options.memory * total
        print(f"{watch.most / 2**30:.1f} GiB of {total / 2**30:.1f} were in use at most, {watch.most / total:.3f}")
    sys.exit(lost > 0 or is_over or counts["failed"] > 0)


def ask(
    engine: Engine, prompt: list[int], room: threading.Semaphore, counts: dict[str, int], chance: random.Random
) -> Job:
    settings = SamplingSettings(max_new_tokens=chance.randint(4, 96), temperature=chance.choice([0.0, 1.0]), seed=1)

    def listen(news: Update | Failure) -> None:
        if isinstance(news, Failure):
            print(news.message, file=sys.stderr)
            counts["failed"] += 1
            room.release()
        elif news.finish_reason is not None:
            counts["ended"] += 1
            room.release()

    return Job(engine.new_sequences(prompt, settings), listen)


def cancel(scheduler: Scheduler, job: Job, room: threading.Semaphore) -> None:
    if not job.ended and not job.cancelled:
        scheduler.cancel(job)
        room.release()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=MODELS, help="a tiny model, with shorter prompts, if not given")
    parser.add_argument("--memory", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=128)
    parser.add_argument("--spread", type=float, default=9.0, help="prompts have 4 to 4 * 2 ** spread tokens")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

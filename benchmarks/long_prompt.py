"""How long do running answers pause when a long prompt arrives?

    python benchmarks/long_prompt.py --as-cost-of llama-8b --prompts alpaca.jsonl --lengths 32768,131072

The scheduler of `graft serve` runs in this process, without HTTP. `--concurrency` requests are decoded, plainly and
with Graft. Each gets `--before` tokens, and then as many while nothing else happens. Then a prompt of random tokens
arrives. Reported are the times between two updates of the same request, without the prompt and while it is prefilled,
and the time to its first token.

The model's context is made long enough. What it says beyond its own context means nothing, but takes as long.
"""

import argparse
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from batched_serving import make_engine
from common import add_model, add_prompts, command_line, mixed_questions, numbers

from graft.engine import Engine
from graft.engine.jobs import Failure, Job, Update
from graft.engine.scheduler import Scheduler
from graft.engine.settings import SchedulerSettings
from graft.model.sampler import SamplingSettings


@dataclass(eq=False)
class Watched:
    """A request, and when it got its updates."""

    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    failure: str | None = None

    def listen(self, news: Update | Failure) -> None:
        if isinstance(news, Failure):
            self.failure = news.message
            return
        self.times.append(time.perf_counter())
        self.num_tokens += len(news.ids)

    @property
    def pauses(self) -> list[tuple[float, float]]:
        return list(itertools.pairwise(self.times))


def main() -> None:
    parser = command_line(__doc__)
    add_model(parser)
    add_prompts(parser, limit=8, max_new_tokens=4000)
    parser.add_argument("--as-cost-of", metavar="SHAPE", help="widen the model to this shape, such as llama-8b")
    parser.add_argument("--lengths", type=numbers, default=[32768, 131072], help="tokens of the long prompts")
    parser.add_argument("--concurrency", type=int, default=16, help="answers that are decoded when the prompt arrives")
    parser.add_argument("--before", type=int, default=64, help="tokens of each answer, twice, before the prompt")
    parser.add_argument("--turns", type=int, default=3, help="at most; a turn that captures no graph is the last")
    parser.add_argument("--only-graft", action="store_true", help="leave out plain decoding")
    options = parser.parse_args()
    engine = make_engine(options, max_positions=max(options.lengths) + 64)
    asked = mixed_questions(options.prompts, engine, options.max_new_tokens, options.limit)
    prompts = [question.ids for question in asked][: options.concurrency]
    room = max(options.lengths) + len(prompts) * (max(map(len, prompts)) + options.max_new_tokens + 256)
    rows = len(prompts) + 1
    scheduler = Scheduler(engine, SchedulerSettings(max_rows=rows, max_cache_tokens=room, prefix_cache_tokens=0))
    scheduler.is_ready.wait()
    for length in options.lengths:
        for speculates in (True,) if options.only_graft else (False, True):
            for _ in range(options.turns):
                num_setups = engine.num_setups
                line = measure(engine, scheduler, prompts, length, speculates, options)
                num_captured = engine.num_setups - num_setups
                name = "graft" if speculates else "plain"
                print(f"{length} tokens, {name}: {line}; {num_captured} graphs captured", flush=True)
                if not num_captured:
                    break
    scheduler.close()


def measure(
    engine: Engine,
    scheduler: Scheduler,
    prompts: list[list[int]],
    length: int,
    speculates: bool,
    options: argparse.Namespace,
) -> str:
    jobs: list[Job] = []

    def ask(ids: list[int], max_new_tokens: int) -> Watched:
        watched = Watched()
        settings = SamplingSettings(max_new_tokens=max_new_tokens, ignore_eos=True)
        sequences = engine.new_sequences(ids, settings)
        sequences[0].speculates = speculates
        jobs.append(Job(sequences, watched.listen))
        scheduler.submit(jobs[-1])
        return watched

    running = [ask(ids, options.max_new_tokens) for ids in prompts]
    spans = []
    for share in (1, 2):
        wait_until(lambda: all(each.num_tokens >= share * options.before for each in running), running)  # noqa: B023
        spans.append(time.perf_counter())
    begin, start = spans
    drawn = random.Random(length)
    long = ask([drawn.randrange(100, engine.target.vocab_size) for _ in range(length)], 8)
    wait_until(lambda: long.num_tokens > 0, [*running, long])
    end = long.times[0]
    for job in jobs:
        scheduler.cancel(job)
    wait_until(lambda: scheduler.num_running == 0, [])
    pauses = [pause for each in running for pause in each.pauses]
    without = sorted(after - before for before, after in pauses if begin <= before and after <= start)
    beside = sorted(after - before for before, after in pauses if start <= after and before <= end)

    def words(pauses: list[float]) -> str:
        if not pauses:
            raise SystemExit("the answers ended before the prompt was read: raise --max-new-tokens")
        return f"longest pause {1e3 * pauses[-1]:.1f} ms, median {1e3 * pauses[len(pauses) // 2]:.1f} ms"

    return f"without the prompt {words(without)}; beside it {words(beside)}; its first token {end - start:.2f} s"


def wait_until(is_so: Callable[[], bool], watched: list[Watched]) -> None:
    while not is_so():
        if failures := [each.failure for each in watched if each.failure is not None]:
            raise SystemExit(failures[0])
        threading.Event().wait(0.001)


if __name__ == "__main__":
    main()

"""How long is a GPU idle because of the host, round by round? Measured on any machine, without a GPU.

    python benchmarks/host_time.py --rows 1 4 16 64
    python benchmarks/host_time.py --rows 64 --plain --profile

The scheduler, the policy and the captured runners are the real ones, over a tiny model. CUDA graphs are replaced by a
simulated device: each replay keeps it busy for as long as an 8B model takes on an H200, events complete when it reaches
them, and its results are made up so that some drafted tokens are accepted. The clock is the thread's processor time,
without that of the simulation. Native code runs in one thread, so that all of it is counted. What launches and
transfers cost the host on a real GPU is missing; their counts are shown.

Columns are medians in milliseconds per round. `host`: from the arrival of a step's results to the launch of the next
step. `behind`: work of the host while the step runs. `idle`: time in which the device has nothing to do. `round`: the
whole round. Then come the means of the clock's phases, and of tokens and nodes per row.
"""

import argparse
import cProfile
import pstats
import statistics
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command_line
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import graft.engine
from graft import Engine, SamplingSettings
from graft.engine.jobs import Failure, Job, SchedulerSettings, Update
from graft.engine.scheduler import Scheduler
from graft.home import model_folder
from graft.model.captures import Captures, Event
from graft.model.cuda_graphs import CapturedTarget, Graphs
from graft.model.runner import TargetRunner
from graft.spec_decode.proposers.eagle3.cuda_graphs import CapturedEagle3Drafter
from graft.spec_decode.proposers.eagle3.head import Eagle3Config, Eagle3Head
from graft.tree.device import walk as walk_kernels
from graft.tree.native import native

STEP, STEP_PER_TOKEN, DRAFT, OTHER = 5.3e-3, 8e-6, 0.12e-3, 0.03e-3  # seconds on the device
SIZES = {1: 32, 4: 64, 16: 128, 64: 256, 1024: 512}  # tokens of a step with trees, by the most rows
PASSES = {1: 5, 4: 5, 16: 4, 64: 3, 1024: 3}  # draft passes, by the most rows
RIGHT = 0.72  # share of positions at which the drafter is right

_thread_time = time.thread_time  # before it is patched; of the scheduler's thread alone


class Device:
    """The simulated device and its clock."""

    def __init__(self) -> None:
        self.offset = self.busy_until = 0.0
        self.waited = self.idle = 0.0
        self.counts: Counter[str] = Counter()
        self.launched: list[tuple[float, float, float]] = []  # per step: launch time, waited and idle so far
        self.known: list[tuple[float, float]] = []  # per step: when the host knew the results, waited so far
        self.asked: list[float] = []  # per step: when the host began to wait
        self.profile, self.is_profiled = cProfile.Profile(), False  # covers the time that `host` counts

    def now(self) -> float:
        return _thread_time() + self.offset

    def replay(self, seconds: float) -> None:
        now = self.now()
        self.idle += max(now - self.busy_until, 0.0)
        self.busy_until = max(now, self.busy_until) + seconds
        self.counts["replays"] += 1

    def wait_until(self, moment: float) -> None:
        ahead = moment - self.now()
        if ahead > 0:
            self.offset += ahead
            self.waited += ahead


class Simulation:
    """Made-up results of the device: a fixed text for each request, of which the drafter knows many tokens."""

    def __init__(self, story: list[int], vocab_size: int) -> None:
        self.story = np.array(story)
        self.vocab_size = vocab_size
        self.scheduler: Scheduler | None = None

    def truth(self, numbers: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.story[(numbers * 7919 + positions) % len(self.story)]

    @property
    def sequences(self) -> list[Any]:
        return self.scheduler._sequences if self.scheduler is not None else []

    def numbers(self, num_rows: int) -> np.ndarray:
        own = [sequence.number for sequence in self.sequences]
        return np.array((own + [0] * num_rows)[:num_rows])

    def step(self, buffers: Any, size: int) -> None:
        depths, rows = (column[:size].numpy() for column in (buffers.step.depths, buffers.step.rows))
        lengths = buffers.by_row[2].numpy()
        best = self.truth(self.numbers(int(rows.max()) + 1)[rows], lengths[rows] + depths + 1)
        buffers.step.best[:size] = torch.from_numpy(best)
        around = (best[:, None] + 17 * np.arange(buffers.best_tokens.shape[1])) % self.vocab_size
        buffers.best_tokens[:size] = torch.from_numpy(around)
        buffers.best_logits[:size] = torch.linspace(4, -4, around.shape[1])

    def level(self, number: int, level: Any) -> None:
        num_rows, count = level.tokens.shape
        if len(self.sequences) != num_rows:
            return
        positions = np.array([len(sequence.ids) for sequence in self.sequences]) + number
        numbers = self.numbers(num_rows)
        is_right = (numbers * 31 + positions * 101) % 97 < RIGHT * 97
        right = self.truth(numbers, positions)
        places = np.arange(count)
        tokens = (right[:, None] + 3 + 29 * places) % self.vocab_size
        tokens[:, 0] = np.where(is_right, right, tokens[:, 0])
        q = np.where(is_right, 0.8, 0.35)[:, None] * 0.55**places
        level.tokens[:] = torch.from_numpy(tokens)
        level.parents[:] = 0 if number == 0 else torch.from_numpy(self.first + places // max(count // 8, 1))
        level.probabilities[:] = torch.from_numpy(q)
        self.first = 1 if number == 0 else self.first + self.count
        self.count = count


def patch(device: Device, simulation: Simulation) -> None:
    """Replaces everything that a GPU does by the simulated device."""

    def uncounted(function: Any, *args: Any) -> None:
        start = _thread_time()
        function(*args)
        device.offset -= _thread_time() - start

    def captured(self: Captures, key: tuple[Any, ...], run: Any, moving: Any = ()) -> Any:
        if key in self.steps:
            return self.steps[key]
        self.num_captured += 1
        if isinstance(self, Graphs) and key[0] == "step":
            buffers = next(known for known in self.buffers if id(known) == key[1])

            def replay() -> None:
                device.launched.append((device.now(), device.waited, device.idle))
                if device.is_profiled:
                    device.profile.disable()
                device.replay(STEP + STEP_PER_TOKEN * key[2])
                uncounted(simulation.step, buffers, key[2])

        else:
            seconds = DRAFT if {"expand", "root", "ahead", "read"} & set(key) else OTHER
            replay = partial(device.replay, seconds)

        self.steps[key] = replay
        return replay

    def record(self: Event) -> None:
        device.counts["events"] += 1
        self.moment = device.busy_until  # type: ignore[attr-defined]

    def wait(self: Event) -> None:
        device.wait_until(getattr(self, "moment", 0.0))

    def wait_for(self: TargetRunner, verified: Any) -> None:
        device.asked.append(device.now())
        verified.step.ready.wait()
        device.known.append((device.now(), device.waited))
        if device.is_profiled:
            device.profile.enable()

    sent = CapturedEagle3Drafter._sent

    def simulated_level(self: CapturedEagle3Drafter, state: Any, number: int) -> Any:
        level = sent(self, state, number)
        uncounted(simulation.level, number, level)
        return level

    copy = torch.Tensor.copy_

    def copy_(self: Any, source: Any, non_blocking: bool = False) -> Any:
        device.counts["copies"] += non_blocking
        return copy(self, source, non_blocking)

    time.perf_counter = device.now  # type: ignore[assignment]
    Captures.captured = captured  # type: ignore[method-assign]
    Event.record, Event.wait = record, wait  # type: ignore[method-assign]
    TargetRunner.wait_for = wait_for  # type: ignore[method-assign]
    TargetRunner.synchronize = lambda self: device.wait_until(device.busy_until)  # type: ignore[method-assign]
    CapturedEagle3Drafter._sent = simulated_level  # type: ignore[method-assign]
    walk_kernels.follow = lambda *args: device.replay(OTHER)
    torch.Tensor.copy_ = copy_  # type: ignore[method-assign]


def make_engine(tokenizer: Any, draft: bool) -> Engine:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=49152, num_hidden_layers=8, max_position_embeddings=8192)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    head = Eagle3Head(Eagle3Config.for_target(config, draft_vocab_size=4096))
    head.set_vocabulary(torch.arange(4096))
    head.target_embedding = model.get_input_embeddings().weight.detach()
    graft.engine.engine.target_for = CapturedTarget  # type: ignore[attr-defined]
    return Engine(model, tokenizer, drafter=CapturedEagle3Drafter(head) if draft else None)


def fix_decisions(budget: Any, num_rows: int, plain: bool) -> None:
    """Makes all rounds alike, so that their times can be compared: decisions are computed, but not followed."""
    size = next(size for limit, size in SIZES.items() if num_rows <= limit)
    num_passes = next(count for limit, count in PASSES.items() if num_rows <= limit)

    def instead(decide: Any, fixed: Any) -> Any:
        return lambda *args: (decide(*args), fixed(*args))[1]

    budget.best = instead(budget.best, lambda plans: min(plans, key=lambda plan: abs(plan.num_nodes + num_rows - size)))
    budget.num_passes = instead(budget.num_passes, lambda _, num_done, reach: max(num_passes - num_done, 0))
    budget.may_propose = instead(budget.may_propose, lambda _: not plain)


def measure(num_rows: int, given: argparse.Namespace, tokenizer: Any, device: Device, simulation: Simulation) -> None:
    engine = make_engine(tokenizer, draft=not given.off)
    fix_decisions(engine.policy.budget, num_rows, given.plain)  # type: ignore[attr-defined]
    settings = SchedulerSettings(max_rows=num_rows, max_waiting=2 * num_rows + 8, max_cache_tokens=num_rows * 5120)
    scheduler = simulation.scheduler = Scheduler(engine, settings)
    scheduler.is_ready.wait()
    for moments in (device.launched, device.known, device.asked):
        moments.clear()
    done, all_jobs = threading.Event(), []
    marks: list[dict[str, Any]] = []  # the counters at the first and at the last round that count
    first_round: list[int] = []  # number of launches when the batch was full and the warm-up rounds were over

    def submit() -> None:
        sampling = SamplingSettings(max_new_tokens=given.answer, ignore_eos=True, seed=0)
        number = engine.new_sequences([1], sampling)[0].number
        prompt = simulation.truth(np.array([number]), np.arange(200)).tolist()
        sequence = engine.new_sequences(prompt, sampling)[0]
        sequence.number, sequence.speculates = number, not given.off
        all_jobs.append(Job([sequence], listen))
        scheduler.submit(all_jobs[-1])

    def listen(news: Update | Failure) -> None:
        if isinstance(news, Failure):
            print(news)
            done.set()
        elif news.finish_reason is not None and not done.is_set():
            submit()

    step = scheduler._step

    def watched_step() -> None:
        step()
        if not first_round and len(scheduler._sequences) == num_rows:
            first_round.append(len(device.launched) + given.warm_up)
        if first_round and not marks and len(device.launched) >= first_round[0]:
            marks.append(counters())
            device.is_profiled = given.profile
        if marks and len(device.launched) >= marks[0]["launched"] + given.rounds and not done.is_set():
            device.profile.disable()
            device.is_profiled = False
            marks.append(counters())
            done.set()

    def counters() -> dict[str, Any]:
        stats = [job.sequences[0].stats for job in all_jobs]
        names = ("rounds", "tokens", "nodes", "draft_passes")
        totals = [sum(getattr(own, name) for own in stats) for name in names]
        now = {"launched": len(device.launched), "time": device.now(), "stats": totals}
        return now | {"phases": dict(scheduler._clock.seconds), "counts": device.counts.copy()}

    scheduler._step = watched_step  # type: ignore[method-assign]
    for _ in range(num_rows):
        submit()
    done.wait()
    for job in all_jobs:
        scheduler.cancel(job)
    scheduler.close()
    print_rounds(num_rows, device, *marks)
    if given.profile:
        pstats.Stats(device.profile).sort_stats("tottime").print_stats(60)


def print_rounds(num_rows: int, device: Device, start: dict[str, Any], end: dict[str, Any]) -> None:
    launched, known, asked = device.launched, device.known, device.asked
    rounds = range(start["launched"], end["launched"] - 1)
    host = [(launched[i + 1][0] - known[i][0]) - (launched[i + 1][1] - known[i][1]) for i in rounds]
    behind = [asked[i] - launched[i][0] for i in rounds]
    idle = [launched[i + 1][2] - launched[i][2] for i in rounds]
    whole = [launched[i + 1][0] - launched[i][0] for i in rounds]
    medians = "".join(f"{1e3 * statistics.median(values):9.3f}" for values in (host, behind, idle, whole))
    num = end["launched"] - start["launched"]
    phases = {name: 1e3 * (after - start["phases"].get(name, 0.0)) / num for name, after in end["phases"].items()}
    phases["outside"] = 1e3 * (end["time"] - start["time"]) / num - sum(phases.values())
    counts = {name: (after - start["counts"][name]) / num for name, after in end["counts"].items()}
    row_rounds, tokens, nodes, passes = (b - a for a, b in zip(start["stats"], end["stats"], strict=True))
    by_phase = ", ".join(f"{name} {value:.3f}" for name, value in phases.items())
    by_count = ", ".join(f"{value:.1f} {name}" for name, value in sorted(counts.items()))
    per_row = f"{tokens / row_rounds:.2f} tokens, {nodes / row_rounds:.1f} nodes, {passes / row_rounds:.1f} passes"
    print(f"{num_rows:4d} rows{medians}   {by_phase} | {per_row} | {by_count}", flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="requests decoded together")
    parser.add_argument("--rounds", type=int, default=200, help="rounds that count")
    parser.add_argument("--warm-up", type=int, default=60, help="rounds before them")
    parser.add_argument("--answer", type=int, default=3000, help="tokens of an answer; a new request follows it")
    parser.add_argument("--plain", action="store_true", help="the policy may not propose")
    parser.add_argument("--off", action="store_true", help="no speculation at all")
    parser.add_argument("--profile", action="store_true", help="show the functions that take longest")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2-135m"))
    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    story = tokenizer.encode("\n".join(page.read_text() for page in pages), verbose=False)
    print(f"{'':9s}{'host':>9s}{'behind':>9s}{'idle':>9s}{'round':>9s}   phases")
    native().graft_use_threads(1)
    device, simulation = Device(), Simulation(story, 49152)
    patch(device, simulation)
    for num_rows in given.rows:
        measure(num_rows, given, tokenizer, device, simulation)


if __name__ == "__main__":
    main()

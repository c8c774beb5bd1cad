"""How long is a GPU idle because of the host, round by round? Measured on any machine, without a GPU.

    python benchmarks/host_time.py --rows 1 4 16 64
    python benchmarks/host_time.py --rows 64 --plain --profile

The scheduler, the policy and the captured runners are the real ones, over a tiny model, but nothing that a GPU would
replay is run. A simulated device takes its place: every replay keeps it busy for as long as an 8B model takes on an
H200, events happen when it has come so far, and its results are made up so that some drafted tokens are accepted. The
clock is the thread's processor time, without what the simulation takes. Native code has one thread, so that it is
counted whole. What launches and transfers cost the host on a real GPU is missing; their counts are shown.

Columns, milliseconds a round (medians): `host`, from the moment a step's results are there to the launch of the next
step; `behind`, what the host does while the step runs; `idle`, how long the device has nothing to do; `round`. Then the
means of the clock's phases, and of tokens and nodes by row.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import threading
import time
from collections import Counter
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
from graft.tree.device import walk as walk_kernels
from graft.model.runner import TargetRunner
from graft.spec_decode.proposers.eagle3.cuda_graphs import CapturedEagle3Drafter
from graft.spec_decode.proposers.eagle3.head import Eagle3Config, Eagle3Head
from graft.tree.native import native

STEP, STEP_OF_TOKEN, DRAFT, OTHER = 5.3e-3, 8e-6, 0.12e-3, 0.03e-3  # seconds on the device
SIZES = {1: 32, 4: 64, 16: 128, 64: 256, 1024: 512}  # tokens of a step with trees, by rows up to which
PASSES = {1: 5, 4: 5, 16: 4, 64: 3, 1024: 3}
RIGHT = 0.72  # share of positions at which the drafter is right

_real = time.thread_time  # of the scheduler's thread alone: whatever else the machine does counts little


class Device:
    """The device that is played, and the clock that goes with it."""

    def __init__(self) -> None:
        self.offset = self.busy_until = 0.0
        self.waited = self.idle = 0.0
        self.counts: Counter[str] = Counter()
        self.launched: list[tuple[float, float, float]] = []  # of steps: when, waited and idle so far
        self.judged: list[tuple[float, float]] = []  # of steps: when the host knew the results, waited so far
        self.asked: list[float] = []  # of steps: when the host began to wait
        self.profile, self.is_profiled = cProfile.Profile(), False  # of what `host` is

    def now(self) -> float:
        return _real() + self.offset

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


class Player:
    """What the device would have computed: the texts' true tokens, of which the drafter knows many."""

    def __init__(self, story: list[int], vocab_size: int) -> None:
        self.story = np.array(story)
        self.vocab_size = vocab_size
        self.scheduler: Scheduler | None = None

    def truth(self, numbers: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.story[(numbers * 7919 + positions) % len(self.story)]

    def numbers(self, num_rows: int) -> np.ndarray:
        sequences = self.scheduler._sequences if self.scheduler is not None else []
        own = [sequence.number for sequence in sequences]
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
        sequences = self.scheduler._sequences if self.scheduler is not None else []
        if len(sequences) != num_rows:
            return
        positions = np.array([len(sequence.ids) for sequence in sequences]) + number
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


def play(device: Device, player: Player) -> None:
    """Puts the device in the place of what a GPU does."""

    def unseen(function: Any, *args: Any) -> Any:
        start = _real()
        try:
            return function(*args)
        finally:
            device.offset -= _real() - start

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
                device.replay(STEP + STEP_OF_TOKEN * key[2])
                unseen(player.step, buffers, key[2])

        else:
            seconds = DRAFT if "expand" in key or "root" in key or "ahead" in key or "read" in key else OTHER

            def replay() -> None:
                device.replay(seconds)

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
        device.judged.append((device.now(), device.waited))
        if device.is_profiled:
            device.profile.enable()

    sent = CapturedEagle3Drafter._sent

    def played_level(self: CapturedEagle3Drafter, state: Any, number: int) -> Any:
        level = sent(self, state, number)
        unseen(player.level, number, level)
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
    CapturedEagle3Drafter._sent = played_level  # type: ignore[method-assign]
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


def decide(budget: Any, num_rows: int, plain: bool) -> None:
    """Every round does the same, so that what it takes can be compared: decisions are made, but not followed."""
    size = next(size for limit, size in SIZES.items() if num_rows <= limit)
    num_passes = next(count for limit, count in PASSES.items() if num_rows <= limit)
    best, more, may_propose = budget.best, budget.num_passes, budget.may_propose

    def chosen(plans: Any) -> Any:
        best(plans)
        return min(plans, key=lambda plan: abs(plan.num_nodes + num_rows - size))

    def further(num_rows: int, num_done: int, reach: float) -> int:
        more(num_rows, num_done, reach)
        return max(num_passes - num_done, 0)

    def looks(num_rows: int) -> bool:
        may_propose(num_rows)
        return not plain

    budget.best, budget.num_passes, budget.may_propose = chosen, further, looks


def measure(num_rows: int, given: argparse.Namespace, tokenizer: Any, device: Device, player: Player) -> None:
    engine = make_engine(tokenizer, draft=not given.off)
    decide(engine.policy.budget, num_rows, given.plain)  # type: ignore[attr-defined]
    settings = SchedulerSettings(max_rows=num_rows, max_waiting=2 * num_rows + 8, max_cache_tokens=num_rows * 5120)
    scheduler = Scheduler(engine, settings)
    player.scheduler = scheduler
    scheduler.is_ready.wait()
    for moments in (device.launched, device.judged, device.asked):
        moments.clear()
    done, all_jobs = threading.Event(), []
    begun: dict[str, Any] = {}

    def submit() -> None:
        sampling = SamplingSettings(max_new_tokens=given.answer, ignore_eos=True, seed=0)
        sequence = engine.new_sequences([1], sampling)[0]
        prompt = player.truth(np.array([sequence.number]), np.arange(200)).tolist()
        number = sequence.number
        sequence = engine.new_sequences(prompt, sampling)[0]
        sequence.number, sequence.speculates = number, not given.off
        job = Job([sequence], hear)
        all_jobs.append(job)
        scheduler.submit(job)

    def hear(news: Update | Failure) -> None:
        if isinstance(news, Failure):
            print(news)
            done.set()
        elif news.finish_reason is not None and not done.is_set():
            submit()

    step = scheduler._step

    def counted() -> None:
        step()
        count = len(scheduler._sequences)
        if not begun and count == num_rows:
            begun["at"] = len(device.launched) + given.warm_up
        if begun and len(device.launched) >= begun["at"] and "start" not in begun:
            begun.update(
                start=len(device.launched), seconds=dict(scheduler._clock.seconds), counts=device.counts.copy()
            )
            begun.update(stats=stats(), time=device.now())
            device.is_profiled = given.profile
        if "start" in begun and len(device.launched) >= begun["start"] + given.rounds and not done.is_set():
            device.profile.disable()
            device.is_profiled = False
            begun.update(after=dict(scheduler._clock.seconds), all=device.counts.copy(), ended=device.now())
            begun.update(last=stats(), end=len(device.launched))
            done.set()

    def stats() -> tuple[int, int, int, int]:
        each = [job.sequences[0].stats for job in all_jobs]
        return (
            sum(s.rounds for s in each),
            sum(s.tokens for s in each),
            sum(s.nodes for s in each),
            sum(s.draft_passes for s in each),
        )

    scheduler._step = counted  # type: ignore[method-assign]
    for _ in range(num_rows):
        submit()
    done.wait()
    for job in all_jobs:
        scheduler.cancel(job)
    scheduler.close()
    first, last = begun["start"], begun["end"]
    launched, judged, asked = device.launched, device.judged, device.asked
    rounds = range(first, last - 1)
    host = [(launched[i + 1][0] - judged[i][0]) - (launched[i + 1][1] - judged[i][1]) for i in rounds]
    behind = [asked[i] - launched[i][0] for i in rounds]
    idle = [launched[i + 1][2] - launched[i][2] for i in rounds]
    whole = [launched[i + 1][0] - launched[i][0] for i in rounds]
    medians = [1e3 * statistics.median(values) for values in (host, behind, idle, whole)]
    num = last - first
    phases = {name: 1e3 * (begun["after"][name] - begun["seconds"].get(name, 0.0)) / num for name in begun["after"]}
    outside = 1e3 * (begun["ended"] - begun["time"]) / num - sum(phases.values())
    counts = {name: (begun["all"][name] - begun["counts"][name]) / num for name in begun["all"]}
    row_rounds, tokens, nodes, passes = (b - a for a, b in zip(begun["stats"], begun["last"], strict=True))
    print(f"{num_rows:4d} rows" + "".join(f"{value:9.3f}" for value in medians), end="   ")
    print(
        ", ".join(f"{name} {value:.3f}" for name, value in sorted(phases.items())), f"outside {outside:.3f}", end=" | "
    )
    print(
        f"{tokens / row_rounds:.2f} tokens, {nodes / row_rounds:.1f} nodes, {passes / row_rounds:.1f} passes", end=" "
    )
    print("| " + ", ".join(f"{value:.1f} {name}" for name, value in sorted(counts.items())), flush=True)
    if given.profile:
        pstats.Stats(device.profile).sort_stats(given.sort).print_stats(given.top)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="requests decoded together")
    parser.add_argument("--rounds", type=int, default=200, help="that count")
    parser.add_argument("--warm-up", type=int, default=60, help="rounds before them")
    parser.add_argument("--answer", type=int, default=3000, help="tokens of an answer; others follow")
    parser.add_argument("--plain", action="store_true", help="the policy never looks for trees")
    parser.add_argument("--off", action="store_true", help="no speculation at all")
    parser.add_argument("--profile", action="store_true", help="show the functions that take longest")
    parser.add_argument("--sort", default="tottime")
    parser.add_argument("--top", type=int, default=60)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2-135m"))
    docs = Path(__file__).parent.parent / "docs"
    story = tokenizer.encode("\n".join(path.read_text() for path in sorted(docs.glob("*.md"))), verbose=False)
    print(f"{'':9s}{'host':>9s}{'behind':>9s}{'idle':>9s}{'round':>9s}   phases")
    native().graft_use_threads(1)
    device, player = Device(), Player(story, 49152)
    play(device, player)
    for num_rows in given.rows:
        measure(num_rows, given, tokenizer, device, player)


if __name__ == "__main__":
    main()

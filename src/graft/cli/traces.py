"""`graft bench --record` and `--replay`: record answers and drafts once, then run policies on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graft.cli.options import Given
from graft.cli.results_table import run_and_show
from graft.cli.terminal import ProgressBars, notes

if TYPE_CHECKING:
    from graft.bench.runner import BenchSettings
    from graft.bench.tasks import Question
    from graft.engine import Engine
    from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
    from graft.spec_decode.proposers.mtp.drafter import MtpDrafter
    from graft.spec_decode.proposers.small_model import SmallModelDrafter


def record_traces(
    engine: Engine,
    drafter: Eagle3Drafter | MtpDrafter | SmallModelDrafter,
    tasks: dict[str, list[Question]],
    folder: Path,
    settings: BenchSettings,
    model: str | None,
    draft: str | None,
) -> None:
    """Record one trace file per task."""
    from graft.bench.replay import Recorder, record, save_traces
    from graft.engine import Engine
    from graft.progress import Report

    target = engine.target
    recording = Engine(target.model, engine.tokenizer, policy=Recorder(drafter), drafter=drafter)
    dtype = str(target.model.dtype).removeprefix("torch.")
    with ProgressBars() as progress:
        for task, questions in tasks.items():
            traces = []
            for start in range(0, len(questions), settings.rows):
                group = [question.ids for question in questions[start : start + settings.rows]]
                traces += record(recording, group, settings.max_new_tokens)
                progress.show(Report(task, len(traces), len(questions), "recorded"))
            path = folder / f"{task}.safetensors"
            facts = {"model": model, "draft": draft, "dtype": dtype, "max_new_tokens": settings.max_new_tokens}
            save_traces(path, traces, drafter.settings, target.vocab_size, task, **facts)
    notes().print(f"Traces are in {folder}: graft bench --replay {folder}", markup=False, soft_wrap=True)


def replay_traces(
    paths: list[Path], names: list[str], states: list[str], out: Path, limit: int | None, heads: Given, learning: Given
) -> None:
    """Run the benchmark on recorded answers, with the policies but without the model."""
    import torch

    from graft.bench.replayed import ReplayMethod, read_recorded
    from graft.bench.results import environment
    from graft.bench.runner import BenchSettings
    from graft.spec_decode.policy_settings import USUAL_BUDGET, USUAL_PASS_COST

    recorded = read_recorded(paths, limit)
    warmup: Path | None = learning.get("warmup")
    lessons: list[Question] = []
    if warmup is not None:
        lesson = read_recorded([warmup], learning.get("warmup_limit"))
        lessons = [question for questions in lesson.tasks.values() for question in questions]
        recorded = recorded.and_traces_of(lesson)
    budget, pass_cost = heads.get("budget", USUAL_BUDGET), heads.get("pass_cost", USUAL_PASS_COST)
    compared = [ReplayMethod(name, recorded, budget, pass_cost) for name in names]
    facts = {
        "replay": True,
        **{fact: recorded.about.get(fact) for fact in ("model", "draft", "dtype", "depth", "topk", "max_new_tokens")},
        "budget": budget,
        "pass_cost": pass_cost,
        "warmup": warmup.stem if warmup is not None else None,
    }
    trial, machine = next(iter(recorded.tasks.values()))[0], environment(torch.device("cpu"))
    run_and_show(compared, states, recorded.tasks, lessons, trial, BenchSettings(), [], facts, machine, out)

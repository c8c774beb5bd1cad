"""A benchmark in the terminal: its progress, the result files and the final table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.cli.terminal import ProgressBars, aside, notes

if TYPE_CHECKING:
    from rich.table import Table

    from graft.bench.methods import Method
    from graft.bench.results import Results
    from graft.bench.settings import BenchSettings
    from graft.bench.tasks import Question
    from graft.engine import Engine

_WIDE = 132  # terminal columns needed for a table with confidence intervals


def run_and_show(
    engine: Engine,
    compared: Sequence[Method],
    states: list[str],
    tasks: dict[str, list[Question]],
    lessons: list[Question],
    trial: Question,
    settings: BenchSettings,
    facts: dict[str, Any],
    out: Path,
) -> None:
    """Run the methods; show and write the results after every task."""
    from graft.bench.report import html, in_short, label
    from graft.bench.results import Summary, environment
    from graft.bench.runner import run, variants
    from graft.progress import Report

    facts |= {
        "methods": [method.name for method in compared],
        "states": states,
        "tasks": {task: len(questions) for task, questions in tasks.items()},
        "warmup_prompts": len(lessons),
    }
    machine, eos_token_ids = environment(engine.target.device), engine.eos_token_ids
    summary = Summary(settings.sampling(eos_token_ids), settings.rows)
    aside("Warming up ...")
    ready = variants(compared, states, lessons, trial, settings, eos_token_ids)
    results: Results | None = None
    try:
        with ProgressBars() as bars:

            def progress(task: str, done: int, total: int) -> None:
                bars.show(Report(task, done, total, "prompts"))

            for task in run(ready, tasks, settings, eos_token_ids, progress):
                summary.add(task)
                results = summary.results(facts, machine)
                results.write(out)
                (out / "report.html").write_text(html(results), encoding="utf-8")
                name = results.runs[-1].task
                words = ", ".join(f"{label(each)} {in_short(each)}" for each in results.runs if each.task == name)
                bars.say(f"{name}: {words}")
    except KeyboardInterrupt:
        if results is not None:
            _print_results(results)
            notes().print(f"Stopped. The tasks that were done are in {out}, and report.html says so", markup=False)
        raise
    assert results is not None
    _print_results(results)
    notes().print(f"The results are in {out}; open report.html to look at them", markup=False)


def _print_results(results: Results) -> None:
    from rich.console import Console

    from graft.bench.report import notes_on

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    console.print(_table(results, console.width))
    for note in notes_on(results):
        console.print(note)
    if different := [run for run in results.averages if run.differ]:
        names = ", ".join(f"{run.method} {run.differ}" for run in different)
        console.print(f"Texts that differ from plain decoding: {names}; see graft check", style="bold red")


def _table(results: Results, width: int) -> Table:
    from rich.table import Table

    from graft.bench.report import COLUMNS, label, titled

    is_widened = bool(results.settings.get("as_cost_of"))
    table = Table("task", "method", title=titled("Graft benchmark", results.settings) if is_widened else None)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    tasks = list(dict.fromkeys(run.task for run in results.runs))
    for task, runs in [(t, [r for r in results.runs if r.task == t]) for t in tasks] + [("average", results.averages)]:
        table.add_section()
        for place, run in enumerate(runs):
            cells = [cell(run) for cell in COLUMNS.values()]
            if width < _WIDE:
                cells = [cell.partition(" [")[0] for cell in cells]
            style = "red" if run.differ else None
            table.add_row(task if place == 0 else "", label(run), *cells, style=style)
    return table

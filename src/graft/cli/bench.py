"""`graft bench`: ways of decoding side by side, on prompts of one's own or on those that come with the package."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.options import MODEL, Given, Group, option, takes
from graft.cli.terminal import load_engine, notes
from graft.models.registry import DEFAULT_MODEL
from graft.settings import require

if TYPE_CHECKING:
    from rich.table import Table

    from graft.bench.results import Results, Run
    from graft.bench.tasks import Question
    from graft.engine import Engine

_decoding = functools.partial(option, rich_help_panel="Decoding")
_learning = functools.partial(option, rich_help_panel="What methods have learned")
_model = functools.partial(option, rich_help_panel="Model")

DECODING: Group = {
    "max_new_tokens": _decoding(int, "--max-new-tokens", "Longest answer.", "128"),
    "temperature": _decoding(float, "--temperature", "Higher is more varied; 0 is greedy.", "0"),
    "seed": _decoding(int, "--seed", "The same seed gives the same text.", "0"),
    "repeat": _decoding(int, "--repeat", "Times each method answers each prompt.", "1"),
    "rows": _decoding(int, "--rows", "Prompts of a task that decode together; times are then of the batch.", "1"),
}
HEADS: Group = {
    "draft": _model(str, "--draft", "An EAGLE-3 head, or none.", "the packaged one of the model", metavar="HEAD"),
    "budget": _model(int, "--budget", "Nodes a round verifies, for all methods.", "each method's own"),
    "assistant": _model(str, "--assistant", "A small model with the same tokenizer, for hf-assisted.", metavar="MODEL"),
}
LEARNING: Group = {
    "warmup": _learning(Path, "--warmup", "Prompts to learn from before the run.", metavar="FILE"),
    "warmup_limit": _learning(int, "--warmup-limit", "Take this many of them.", "all"),
    "state": _learning(
        list[str], "--state", "cold, warm or persistent; repeatable.", "warm with --warmup, else cold", metavar="STATE"
    ),
}
TRIAL = "Count from one to ten."
_WIDE = 132  # columns a table with intervals needs


@takes(loading=MODEL, heads=HEADS, learning=LEARNING, decoding=DECODING)
def bench(
    out: Annotated[Path, typer.Option(help="Folder for results.json, results.csv and report.html.")],
    data: Annotated[list[Path] | None, typer.Option(help="Prompts; a file is a task; may be repeated.")] = None,
    methods: Annotated[
        str, typer.Option(help="Policies, and hf, hf-lookup, hf-assisted; comma between.")
    ] = "off,graft",
    limit: Annotated[int | None, typer.Option(help="Take this many prompts of each task.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Cut longer prompts in the middle.")] = None,
    *,
    loading: Given,
    heads: Given,
    learning: Given,
    decoding: Given,
) -> None:
    """Decode the same prompts with several methods in turn, and compare speed and accepted lengths.

    Without --data, the six tasks of ten prompts that come with the package are taken.

    cold: every prompt starts with nothing learned. warm: with what --warmup taught. persistent: learning goes on.

    [dim]Example:[/] graft bench --methods off,graft,hf --limit 3 --out results
    """
    from graft.bench.lineup import check_names, make_methods
    from graft.bench.results import Summary, environment
    from graft.bench.runner import BenchSettings, check_states, contestants, run
    from graft.bench.tasks import Task, built_in_tasks, questions, read_tasks
    from graft.data import Prompt
    from graft.loading import load_drafter

    # What is wrong with the options is said before anybody waits for a model.
    settings = BenchSettings.of(decoding)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    warmup: Path | None = learning.get("warmup")
    states = learning.get("state", ["cold" if warmup is None else "warm"])
    check_names(names)
    check_states(states, warmup is not None)
    require(warmup is not None or "warmup_limit" not in learning, "--warmup-limit is of --warmup FILE: name the file")
    require(max_prompt_tokens is None or max_prompt_tokens >= 2, "--max-prompt-tokens must be at least 2")
    read = read_tasks(data, limit) if data else built_in_tasks(limit)
    lesson = read_tasks([warmup], learning.get("warmup_limit"))[0] if warmup is not None else Task("warmup", [])
    _check_folder(out)

    engine = load_engine({**loading, "policy": "off", "draft": None})
    model_name = loading.get("model", DEFAULT_MODEL)
    head_name = _head_name(heads.get("draft", "auto"), model_name)
    drafter = load_drafter(head_name, engine.target.model) if head_name is not None else None
    assistant = _assistant(heads.get("assistant"), engine)
    lineup = make_methods(names, engine.target.model, drafter, heads.get("budget"), assistant, settings.rows)

    def asked(task: Task) -> list[Question]:
        return questions(task, engine, settings.max_new_tokens, max_prompt_tokens)

    tasks = {task.name: asked(task) for task in read}
    lessons = asked(lesson)
    trial = asked(Task("trial", [Prompt("trial", TRIAL)]))[0]
    facts = {
        "model": _public(model_name),
        "draft": _public(head_name) if head_name is not None else None,
        "dtype": str(engine.target.model.dtype).removeprefix("torch."),
        "methods": names,
        "states": states,
        "tasks": {task: len(prompts) for task, prompts in tasks.items()},
        **vars(settings),
        "budget": heads.get("budget"),
        "assistant": _public(heads["assistant"]) if "assistant" in heads else None,
        "warmup": warmup.stem if warmup is not None else None,
        "warmup_prompts": len(lessons),
        "max_prompt_tokens": max_prompt_tokens,
    }
    machine = environment(engine.target.device)
    summary = Summary(settings.sampling(engine.eos_token_ids), settings.rows)
    with _Display() as display:
        display.say("warming up")
        ready = contestants(lineup, states, lessons, trial, settings, engine.eos_token_ids)
        for task in run(ready, tasks, settings, engine.eos_token_ids, display.progress):
            summary.add(task)
            results = summary.results(facts, machine)
            _write(results, out)
            display.show(results)
    _print(results)
    notes().print(f"Results, and report.html to look at, are in {out}", markup=False)


def _head_name(draft: str, model_name: str) -> str | None:
    """Unlike elsewhere the packaged head is taken on a CPU too: most methods cannot do without one."""
    from graft.loading import packaged_head

    if draft == "auto":
        return model_name if packaged_head(model_name) is not None else None
    return draft if draft != "none" else None


def _assistant(name: str | None, engine: Engine) -> Any | None:
    if name is None:
        return None
    from graft.models.load import load_model

    return load_model(name, device=str(engine.target.device), dtype=engine.target.model.dtype)[0]


def _public(name: str) -> str:
    """A model's name without the path to it: results are for showing round."""
    return Path(name).name if Path(name).is_dir() else name


def _check_folder(out: Path) -> None:
    """Better now than after an hour."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        require(False, f"cannot write to {out}: {error.strerror}")


def _write(results: Results, out: Path) -> None:
    from graft.bench.report import html

    results.write(out)
    (out / "report.html").write_text(html(results), encoding="utf-8")


class _Display:
    """On a terminal a table that grows with every task, and what is being done; in a pipe a line a task."""

    def __init__(self) -> None:
        from rich.live import Live

        self._console = notes()
        self._live = Live(console=self._console, transient=True) if self._console.is_terminal else None
        self._table: Table | str = ""
        self._doing = ""

    def __enter__(self) -> _Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, doing: str) -> None:
        self._doing = doing
        self._refresh()

    def progress(self, task: str, done: int, total: int) -> None:
        self.say(f"{task}: {done} of {total} prompts")

    def show(self, results: Results) -> None:
        self._table = _table(results, self._console.width)
        self._refresh()
        if self._live is None:
            runs = [run for run in results.runs if run.task == results.runs[-1].task]
            self._console.print(f"{runs[0].task}: {', '.join(map(_in_short, runs))}", markup=False, soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is not None:
            from rich.console import Group as Lines
            from rich.text import Text

            self._live.update(Lines(self._table, Text(self._doing, style="dim")), refresh=True)


def _in_short(run: Run) -> str:
    from graft.bench.report import label

    return f"{label(run)} {run.tokens_per_second:.1f} tokens/s, accepted {run.mean_accepted:.2f}"


def _print(results: Results) -> None:
    from rich.console import Console

    from graft.bench.report import batch_note

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    console.print(_table(results, console.width))
    if note := batch_note(results.settings):
        console.print(note)
    if different := [run for run in results.averages if run.differ]:
        names = ", ".join(f"{run.method} {run.differ}" for run in different)
        console.print(f"Texts that differ from plain decoding: {names}; see graft check", style="bold red")


def _table(results: Results, width: int) -> Table:
    from rich.table import Table

    from graft.bench.report import COLUMNS, label

    table = Table("task", "method")
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

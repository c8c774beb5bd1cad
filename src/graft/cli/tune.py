"""`graft tune`: learns a profile of a model, a head and this machine from warm-up prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graft.cli.options import LOADING, MODEL, Given, Group, takes
from graft.cli.terminal import ProgressBars, checked_folder, load_engine, notes
from graft.hub.registry import DEFAULT_MODEL
from graft.settings import require

TUNING: Group = MODEL | {"draft": LOADING["draft"]}


@takes(loading=TUNING)
def tune(
    prompts: Annotated[list[Path], typer.Option(help="Prompts, one JSON object a line; may be repeated.")],
    limit: Annotated[int | None, typer.Option(help="Take this many prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 64,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Cut longer prompts in the middle.")] = None,
    portable: Annotated[bool, typer.Option("--portable", help="For any machine: small, and without times.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The profile's file. [dim]\\[default: where graft looks for it][/]")
    ] = None,
    *,
    loading: Given,
) -> None:
    """Learn from prompts like your own, measure this machine, and save it as a profile that is used from then on.

    The profile is of one model, drafter and machine; graft generate --profile none goes without it. With a fifth of the
    prompts the drafter is measured: --draft auto takes the fastest from then on, and graft drafters lists them.

    [dim]Example:[/] graft tune --prompts prompts.jsonl --limit 20
    """
    from graft.bench.tasks import questions, read_tasks
    from graft.hub.drafters import NAMED
    from graft.loading import load, packaged_head
    from graft.tuning.drafters import full_name, measure, remember, split_prompts
    from graft.tuning.profile import profile_path
    from graft.tuning.tuning import tune as learn

    require(max_new_tokens >= 1, f"--max-new-tokens must be at least 1, not {max_new_tokens}")
    require(max_prompt_tokens is None or max_prompt_tokens >= 2, "--max-prompt-tokens must be at least 2")
    if out is not None:
        require(not out.is_dir(), f"cannot write {out}: it is a folder, and a profile is a file")
        checked_folder(out.parent)
    tasks = read_tasks(prompts, limit)
    model, draft = loading.get("model", DEFAULT_MODEL), loading.get("draft", "auto")
    if draft == "auto":  # which is not chosen by what is to be measured here
        draft = model if packaged_head(model) is not None else "none"
    choose = NAMED[draft].choose if draft in NAMED else None  # by the prompts, which need the model's tokenizer
    engine = load_engine(loading | {"profile": "none", "draft": draft if choose is None else "none"})
    asked = [question.ids for task in tasks for question in questions(task, engine, max_new_tokens, max_prompt_tokens)]
    lessons, trials = (asked, []) if portable else split_prompts(asked)
    if choose is not None:
        draft = choose(engine.target.model, lessons)
        notes().print(f"{draft} is the best of those tried", markup=False)
        before = engine.target
        engine = load(before.model, tokenizer=engine.tokenizer, draft=draft, profile=None)
        engine.target.progress = before.progress
    with ProgressBars() as progress:
        profile = learn(engine, lessons, max_new_tokens, portable, progress.show)
        result = measure(engine, full_name(draft), trials, max_new_tokens, progress.show) if trials else None
    path = out or profile_path(profile.about)
    try:
        profile.save(path)
    except OSError as error:
        require(False, f"cannot write {path}: {error.strerror}")
    notes().print(f"The profile is in {path}", markup=False, soft_wrap=True)
    if result is not None:
        remember(profile.about, result)
        words = f"{result.speed:.2f} times plain decoding, {result.mean_accepted:.2f} tokens accepted a round"
        notes().print(f"Drafter {result.draft}: {words}", markup=False, soft_wrap=True)
    elif not portable:
        notes().print("Too few prompts to measure the drafter with: at least 5", markup=False)

"""`graft tune`: learn a profile of a model, a drafter and this machine from warm-up prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from graft.cli.options import LIMIT, LOADING, MODEL, PROMPTS, Given, Group, takes
from graft.cli.terminal import ProgressBars, check_loading, checked_folder, load_engine, notes
from graft.hub.registry import DEFAULT_MODEL
from graft.settings import require
from graft.tuning import MIN_PROMPTS, NUM_TRIALS

TUNING: Group = MODEL | {"draft": LOADING["draft"]}


@takes(loading=TUNING)
def tune(
    prompts: Annotated[list[Path], PROMPTS],
    limit: Annotated[int | None, LIMIT] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 64,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Cut longer prompts in the middle.")] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Answer each prompt at this temperature; repeatable. [dim]\\[default: 0][/]"),
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="Make a small profile without measured times, for any machine.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="File of the profile. [dim]\\[default: where --profile auto finds it][/]")
    ] = None,
    *,
    loading: Given,
) -> None:
    """Tune Graft to your prompts and this machine, and save the result as a profile.

    Later runs with the same model, drafter and machine use the profile, unless they say --profile none.

    It measures the drafter's speed-up on a fifth of the prompts. It needs at least 5, and 30 or more to say much.

    graft drafters lists these results, and --draft auto uses the fastest drafter.

    [dim]Example:[/] graft tune --prompts prompts.jsonl --limit 40
    """
    from graft.bench.tasks import questions, read_tasks
    from graft.model.sampling_settings import SamplingSettings

    require(max_new_tokens >= 1, f"--max-new-tokens must be at least 1, not {max_new_tokens}")
    require(max_prompt_tokens is None or max_prompt_tokens >= 2, "--max-prompt-tokens must be at least 2")
    temperatures = temperature or [0.0]
    for value in temperatures:
        SamplingSettings(temperature=value)  # checks it
    if out is not None:
        require(not out.is_dir(), f"cannot write {out}: it is a folder, and a profile is a file")
        checked_folder(out.parent)
    require(out is not None or not portable, "a portable profile is a file to pass on: name one with --out FILE")
    tasks = read_tasks(prompts, limit)
    count = len({prompt.text for task in tasks for prompt in task.prompts})
    require(
        portable or count >= MIN_PROMPTS,
        f"graft tune needs at least {MIN_PROMPTS} different prompts, a fifth of them to measure with, not {count}: "
        "give more, or make a profile without times with --portable",
    )
    check_loading(loading, max_new_tokens)

    from graft.hub.draft_names import packaged_head_of
    from graft.hub.drafters import NAMED
    from graft.loading import load
    from graft.tuning import learned
    from graft.tuning.drafters import full_name, measure, remember, speeds_of, split_prompts
    from graft.tuning.tuning import tune as learn

    model, draft = loading.get("model", DEFAULT_MODEL), loading.get("draft", "auto")
    if draft == "auto":  # the usual drafter: earlier measurements must not decide what is measured now
        draft = packaged_head_of(model) or "none"
    choose = NAMED[draft].choose if draft in NAMED else None  # chooses by the prompts, once the model is loaded
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
        profile = learn(engine, lessons, max_new_tokens, portable, progress.show, temperatures)
        result = measure(engine, full_name(draft), trials, max_new_tokens, progress.show) if trials else None
    try:
        if out is None:
            path = learned.add(replace(profile, speeds=speeds_of(result) if result is not None else {}))
        else:
            profile.save(path := out)
            if result is not None:
                remember(profile.about, result)
    except OSError as error:
        require(False, f"cannot write {error.filename}: {error.strerror}")
    notes().print(f"The profile is in {path}", markup=False, soft_wrap=True)
    if result is not None:
        words = f"{result.speed:.2f} times plain decoding, mean accepted length {result.mean_accepted:.2f}"
        notes().print(f"Drafter {result.draft}: {words}", markup=False, soft_wrap=True)
        if len(trials) < NUM_TRIALS:
            counts = f"learned from {len(lessons)} prompts and measured on {len(trials)}"
            more = f"give {MIN_PROMPTS * NUM_TRIALS} or more, {NUM_TRIALS} of them to measure with"
            notes().print(f"warning: this says little, {counts}: {more}", markup=False, soft_wrap=True)

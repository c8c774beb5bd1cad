"""`graft bench`: compare decoding methods on the user's prompts or on built-in ones."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.options import LIMIT, LOADING, MODEL, PROMPTS, Given, Group, option, takes
from graft.cli.terminal import aside, check_loading, checked_folder, load_engine, notes
from graft.hub.registry import DEFAULT_MODEL
from graft.settings import require

if TYPE_CHECKING:
    from graft.bench.shapes import ModelShape
    from graft.bench.tasks import Question
    from graft.engine import Engine
    from graft.hub.drafters import AnyDrafter

_decoding = functools.partial(option, rich_help_panel="Decoding")
_learning = functools.partial(option, rich_help_panel="Learning before the run")
_model = functools.partial(option, rich_help_panel="Model")

DECODING: Group = {
    "max_new_tokens": _decoding(int, "Longest answer.", "128"),
    "temperature": _decoding(float, "Higher is more varied; 0 is greedy.", "0"),
    "top_p": _decoding(float, "Sample from the likeliest tokens whose probabilities add up to P.", "1"),
    "min_p": _decoding(float, "Drop tokens less likely than P times the likeliest.", "0"),
    "seed": _decoding(int, "The same seed gives the same text.", "0"),
    "repeat": _decoding(
        int, "Turns: times that each prompt is answered. From 2 on, intervals include the machine's noise.", "1"
    ),
    "rows": _decoding(int, "Batch size. Prompts of a batch do not learn from each other and share its time.", "1"),
}
HEADS: Group = {
    "draft": _model(
        str,
        "The drafter: a draft head or small model, mtp, early-exit or none.",
        "the model's packaged head",
        metavar="HEAD",
    ),
    "budget": _model(int, "Draft nodes verified per round, for all methods.", "each method's own"),
    "pass_cost": _model(float, "Cost of a draft pass, relative to a verify step.", "measured", metavar="F"),
    "passes": _model(int, "Draft passes of every round of graft and its ablations.", "what pays"),
    "exact": LOADING["exact"],
    "as_cost_of": _model(
        str,
        "Give the model the cost of a larger one: llama-1b5, llama-8b, qwen-32b or layers=..,hidden=..",
        metavar="SHAPE",
    ),
    "assistant": _model(str, "The assistant of hf-assisted: a small model with the same tokenizer.", metavar="MODEL"),
}
LEARNING: Group = {
    "warmup": _learning(Path, "Prompts to learn from before the run.", metavar="FILE"),
    "warmup_limit": _learning(int, "Use only this many warm-up prompts.", "all"),
    "state": _learning(
        list[str], "cold, warm or persistent; repeatable.", "warm with --warmup, else cold", metavar="STATE"
    ),
}
TRIAL = "Count from one to ten."


@takes(loading=MODEL, heads=HEADS, learning=LEARNING, decoding=DECODING)
def bench(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json, results.csv and report.html; required.")
    ] = None,
    prompts: Annotated[list[Path] | None, PROMPTS] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: off, dense, prune, paper, dense-with-noise, paper-with-noise, "
            "block, block-paper, graft, graft-without-..., hf, hf-lookup, hf-assisted."
        ),
    ] = "off,graft",
    limit: Annotated[int | None, LIMIT] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Cut longer prompts in the middle.")] = None,
    *,
    loading: Given,
    heads: Given,
    learning: Given,
    decoding: Given,
) -> None:
    """Decode the same prompts with several methods, and compare speed and accepted lengths.

    Each file of prompts is a task. Without --prompts, there are six built-in tasks of ten prompts each.

    --as-cost-of SHAPE makes a Llama as slow as a larger one without changing its text: see docs/measuring.md.

    --state cold forgets everything before each prompt; warm keeps what --warmup taught; persistent keeps learning.

    [dim]Example:[/] graft bench --methods off,graft,hf --limit 3 --out results
    """
    if context.invoked_subcommand is not None:
        return
    from graft.bench.settings import BenchSettings, check_names, check_states
    from graft.bench.shapes import ModelShape
    from graft.bench.tasks import Task, built_in_tasks, questions, read_tasks, without_repeats
    from graft.cli.results_table import run_and_show
    from graft.prompt_files import PromptRow
    from graft.spec_decode.policy_settings import PolicySettings

    # Check all options before loading the model.
    settings = BenchSettings.of(decoding)
    check_loading(loading | {"draft": heads.get("draft", "auto")}, settings.max_new_tokens)
    if "assistant" in heads:
        check_loading({"model": heads["assistant"]})
    names = [name.strip() for name in methods.split(",") if name.strip()]
    warmup: Path | None = learning.get("warmup")
    states = learning.get("state", ["cold" if warmup is None else "warm"])
    check_names(names, settings.rows, "assistant" in heads)
    check_states(states, warmup is not None, settings.rows)
    require(warmup is not None or "warmup_limit" not in learning, "--warmup-limit needs --warmup FILE")
    require(max_prompt_tokens is None or max_prompt_tokens >= 2, "--max-prompt-tokens must be at least 2")
    budget, pass_cost, passes = (heads.get(name) for name in ("budget", "pass_cost", "passes"))
    policy = PolicySettings(budget, pass_cost, passes=passes)
    require(pass_cost is None or budget is not None, "--pass-cost needs --budget")
    shape = ModelShape.named(heads["as_cost_of"]) if "as_cost_of" in heads else None
    read = read_tasks(prompts, limit) if prompts else built_in_tasks(limit)
    lesson = read_tasks([warmup], learning.get("warmup_limit"))[0] if warmup is not None else Task("warmup", [])
    folder = checked_folder(out)

    engine = load_engine({**loading, "policy": "off", "draft": None})
    from graft.bench.runs import make_methods
    from graft.loading import load_drafter

    model_name = loading.get("model", DEFAULT_MODEL)
    head_name = _head_name(heads.get("draft", "auto"), model_name)
    drafter = load_drafter(head_name, engine.target.model, None, engine.tokenizer) if head_name else None
    if shape is not None:
        engine, drafter = widened_engine(engine, drafter, shape)

    def asked(task: Task) -> list[Question]:
        return questions(task, engine, settings.max_new_tokens, max_prompt_tokens)

    tasks = {task.name: asked(task) for task in read}
    assistant = _assistant(heads.get("assistant"), engine)
    exact = heads.get("exact", False)
    compared = make_methods(names, engine.target.model, drafter, policy, assistant, settings.rows, exact)
    tasks, lessons, num_repeats = without_repeats(tasks, asked(lesson))
    if num_repeats:
        words = "prompts are left out: they are in the run already, and their answers would be recalled, not decoded"
        notes().print(f"{num_repeats} {words}", markup=False, soft_wrap=True)
    trial = asked(Task("trial", [PromptRow("trial", TRIAL)]))[0]
    facts = {
        "model": _public(model_name),
        "draft": _public(head_name),
        "as_cost_of": heads.get("as_cost_of"),
        "shape": vars(shape) | {"parameters": engine.target.model.num_parameters()} if shape is not None else None,
        "dtype": str(engine.target.model.dtype).removeprefix("torch."),
        **vars(settings),
        "budget": budget,
        "pass_cost": pass_cost,
        "passes": passes,
        "exact": exact,
        "assistant": _public(heads.get("assistant")),
        "warmup": warmup.stem if warmup is not None else None,
        "max_prompt_tokens": max_prompt_tokens,
    }
    run_and_show(engine, compared, states, tasks, lessons, trial, settings, facts, folder)


def _head_name(draft: str, model_name: str) -> str | None:
    """The head to load. Unlike elsewhere, a CPU also uses the packaged head: most methods need one."""
    from graft.hub.draft_names import packaged_head_of

    if draft == "auto":
        return packaged_head_of(model_name)
    return draft if draft != "none" else None


def widened_engine(engine: Engine, drafter: AnyDrafter | None, shape: ModelShape) -> tuple[Engine, AnyDrafter | None]:
    """The engine and its drafter at the cost of a larger model, with the same text and drafts."""
    from graft.bench.cost_emulation import widen, widen_head
    from graft.drafters.block.drafter import BlockDrafter
    from graft.drafters.eagle3.drafter import Eagle3Drafter
    from graft.drafters.early_exit import EarlyExitDrafter
    from graft.drafters.factory import drafter_for
    from graft.engine import Engine

    aside("Widening the model ...")
    model = widen(engine.target.model, shape)
    if isinstance(drafter, EarlyExitDrafter):
        drafter = drafter.of_model(model)
    elif isinstance(drafter, Eagle3Drafter | BlockDrafter):  # a small draft model stays as it is
        drafter = drafter_for(widen_head(drafter.head, engine.target.model, shape, model), drafter.settings)
    return Engine(model, engine.tokenizer, policy="off"), drafter


def _assistant(name: str | None, engine: Engine) -> Any | None:
    if name is None:
        return None
    from graft.hub.load import load_model

    return load_model(name, device=str(engine.target.device), dtype=engine.target.model.dtype)[0]


def _public(name: str | None) -> str | None:
    """A model's name without its path, since results are made to be shared."""
    return Path(name).name if name is not None and Path(name).is_dir() else name

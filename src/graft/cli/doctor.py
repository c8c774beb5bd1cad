"""`graft doctor`: check that Graft supports a model on this machine, and measure whether it is faster."""

from __future__ import annotations

import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import LIMIT, LOADING, PROMPTS, Given, takes
from graft.cli.terminal import ProgressBars, load_engine
from graft.hub.registry import DEFAULT_MODEL
from graft.settings import check_size, require
from graft.tuning import NUM_TRIALS

if TYPE_CHECKING:
    from graft.engine import Engine


@takes(loading=LOADING)
def doctor(
    prompts: Annotated[list[Path] | None, PROMPTS] = None,
    limit: Annotated[int | None, LIMIT] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 48,
    *,
    loading: Given,
) -> None:
    """Check that a model is supported here, list its kernels and drafters, and measure its speed-up.

    Each prompt is decoded plainly before and after Graft. If the two differ too much, there is no verdict.

    Without --prompts, the prompts are built-in ones, --limit in all. Without --limit, it uses 6 prompts in all.

    Exits with 1 if the model is not supported, or if Graft would be slower than plain decoding.

    [dim]Example:[/] graft doctor --model Qwen/Qwen2.5-7B-Instruct --prompts my-prompts.jsonl
    """
    from graft.bench.tasks import built_in_tasks, read_tasks
    from graft.errors import GraftError
    from graft.prompt_files import user_message

    is_count = any(str(path).isdecimal() and not path.exists() for path in prompts or ())
    require(not is_count, "--prompts names a file; --limit is how many of its prompts to use")
    check_size("max_new_tokens", max_new_tokens)
    tasks = read_tasks(prompts, limit) if prompts else built_in_tasks(limit)
    ranks = zip_longest(*([prompt.text for prompt in task.prompts] for task in tasks))  # of each task in turn
    # A repeated prompt would be recalled, not decoded.
    texts = list(dict.fromkeys(text for rank in ranks for text in rank if text is not None))
    texts = texts if prompts and limit is not None else texts[: limit or NUM_TRIALS]
    name, start = str(loading.get("model", DEFAULT_MODEL)), time.perf_counter()
    try:
        engine = load_engine(loading | {"prefix_cache": False}, max_new_tokens=max_new_tokens)
    except GraftError as error:
        _print_line("supported", f"no: {error}")
        raise typer.Exit(1) from error
    from graft.tuning.turns import MIN_NOISE, measure_turns, speed_of

    load_seconds = time.perf_counter() - start
    target = engine.target
    _print_line("supported", f"yes: {type(target.model).__name__} on {target.device}")
    _print_line("drafters", _drafters_of(engine, name))
    asked = [engine.encode(user_message(text, engine.tokenizer)) for text in texts]
    with ProgressBars() as progress:
        turns = measure_turns(engine, asked, max_new_tokens, progress.show)
    for label, fact in target.describe().items():  # after the steps have been tried
        _print_line(label, fact)
    _print_line("kernels", _kernels_of(engine))
    setup_seconds = turns[0].stats.setup_seconds
    _print_line("set-up", f"{load_seconds:.1f} s to load, {setup_seconds:.1f} s before the first answer")
    speed = speed_of(turns)
    _print_line("accepted", f"{speed.mean_accepted:.2f} tokens a round; plain decoding has 1")
    each = ", ".join(f"{(turn.before + turn.after) / 2 / turn.ours:.2f}" for turn in turns)
    _print_line("measured", f"{speed.ratio:.2f} times plain decoding, by prompt {each}")
    _print_line(
        "noise",
        f"give or take {speed.noise:.2f}: plain runs before and after Graft ({speed.before:.1f} s and "
        f"{speed.after:.1f} s) differ that much from their mean; at least {MIN_NOISE} is assumed",
    )
    if speed.doubt is not None:
        _print_line("verdict", f"none: {speed.doubt}")
        return
    if speed.ratio < 1 - speed.noise:
        _print_line("verdict", "slower: use --policy off, or try another drafter with graft tune --draft NAME")
        raise typer.Exit(1)
    is_faster = speed.ratio > 1 + speed.noise
    _print_line("verdict", "faster" if is_faster else "as fast as plain decoding; graft tune or a drafter may help")


def _kernels_of(engine: Engine) -> str:
    """The kernels of Graft that run the model: C on a CPU, Triton on a GPU, or none and why."""
    from graft.model.cpu_linear import FewTokensLinear
    from graft.model.runner import TargetRunner

    model = engine.target.model
    if model.device.type != "cpu":
        captured = type(engine.target) is not TargetRunner and not engine.target.mode.startswith("eager")
        return "Triton" if captured else "none: Triton is not installed, the model is split, or it cannot be captured"
    count = sum(isinstance(layer, FewTokensLinear) for layer in model.modules())
    if count:
        return f"C, for up to 64 tokens, in {count} linear layers"
    return "none: the model has no plain float32 layers, or the kernels were not built"


def _drafters_of(engine: Engine, name: str) -> str:
    from graft.hub.draft_names import NONE
    from graft.tuning.drafters import drafts_for

    found = [draft for draft in drafts_for(name, engine.target.model) if draft != NONE]
    used = "no drafter" if engine.drafter is None else type(engine.drafter).__name__
    return f"{', '.join(found) or 'none found'}; this run uses {used} and retrieval"


def _print_line(label: str, text: str) -> None:
    print(f"{label:<10} {text}", flush=True)

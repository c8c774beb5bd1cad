"""`graft train`: train a draft head for a model on the model's own answers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.options import LIMIT, MODEL, PROMPTS, Given, Group, option, takes
from graft.cli.terminal import ProgressBars, checked_folder, load_engine, notes
from graft.hub.draft_names import check_head
from graft.prompt_files import read_prompts
from graft.settings import require, require_known

if TYPE_CHECKING:
    from graft.train.recipe import Recipe

_answering = functools.partial(option, rich_help_panel="Generating answers")
_training = functools.partial(option, rich_help_panel="Training")
_eagle3 = functools.partial(option, rich_help_panel="EAGLE-3 heads")
_heads = functools.partial(option, rich_help_panel="EAGLE-3 and block heads")
_layers = functools.partial(option, rich_help_panel="Block heads and depth-pruned models")
_pruned = functools.partial(option, rich_help_panel="Depth-pruned models")
_block = functools.partial(option, rich_help_panel="Block heads: dflash, treeflash")

ANSWERING: Group = {
    "max_new_tokens": _answering(int, "Longest answer.", "256"),
    "temperatures": _answering(
        list[float], "Answer every prompt at this temperature; repeatable.", "0", flag="--temperature"
    ),
    "num_rows": _answering(int, "Batch size; 1024 suits a large GPU.", "64", flag="--rows"),
    "max_prompt_tokens": _answering(int, "Skip longer prompts.", "1536"),
}
TRAINING: Group = {
    "steps": _training(int, "Optimizer steps; 0 is allowed for depth-pruned.", "2000"),
    "batch_tokens": _training(int, "Tokens per step.", "32768"),
    "max_tokens": _training(int, "Cut prompt and answer after this many tokens.", "2048"),
    "learning_rate": _training(float, "Peak learning rate.", "0.001, depth-pruned 0.0003"),
    "warmup_steps": _training(int, "Steps of learning-rate warm-up.", "100"),
    "weight_decay": _training(float, "Weight decay of matrices.", "0.01"),
    "ema_decay": _training(
        float, "Decay of the averaged weights that are saved; 0 averages none.", "0, block heads 0.999"
    ),
    "evaluate_every": _training(int, "Evaluate and save every so many steps.", "200"),
    "held_back": _training(float, "Share of prompts held back for evaluation.", "0.01"),
    "seed": _training(int, "Fixes the order of the answers.", "0"),
}
EAGLE3: Group = {
    "draft_vocab_size": _eagle3(int, "Tokens that the head can draft.", "98 % of the answers' tokens"),
    "is_normed": _eagle3(
        bool,
        "EAGLE-3.1: read five layers, norm their features and the head's output. Or EAGLE-3, for older engines.",
        "normed",
        flag="--normed/--plain",
    ),
    "unroll": _eagle3(int, "Draft depths to train.", "5"),
    "step_weight": _eagle3(float, "Loss weight of each depth relative to the one before.", "0.8"),
    "greedy_weight": _eagle3(
        float, "Share of the loss's target that is the likeliest token; the rest is the model's distribution.", "0"
    ),
}
START: Group = {
    "start_from": _heads(Path, "Start with the weights of this head.", metavar="HEAD"),
}
HEADS: Group = {
    "flex": _heads(bool, "On a GPU, use FlexAttention or a dense mask.", "flex", flag="--flex/--dense"),
}
LAYERS: Group = {
    "num_layers": _layers(
        int, "Layers of the head or draft model.", "4, depth-pruned a third of the model's", flag="--layers"
    ),
}
SHAPE: Group = {
    "num_taps": _block(int, "Number of target layers to read, evenly spread.", "5", flag="--taps"),
    "target_layers": _block(
        list[int], "Instead of --taps: read the input of this target layer; repeatable.", flag="--target-layer"
    ),
    "conditional_size": _block(int, "Inner size of treeflash's MLP.", "that of the layers"),
    "num_drafts": _block(int, "Tokens that a block predicts.", "12", flag="--drafts"),
    "slots": _block(str, "in-place, as other engines expect, or shifted.", "in-place"),
    "causal": _block(
        bool, "Whether slots see only earlier slots, as in JetSpec.", "bidirectional", flag="--causal/--bidirectional"
    ),
    "learned_mask": _block(
        bool,
        "Fill masked slots with a learned vector or a token's embedding.",
        "learned-mask",
        flag="--learned-mask/--token-mask",
    ),
}
BLOCK: Group = {
    "anchors": _block(int, "Blocks trained per row of --max-tokens.", "384"),
    "weighting": _block(str, "Weights of slots: decay, or pace for D-PACE.", "decay"),
    "gamma": _block(float, "With decay: slots until the weight falls to 1/e.", "5"),
    "pace_floor": _block(float, "With pace: smallest probability of a slot.", "0.5"),
    "marginal_weight": _block(float, "treeflash: loss weight of predictions without the token before.", "0.5"),
    "chunk_slots": _block(int, "Slots whose logits are in memory at once.", "4608"),
    "simulated": _block(int, "Held-back answers to simulate in evaluations.", "128"),
    "nodes": _block(int, "Tree nodes in these simulations.", "60"),
}
PRUNED: Group = {
    "measured": _pruned(int, "Tokens on which layers are compared, prompts included.", "4096"),
}
FILES: Group = {
    "max_file_mib": _block(int, "Split the weights into files of at most this size.", "one file"),
}


OF_KINDS: Group = LAYERS | EAGLE3 | START | HEADS | SHAPE | BLOCK | FILES | PRUNED  # options that only some kinds take
_BLOCK_HEADS = LAYERS | START | HEADS | SHAPE | BLOCK | FILES
_BY_KIND = {
    "eagle3": EAGLE3 | START | HEADS,
    "dflash": _BLOCK_HEADS,
    "treeflash": _BLOCK_HEADS,
    "depth-pruned": LAYERS | PRUNED,
}


_INTERRUPTED = 130  # exit status of a command that Ctrl-C stopped
_RIGHT = (
    "right_0 is the share of the model's next tokens that the head guesses right, right_1 is the share one token "
    "further, and so on. held_back means answers that it does not learn from."
)


@takes(loading=MODEL, answering=ANSWERING, training=TRAINING, of_kind=OF_KINDS)
def train(
    out: Annotated[Path, typer.Option(help="Folder of the new head or draft model.")],
    prompts: Annotated[list[Path] | None, PROMPTS] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Instead of --prompts: the work/answers folder of an earlier training.")
    ] = None,
    kind: Annotated[str, typer.Option(help="eagle3, dflash, treeflash or depth-pruned.")] = "eagle3",
    limit: Annotated[int | None, LIMIT] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Stop after this long; the same command resumes.")] = None,
    *,
    loading: Given,
    answering: Given,
    training: Given,
    of_kind: Given,
) -> None:
    """Train a draft head: the model answers the prompts, and the head learns to predict the answers.

    --kind depth-pruned makes a draft model: the model without its least important layers, trained to imitate it.

    For depth-pruned, --steps 0 only removes layers.

    A run that Ctrl-C or --max-seconds stopped resumes with the same options; only --steps may change.

    Progress shows right_0, the share of next tokens guessed right; right_1, the share one token further; and so on.

    Other engines can load the results: the layouts are SafeAILab's (EAGLE-3), z-lab's (block) and transformers'.

    [dim]Example:[/] graft train --prompts prompts.jsonl --out my-head --kind treeflash --steps 4000
    """
    require((not prompts) == (answers is not None), "give either --prompts or --answers")
    require(not (answers is not None and (answering or limit)), "--answers excludes options for generating answers")
    require(max_seconds is None or max_seconds > 0, f"--max-seconds must be above 0, not {max_seconds}")
    _check_kind(kind, of_kind)
    texts = [prompt.text for path in prompts or () for prompt in read_prompts(path, limit)]
    require(answers is None or answers.is_dir(), f"there is no folder {answers}: name the work/answers of a training")
    from graft.train.settings import AnswerSettings

    if "temperatures" in answering:
        answering["temperatures"] = tuple(answering["temperatures"])
    answer_settings = AnswerSettings.of(answering)
    recipe = _recipe(kind, training, of_kind)
    checked_folder(out)
    engine = load_engine(
        loading | {"policy": "off"}, max_new_tokens=answer_settings.max_new_tokens if prompts else None
    )
    from graft.train.recipe import WORK, train_head

    try:
        with ProgressBars() as progress:
            if kind in ("eagle3", "depth-pruned"):
                progress.say(_RIGHT)
            seconds = math.inf if max_seconds is None else max_seconds
            outcome = train_head(engine, texts, out, recipe(), answer_settings, progress.show, answers, seconds)
    except KeyboardInterrupt as stop:
        words = "Stopped. The same command continues from the last answers and steps that were saved in"
        notes().print(f"{words} {out / WORK}.", markup=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from stop
    what, done = "draft model" if kind == "depth-pruned" else "head", f"{outcome.done} of {outcome.total}"
    if outcome.stage == "answer":
        words = f"Time is up after {done} groups of answers. The same command resumes."
    elif outcome.stage == "measure":
        words = f"Time is up after choosing {done} layers to remove. The same command resumes."
    elif not outcome.is_finished:
        words = f"Time is up after {done} steps. The {what} so far is in {out}; the same command resumes."
    else:
        words = f"The {what} is in {out}"
    notes().print(words, markup=False, soft_wrap=True)


def _check_kind(kind: str, of_kind: Given) -> None:
    require_known("kind", kind, _BY_KIND)
    for name in of_kind:
        fits = name in _BY_KIND[kind]
        require(fits, f"{_flag(name)} does not apply to --kind {kind}: drop it, or choose another kind")


def _recipe(kind: str, training: Given, of_kind: Given) -> Callable[[], Recipe]:
    """Makes the recipe of a kind. Its options are checked now, and torch is imported when it is made."""
    from graft.train.settings import BlockSettings, BlockShape, DepthPrunedSettings, Eagle3Settings

    start_from = of_kind.get("start_from")
    if start_from is not None:
        check_head(str(start_from))
    count = of_kind.get("num_layers", 1)
    require(count >= 1, f"--layers must be at least 1, not {count}")
    mib = of_kind.get("max_file_mib")
    require(mib is None or mib >= 1, f"--max-file-mib must be at least 1, not {mib}")
    if "target_layers" in of_kind:
        of_kind["target_layers"] = tuple(of_kind["target_layers"])
    if kind == "eagle3":
        own = {name: of_kind.pop(name) for name in ("draft_vocab_size", "is_normed", "start_from") if name in of_kind}
        return _made("Eagle3Recipe", settings=Eagle3Settings.of(training | of_kind), **own)
    if kind == "depth-pruned":
        pruning = DepthPrunedSettings.of(training | _part(of_kind, PRUNED))
        return _made("DepthPrunedRecipe", settings=pruning, num_layers=of_kind.get("num_layers"))
    return _made(
        "BlockRecipe",
        settings=BlockSettings.of(training | _part(of_kind, HEADS | BLOCK)),
        shape=BlockShape.of(_part(of_kind, LAYERS | SHAPE)),
        conditional=kind == "treeflash",
        start_from=start_from,
        max_file_bytes=None if mib is None else mib * 2**20,
    )


def _made(name: str, **facts: Any) -> Callable[[], Recipe]:
    def make() -> Recipe:
        from graft.train import recipe

        made: Recipe = getattr(recipe, name)(**facts)
        return made

    return make


def _part(given: Given, group: Group) -> Given:
    return {name: value for name, value in given.items() if name in group}


def _flag(name: str) -> str:
    """The command-line flag of a setting."""
    (given,) = OF_KINDS[name].__metadata__
    # Inside Annotated, typer stores its first argument, the flag, as the default until it builds the command.
    names = [each for each in (given.default, *(given.param_decls or ())) if isinstance(each, str)]
    return names[0].partition("/")[0] if names else f"--{name.replace('_', '-')}"

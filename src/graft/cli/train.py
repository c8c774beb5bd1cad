"""`graft train`: trains an EAGLE-3 draft head for a model on the model's own answers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from graft.cli.options import MODEL, Given, Group, option, takes
from graft.cli.terminal import ProgressBars, load_engine, notes
from graft.data import read_prompts

_answering = functools.partial(option, rich_help_panel="Answering")
_training = functools.partial(option, rich_help_panel="Training")

ANSWERING: Group = {
    "max_new_tokens": _answering(int, "--max-new-tokens", "Longest answer.", "256"),
    "temperatures": _answering(list[float], "--temperature", "An answer to every prompt at this; repeatable.", "0"),
    "num_rows": _answering(int, "--rows", "Prompts answered together; a large GPU takes 1024.", "64"),
    "max_prompt_tokens": _answering(int, "--max-prompt-tokens", "Longer prompts are left out.", "1536"),
}
TRAINING: Group = {
    "steps": _training(int, "--steps", "Optimizer steps.", "2000"),
    "batch_tokens": _training(int, "--batch-tokens", "Tokens of a step.", "32768"),
    "max_tokens": _training(int, "--max-tokens", "Prompt and answer are cut here.", "2048"),
    "unroll": _training(int, "--unroll", "Drafted steps that are trained.", "5"),
    "step_weight": _training(float, "--step-weight", "Weight of each further step.", "0.8"),
    "learning_rate": _training(float, "--learning-rate", "At its highest.", "0.001"),
    "warmup_steps": _training(int, "--warmup-steps", "Steps until then.", "100"),
    "evaluate_every": _training(int, "--evaluate-every", "Steps between evaluations, which also save.", "200"),
    "seed": _training(int, "--seed", "Fixes the order of the answers.", "0"),
}


@takes(loading=MODEL, answering=ANSWERING, training=TRAINING)
def train(
    prompts: Annotated[list[Path], typer.Option(help="Prompts, one JSON object a line; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Folder of the new head.")],
    draft_vocab_size: Annotated[int, typer.Option(help="Tokens the head can draft.")] = 8192,
    limit: Annotated[int | None, typer.Option(help="Take this many prompts of each file.")] = None,
    *,
    loading: Given,
    answering: Given,
    training: Given,
) -> None:
    """Train an EAGLE-3 draft head: the model answers the prompts, and the head learns to guess its answers.

    Interrupted and started again with the same options, it goes on where it stopped.

    The head is saved in the layout of SafeAILab's EAGLE-3, which other engines read too.

    [dim]Example:[/] graft train --prompts prompts.jsonl --out my-head --steps 4000
    """
    from graft.train.generate_data import AnswerSettings
    from graft.train.recipe import train_head
    from graft.train.trainer import TrainSettings

    if "temperatures" in answering:
        answering["temperatures"] = tuple(answering["temperatures"])
    answer_settings, train_settings = AnswerSettings.of(answering), TrainSettings.of(training)
    texts = [prompt.text for path in prompts for prompt in read_prompts(path, limit)]
    engine = load_engine(loading | {"policy": "off"})
    with ProgressBars() as progress:
        train_head(engine, texts, out, draft_vocab_size, answer_settings, train_settings, progress.show)
    notes().print(f"The head is in {out}", markup=False)

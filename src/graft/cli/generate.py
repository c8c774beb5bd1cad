"""`graft generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.options import LOADING, SAMPLING, Given, Group, option, sampling_settings, takes
from graft.cli.terminal import load_engine, notes, utf8_stdin
from graft.settings import require

if TYPE_CHECKING:
    from graft.engine import Choice, Engine, Generation, Prompt
    from graft.model import TargetRunner
    from graft.model.sampler import SamplingSettings
    from graft.request.stats import Stats

ANSWERS: Group = {
    "n": option(int, "Number of answers.", "1"),
    "logprobs": option(int, "With --json: log-probabilities of each token and of N alternatives."),
}


@takes(loading=LOADING, sampling=ANSWERS | SAMPLING)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. Without one, or with -, read it from stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without applying the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and acceptance statistics on stderr.")] = False,
    show_tree: Annotated[bool, typer.Option("--show-tree", help="Draw the tree of each round on stderr.")] = False,
    color_by_origin: Annotated[
        bool, typer.Option("--color-by-origin", help="Colour each token by the drafter or source that proposed it.")
    ] = False,
    *,
    loading: Given,
    sampling: Given,
) -> None:
    """Answer one prompt, streaming the text.

    [dim]Example:[/] graft generate "Why is the sky blue?" --max-new-tokens 64 --stats

    [dim]Example:[/] graft generate "List the months of the year." --budget 16 --show-tree --color-by-origin

    [dim]Example:[/] cat story.txt | graft generate --raw --temperature 0.7 --seed 1
    """
    require(not (raw and system is not None), "--system needs the chat template, which --raw turns off: drop one")
    require(as_json or "logprobs" not in sampling, "--logprobs needs --json")
    text = _read_prompt(prompt)
    require(bool(text), "the prompt is empty")
    settings = sampling_settings(sampling)
    can_stream = settings.n == 1 and not as_json
    require(
        can_stream or not (show_tree or color_by_origin), "--show-tree and --color-by-origin exclude --json and --n"
    )
    engine = load_engine(loading, keep_learned=None, max_new_tokens=settings.max_new_tokens)
    message = text if raw else engine.user_message(text, system)
    if show_tree or color_by_origin:
        generation = _stream_with_rounds(engine, message, settings, show_tree, color_by_origin)
    elif can_stream:
        stream = engine.stream(message, **vars(settings))
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        generation = stream.result
    else:
        generation = engine.generate(message, **vars(settings))
        print(json.dumps(_as_json(generation)) if as_json else _numbered(generation.choices))
    if stats:
        _print_stats([choice.stats for choice in generation.choices], engine.target)


def _stream_with_rounds(
    engine: Engine, prompt: Prompt, settings: SamplingSettings, show_tree: bool, color_by_origin: bool
) -> Generation:
    """Print the answer and its rounds. With `show_tree`, the text follows after all the trees."""
    from rich.console import Console

    from graft.cli.rounds import Rounds

    ids, screen = engine.encode(prompt), Console()
    rounds = Rounds(engine.tokenizer, ids, engine.policy.sources, notes() if show_tree else None)
    stream = engine.stream(ids, watch=rounds.watch, show_all=True, **vars(settings))
    for piece in ["".join(stream)] if show_tree else stream:
        print(rounds.paint(piece, screen) if color_by_origin else piece, end="", flush=True)
    print()
    notes().print(rounds.legend())
    if show_tree and not rounds.has_trees:
        words = "No round had a tree: trees did not seem to pay on this machine. --budget 16 verifies them anyway."
        notes().print(words, soft_wrap=True)
    return stream.result


def _read_prompt(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return str(prompt)
    require(prompt == "-" or not sys.stdin.isatty(), "no prompt: give one, or pipe it in")
    with utf8_stdin() as stdin:
        return stdin.read().removesuffix("\n")


def _as_json(generation: Generation) -> dict[str, Any]:
    """The first answer's fields at the top level. If there are several answers, all are under `choices`."""
    choices = [_choice_as_json(choice) for choice in generation.choices]
    several = {"choices": choices} if len(choices) > 1 else {}
    return {"prompt_tokens": len(generation.prompt_ids), **choices[0], **several}


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    facts = {**vars(choice), "stats": choice.stats.as_dict()}
    if choice.logprobs:
        return facts | {"logprobs": [asdict(token) for token in choice.logprobs]}
    del facts["logprobs"]
    return facts


def _numbered(choices: list[Choice]) -> str:
    return "\n\n".join(f"[{rank}]\n{choice.text}" for rank, choice in enumerate(choices, start=1))


def _print_stats(answers: list[Stats], target: TargetRunner) -> None:
    """Print counts and times on stderr, one column per answer."""
    from rich.filesize import decimal
    from rich.table import Table

    def ms_per_round(stats: Stats) -> str:
        phases = stats.seconds_by_phase.items()
        return ", ".join(f"{phase} {1000 * seconds / stats.rounds:.1f}" for phase, seconds in phases)

    def by_source(stats: Stats) -> str:
        return ", ".join(f"{source} {count}" for source, count in stats.accepted_by_source.items()) or "none"

    def by_stage(stats: Stats) -> str:
        stages = {"set-up": stats.setup_seconds, "prefill": stats.prefill_seconds, "decode": stats.decode_seconds}
        return f"{stats.seconds:.2f}: " + ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())

    def plain_rounds(stats: Stats) -> str:
        count = "all" if stats.plain_rounds == stats.rounds else f"{stats.plain_rounds} of"
        return f"{count} {stats.rounds} rounds: no tree was verified"

    def recalled(stats: Stats) -> str:
        return f"{stats.recalled} of {stats.tokens} tokens, from earlier answers" if stats.recalled else "none"

    table = Table.grid(padding=(0, 2))
    table.add_row("tokens", *(f"{s.tokens}" for s in answers))
    table.add_row("rounds", *(f"{s.rounds}" for s in answers))
    if any(s.plain_rounds for s in answers):
        table.add_row("plain decoding", *map(plain_rounds, answers))
    if any(s.is_recalled for s in answers):
        table.add_row("recalled", *map(recalled, answers))
    table.add_row("mean accepted length", *(f"{s.mean_accepted:.2f}" for s in answers))
    table.add_row("tokens/s", *(f"{s.tokens_per_second:.1f}" for s in answers))
    table.add_row("seconds", *map(by_stage, answers))
    table.add_row("accepted by source", *map(by_source, answers))
    table.add_row("ms per round", *map(ms_per_round, answers))
    for name, fact in target.describe().items():
        table.add_row(name, fact)
    if target.device.type == "cuda" and (memory := target.memory_report()):
        table.add_row("GPU memory", ", ".join(f"{what} {decimal(size)}" for what, size in memory.items()))
    notes().print(table)
    if any(s.is_recalled for s in answers):
        notes().print(
            "This prompt, or one like it, was answered before, and most of that answer was recalled: the speed is not "
            "that of new text. --no-keep-learned and GRAFT_KEEP_LEARNED=0 keep no answers.",
            soft_wrap=True,
        )

"""`graft demo`: plain decoding and Graft side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import typer

from graft.cli.options import MODEL, Given, takes
from graft.cli.terminal import load_engine
from graft.data import user_message

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graft.engine import Engine, Generation
    from graft.tuning.turns import Turn

MAX_NEW_TOKENS = 80
WARM_UP = "Count from one to ten."
PROMPTS = {
    "copying": "Repeat this text, word for word:\n\nThe lighthouse keeper climbed the stairs every evening, lit the "
    "lamp, and wrote down the weather in a small blue book. When the storm came, the keeper climbed the stairs "
    "again and kept the lamp burning until morning.",
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "question": "Why is the sky blue?",
    "story": "Write a short story about a fox and a river.",
}


@takes(loading=MODEL)
def demo(*, loading: Given) -> None:
    """Answer four prompts by plain decoding and by Graft, and compare texts and speeds.

    Plain decoding runs before and after Graft: if the two differ too much, there is no verdict on speed.

    Takes a minute or two on a laptop. Exits with 1 if a text differs.

    [dim]Example:[/] graft demo
    """
    engine = load_engine(loading)

    from rich.console import Console

    from graft.tuning.turns import speed_of

    console = Console(highlight=False)
    with console.status("Decoding each prompt plainly, with Graft, and plainly again"):
        races = _run(engine, console)
    console.print(_table(races))
    if different := [title for title, race in races.items() if not race.same]:
        console.print(f"Not the same: {', '.join(different)}.", style="bold red")
        console.print(
            "In fp32 that is a bug in Graft. In bf16 and fp16, steps of different width round differently: try --dtype "
            "fp32. graft check shows where the texts diverge, and the scores of both tokens there."
        )
        raise typer.Exit(1)
    speed = speed_of([race.turn for race in races.values()])
    accepted = f"{speed.mean_accepted:.2f} tokens a round (plain decoding has 1)"
    console.print(f"Every text was the same, token for token, with {accepted}.")
    if speed.doubt is not None:
        console.print(f"No verdict on speed: {speed.doubt}.", style="bold")
    else:
        console.print(f"{speed.ratio:.2f} times the speed of plain decoding, give or take {speed.noise:.2f}.")
    console.print("Graft gains where an answer is easy to guess or repeats earlier text; elsewhere it decodes plainly.")
    console.print('Next: graft generate "YOUR PROMPT" --stats, graft chat, graft check --help', style="dim")


class Race(NamedTuple):
    """One prompt's times, and its answers by plain decoding, by Graft, and by plain decoding again."""

    turn: Turn
    answers: list[Generation]

    @property
    def same(self) -> bool:
        return len({tuple(answer.ids) for answer in self.answers}) == 1


def _run(engine: Engine, console: Console) -> dict[str, Race]:
    from rich.padding import Padding

    from graft.compare import plain_twin
    from graft.engine import Engine
    from graft.tuning.turns import decode_in_turns

    # A new engine, so that Graft has not seen these answers in an earlier run.
    graft = Engine(engine.target.model, engine.tokenizer, drafter=engine.drafter)
    plain = plain_twin(engine)
    for each in (plain, graft):
        each.generate(user_message(WARM_UP, engine.tokenizer), max_new_tokens=16)
    races = {}
    for title, prompt in PROMPTS.items():
        races[title] = Race(*decode_in_turns(plain, graft, user_message(prompt, engine.tokenizer), MAX_NEW_TOKENS))
        console.rule(title, align="left", style="dim")
        console.print(Padding(prompt, (0, 0, 1, 4), style="dim", expand=False))
        console.print(f"{races[title].answers[1].text}\n", markup=False)
    return races


def _table(races: dict[str, Race]) -> Table:
    from rich.table import Table

    from graft.tuning.turns import speed_of

    table = Table("prompt")
    for column in ("accepted a round", "tokens", "plain tokens/s, before and after", "Graft tokens/s", "ratio", "same"):
        table.add_column(column, justify="right")
    for title, race in races.items():
        speed, (before, ours, after) = speed_of([race.turn]), (answer.stats for answer in race.answers)
        table.add_row(
            title,
            f"{ours.mean_accepted:.2f}",
            f"{ours.tokens}",
            f"{before.tokens_per_second:.1f}, {after.tokens_per_second:.1f}",
            f"{ours.tokens_per_second:.1f}",
            f"{speed.ratio:.2f}" if speed.doubt is None else "uncertain",
            "✓" if race.same else "✗",
        )
    return table

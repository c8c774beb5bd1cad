"""`graft demo`: plain decoding and Graft side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from graft.cli.options import MODEL, Given, takes
from graft.cli.terminal import load_engine
from graft.data import user_message

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graft.engine import Engine, Generation

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

    Takes a minute or two on a laptop. Exits with 1 if a text differs.

    [dim]Example:[/] graft demo
    """
    engine = load_engine(loading)

    from rich.console import Console

    console = Console(highlight=False)
    with console.status("Decoding each prompt both ways, twice"):
        races = _run(engine, console)
    console.print(_table(races))
    if different := [title for title, race in races.items() if not race.same]:
        console.print(f"Not the same: {', '.join(different)}.", style="bold red")
        console.print(
            "In fp32 that is a bug in Graft. In bf16 and fp16, steps of different width round differently: try --dtype "
            "fp32. graft check shows where the texts part, and the scores of both tokens there."
        )
        raise typer.Exit(1)
    ratios = [race.ratio for race in races.values()]
    console.print(
        f"Every text was the same, token for token, at {min(ratios):.2f} to {max(ratios):.2f} times the speed. Graft "
        "gains where an answer is easy to guess or repeats earlier text; elsewhere it falls back to plain decoding."
    )
    console.print('Next: graft generate "YOUR PROMPT" --stats, graft chat, graft check --help', style="dim")


@dataclass
class Race:
    """One prompt's answers by plain decoding and by Graft."""

    plain: list[Generation] = field(default_factory=list)
    graft: list[Generation] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return len({tuple(answer.ids) for answer in self.plain + self.graft}) == 1

    @property
    def ratio(self) -> float:
        return _fastest(self.graft).stats.tokens_per_second / _fastest(self.plain).stats.tokens_per_second


def _run(engine: Engine, console: Console) -> dict[str, Race]:
    """Decode all prompts both ways, twice; the faster run of each counts."""
    from rich.padding import Padding

    from graft.compare import plain_twin
    from graft.engine import Engine

    races = {title: Race() for title in PROMPTS}
    for repeated in (False, True):
        # New engines, so that the second run does not profit from having seen the answers.
        plain = plain_twin(engine)
        graft = Engine(engine.target.model, engine.tokenizer, drafter=engine.drafter)
        for each in (plain, graft):
            each.generate(user_message(WARM_UP, engine.tokenizer), max_new_tokens=16)
        for title, prompt in PROMPTS.items():
            message = user_message(prompt, engine.tokenizer)
            races[title].plain.append(plain.generate(message, max_new_tokens=MAX_NEW_TOKENS))
            races[title].graft.append(graft.generate(message, max_new_tokens=MAX_NEW_TOKENS))
            if not repeated:
                console.rule(title, align="left", style="dim")
                console.print(Padding(prompt, (0, 0, 1, 4), style="dim", expand=False))
                console.print(f"{races[title].graft[0].text}\n", markup=False)
    return races


def _fastest(answers: list[Generation]) -> Generation:
    return max(answers, key=lambda answer: answer.stats.tokens_per_second)


def _table(races: dict[str, Race]) -> Table:
    from rich.table import Table

    table = Table("prompt")
    for column in ("tokens", "plain tokens/s", "Graft tokens/s", "ratio", "mean accepted length", "same text"):
        table.add_column(column, justify="right")
    for title, race in races.items():
        plain, graft = _fastest(race.plain).stats, _fastest(race.graft).stats
        table.add_row(
            title,
            f"{graft.tokens}",
            f"{plain.tokens_per_second:.1f}",
            f"{graft.tokens_per_second:.1f}",
            f"{race.ratio:.2f}",
            f"{graft.mean_accepted:.2f}",
            "✓" if race.same else "✗",
        )
    return table

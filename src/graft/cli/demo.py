"""`graft demo`: transformers' `generate`, plain decoding and Graft side by side.

On a busy machine fewer tokens are decoded, so that the demo ends in time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

from graft.cli.options import MODEL, Given, takes
from graft.cli.terminal import load_engine
from graft.machine import are_cores_shared
from graft.prompt_files import user_message

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graft.bench.methods import Answer
    from graft.bench.peers import Peer
    from graft.engine import Engine, Generation, Prompt
    from graft.tuning.turns import Speed, Turn

MAX_NEW_TOKENS = 80
MIN_NEW_TOKENS = 16  # of an answer: fewer say little, so prompts are left out instead
TIME_LIMIT = 90.0  # seconds after which the answers should be decoded, model loading included
_REFERENCE_SHARE = 1 / 3  # of that time, for transformers
_FEWEST_OF_TRANSFORMERS = 8  # tokens
WARM_UP, WARM_UP_TOKENS = "Count from one to ten.", 12
PROMPTS = {
    "copying: repeats text": "Repeat this text, word for word:\n\nThe lighthouse keeper climbed the stairs every "
    "evening, lit the lamp, and wrote down the weather in a small blue book. When the storm came, the keeper climbed "
    "the stairs again and kept the lamp burning until morning.",
    "code: follows rules": "Write a Python function that returns the n-th Fibonacci number.",
    "question: plain facts": "Why is the sky blue?",
    "story: hard to guess": "Write a short story about a fox and a river.",
}


@takes(loading=MODEL)
def demo(*, loading: Given) -> None:
    """Answer four prompts with transformers, by plain decoding and with Graft, and compare texts and speeds.

    Plain decoding runs before and after Graft: if the two differ too much, there is no verdict on speed. The story is
    there because it is hard to guess: Graft gains little or nothing on it.

    Takes less than two minutes; on a busy machine it decodes fewer tokens. Nothing that earlier runs learned is used.
    Exits with 1 if Graft's text differs from that of plain decoding, or, in fp32, from that of transformers.

    [dim]Example:[/] graft demo
    """
    deadline, is_shared = time.monotonic() + TIME_LIMIT, are_cores_shared()
    engine = load_engine(loading)

    from rich.console import Console

    from graft.checking.compare import comparable_to_transformers
    from graft.model.sampler import SamplingSettings
    from graft.tuning.turns import speed_of

    console = Console(highlight=False)
    races = _run(engine, console, deadline)
    why = "other programs use the cores" if is_shared else "decoding is slow here"
    console.print(_table(races))
    if is_shared:
        console.print("Other programs use the cores of this machine, so all speeds are lower than they could be.")
    if cut := _cut(races):
        console.print(f"To end in time, {cut}, because {why}.")

    must_equal_transformers = comparable_to_transformers(engine, SamplingSettings.of({}))
    differ = {title: race.differing for title, race in races.items() if race.differing}
    for title, decoders in differ.items():
        console.print(f"Not the same: {title.partition(':')[0]}, {decoders}.", style="bold red")
    if differ:
        console.print(
            "In fp32 that is a bug in Graft. In bf16 and fp16, steps of different width round differently: try --dtype "
            "fp32. graft check shows where the texts diverge, and the scores of both tokens there."
        )
    if (must_equal_transformers and differ) or not all(race.is_lossless for race in races.values()):
        raise typer.Exit(1)

    speed = speed_of([race.turn for race in races.values()])
    same = "Every text was the same, token for token" if not differ else "Graft's texts were those of plain decoding"
    console.print(f"{same}, with {speed.mean_accepted:.2f} tokens a round (plain decoding has 1).")
    for words in _verdict(speed, races):
        console.print(words, style="bold")
    console.print(
        "Graft gains where an answer repeats earlier text or is easy to guess. A story is hard to guess: there Graft "
        "gains little, and decodes plainly where guesses do not pay."
    )
    console.print('Next: graft generate "YOUR PROMPT" --stats, graft chat, graft check --help', style="dim")


class Race(NamedTuple):
    """One prompt's times, and its answers by plain decoding, by Graft, by plain decoding again, and by transformers.

    In little time, transformers decodes only the answer's first tokens.
    """

    turn: Turn
    answers: list[Generation]
    reference: Answer
    asked: tuple[int, int]  # the most tokens: of each answer, and of transformers'

    @property
    def is_lossless(self) -> bool:
        return len({tuple(answer.ids) for answer in self.answers}) == 1

    @property
    def differing(self) -> str:
        """Which decoders' texts differ; nothing if all are the same."""
        if not self.is_lossless:
            return "Graft and plain decoding"
        is_same = self.answers[1].ids[: self.asked[1]] == self.reference.ids
        return "" if is_same else "Graft and transformers"

    @property
    def reference_seconds(self) -> float:
        """Of transformers, for as many tokens as Graft's answer has, at its own pace."""
        return self.answers[1].stats.tokens / self.reference.stats.tokens_per_second


def _run(engine: Engine, console: Console, deadline: float) -> dict[str, Race]:
    """Race through the prompts, at least the first. Those for which there is no time are left out."""
    from rich.padding import Padding

    from graft.bench.peers import make_peer
    from graft.checking.compare import plain_twin
    from graft.tuning.turns import decode_in_turns

    plain, peer = plain_twin(engine), make_peer("hf", engine.target.model)
    warm_up = user_message(WARM_UP, engine.tokenizer)
    with console.status("warming up") as line:
        answers = [each.generate(warm_up, max_new_tokens=WARM_UP_TOKENS) for each in (plain, engine)]
        pace = _seconds_per_token([answers[0]])
        reference_pace = _seconds_per_token([_reference(peer, engine, warm_up, WARM_UP_TOKENS)])
        races: dict[str, Race] = {}
        for number, (title, text) in enumerate(PROMPTS.items()):
            prompt = user_message(text, engine.tokenizer)
            left = deadline - time.monotonic()
            share = left / (len(PROMPTS) - number)
            count = max(MIN_NEW_TOKENS, int(share * (1 - _REFERENCE_SHARE) / (3 * pace)))
            count = min(count, MAX_NEW_TOKENS)
            if races and left < 3 * pace * count:
                break
            words = f"{title.partition(':')[0]}, prompt {number + 1} of {len(PROMPTS)}"
            line.update(f"{words}: plain decoding, Graft, and plain decoding again, {count} tokens each")
            turn, answers = decode_in_turns(plain, engine, prompt, count)
            pace = _seconds_per_token(answers[::2])
            fewer = min(count, max(_FEWEST_OF_TRANSFORMERS, int((share - 3 * pace * count) / reference_pace)))
            line.update(f"{words}: transformers' generate, {fewer} tokens")
            reference = _reference(peer, engine, prompt, fewer)
            reference_pace = _seconds_per_token([reference])
            races[title] = Race(turn, answers, reference, (count, fewer))
            console.rule(title, align="left", style="dim")
            console.print(Padding(text, (0, 0, 1, 4), style="dim", expand=False))
            console.print(f"{answers[1].text}\n", markup=False)
    return races


def _reference(peer: Peer, engine: Engine, prompt: Prompt, count: int) -> Answer:
    """transformers' own answer, by the layers that it would have without Graft."""
    from graft.model.cpu_linear import torchs_linear
    from graft.model.sampler import SamplingSettings

    settings = SamplingSettings(max_new_tokens=count, stop_token_ids=engine.eos_token_ids)
    with torchs_linear(engine.target.model):
        return peer.answer([engine.encode(prompt)], settings)[0]


def _seconds_per_token(answers: Sequence[Answer | Generation]) -> float:
    return sum(each.stats.decode_seconds for each in answers) / sum(each.stats.tokens for each in answers)


def _cut(races: dict[str, Race]) -> str:
    """What was left out for lack of time, in words; nothing if all was done."""
    ours, theirs = (min(race.asked[decoder] for race in races.values()) for decoder in (0, 1))
    cuts = [f"answers have as few as {ours} of {MAX_NEW_TOKENS} tokens"] if ours < MAX_NEW_TOKENS else []
    cuts += [f"transformers decoded as few as {theirs} tokens of an answer"] if theirs < ours else []
    if missing := [title.partition(":")[0] for title in PROMPTS if title not in races]:
        cuts.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} left out")
    return ", ".join(cuts)


def _verdict(speed: Speed, races: dict[str, Race]) -> list[str]:
    """Graft's speed beside plain decoding and beside transformers, as far as the noise allows."""
    times = sum(race.reference_seconds for race in races.values()) / sum(race.turn.ours for race in races.values())
    beside = f"transformers' generate took {times:.1f} times as long as Graft"
    if speed.doubt is not None:
        return [f"No verdict on speed: {speed.doubt}.", f"{beside}; on so busy a machine that is a rough figure."]
    return [f"{speed.ratio:.2f} times the speed of plain decoding, give or take {speed.noise:.2f}.", f"{beside}."]


def _table(races: dict[str, Race]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from graft.tuning.turns import speed_of

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("tokens per second", no_wrap=True)
    for column in ("transformers", "plain", "Graft"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("Graft /\nplain", "tokens\na round", "same\ntext"):
        table.add_column(column, justify="right", no_wrap=True)
    for title, race in races.items():
        speed, ours = speed_of([race.turn]), race.answers[1].stats
        table.add_row(
            title,
            f"{race.reference.stats.tokens_per_second:.1f}",
            f"{2 * ours.tokens / (speed.before + speed.after):.1f}",
            f"{ours.tokens_per_second:.1f}",
            f"{speed.ratio:.2f}" if speed.doubt is None else "uncertain",
            f"{ours.mean_accepted:.2f}",
            "✗" if race.differing else "✓",
        )
    return table

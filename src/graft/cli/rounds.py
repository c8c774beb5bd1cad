"""Terminal view of the rounds of an answer: the tree of each round, and the text coloured by proposer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text
from rich.tree import Tree

from graft.request.detokenizer import TextStream
from graft.request.round_trace import MODEL, RoundRecord

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
_COLOR_SYSTEM = ColorSystem.STANDARD  # the 16 colours that every colour terminal has
MAX_NODES = 24  # nodes drawn per tree, besides accepted ones
_MAX_PRUNED = 8  # pruned proposals drawn per tree


class Rounds:
    """Draws the trees of one answer, if asked to, and records which proposer each character came from."""

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], sources: Sequence[str], draw_on: Console | None = None
    ) -> None:
        """sources: of the policy; the first is the model itself, whose tokens have no colour."""
        self._tokenizer = tokenizer
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(sources[1:])}
        self._draw_on = draw_on
        self._num_rounds = 0
        self.has_trees = False  # whether any round verified more than its root
        self._num_tokens: Counter[str] = Counter()
        self._text = TextStream(tokenizer, prompt)  # ignores stop strings, so it may be longer than the answer
        self._origins: list[str] = []  # by character
        self._num_painted = 0

    def watch(self, record: RoundRecord) -> None:
        self._num_rounds += 1
        self.has_trees |= record.num_verified > 1
        if self._draw_on is not None:
            self._draw_on.print(drawn(record, f"round {self._num_rounds}", self._colours, self._spell))
        for token, origin in zip(record.new_tokens, record.origins, strict=True):
            self._text.push(token)
            self._origins += [origin] * (len(self._text.text) - len(self._origins))
            self._num_tokens[origin] += 1

    def paint(self, piece: str, console: Console) -> str:
        """The answer's next piece, coloured if the console shows colours."""
        start, self._num_painted = self._num_painted, self._num_painted + len(piece)
        if console.color_system is None or console.no_color:
            return piece
        # An answer that ends inside a character has a last character that no token completed.
        origins = [*self._origins[start : self._num_painted], *[MODEL] * len(piece)]
        runs = groupby(zip(piece, origins, strict=False), key=lambda pair: pair[1])
        return "".join(
            self._style(origin).render("".join(c for c, _ in run), color_system=_COLOR_SYSTEM) for origin, run in runs
        )

    def legend(self) -> Text:
        """Each proposer in its colour, with the number of tokens it contributed."""
        labels = {**{name: name for name in self._colours}, MODEL: "the model's own"}
        parts = [Text(f"{label} {self._num_tokens[name]}", style=self._style(name)) for name, label in labels.items()]
        return Text(", ").join(parts)

    def _style(self, origin: str) -> Style:
        return Style(color=self._colours.get(origin))

    def _spell(self, token: int) -> str:
        return repr(self._tokenizer.decode([token]))


def drawn(record: RoundRecord, title: str, colours: Mapping[str, str], spell: Callable[[int], str]) -> Tree:
    """A round's tree: the proposer and acceptance probability of each node, and whether it was accepted or pruned."""
    num_nodes, accepted = record.num_verified - 1, set(record.accepted)
    has_tree = num_nodes > 0 or record.num_hidden > 0
    outcome = f"{len(accepted)} of {num_nodes} accepted" if has_tree else "plain decoding, no tree verified"
    if record.knew_noise:
        outcome += ", guessed with the random numbers that the sampler was about to use"
    tree = Tree(Text.assemble((title, "bold"), f" after {spell(record.tokens[0])}: {outcome}"), guide_style="dim")
    shown = likeliest(record, MAX_NODES) | accepted
    branches = {0: tree}
    for node in sorted(shown | _pruned_below(record, shown | {0})):
        word, style, end = spell(record.tokens[node]), colours[record.sources[node]], ""
        if node in accepted:
            word, style = f"{word} ✓", f"bold {style}"
        elif node >= record.num_verified:
            style, end = "dim strike", " pruned"
        details = f"  {record.probabilities[node]:.2f} {record.sources[node]}{end}"
        branches[node] = branches[record.parents[node]].add(Text.assemble((word, style), (details, "dim")))
    if len(record.new_tokens) > len(record.accepted):
        last = record.accepted[-1] if record.accepted else 0
        branches[last].add(Text.assemble((spell(record.new_tokens[-1]), "bold"), ("  the model's own", "dim")))
    if len(shown) < num_nodes:
        tree.add(Text(f"and {num_nodes - len(shown)} less likely", style="dim"))
    if record.num_hidden:
        tree.add(Text(f"and {record.num_hidden} hidden: they may be text of other users", style="dim"))
    return tree


def likeliest(record: RoundRecord, count: int) -> set[int]:
    """The `count` verified nodes most likely to be accepted. The parent of each is one of them or the root."""
    reach = [1.0]
    for node in range(1, record.num_verified):
        reach.append(reach[record.parents[node]] * record.probabilities[node])
    return set(sorted(range(1, len(reach)), key=lambda node: (-reach[node], node))[:count])


def _pruned_below(record: RoundRecord, shown: set[int]) -> set[int]:
    """The first pruned nodes below the shown ones or below each other."""
    found: set[int] = set()
    for node in range(record.num_verified, len(record.tokens)):
        if record.parents[node] in shown | found and len(found) < _MAX_PRUNED:
            found.add(node)
    return found

"""Draw one recorded round as an SVG file in four steps: draft, prune, graft, verify.

    python benchmarks/draw_method.py docs/results/round.json docs/pictures/method.svg

With --record, the round is first recorded with the default model on a CPU. Every word, probability and origin in the
picture is the record's. Draft and prune show the guesses of the small network that build on its own; Graft ranks the
guesses of all sources together. Colours are those of the server's page, for light and dark pages.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

PROMPT = (
    "A small fox crossed the frozen river at night to find food for her cubs. Why did the small fox cross the frozen "
    "river?"
)
BUDGET, ROUND = 10, 2  # nodes verified in a round, and the round to draw, from 0

KINDS = {"drafted": "drafted", "suffix": "copied", "past": "copied"}  # all others: seen before
LEGEND = {
    "drafted": "guessed by a small network",
    "copied": "copied from earlier text",
    "seen": "seen before",
    "model": "the model's own",
}
CAPTIONS = {
    "Draft": "A small, fast network guesses how the text goes on, several words ahead.",
    "Prune": "Each guess gets a probability of being right. Unlikely ones are dropped.",
    "Graft": "Guesses from memory join: words of the question, and words seen together before.",
    "Verify": "The model checks all guesses in one step, keeps what it would have written, and adds one word.",
}

WIDTH, MARGIN, HEADER = 830, 20, 84
LANE, BOX, COLUMN, ROOT = 42, 26, 92, 134  # heights of a lane and a box; widths of a column and of the root's
CAPTION, PAD = 42, 6  # height of a panel's caption; space below its tree

STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1d1f21; }
  .strong { font-weight: 600; } .name { font-size: 16px; font-weight: 600; }
  .quiet { fill: #5a5f64; } .small { font-size: 12px; } .chance { font-size: 11px; fill: #5a5f64; }
  .middle { text-anchor: middle; } .end { text-anchor: end; }
  .panel { fill: none; stroke: #dddad4; } .edge { fill: none; stroke: #85888c; stroke-width: 1.3; }
  .kept { stroke: #2c6e49; stroke-width: 2.6; }  .right .word { font-weight: 600; }
  .badge { fill: #2c6e49; } .number { fill: #ffffff; font-size: 13px; font-weight: 700; text-anchor: middle; }
  .drafted { fill: #bcd5ff; stroke: #3f74cf; } .copied { fill: #b4e6be; stroke: #2f8a4b; }
  .seen { fill: #ffdf9e; stroke: #b07a10; } .model { fill: #eae8e3; stroke: #85888c; }
  .dropped { opacity: 0.5; } .dropped rect { stroke-dasharray: 4 3; } .dropped .word { text-decoration: line-through; }
  .wrong { opacity: 0.38; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8e6e3; } .quiet, .chance { fill: #a6aaaf; }
    .panel { stroke: #363b42; } .edge { stroke: #9a9ea4; } .kept { stroke: #7bc796; }
    .badge { fill: #7bc796; } .number { fill: #15171a; }
    .drafted { fill: #23457f; stroke: #8fb8ff; } .copied { fill: #1d5230; stroke: #82d79b; }
    .seen { fill: #5e4510; stroke: #f0c56a; } .model { fill: #2d3137; stroke: #9a9ea4; }
  }
"""


class Node(NamedTuple):
    """A guess in a panel: its word, kind and state (kept, dropped, wrong or nothing), and a note below it."""

    parent: int
    word: str
    kind: str
    state: str = ""
    note: str = ""


def record() -> dict[str, Any]:
    """The round, as the default model decodes it on a CPU with nothing learned before."""
    from graft import load

    engine = load(device="cpu", dtype="fp32", budget=BUDGET, keep_learned=False)
    rounds: list[Any] = []
    list(engine.stream(engine.user_message(PROMPT), watch=rounds.append, show_all=True, max_new_tokens=40))
    before = [token for one in rounds[:ROUND] for token in one.new_tokens]
    drawn, spell = rounds[ROUND], engine.tokenizer.decode
    return {
        "prompt": PROMPT,
        "answer": spell(before),
        "tokens": [spell([token]) for token in drawn.tokens],
        "parents": drawn.parents,
        "probabilities": [round(float(each), 2) for each in drawn.probabilities],
        "sources": drawn.sources,
        "accepted": drawn.accepted,
        "num_verified": drawn.num_verified,
        "own": spell([drawn.new_tokens[-1]]),
    }


def draw(round: dict[str, Any]) -> str:
    """The picture of a recorded round as SVG text."""
    panels = dict(zip(CAPTIONS, _panels(round), strict=True))
    parts, y = list(_header(round)), HEADER
    for number, (name, nodes) in enumerate(panels.items(), start=1):
        places = _layout(nodes)
        height = CAPTION + (1 + max(lane for _, lane in places.values())) * LANE + PAD
        parts.append(f'<rect class="panel" x="0.5" y="{y}" width="{WIDTH - 1}" height="{height}" rx="8"/>')
        parts += [f'<circle class="badge" cx="{MARGIN + 10}" cy="{y + 20}" r="10.5"/>']
        parts += [_text(MARGIN + 10, y + 24.5, str(number), "number"), _text(MARGIN + 28, y + 25, name, "name")]
        parts.append(_text(MARGIN + 90, y + 25, CAPTIONS[name], "quiet"))
        parts += _tree(nodes, places, " ".join(round["answer"].split()[-2:]), y + CAPTION)
        y += height + 8
    parts += _footer(round, y)
    label = "One round of Graft: draft, prune, graft, verify. " + " ".join(CAPTIONS.values())
    size = f'viewBox="0 0 {WIDTH} {y + 46}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def _panels(round: dict[str, Any]) -> Iterator[dict[int, Node]]:
    """Each panel's nodes by number. The first two have the guesses of the network that build on its own."""
    tokens, parents, accepted = round["tokens"], round["parents"], set(round["accepted"])
    kinds = ["model", *(KINDS.get(source, "seen") for source in round["sources"][1:])]
    drafted = {0}
    for node in range(1, len(tokens)):
        if kinds[node] == "drafted" and parents[node] in drafted:
            drafted.add(node)
    verified = range(1, round["num_verified"])

    def nodes(chosen: Iterable[int], **more: Any) -> dict[int, Node]:
        shown = {node: Node(parents[node], tokens[node], kinds[node]) for node in sorted(chosen)}
        return {node: one._replace(**{key: say(node) for key, say in more.items()}) for node, one in shown.items()}

    yield nodes(drafted - {0})
    yield nodes(
        drafted - {0},
        state=lambda node: "" if node in verified else "dropped",
        note=lambda node: f"{100 * round['probabilities'][node]:.0f} %",
    )
    yield nodes(verified)
    checked = nodes(verified, state=lambda node: "kept" if node in accepted else "wrong")
    yield checked | {len(tokens): Node(round["accepted"][-1], round["own"], "model", "kept")}


def _layout(nodes: dict[int, Node]) -> dict[int, tuple[int, int]]:
    """Column and lane of each node. The first guess after a node stays in its lane; others branch off below."""
    places: dict[int, tuple[int, int]] = {}

    def after(node: int) -> list[int]:
        return [number for number, one in nodes.items() if one.parent == node]

    def length(node: int) -> int:
        return 1 + max(map(length, after(node)), default=0)

    def place(node: int, column: int, lane: int) -> None:
        places[node] = (column, lane)
        for rank, child in enumerate(after(node)):
            below = lane
            needed = range(column + 1, column + 2 + length(child))  # and a gap, so that it does not seem to continue
            while rank and any(other in needed and its == below for other, its in places.values()):
                below += 1
            place(child, column + 1, below)

    place(0, 0, 0)
    return places


def _tree(nodes: dict[int, Node], places: dict[int, tuple[int, int]], root: str, top: float) -> Iterator[str]:
    def box(node: int) -> tuple[float, float, float]:
        """The left edge, the middle's height and the width of a node."""
        column, lane = places[node]
        y = top + LANE * lane + BOX / 2
        if node == 0:
            return MARGIN, y, ROOT - 22
        return MARGIN + ROOT + COLUMN * (column - 1), y, max(34.0, 18 + 8.2 * len(words(nodes[node])))

    def words(node: Node) -> str:
        return f"{node.word.strip()} ✓" if node.state == "kept" and node.kind != "model" else node.word.strip()

    for number, node in nodes.items():
        (x, y, _), (before, start, width) = box(number), box(node.parent)
        begin, middle = before + width, (before + width + x) / 2
        bend = f"C{middle:.1f} {start:.1f} {middle:.1f} {y:.1f} {x:.1f} {y:.1f}"
        yield f'<path class="edge {node.state}" d="M{begin:.1f} {start:.1f} {bend}"/>'
    x, y, width = box(0)
    yield f'<rect class="model" x="{x}" y="{y - BOX / 2:.1f}" width="{width}" height="{BOX}" rx="6"/>'
    yield _text(x + width / 2, y + 5, f"… {root}", "middle")
    for number, node in nodes.items():
        x, y, width = box(number)
        yield f'<g class="{node.state}">' if node.state != "kept" else '<g class="right">'
        yield f'<rect class="{node.kind}" x="{x:.1f}" y="{y - BOX / 2:.1f}" width="{width:.1f}" height="{BOX}" rx="6"/>'
        yield _text(x + width / 2, y + 5, words(node), "word middle") + "</g>"
        if node.note:
            yield _text(x + width / 2, y + 25, node.note, "chance middle")


def _header(round: dict[str, Any]) -> Iterator[str]:
    first, rest = round["prompt"].split(". ", 1)
    yield _text(MARGIN, 22, "Question", "strong")
    yield _text(MARGIN + 80, 22, f"{first}. {rest}", "quiet small")
    yield _text(MARGIN, 46, "Answer", "strong")
    yield _text(MARGIN + 80, 46, f"{round['answer']} …", "quiet small")
    x = float(MARGIN)
    for kind, words in LEGEND.items():
        yield f'<rect class="{kind}" x="{x}" y="61" width="14" height="14" rx="3"/>'
        yield _text(x + 20, 72.5, words, "small")
        x += 50 + 6.3 * len(words)


def _footer(round: dict[str, Any], y: float) -> Iterator[str]:
    count = 1 + len(round["accepted"])
    words = "".join([*(round["tokens"][node] for node in round["accepted"]), round["own"]]).strip()
    yield _text(MARGIN, y + 18, f"{count} tokens from one step of the model: “{words}”", "strong")
    yield _text(MARGIN, y + 38, f"Without guesses it writes the same {count} tokens, in {count} steps.", "quiet")


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("round", type=Path, help="the recorded round, as JSON")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--record", action="store_true", help="first record the round into that file")
    given = parser.parse_args()
    if given.record:
        given.round.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    given.picture.write_text(draw(json.loads(given.round.read_text(encoding="utf-8"))), encoding="utf-8")

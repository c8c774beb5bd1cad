"""Draw a bar chart of measured speeds as an SVG file, from a results file in docs/results.

    python benchmarks/draw_speed.py docs/results/speed_h200.json docs/pictures/speed.svg

A bar's height is its speed over the baseline's in the same group. Its label is the measured tokens per second. The
picture has its own colours for light and dark pages, and needs no library.
"""

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 76, 46  # the space around the plot
GAP = 0.22  # of a group's width, between two groups

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f; }
  .title { font-size: 16px; font-weight: 600; }
  .value { font-size: 11px; text-anchor: middle; }
  .group { text-anchor: middle; }
  .tick { font-size: 11px; text-anchor: end; fill: #57606a; }
  .axis { stroke: #d0d7de; }
  .bar0 { fill: #8c959f; } .bar1 { fill: #4f8fd6; } .bar2 { fill: #2c8a57; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .tick { fill: #9198a1; } .axis { stroke: #3d444d; }
    .bar0 { fill: #7d8590; } .bar1 { fill: #6cb0ff; } .bar2 { fill: #4ac17d; }
  }
"""


def draw(results: dict[str, Any]) -> str:
    """The picture of one results file as SVG text."""
    series, groups, baseline = results["series"], results["groups"], results["baseline"]
    speeds = [group["tokens_per_second"] for group in groups]
    ratios = [[one[name] / one[baseline] for name in series] for one in speeds]
    highest = 0.5 * int(2 * max(max(row) for row in ratios) + 1)
    plot_height = HEIGHT - TOP - BOTTOM
    group_width = (WIDTH - LEFT - RIGHT) / len(groups)
    bar_width = group_width * (1 - GAP) / len(series)

    def y(ratio: float) -> float:
        return TOP + plot_height * (1 - ratio / highest)

    parts, x = [_text(LEFT, 24, results["title"], "title")], LEFT
    for place, name in enumerate(series):  # the legend
        parts.append(f'<rect class="bar{place}" x="{x}" y="39" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, 50, name, "legend"))
        x += 40 + 8 * len(name)
    parts.append(_text(WIDTH - RIGHT, 50, f"height of a bar: speed over {baseline}", "tick"))
    for half in range(int(2 * highest) + 1):
        ratio = half / 2
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}"/>')
        parts.append(_text(LEFT - 8, y(ratio) + 4, f"{ratio:g} ×", "tick"))
    for index, (group, row) in enumerate(zip(groups, ratios, strict=True)):
        start = LEFT + group_width * (index + GAP / 2)
        for place, (name, ratio) in enumerate(zip(series, row, strict=True)):
            x = start + bar_width * place
            parts.append(
                f'<rect class="bar{place}" x="{x:.1f}" y="{y(ratio):.1f}" width="{bar_width - 3:.1f}" '
                f'height="{y(0) - y(ratio):.1f}" rx="2"/>'
            )
            middle = x + (bar_width - 3) / 2
            parts.append(_text(middle, y(ratio) - 5, f"{group['tokens_per_second'][name]:,}", "value"))
        words = f"{group['requests']} request" + ("s" if group["requests"] > 1 else "")
        parts.append(_text(LEFT + group_width * (index + 0.5), HEIGHT - BOTTOM + 20, words, "group"))
    label = escape(results["title"], quote=True)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="measured speeds, as JSON")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    given = parser.parse_args()
    given.picture.write_text(draw(json.loads(given.results.read_text(encoding="utf-8"))), encoding="utf-8")

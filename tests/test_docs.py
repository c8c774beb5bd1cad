"""The documentation keeps up with the repository: its pictures, its figures and the pages that code names."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = json.loads((DOCS / "results" / "speed_h200.json").read_text())


def test_the_picture_of_speeds_is_drawn_from_its_results_file():
    draw = runpy.run_path(str(ROOT / "benchmarks" / "draw_speed.py"))["draw"]
    assert draw(RESULTS) == (DOCS / "pictures" / "speed.svg").read_text()


def test_the_picture_of_the_method_is_drawn_from_a_recorded_round():
    draw = runpy.run_path(str(ROOT / "benchmarks" / "draw_method.py"))["draw"]
    recorded = json.loads((DOCS / "results" / "round.json").read_text())
    assert draw(recorded) == (DOCS / "pictures" / "method.svg").read_text()


@pytest.mark.parametrize("group", RESULTS["groups"], ids=lambda group: f"{group['requests']} requests")
def test_the_benchmarks_page_has_every_figure_of_the_picture(group):
    lines = (DOCS / "benchmarks.md").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"| {group['requests']} |") and group["commit"] in line)
    assert all(f"{speed:,}" in line for speed in group["tokens_per_second"].values())


def test_every_page_that_the_code_names_is_there():
    sources = [path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    named = {page for path in sources for page in re.findall(r"\bdocs/[\w-]+\.md", path.read_text())}
    assert named and not [page for page in sorted(named) if not (ROOT / page).exists()]


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120

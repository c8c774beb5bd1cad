"""The model card of a trained head or draft model: README.md, training.json and training curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.rendering import render

Log = list[dict[str, float]]

SHOWN = ("loss", "accepted_chain", "accepted_marginal", "accepted_conditional")  # in progress reports
_TREES = {
    "chain": "chain of each slot's likeliest token",
    "marginal": "tree of the likeliest paths, slots taken as independent",
    "conditional": "tree of the likeliest paths, given the token before each slot",
}


def read_log(path: Path) -> Log:
    try:
        log: Log = [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise GraftError(f"{path} is missing or damaged: it is not the log of a training run") from error
    return log


def write_card(folder: Path, facts: dict[str, Any], log: Log, text: str) -> None:
    """Write README.md and training.json, and loss.png if matplotlib is installed."""
    picture = "\n![loss and right guesses over training](loss.png)\n" if _plot(log, folder / "loss.png") else ""
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(text + picture, encoding="utf-8")


def eagle3_text(facts: dict[str, Any], log: Log) -> str:
    return render("card_eagle3.md", **facts, rights=by_place(_evaluations(log)[-1], "held_back_right"))


def block_text(facts: dict[str, Any], log: Log) -> str:
    figures = _evaluations(log)[-1]
    kinds = [kind for kind in ("marginal", "conditional") if f"held_back_{kind}_hit1_0" in figures]
    hits = [name.split("_")[3] for name in figures if name.startswith("held_back_marginal_") and name.endswith("_0")]
    columns = {f"{kind}, {hit}": by_place(figures, f"held_back_{kind}_{hit}") for kind in kinds for hit in hits}
    accepted = [(words, figures[f"accepted_{kind}"]) for kind, words in _TREES.items() if f"accepted_{kind}" in figures]
    rows = list(zip(*columns.values(), strict=True))
    return render("card_block.md", **facts, columns=list(columns), rows=rows, accepted=accepted)


def depth_pruned_text(facts: dict[str, Any], log: Log) -> str:
    columns = {"before": facts["before"]} | ({"after": _evaluations(log)[-1]} if facts["steps"] else {})
    return render("card_depth_pruned.md", **facts, columns=columns)


def by_place(record: dict[str, float], name: str) -> list[float]:
    """The values `name`_0, `name`_1, ... of a log line."""
    found: list[float] = []
    while f"{name}_{len(found)}" in record:
        found.append(record[f"{name}_{len(found)}"])
    return found


def _evaluations(log: Log) -> Log:
    return [record for record in log if any(name.startswith("held_back_") for name in record)]


def _plot(log: Log, path: Path) -> bool:
    """Plot the training curves. Returns False if there are none, or without matplotlib."""
    evaluations = _evaluations(log)
    if not evaluations:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False  # optional: `graft train` run again with matplotlib adds the picture
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [record for record in log if "loss" in record]
    left.plot([r["step"] for r in steps], [r["loss"] for r in steps], linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", title="loss against the target's distribution")
    known = ("held_back_right", "held_back_conditional_hit1", "held_back_marginal_hit1")
    name = next(name for name in known if f"{name}_0" in evaluations[-1])
    for place in range(len(by_place(evaluations[-1], name))):
        values = [r[f"{name}_{place}"] for r in evaluations]
        right.plot([r["step"] for r in evaluations], values, label=f"depth {place + 1}")
    right.set(xlabel="step", title="right guesses on held-back answers")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return True

"""The model card of a trained head or draft model: README.md, training.json and training curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft.errors import GraftError

Log = list[dict[str, float]]

SHOWN = ("loss", "accepted_chain", "accepted_marginal", "accepted_conditional")  # in progress reports
_TREES = {
    "chain": "chain of each slot's likeliest token",
    "marginal": "tree of the likeliest products of slots",
    "conditional": "tree of the likeliest paths, given the token before each slot",
}


def read_log(path: Path) -> Log:
    try:
        log: Log = [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise GraftError(f"{path} is missing or damaged: it is no log of a training run") from error
    return log


def write_card(folder: Path, facts: dict[str, Any], log: Log, text: str) -> None:
    """Write README.md and training.json, and loss.png if matplotlib is installed."""
    picture = "\n![loss and right guesses over training](loss.png)\n" if _plot(log, folder / "loss.png") else ""
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(text + picture, encoding="utf-8")


def eagle3_text(facts: dict[str, Any], log: Log) -> str:
    rights = by_place(_evaluations(log)[-1], "held_back_right")
    rows = "\n".join(f"| {depth} | {right:.3f} |" for depth, right in enumerate(rights, start=1))
    return f"""# An EAGLE-3 draft head, made with `graft train`

{_data(facts)} Its draft vocabulary covers
{facts["vocabulary_coverage"]:.2%} of the answers' tokens. All settings are in `training.json`.

Share of right guesses on held-back answers, by drafted depth (top 1, the tokens before it right):

| depth | right |
|---|---|
{rows}
"""


def block_text(facts: dict[str, Any], log: Log) -> str:
    figures, head = _evaluations(log)[-1], facts["head"]
    kinds = [kind for kind in ("marginal", "conditional") if f"held_back_{kind}_hit1_0" in figures]
    hits = [name.split("_")[3] for name in figures if name.startswith("held_back_marginal_") and name.endswith("_0")]
    columns = {f"{kind}, {hit}": by_place(figures, f"held_back_{kind}_{hit}") for kind in kinds for hit in hits}
    accepted = [kind for kind in _TREES if f"accepted_{kind}" in figures]
    lines = [f"| {_TREES[kind]} | {figures[f'accepted_{kind}']:.2f} |" for kind in accepted]
    simulated = f"""
Mean accepted length on held-back answers at temperature {min(facts["temperatures"])}, simulated: trees of
{facts["training"]["nodes"]} nodes from one pass of this head alone, the target's own token of each round included.

| tree | mean accepted length |
|---|---|
{chr(10).join(lines)}
"""
    name = "TreeFlash" if head["conditional"] else "DFlash"
    slots = "shifted" if head["shifted"] else "in place"
    return f"""# A block draft head ({name}), made with `graft train`

{_data(facts)} All settings are in `training.json`.

{len(head["causal"])} {"causal" if all(head["causal"]) else "bidirectional"} layers; blocks of {head["block_size"]}
slots, {slots}; reads what goes into the target's layers {", ".join(map(str, head["target_layers"]))}.

Share of slots with the true token among the likeliest, on held-back answers, the text before the block given, and for
`conditional` the token before the slot:

| slot | {" | ".join(columns)} |
|---|{"---|" * len(columns)}
{_table(columns)}
{simulated if accepted else ""}"""


def depth_pruned_text(facts: dict[str, Any], log: Log) -> str:
    steps, training = facts["steps"], facts["training"]
    columns = {"before": facts["before"]} | ({"after": _evaluations(log)[-1]} if steps else {})
    lines = [
        f"| {words} | {' | '.join(f'{figures[name]:.3f}' for figures in columns.values())} |"
        for words, name in (("right", "held_back_right_0"), ("KL divergence", "held_back_divergence"))
    ]
    removed = "\n".join(
        f"| {removal['layer']} | {facts['divergence_without'][removal['layer']]:.4f} | {removal['divergence']:.4f} |"
        for removal in facts["removed"]
    )
    kept = ", ".join(map(str, facts["kept_layers"]))
    made = "The layers are as they were: nothing was trained." if not steps else _data(facts)
    return f"""# A depth-pruned draft model, made with `graft train`

{len(facts["kept_layers"])} of the target's {facts["num_target_layers"]} layers: {kept}. Embedding, output layer and
tokenizer are the target's. An ordinary checkpoint, for any engine that takes a draft model. All settings are in
`training.json`.

{made} Share of right guesses (top 1) and mean KL divergence from the target, on held-back answers:

| | {" | ".join(f"{name} training" for name in columns)} |
|---|{"---|" * len(columns)}
{chr(10).join(lines)}

The layers that went, in this order, with the mean KL divergence of the next-token distributions on some of the
answers ({training["measured"]:,} tokens with their prompts):

| layer | without it alone | without it and those above |
|---|---|---|
{removed}
"""


def by_place(record: dict[str, float], name: str) -> list[float]:
    """The values `name`_0, `name`_1, ... of a log line."""
    found: list[float] = []
    while f"{name}_{len(found)}" in record:
        found.append(record[f"{name}_{len(found)}"])
    return found


def _data(facts: dict[str, Any]) -> str:
    training = facts["training"]
    of = f" of {training['steps']:,} planned" if facts["steps"] < training["steps"] else ""
    return f"""Trained on {facts["answer_tokens"]:,} tokens of the target's own answers ({facts["answers"]:,} answers to
{facts["prompts"]:,} prompts, temperatures {", ".join(map(str, facts["temperatures"]))}), for
{facts["steps"]:,} steps{of} of {training["batch_tokens"]:,} tokens."""


def _table(columns: dict[str, list[float]]) -> str:
    rows = zip(*columns.values(), strict=True)
    return "\n".join(f"| {n} | {' | '.join(f'{value:.3f}' for value in row)} |" for n, row in enumerate(rows, start=1))


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

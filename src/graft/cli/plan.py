"""`graft plan`: predicts what Graft would bring a model on GPUs that are not here."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.options import Given, Group, option, takes

if TYPE_CHECKING:
    from graft.plan.planner import Plan, Row

_machine = functools.partial(option, rich_help_panel="Model and machine")
_load = functools.partial(option, rich_help_panel="Load")
_drafts = functools.partial(option, rich_help_panel="Drafts")

PLANNED: Group = {
    "model": _machine(
        str,
        "--model",
        "llama-1b5, llama-8b, qwen-32b, llama-70b, qwen3-30b-a3b, qwen3-235b; a folder with config.json; "
        "or layers=..,hidden=..",
        "llama-8b",
    ),
    "gpu": _machine(str, "--gpu", "h200, h100-sxm, b200, a100-80g, l40s, rtx4090.", "h200"),
    "gpus": _machine(int, "--gpus", "How many share the model, by tensor parallelism.", "1"),
    "batch": _load(list[int], "--batch", "Texts decoded together; repeatable.", "1, 4, 16, 64, 128"),
    "context": _load(int, "--context", "Tokens of each text, on the average.", "2000"),
    "prompt_tokens": _load(int, "--prompt-tokens", "Count the time to read prompts of so many.", "0: decoding alone"),
    "answer_tokens": _load(int, "--answer-tokens", "New tokens for each such prompt.", "256"),
    "draft_vocab": _drafts(int, "--draft-vocab", "Tokens that the head drafts from.", "32000"),
    "accepted": _drafts(
        float, "--accepted", "Mean accepted length of the head's dense tree of 60 nodes.", "that of the packaged head"
    ),
    "acceptance": _drafts(
        Path, "--acceptance", "Or take it from a results.json of graft bench on your own prompts.", metavar="FILE"
    ),
}


@takes(planned=PLANNED)
def plan(
    check: Annotated[
        bool, typer.Option("--check", help="Show predictions beside what was measured, and their errors.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    *,
    planned: Given,
) -> None:
    """Predict tokens per second, and the best budget and draft passes, for a model and GPUs that are not here.

    A step's time is that of reading weights, keys and values, of arithmetic, launches and all-reduces; what is reached
    of a data sheet was measured on an H200. Accepted lengths by budget and passes are measured too, of the packaged
    model and head: give --accepted or --acceptance for your own. All that is assumed is printed; --check shows how far
    off predictions are where something was measured.

    [dim]Example:[/] graft plan --model qwen3-235b --gpus 8 --gpu h200
    """
    if check:
        _check(as_json)
        return
    from graft.plan.planner import PlanSettings, make_plan

    if "batch" in planned:
        planned["batch"] = tuple(planned["batch"])
    made = make_plan(PlanSettings.of(planned))
    if as_json:
        print(json.dumps(_facts(made), indent=2))
        return
    settings, costs = made.settings, made.costs
    print(
        f"PREDICTED, not measured: {costs.model.name} ({costs.model.parameters / 1e9:.1f} B parameters, bf16) on "
        f"{costs.num_gpus} x {costs.gpu.name}, texts of {settings.context:,} tokens"
    )
    print()
    titles = ("batch", "plain tokens/s", "Graft tokens/s", "speedup", "nodes", "passes", "accepted", "round ms")
    _print_table((*titles, "GB a GPU"), [_cells(row) for row in made.rows])
    print()
    if any(not row.fits for row in made.rows):
        print(f"no room: weights and KV cache are more than 85 % of the {costs.gpu.memory_bytes / 1e9:.0f} GB of a GPU")
    print("Assumed:")
    for line in assumptions(made):
        print(f"- {line}")


def assumptions(made: Plan) -> list[str]:
    """What a plan takes for granted, in sentences."""
    settings, costs, reached = made.settings, made.costs, made.costs.efficiency
    lines = [
        f"acceptance: {made.acceptance.source}. Another model, head or text accepts more or less: --accepted, "
        "--acceptance",
        f"reached of the data sheet, as on an H200: {reached.bandwidth:.0%} of the bandwidth, {reached.products:.0%} "
        f"of the bf16 arithmetic in products, {reached.attention:.0%} in tree attention; {reached.launch * 1e6:.1f} us "
        "a kernel",
        f"beside that a round with a tree takes {reached.host * 1e3:.1f} ms, as on an H200's host, times the cube root "
        "of the batch",
        f"the head: EAGLE-3, one layer of the model's width, {settings.draft_vocab:,} draft tokens, one pass a depth",
        "nodes are those of each text; `passes` a mean, and with several texts the same for all",
    ]
    if costs.num_gpus > 1:
        latency = reached.nvlink_latency if costs.gpu.has_nvlink else reached.pcie_latency
        lines.append(
            f"{costs.num_gpus} GPUs by tensor parallelism, head included: two all-reduces a layer of "
            f"{latency * 1e6:.0f} us and {costs.gpu.link / 2e9:.0f} GB/s each way. Nothing was measured on more than "
            "one GPU"
        )
    if costs.model.experts:
        lines.append(
            f"tokens choose {costs.model.active_experts} of {costs.model.experts} experts independently, so a step of "
            f"64 reads {costs.model.experts_touched(64):.0%} of them; their layers are as efficient as dense ones, "
            "though only dense models have fused layers today, and none with experts was measured"
        )
    if not settings.prompt_tokens:
        lines.append("reading prompts is left out: --prompt-tokens counts it")
    lines.append("graft plan --check: how far predictions are from what was measured")
    return lines


def _cells(row: Row) -> list[str]:
    memory = f"{row.memory_bytes / 1e9:.0f}"
    if not row.fits:
        return [str(row.batch), "no room", *[""] * 6, memory]
    return [
        str(row.batch),
        f"{row.plain_tokens_per_second:,.0f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.speedup:.2f}",
        str(row.nodes),
        f"{row.passes:.1f}",
        f"{row.accepted:.2f}",
        f"{row.round_seconds * 1e3:.2f}",
        memory,
    ]


def _facts(made: Plan) -> dict[str, Any]:
    """A plan for machines."""
    settings = vars(made.settings) | {"acceptance": str(made.settings.acceptance) if made.settings.acceptance else None}
    return {
        "predicted": True,
        "settings": settings,
        "model": vars(made.costs.model) | {"shape": vars(made.costs.model.shape)},
        "gpu": vars(made.costs.gpu),
        "efficiency": vars(made.costs.efficiency),
        "rows": [vars(row) for row in made.rows],
        "assumptions": assumptions(made),
    }


def _check(as_json: bool) -> None:
    from graft.plan.check import checked_points, summary

    points = checked_points()
    if as_json:
        print(json.dumps([vars(point) | {"error": point.error} for point in points], indent=2))
        return
    print("Predicted beside measured on one H200; * was used to fit. Sources: docs/benchmarks.md")
    for group in dict.fromkeys(point.group for point in points):
        print(f"\n{group}")
        _print_table(
            ("", "predicted", "measured", "error", ""),
            [
                [p.what, _number(p.predicted), _number(p.measured), f"{p.error:+.0%}", "*" if p.fitted else ""]
                for p in points
                if p.group == group
            ],
        )
    print("\nErrors of what was not fitted")
    _print_table(
        ("", "figures", "median", "largest"),
        [[group, str(count), f"{middle:.0%}", f"{worst:+.0%}"] for group, count, middle, worst in summary(points)],
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns that are as wide as they need to be: the first to the left where it has words, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    has_words = not all(row[0].isdecimal() for row in rows)
    for row in (titles, *rows):
        first = row[0].ljust(widths[0]) if has_words else row[0].rjust(widths[0])
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([first, *others]).rstrip())

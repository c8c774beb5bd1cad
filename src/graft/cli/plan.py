"""`graft plan`: predict Graft's speed for a model on GPUs that are not here."""

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
        "llama-1b5, llama-8b, qwen-32b, llama-70b, qwen3-30b-a3b, qwen3-235b; a folder with a config.json; "
        "or sizes, as layers=..,hidden=..",
        "llama-8b",
    ),
    "gpu": _machine(str, "h200, h100-sxm, b200, a100-80g, l40s, rtx4090.", "h200"),
    "gpus": _machine(int, "Number of GPUs, with tensor parallelism.", "1"),
    "batch": _load(list[int], "Batch size; repeatable.", "1, 4, 16, 64, 128"),
    "context": _load(int, "Mean tokens of each text.", "2000"),
    "prompt_tokens": _load(int, "Include prefill of prompts this long.", "0: decode only"),
    "answer_tokens": _load(int, "With --prompt-tokens: new tokens per prompt.", "256"),
    "draft_vocab": _drafts(int, "Draft vocabulary of the head.", "32000"),
    "accepted": _drafts(
        float, "Mean accepted length of the head's dense tree of 60 nodes.", "that of the packaged head"
    ),
    "acceptance": _drafts(
        Path, "Instead of --accepted: a results.json of graft bench on your prompts.", metavar="FILE"
    ),
}


@takes(planned=PLANNED)
def plan(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    *,
    planned: Given,
) -> None:
    """Predict Graft's speed, and its best budget and draft passes, for a model on GPUs that are not here.

    A roofline model gives the time of a step: reading weights and KV cache, arithmetic, kernel launches, all-reduces.
    Its efficiencies were measured on an H200. Accepted lengths were measured with the packaged model and head: give
    your own with --accepted or --acceptance. The plan prints its assumptions; docs/plan.md lists its errors.

    [dim]Example:[/] graft plan --model qwen3-235b --gpus 8 --gpu h200
    """
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
        print(f"no room: weights and KV cache exceed 85 % of a GPU's {costs.gpu.memory_bytes / 1e9:.0f} GB")
    print("Assumptions:")
    for line in assumptions(made):
        print(f"- {line}")


def assumptions(made: Plan) -> list[str]:
    """The assumptions of a plan, in sentences."""
    settings, costs, efficiency = made.settings, made.costs, made.costs.efficiency
    lines = [
        f"acceptance: {made.acceptance.source}. Other models, heads and texts differ: see --accepted and --acceptance",
        f"efficiency, as measured on an H200: {efficiency.bandwidth:.0%} of the memory bandwidth; "
        f"{efficiency.products:.0%} of the bf16 arithmetic in matrix products, {efficiency.attention:.0%} in tree "
        f"attention; {efficiency.launch * 1e6:.1f} us per kernel launch",
        f"host time of a round with a tree: {efficiency.host * 1e3:.1f} ms, as measured on an H200's host, times the "
        "cube root of the batch size",
        f"head: EAGLE-3, one layer of the model's width, {settings.draft_vocab:,} draft tokens, one pass per depth",
        "`nodes` is per text; `passes` is a mean, and the same for all texts of a batch",
    ]
    if costs.num_gpus > 1:
        latency = efficiency.nvlink_latency if costs.gpu.has_nvlink else efficiency.pcie_latency
        lines.append(
            f"{costs.num_gpus} GPUs with tensor parallelism, head included: two all-reduces per layer, each of "
            f"{latency * 1e6:.0f} us and {costs.gpu.link / 2e9:.0f} GB/s each way. Nothing was measured on more than "
            "one GPU"
        )
    if costs.model.experts:
        lines.append(
            f"each token chooses {costs.model.active_experts} of {costs.model.experts} experts independently, so a "
            f"step of 64 tokens reads {costs.model.experts_touched(64):.0%} of them. Expert layers are as efficient as "
            "dense ones, though only dense models have fused layers today, and no model with experts was measured"
        )
    if not settings.prompt_tokens:
        lines.append("prefill is left out: --prompt-tokens includes it")
    return [*lines, "docs/plan.md lists how far predictions are from measurements"]


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
    """A plan as JSON values."""
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


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns aligned to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

"""Predictions compared with measurements on one H200 (docs/benchmarks.md). Points used for fitting are marked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from graft.plan.acceptance import Acceptance
from graft.plan.cost import Costs
from graft.plan.gpus import GPUS
from graft.plan.models import MODELS
from graft.plan.planner import PLAIN, best_point, tokens_per_second

H200 = GPUS["h200"]
# The 8B costs were measured by cost emulation, which keeps the small model's vocabularies.
WIDE_8B = Costs(replace(MODELS["llama-8b"], vocab=49_152, tied=True), H200, draft_vocab=11_520)
_BENCH_CONTEXT = 400  # mean tokens of a text in `graft bench`
_PROMPT, _ANSWER = 250, 96  # mean tokens of a request in the load test
_LOAD_CONTEXT = 300

# Milliseconds of a step's CUDA graph, 8B: context, rows, {tokens per row: ms}
_STEPS = (
    (2_000, 1, {1: 4.50, 64: 5.28, 128: 6.54}),
    (16_000, 1, {1: 5.33, 64: 7.22, 128: 9.83}),
    (300, 64, {1: 5.84, 2: 6.46, 4: 9.70}),
)
_PRODUCTS = {1: 115.3, 64: 123.3, 128: 132.7, 256: 187.5, 512: 314.0, 1024: 590.0, 2048: 1157.0}  # a layer of 8B, in us
# Milliseconds of a round at the cost of 8B: name, nodes, draft passes, ms, whether it was used for fitting
_ROUNDS = (
    ("8B, plain", 0, 0.0, 4.77, False),
    ("8B, dense", 59, 8.82, 7.56, True),
    ("8B, graft", 102, 4.68, 7.46, True),
)
_ONE_TEXT = 786  # tokens per second of policy graft at the cost of 8B
# Tokens per second of a load test at the cost of 8B, by concurrent requests: vLLM plain, our plain, Graft.
_LOAD = {
    1: (211, 216, 586),
    4: (777, 777, 1590),
    16: (2584, 2567, 3908),
    64: (7197, 6443, 6534),
}
_SGLANG = {1: 204, 4: 688, 16: 2109, 64: 5453}  # SGLang's plain decoding, in a load test of the same kind
# Speed-up in the load test with a fixed budget, by concurrent requests and nodes.
_FIXED = {
    1: {1: 1.42, 3: 1.75, 7: 2.11, 15: 2.32, 31: 2.71, 60: 2.80},
    4: {1: 0.94, 3: 1.32, 7: 1.37, 15: 1.83, 31: 1.66, 60: 1.64},
    16: {1: 1.20, 3: 1.34, 7: 1.36, 15: 1.39, 31: 1.17, 60: 0.87},
    64: {1: 0.86, 3: 0.81, 7: 0.78, 15: 0.64, 31: 0.45, 60: 0.30},
}


@dataclass(frozen=True)
class Checked:
    """One measured figure beside its prediction."""

    group: str
    what: str
    predicted: float
    measured: float
    fitted: bool  # it was used to fit the efficiencies

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def checked_points() -> list[Checked]:
    """Every measured figure that the cost model can predict."""
    return [*_products(), *_steps(), *_rounds(), *_speeds(), *_load(), *_fixed_budgets()]


def summary(points: list[Checked]) -> list[tuple[str, int, float, float]]:
    """For each group, without fitted figures: their number, the median absolute error, and the largest error."""
    lines = []
    for group in dict.fromkeys(point.group for point in points):
        errors = [point.error for point in points if point.group == group and not point.fitted]
        lines.append((group, len(errors), median(map(abs, errors)), max(errors, key=abs)))
    return lines


def _products() -> Iterator[Checked]:
    costs = Costs(MODELS["llama-8b"], H200)
    weights = costs.model.attention_weights + costs.model.mlp_weights
    for tokens, measured in _PRODUCTS.items():
        seconds = costs.products(weights, tokens * weights) + 4 * costs.efficiency.launch
        yield Checked("products of a layer, us", f"8B, {tokens} tokens", seconds * 1e6, measured, tokens >= 512)


def _steps() -> Iterator[Checked]:
    costs = Costs(MODELS["llama-8b"], H200)
    for context, rows, by_width in _STEPS:
        for width, measured in by_width.items():
            what = f"8B, {rows} x {width} tokens at {context}"
            yield Checked("step, ms", what, costs.step(rows, width, context) * 1e3, measured, False)


def _rounds() -> Iterator[Checked]:
    for what, nodes, passes, measured, fitted in _ROUNDS:
        seconds = WIDE_8B.round(1, nodes, passes, _BENCH_CONTEXT)
        yield Checked("round of one text, ms", what, seconds * 1e3, measured, fitted)


def _speeds() -> Iterator[Checked]:
    """Cost and acceptance together, with the budget and passes that the plan chooses."""
    _, speed = best_point(WIDE_8B, Acceptance.measured(), 1, _BENCH_CONTEXT)
    yield Checked("one text, tokens/s", "8B, graft", speed, _ONE_TEXT, False)


def _load() -> Iterator[Checked]:
    acceptance = Acceptance.measured()
    group = "load test at the cost of 8B, tokens/s"
    for rows, (vllm, plain, graft) in _LOAD.items():
        predicted = tokens_per_second(WIDE_8B, PLAIN, 1.0, rows, _LOAD_CONTEXT, _PROMPT, _ANSWER)
        _, best = best_point(WIDE_8B, acceptance, rows, _LOAD_CONTEXT, _PROMPT, _ANSWER)
        yield Checked(group, f"vLLM plain, {rows} at once", predicted, vllm, False)
        yield Checked(group, f"our plain, {rows} at once", predicted, plain, False)
        yield Checked(group, f"Graft, {rows} at once", best, graft, False)
        yield Checked(group, f"SGLang plain, {rows} at once", predicted, _SGLANG[rows], False)


def _fixed_budgets() -> Iterator[Checked]:
    """Speed-up with a fixed budget and the number of draft passes that the plan would choose for it."""
    acceptance = Acceptance.measured()
    for rows, by_nodes in _FIXED.items():
        load = rows, _LOAD_CONTEXT, _PROMPT, _ANSWER
        plain = tokens_per_second(WIDE_8B, PLAIN, 1.0, *load)
        for nodes, measured in by_nodes.items():
            nearest = min((point.nodes for point in acceptance.points), key=lambda n: abs(n - nodes))
            points = [point for point in acceptance.choices(rows) if point.nodes == nearest]
            best = max(tokens_per_second(WIDE_8B, replace(point, nodes=nodes), 1.0, *load) for point in points)
            group = "fixed budget in the load test, times plain"
            yield Checked(group, f"{rows} at once, {nodes} nodes", best / plain, measured, False)

"""Predictions beside what was measured on one H200: docs/benchmarks.md. Fitted points are marked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from graft.bench.shapes import Shape
from graft.plan.acceptance import Acceptance, Point
from graft.plan.cost import Costs
from graft.plan.gpus import GPUS
from graft.plan.models import MODELS, ModelShape
from graft.plan.planner import PLAIN, best_point, tokens_per_second

H200 = GPUS["h200"]
SMOLLM2 = ModelShape(
    "smollm2-135m",
    Shape(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64),
    vocab=49_152,
    tied=True,
)
# Cost emulation keeps the small model's vocabularies. Its texts had about 400 tokens.
WIDE_8B, WIDE_32B = (
    Costs(replace(MODELS[name], vocab=49_152, tied=True), H200, draft_vocab=11_520) for name in ("llama-8b", "qwen-32b")
)
_BENCH_CONTEXT = 400
_PROMPT, _ANSWER = 250, 96  # mean tokens of the load test's requests
_LOAD_CONTEXT = 300

# Milliseconds of a step's graph: shape, context, rows, {width: ms}
_STEPS = (
    ("llama-8b", 2_000, 1, {1: 4.62, 64: 5.43, 128: 6.54}),
    ("llama-8b", 16_000, 1, {1: 5.33, 64: 7.22, 128: 9.83}),
    ("llama-8b", 300, 64, {1: 5.84, 2: 6.46, 4: 9.70}),
)
_OLDER_STEPS = (  # before the page pool; 1.5B and 32B with slower products of 64 tokens and more
    ("smollm2-135m", 2_000, 1, {1: 1.08, 16: 1.10, 64: 1.18, 128: 1.30}),
    ("llama-1b5", 2_000, 1, {1: 1.85, 16: 1.97, 64: 2.57, 128: 3.65}),
    ("llama-8b", 64_000, 1, {1: 6.86, 16: 7.32, 64: 11.82, 128: 20.07}),
    ("qwen-32b", 2_000, 1, {1: 17.57, 16: 18.13, 64: 21.00, 128: 29.90}),
    ("qwen-32b", 16_000, 1, {1: 19.36, 16: 20.68, 64: 28.15, 128: 44.29}),
)
_PRODUCTS = {1: 115.3, 64: 123.3, 128: 132.7, 256: 187.5, 512: 314.0, 1024: 590.0, 2048: 1157.0}  # a layer of 8B, in us
_ATTENTION = {  # a layer of 8B, in us: context -> {width: us}
    2_000: {1: 13.2, 16: 13.8, 64: 26.0},
    16_000: {1: 34.2, 16: 36.4, 64: 81.1},
    64_000: {1: 85.9, 16: 95.0, 64: 220.0},
}
# Milliseconds of a round: what, costs, nodes, passes, ms, fitted
_ROUNDS = (
    ("8B, plain", WIDE_8B, 0, 0.0, 4.77, False),
    ("8B, dense", WIDE_8B, 59, 8.82, 7.56, True),
    ("8B, graft", WIDE_8B, 102, 4.68, 7.46, True),
    ("32B, plain", WIDE_32B, 0, 0.0, 1e3 / 57, False),
    ("32B, dense", WIDE_32B, 60, 8.95, 4.47e3 / 189, False),
)
# Tokens per second of a load test at the cost of 8B, by requests at once: vLLM plain, our plain, Graft.
_LOAD = {
    1: (211, 216, 586),
    4: (777, 777, 1590),
    16: (2584, 2567, 3908),
    64: (7197, 6443, 6534),
    128: (9950, 8369, 8224),
}
_SGLANG = {1: 204, 4: 688, 16: 2109, 64: 5453}  # SGLang's plain decoding, in a load test of the same kind
# Of our load test, as multiples of plain decoding with a fixed number of nodes.
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
    fitted: bool  # the efficiencies were chosen by it

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def checked_points() -> list[Checked]:
    """Every measured figure that the model of costs can predict."""
    return [*_products(), *_attention(), *_steps(), *_rounds(), *_speeds(), *_load(), *_fixed_budgets()]


def summary(points: list[Checked]) -> list[tuple[str, int, float, float]]:
    """By group, of what was not fitted: how many, the median size of an error, and the error that is largest."""
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


def _attention() -> Iterator[Checked]:
    costs = Costs(MODELS["llama-8b"], H200)
    for context, by_width in _ATTENTION.items():
        for width, measured in by_width.items():
            layer = costs.attention(1, width, context) / costs.model.shape.layers + 3 * costs.efficiency.launch
            fitted = (context, width) == (16_000, 64)
            yield Checked("attention of a layer, us", f"8B, width {width} at {context}", layer * 1e6, measured, fitted)


def _steps() -> Iterator[Checked]:
    for group, lines in (("step, ms", _STEPS), ("step, older code, ms", _OLDER_STEPS)):
        for name, context, rows, by_width in lines:
            costs = Costs(SMOLLM2 if name == "smollm2-135m" else MODELS[name], H200)
            for width, measured in by_width.items():
                fitted = name == "smollm2-135m" and width == 1
                what = f"{name}, {rows} x {width} tokens at {context}"
                yield Checked(group, what, costs.step(rows, width, context) * 1e3, measured, fitted)


def _rounds() -> Iterator[Checked]:
    for what, costs, nodes, passes, measured, fitted in _ROUNDS:
        seconds = costs.round(1, nodes, passes, _BENCH_CONTEXT)
        yield Checked("round of one text, ms", what, seconds * 1e3, measured, fitted)


def _speeds() -> Iterator[Checked]:
    """Cost and acceptance together: the budget and the passes are the plan's own."""
    acceptance = Acceptance.measured()
    for what, costs, measured in (("8B, graft", WIDE_8B, 786), ("32B, graft", WIDE_32B, 240)):
        _, speed = best_point(costs, acceptance, 1, _BENCH_CONTEXT)
        yield Checked("one text, tokens/s", what, speed, measured, False)


def _load() -> Iterator[Checked]:
    acceptance = Acceptance.measured()
    for rows, (peer, plain, graft) in _LOAD.items():
        predicted = tokens_per_second(WIDE_8B, PLAIN, 1.0, rows, _LOAD_CONTEXT, _PROMPT, _ANSWER)
        _, best = best_point(WIDE_8B, acceptance, rows, _LOAD_CONTEXT, _PROMPT, _ANSWER)
        group = "load test at the cost of 8B, tokens/s"
        yield Checked(group, f"vLLM plain, {rows} at once", predicted, peer, False)
        yield Checked(group, f"our plain, {rows} at once", predicted, plain, False)
        yield Checked(group, f"Graft, {rows} at once", best, graft, False)
        if rows in _SGLANG:
            yield Checked(group, f"SGLang plain, {rows} at once", predicted, _SGLANG[rows], False)


def _fixed_budgets() -> Iterator[Checked]:
    """Speed over plain decoding with a fixed budget; passes are those that the plan would make with it."""
    acceptance = Acceptance.measured()
    for rows, by_nodes in _FIXED.items():
        load = rows, _LOAD_CONTEXT, _PROMPT, _ANSWER
        plain = tokens_per_second(WIDE_8B, PLAIN, 1.0, *load)
        for nodes, measured in by_nodes.items():
            nearest = min((point.nodes for point in acceptance.points), key=lambda n: abs(n - nodes))
            points = [point for point in acceptance.choices(rows) if point.nodes == nearest]
            best = max(tokens_per_second(WIDE_8B, _with_nodes(point, nodes), 1.0, *load) for point in points)
            group = "fixed budget in the load test, times plain"
            yield Checked(group, f"{rows} at once, {nodes} nodes", best / plain, measured, False)


def _with_nodes(point: Point, nodes: int) -> Point:
    return replace(point, nodes=nodes)

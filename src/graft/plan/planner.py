"""The plan: for each batch size, the budget and draft passes with the highest predicted throughput."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from graft.errors import GraftError
from graft.plan.acceptance import Acceptance, Point
from graft.plan.cost import Costs
from graft.plan.gpus import Gpu
from graft.plan.models import ModelShape
from graft.settings import Settings, require

MEMORY_SHARE = 0.85  # of a GPU's memory, for weights, KV cache and graphs, as in `graft serve`
PLAIN = Point(nodes=0, passes=0.0, adapts=False, reached=())


@dataclass(frozen=True)
class PlanSettings(Settings):
    """What to plan for."""

    model: str = "llama-8b"
    gpu: str = "h200"
    gpus: int = 1
    batch: tuple[int, ...] = (1, 4, 16, 64, 128)
    context: int = 2_000  # mean tokens of each text
    prompt_tokens: int = 0  # prefill per request; 0 is decoding only
    answer_tokens: int = 256  # new tokens per request, used only with prompt_tokens
    draft_vocab: int = 32_000  # tokens that the head can draft
    accepted: float | None = None  # mean accepted length of the head's dense tree of 60 nodes
    acceptance: Path | None = None  # instead of `accepted`, a results.json to fit to

    def __post_init__(self) -> None:
        self.check_least(1, "gpus", "context", "answer_tokens", "draft_vocab")
        self.check_least(0, "prompt_tokens")
        require(bool(self.batch) and min(self.batch) >= 1, f"batch must be at least 1, not {self.batch}")
        require(self.accepted is None or self.acceptance is None, "give either accepted or acceptance, not both")


@dataclass(frozen=True)
class Row:
    """Predictions for one batch size. If it does not fit, only `batch` and `memory_bytes` are set."""

    batch: int
    fits: bool
    memory_bytes: float  # weights and KV cache on each GPU
    plain_tokens_per_second: float = 0.0
    tokens_per_second: float = 0.0
    speedup: float = 0.0
    nodes: int = 0  # per text; 0 means that plain decoding is fastest
    passes: float = 0.0
    accepted: float = 0.0
    verify_seconds: float = 0.0
    round_seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A plan with its inputs."""

    settings: PlanSettings
    costs: Costs
    acceptance: Acceptance
    rows: tuple[Row, ...]


def make_plan(settings: PlanSettings) -> Plan:
    """Predict every batch size. If not even one text fits, the error says how many GPUs would do."""
    costs = Costs(ModelShape.named(settings.model), Gpu.named(settings.gpu), settings.gpus, settings.draft_vocab)
    if settings.acceptance is not None:
        acceptance = Acceptance.of_results(settings.acceptance)
    elif settings.accepted is not None:
        acceptance = Acceptance.of_head(settings.accepted)
    else:
        acceptance = Acceptance.measured()
    _require_room(costs, settings.context)
    rows = tuple(_row(costs, acceptance, settings, batch) for batch in settings.batch)
    return Plan(settings, costs, acceptance, rows)


def tokens_per_second(
    costs: Costs,
    point: Point,
    exponent: float,
    rows: int,
    context: int,
    prompt_tokens: int = 0,
    answer_tokens: int = 1,
) -> float:
    """Throughput of all rows. Nothing is decoded during prefill."""
    accepted = point.accepted(exponent)
    seconds = costs.round(rows, point.nodes, point.passes, context) * answer_tokens / accepted
    if prompt_tokens:
        seconds += rows * prompt_tokens * costs.prompt_token(prompt_tokens // 2)
    return rows * answer_tokens / seconds


def best_point(
    costs: Costs, acceptance: Acceptance, rows: int, context: int, prompt_tokens: int = 0, answer_tokens: int = 1
) -> tuple[Point, float]:
    """The budget and passes with the highest throughput, and that throughput."""

    def speed(point: Point) -> float:
        return tokens_per_second(costs, point, acceptance.exponent, rows, context, prompt_tokens, answer_tokens)

    best = max([PLAIN, *acceptance.choices(rows)], key=speed)
    return best, speed(best)


def _row(costs: Costs, acceptance: Acceptance, settings: PlanSettings, batch: int) -> Row:
    memory = costs.weight_bytes() + costs.cache_bytes(batch, settings.context)
    if memory > MEMORY_SHARE * costs.gpu.memory_bytes:
        return Row(batch, False, memory)

    load = batch, settings.context, settings.prompt_tokens, settings.answer_tokens
    plain = tokens_per_second(costs, PLAIN, 1.0, *load)
    best, speed = best_point(costs, acceptance, *load)
    return Row(
        batch,
        True,
        memory,
        plain_tokens_per_second=plain,
        tokens_per_second=speed,
        speedup=speed / plain,
        nodes=best.nodes,
        passes=best.passes,
        accepted=best.accepted(acceptance.exponent),
        verify_seconds=costs.step(batch, 1 + best.nodes, settings.context),
        round_seconds=costs.round(batch, best.nodes, best.passes, settings.context),
    )


def _require_room(costs: Costs, context: int) -> None:
    """Raise a GraftError unless the weights and the KV cache of one text fit."""
    room = MEMORY_SHARE * costs.gpu.memory_bytes
    if _needed(costs, context) <= room:
        return
    shape = costs.model.shape
    more = (count for count in range(costs.num_gpus + 1, shape.heads + 1) if shape.heads % count == 0)
    enough = next((count for count in more if _needed(replace(costs, num_gpus=count), context) <= room), None)
    advice = f"{enough} would do" if enough else f"no number of them up to {shape.heads} would do"
    raise GraftError(
        f"{costs.model.name} does not fit on {costs.num_gpus} x {costs.gpu.name}: weights and the KV cache of one text "
        f"need {_needed(costs, context) / 1e9:.0f} GB of each GPU's {room / 1e9:.0f} GB ({MEMORY_SHARE:.0%} of its "
        f"memory); {advice}"
    )


def _needed(costs: Costs, context: int) -> float:
    return costs.weight_bytes() + costs.cache_bytes(1, context)

"""Measured accepted lengths by budget and draft passes, and how they change with a better or worse head.

`acceptance.json` is of SmolLM2-135M and its head on the built-in prompts, replayed by `benchmarks/acceptance_curve.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.settings import require

_MOST = 32.0  # the exponent of a head that is hardly ever right


@dataclass(frozen=True)
class Point:
    """Mean accepted length with one budget and number of draft passes."""

    nodes: int
    passes: float
    adapts: bool  # each round stopped drafting by itself, which only a single row can
    reached: tuple[float, ...]  # share of rounds that accepted at least 1, 2 ... tokens

    def accepted(self, exponent: float = 1.0) -> float:
        """Tokens a round. exponent: of the probability to accept a token; above 1 the head is worse."""
        return 1 + sum(share**exponent for share in self.reached)


@dataclass(frozen=True)
class Acceptance:
    """Points that can be chosen from, and the exponent that fits them to a head."""

    points: tuple[Point, ...]
    dense: Point  # EAGLE-3's tree of 60 nodes, all passes made
    source: str
    exponent: float = 1.0

    @staticmethod
    def measured() -> Acceptance:
        """The packaged curves."""
        return _packaged()

    @classmethod
    def of_head(cls, accepted: float) -> Acceptance:
        """The packaged curves, fitted to a head whose dense tree of 60 nodes has that mean accepted length."""
        packaged = _packaged()
        words = f"{packaged.source}, fitted to {accepted:g} accepted by the dense tree"
        exponent = _exponent(packaged.dense, accepted)
        return cls(packaged.points, packaged.dense, words, exponent)

    @classmethod
    def of_results(cls, path: Path) -> Acceptance:
        """The packaged curves, fitted to a results.json of `graft bench`: to its `graft`, else its `dense`."""
        packaged = _packaged()
        averages = _averages(path)
        run = averages.get("graft") or averages.get("dense")
        if run is None:
            raise GraftError(f"{path} has no results of graft or dense: run graft bench --methods off,dense,graft")
        try:
            accepted = float(run["mean_accepted"])
            nodes, passes = float(run["nodes_per_round"]), float(run["draft_passes_per_round"])
        except (KeyError, TypeError, ValueError) as error:
            raise GraftError(f"{path} is not a results.json of graft bench: {error!r} of its averages") from error
        point = packaged.dense
        if "graft" in averages:
            point = min(packaged.points, key=lambda p: (abs(p.nodes - nodes), abs(p.passes - passes)))
        words = f"{packaged.source}, fitted to {run['method']} in {path.name}: {accepted:.2f} accepted"
        return cls(packaged.points, packaged.dense, words, _exponent(point, accepted))

    def choices(self, rows: int) -> list[Point]:
        """Points for a batch: a pass is made for all rows, so that none of several stops by itself."""
        return [point for point in self.points if rows == 1 or not point.adapts]


@cache
def _packaged() -> Acceptance:
    content = json.loads(files("graft.plan").joinpath("acceptance.json").read_text(encoding="utf-8"))
    about = content["source"]
    prompts = sum(about["tasks"].values())
    source = f"{about['model']} and its EAGLE-3 head, greedy, {prompts} built-in prompts"
    return Acceptance(tuple(map(_point, content["points"])), _point(content["dense"]), source)


def _point(values: dict[str, Any]) -> Point:
    return Point(values["nodes"], values["passes"], values["adapts"], tuple(values["reached"]))


def _exponent(point: Point, accepted: float) -> float:
    """The exponent with which a point has that mean accepted length, by halving."""
    low, high = 0.0, _MOST
    lengths = point.accepted(high), point.accepted(low)
    require(
        lengths[0] < accepted < lengths[1],
        f"a mean accepted length of {point.nodes} nodes must be above {lengths[0]:.2f} and below {lengths[1]:.0f}, "
        f"not {accepted:g}",
    )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if point.accepted(middle) > accepted else (low, middle)
    return low


def _averages(path: Path) -> dict[str, dict[str, Any]]:
    """The averages of a results.json by method; of several states the last."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GraftError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise GraftError(f"{path} is not JSON: {error}") from error
    runs = content.get("averages") if isinstance(content, dict) else None
    good = isinstance(runs, list) and all(isinstance(run, dict) and "method" in run for run in runs)
    if not good or runs is None:
        raise GraftError(f"{path} is not a results.json of graft bench: it has no averages")
    return {run["method"]: run for run in runs}

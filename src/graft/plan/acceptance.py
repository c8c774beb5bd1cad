"""Measured accepted lengths by budget and draft passes, and their adaptation to better or worse heads.

`benchmarks/acceptance_curve.py` made `acceptance.json` with SmolLM2-135M and its head on the built-in prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.files import read_json
from graft.settings import require

_MAX_EXPONENT = 32.0  # a head that is hardly ever right


@dataclass(frozen=True)
class Point:
    """Mean accepted length with one budget and number of draft passes."""

    nodes: int
    passes: float
    adapts: bool  # each round chose its own number of passes, which only a batch of one can
    reached: tuple[float, ...]  # share of rounds that accepted at least 1, 2 ... tokens

    def accepted(self, exponent: float = 1.0) -> float:
        """Tokens per round. exponent: applied to acceptance probabilities; above 1 the head is worse."""
        return 1 + sum(share**exponent for share in self.reached)


@dataclass(frozen=True)
class Acceptance:
    """Points to choose from, and the exponent that fits them to a head."""

    points: tuple[Point, ...]
    dense: Point  # EAGLE-3's tree of 60 nodes with all draft passes
    source: str
    exponent: float = 1.0

    @staticmethod
    @cache
    def measured() -> Acceptance:
        """The packaged curves."""
        content = json.loads(files("graft.plan").joinpath("acceptance.json").read_text(encoding="utf-8"))
        about = content["source"]
        prompts = sum(about["tasks"].values())
        source = f"{about['model']} and its EAGLE-3 head, greedy, {prompts} built-in prompts"
        return Acceptance(tuple(map(_point, content["points"])), _point(content["dense"]), source)

    @classmethod
    def of_head(cls, accepted: float) -> Acceptance:
        """The packaged curves, fitted to a head by the mean accepted length of its dense tree of 60 nodes."""
        packaged = cls.measured()
        source = f"{packaged.source}, fitted to {accepted:g} accepted by the dense tree"
        return replace(packaged, source=source, exponent=_exponent(packaged.dense, accepted))

    @classmethod
    def of_results(cls, path: Path) -> Acceptance:
        """The packaged curves, fitted to method `graft`, or else `dense`, in a results.json of `graft bench`."""
        packaged = cls.measured()
        averages = _averages(path)
        run = averages.get("graft") or averages.get("dense")
        if run is None:
            raise GraftError(f"{path} has no results of graft or dense: run graft bench --methods off,dense,graft")
        try:
            accepted = float(run["mean_accepted"])
            nodes, passes = float(run["nodes_per_round"]), float(run["draft_passes_per_round"])
        except (KeyError, TypeError, ValueError) as error:
            raise GraftError(f"{path} is not a results.json of graft bench: its averages have {error!r}") from error
        point = packaged.dense
        if "graft" in averages:
            point = min(packaged.points, key=lambda p: (abs(p.nodes - nodes), abs(p.passes - passes)))
        source = f"{packaged.source}, fitted to {run['method']} in {path.name}: {accepted:.2f} accepted"
        return replace(packaged, source=source, exponent=_exponent(point, accepted))

    def choices(self, rows: int) -> list[Point]:
        """Points possible for a batch size. All rows of a batch share their draft passes, so no row adapts them."""
        return [point for point in self.points if rows == 1 or not point.adapts]


def _point(values: dict[str, Any]) -> Point:
    return Point(values["nodes"], values["passes"], values["adapts"], tuple(values["reached"]))


def _exponent(point: Point, accepted: float) -> float:
    """The exponent that gives a point this mean accepted length, by bisection."""
    low, high = 0.0, _MAX_EXPONENT
    lengths = point.accepted(high), point.accepted(low)
    require(
        lengths[0] < accepted < lengths[1],
        f"the mean accepted length with {point.nodes} nodes must be above {lengths[0]:.2f} and below "
        f"{lengths[1]:.0f}, not {accepted:g}",
    )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if point.accepted(middle) > accepted else (low, middle)
    return low


def _averages(path: Path) -> dict[str, dict[str, Any]]:
    """The averages of a results.json by method; with several states, those of the last."""
    content = read_json(path)
    runs = content.get("averages") if isinstance(content, dict) else None
    good = isinstance(runs, list) and all(isinstance(run, dict) and isinstance(run.get("method"), str) for run in runs)
    if not good or runs is None:
        raise GraftError(f"{path} is not a results.json of graft bench: it has no averages")
    return {run["method"]: run for run in runs}

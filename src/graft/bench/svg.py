"""Plots as SVG text: points, lines, stacked bars, bars with intervals.

Not by matplotlib: `graft bench` then needs no further package, colours follow the page's light or dark style by CSS,
and bars and points show their numbers under the mouse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
NUM_COLOURS = 12
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 24, 16, 46
_CHARACTER = 6.6  # width of one in a label, roughly


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    series: int  # its colour
    label: str = ""  # written beside it; without one it is small and pale
    note: str = ""  # shown under the mouse


@dataclass(frozen=True)
class Bar:
    value: float
    series: int
    note: str = ""
    interval: tuple[float, float] | None = None


def colour(series: int) -> str:
    return f"var(--s{series % NUM_COLOURS})"


def scatter(points: Sequence[Point], x_title: str, y_title: str, height: int = 420) -> str:
    frame = _Frame.around([p.x for p in points], [p.y for p in points], height, from_zero=False)
    parts = [frame.axes(x_title, y_title)]
    for point in (p for p in points if not p.label):
        parts.append(_circle(frame, point, radius=4, opacity=0.35))
    placed: list[tuple[float, float, float]] = []  # labels so far: left, right, height
    for point in sorted((p for p in points if p.label), key=lambda p: -p.y):
        width = _CHARACTER * len(point.label)
        x, y = frame.x(point.x), frame.y(point.y)
        left = x + 12 if x + 12 + width < WIDTH else x - 12 - width
        while any(left < end and start < left + width and abs(y - level) < 15 for start, end, level in placed):
            y += 3
        placed.append((left, left + width, y))
        parts.append(_circle(frame, point, radius=7, opacity=1))
        parts.append(_text(left, y + 4, point.label, "start", "label"))
    return _svg(parts, height, f"{y_title} against {x_title}")


def lines(curves: Mapping[int, Sequence[tuple[float, float]]], x_title: str, y_title: str, height: int = 360) -> str:
    """Line plot. curves: by series, points from left to right."""
    places = [place for curve in curves.values() for place in curve] or [(1.0, 0.0)]
    frame = _Frame.around([x for x, _ in places], [y for _, y in places], height, whole_x=True)
    parts = [frame.axes(x_title, y_title)]
    for series, curve in curves.items():
        if not curve:
            continue
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour(series)}" stroke-width="2.5"/>')
        parts += [_circle(frame, Point(x, y, series, note=f"{y:.3g} at {x:g}"), 3.5, 1) for x, y in curve]
    return _svg(parts, height, f"{y_title} by {x_title}")


def stacked(rows: Sequence[tuple[str, Sequence[Bar]]], x_title: str) -> str:
    """Stacked horizontal bars, one per row."""
    left = _label_width([label for label, _ in rows])
    height = 34 * len(rows) + _BOTTOM + 8
    most = max((sum(bar.value for bar in bars) for _, bars in rows), default=0.0) or 1.0
    scale = (WIDTH - left - _RIGHT - 44) / most
    parts = [_vertical_grid(left, scale, most, height - _BOTTOM, height, x_title)]
    for index, (label, bars) in enumerate(rows):
        top, x = 8 + 34 * index, left
        parts.append(_text(left - 10, top + 17, label, "end", "label"))
        for bar in bars:
            parts.append(_rectangle(x, top, scale * bar.value, 24, bar))
            x += scale * bar.value
        parts.append(_text(x + 6, top + 17, f"{sum(bar.value for bar in bars):.2f}", "start", "tick"))
    return _svg(parts, height, x_title)


def grouped(
    groups: Sequence[tuple[str, Sequence[Bar]]], y_title: str, line_at: float | None = None, height: int = 340
) -> str:
    """Grouped vertical bars, with a dashed reference line at `line_at`."""
    values = [v for _, bars in groups for bar in bars for v in (bar.value, *(bar.interval or ()))]
    frame = _Frame(0, len(groups), 0, max([*values, line_at or 0.0]) * 1.06 or 1.0, height)
    parts = [frame.axes("", y_title, with_x=False)]
    for index, (label, bars) in enumerate(groups):
        left, right = frame.x(index + 0.1), frame.x(index + 0.9)
        width = (right - left) / max(len(bars), 1)
        parts.append(_text((left + right) / 2, height - _BOTTOM + 18, label, "middle", "label"))
        for place, bar in enumerate(bars):
            x, y = left + width * place, frame.y(bar.value)
            parts.append(_rectangle(x, y, width * 0.88, frame.y(0) - y, bar))
            if bar.interval is not None:
                middle, (low, high) = x + width * 0.44, map(frame.y, bar.interval)
                parts.append(
                    f'<line class="whisker" x1="{middle:.1f}" x2="{middle:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
                )
    if line_at is not None:
        y = frame.y(line_at)
        parts.append(f'<line class="reference" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return _svg(parts, height, y_title)


@dataclass(frozen=True)
class _Frame:
    """Axes of a plot: maps data to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: int
    whole_x: bool = False

    @classmethod
    def around(
        cls, xs: Sequence[float], ys: Sequence[float], height: int, whole_x: bool = False, from_zero: bool = True
    ) -> _Frame:
        x_room, y_room = (0.1 * (max(values) - min(values) or 1.0) for values in (xs, ys))
        y_low = 0.0 if from_zero else min(ys) - y_room
        return cls(min(xs) - x_room, max(xs) + x_room, y_low, max(ys) + y_room, height, whole_x)

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        bottom = self.height - _BOTTOM
        return bottom - (value - self.y_low) / (self.y_high - self.y_low) * (bottom - _TOP)

    def axes(self, x_title: str, y_title: str, with_x: bool = True) -> str:
        bottom = self.height - _BOTTOM
        parts = []
        for tick in ticks(self.y_low, self.y_high):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}", "end", "tick"))
        if with_x:
            for tick in ticks(self.x_low, self.x_high, self.whole_x):
                parts.append(_text(self.x(tick), bottom + 18, f"{tick:g}", "middle", "tick"))
            parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, self.height - 8, x_title, "middle", "title"))
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<text class="title" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})" x="14" y="{middle:.1f}">'
            f"{escape(y_title)}</text>"
        )
        return "".join(parts)


def ticks(low: float, high: float, whole: bool = False, count: int = 8) -> list[float]:
    """Round numbers between two values, about `count` of them."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step)
    return [round(step * i, 10) for i in range(first, math.floor(high / step) + 1)]


def _vertical_grid(left: float, scale: float, most: float, bottom: float, height: float, title: str) -> str:
    parts = []
    for tick in ticks(0, most):
        x = left + scale * tick
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom:.1f}"/>')
        parts.append(_text(x, bottom + 16, f"{tick:g}", "middle", "tick"))
    parts.append(_text((left + WIDTH - _RIGHT) / 2, height - 8, title, "middle", "title"))
    return "".join(parts)


def _label_width(labels: Sequence[str]) -> float:
    return 24 + _CHARACTER * max(map(len, labels), default=0)


def _circle(frame: _Frame, point: Point, radius: float, opacity: float) -> str:
    note = escape(point.note or point.label)
    return (
        f'<circle cx="{frame.x(point.x):.1f}" cy="{frame.y(point.y):.1f}" r="{radius:g}" '
        f'fill="{colour(point.series)}" opacity="{opacity:g}"><title>{note}</title></circle>'
    )


def _rectangle(x: float, y: float, width: float, height: float, bar: Bar) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" rx="1.5" '
        f'fill="{colour(bar.series)}"><title>{escape(bar.note)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'

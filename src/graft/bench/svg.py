"""Plots as SVG text: points, lines, and horizontal bars.

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
_ROW = 28  # height of a row of bars
_CHARACTER = 6.6  # approximate width of a character in a label


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    series: int  # decides the colour
    label: str = ""  # written beside the point; a point without a label is small and pale
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
    parts += [_circle(frame, point, radius=4, opacity=0.35) for point in points if not point.label]
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
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour(series)}" stroke-width="2.5"/>')
        parts += [_circle(frame, Point(x, y, series, note=f"{y:.3g} at {x:g}"), 3.5, 1) for x, y in curve]
    return _svg(parts, height, f"{y_title} by {x_title}")


def bars(rows: Sequence[tuple[str, Sequence[Bar]]], x_title: str, line_at: float | None = None) -> str:
    """Stacked horizontal bars, one stack for each row; a row without bars is a heading. line_at: a dashed line."""
    left = 24 + _CHARACTER * max((len(label) for label, _ in rows), default=0)
    bottom = 8 + _ROW * len(rows)
    ends = [bar.interval[1] if bar.interval else bar.value for _, row in rows for bar in row]
    most = max([*ends, *(sum(bar.value for bar in row) for _, row in rows)], default=0.0) or 1.0
    scale = (WIDTH - left - _RIGHT - 44) / most
    parts = []
    for tick in ticks(0, most):
        parts.append(_line("grid", left + scale * tick, 4, left + scale * tick, bottom))
        parts.append(_text(left + scale * tick, bottom + 16, f"{tick:g}", "middle", "tick"))
    for index, (label, row) in enumerate(rows):
        top, x = 8 + _ROW * index, left
        parts.append(_text(left - 10, top + 15, label, "end", "label" if row else "title"))
        for bar in row:
            parts.append(_rectangle(x, top, scale * bar.value, _ROW - 8, bar))
            x += scale * bar.value
            if bar.interval is not None:
                low, high = (left + scale * end for end in bar.interval)
                parts.append(_line("whisker", low, top + 10, high, top + 10))
                x = max(x, high)
        if row:
            parts.append(_text(x + 6, top + 15, f"{sum(bar.value for bar in row):.2f}", "start", "tick"))
    if line_at is not None:
        parts.append(_line("reference", left + scale * line_at, 4, left + scale * line_at, bottom))
    parts.append(_text((left + WIDTH - _RIGHT) / 2, bottom + _BOTTOM - 8, x_title, "middle", "title"))
    return _svg(parts, bottom + _BOTTOM, x_title)


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

    def axes(self, x_title: str, y_title: str) -> str:
        bottom = self.height - _BOTTOM
        parts = []
        for tick in ticks(self.y_low, self.y_high):
            parts.append(_line("grid", _LEFT, self.y(tick), WIDTH - _RIGHT, self.y(tick)))
            parts.append(_text(_LEFT - 8, self.y(tick) + 4, f"{tick:g}", "end", "tick"))
        for tick in ticks(self.x_low, self.x_high, self.whole_x):
            parts.append(_text(self.x(tick), bottom + 18, f"{tick:g}", "middle", "tick"))
        parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, self.height - 8, x_title, "middle", "title"))
        middle = (_TOP + bottom) / 2
        rotated = _text(14, middle, y_title, "middle", "title")
        return "".join([*parts, f'<g transform="rotate(-90 14 {middle:.1f})">{rotated}</g>'])


def ticks(low: float, high: float, whole: bool = False, count: int = 8) -> list[float]:
    """Round numbers between two values, about `count` of them."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step)
    return [round(step * i, 10) for i in range(first, math.floor(high / step) + 1)]


def _circle(frame: _Frame, point: Point, radius: float, opacity: float) -> str:
    note = escape(point.note or point.label)
    return (
        f'<circle cx="{frame.x(point.x):.1f}" cy="{frame.y(point.y):.1f}" r="{radius:g}" '
        f'fill="{colour(point.series)}" opacity="{opacity:g}"><title>{note}</title></circle>'
    )


def _rectangle(x: float, y: float, width: float, height: float, bar: Bar) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="1.5" '
        f'fill="{colour(bar.series)}"><title>{escape(bar.note)}</title></rect>'
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'

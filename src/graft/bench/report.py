"""report.html: one self-contained HTML file with plots and all tables, made from the template of that name."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graft.bench.results import PLAIN_NOISE, Results, Run
from graft.bench.runner import STATELESS
from graft.rendering import render
from graft.spec_decode.policy_settings import USUAL_PASS_COST
from graft.tuning.turns import MAX_NOISE

# Each column is explained in docs/measuring.md.
COLUMNS: dict[str, Callable[[Run], str]] = {
    "tokens/s": lambda run: f"{run.tokens_per_second:.1f}",
    "speedup": lambda run: _with_interval(run, "speedup"),
    "accepted": lambda run: _with_interval(run, "mean_accepted"),
    "passes": lambda run: f"{run.draft_passes_per_round:.2f}",
    "nodes": lambda run: f"{run.nodes_per_round:.1f}",
    "modelled": lambda run: f"{run.modelled_speed:.2f}",
    "over dense": lambda run: "–" if run.modelled_over_dense is None else f"{run.modelled_over_dense:.2f}",
    "differ": lambda run: "–" if run.differ is None else f"{run.differ}",
}
_PAGE_COLUMNS = COLUMNS | {
    "ms by phase": lambda run: _listed(_milliseconds(run, run.rounds), 1),
    "accepted of nodes, by source": lambda run: _sources(run),
}
_NUM_COLOURS = 12  # colours in the page's style
_LEFT_RIGHT, _BOTTOM_TOP = (58, 736), (354, 16)  # pixels of a plot, as in the template


def label(run: Run) -> str:
    return run.method if run.state == STATELESS else f"{run.method} ({run.state})"


def in_short(run: Run) -> str:
    """A run in one line: tokens per second and mean accepted length."""
    return f"{run.tokens_per_second:.1f} tokens/s, accepted {run.mean_accepted:.2f}"


def titled(words: str, settings: dict[str, Any]) -> str:
    """A title that names the emulated cost, so that a widened model is never taken for a large one."""
    cost = settings.get("as_cost_of")
    return f"{words} at the cost of {cost} (widened {settings['model']})" if cost else words


def html(results: Results) -> str:
    """The whole HTML page."""
    settings, averages, every = results.settings, results.averages, [*results.runs, *results.averages]
    colours = {run.key: _colour(place) for place, run in enumerate(averages)}
    speed, speed_title = "speedup", "Speedup over plain decoding"
    if any(run.speedup is None for run in averages):  # plain decoding was not run
        speed, speed_title = "tokens_per_second", "Tokens per second"
    fastest = max(getattr(run, speed) for run in every)
    by_task = {task: [run for run in every if run.task == task] for task in dict.fromkeys(run.task for run in every)}
    speeds: list[tuple[str, list[_Bar] | None, str]] = []
    for task, runs in by_task.items():
        speeds.append((task, None, ""))  # a heading
        for run in runs:
            bar = _Bar(100 * getattr(run, speed) / fastest, colours[run.key], label(run))
            speeds.append((label(run), [bar], _with_interval(run, speed)))
    return render(
        "report.html",
        name=titled("Graft benchmark", settings),
        numbers=titled("All numbers", settings),
        about=" · ".join(filter(None, (settings.get("model"), results.environment["device"], settings.get("dtype")))),
        notes=notes_on(results),
        tiles=_tiles(averages),
        methods=[(label(run), colours[run.key]) for run in averages],
        frontier=_frontier(results, colours, speed, speed_title),
        speeds=speeds,
        speed_title=speed_title,
        plain_at=100 / fastest if speed == "speedup" else None,
        depths=_depths(averages, colours),
        sources=_stacked(averages, _accepted_per_round),
        phases=_stacked(averages, lambda run: _milliseconds(run, run.tokens)),
        pass_cost=USUAL_PASS_COST,
        columns=["method", *_PAGE_COLUMNS],
        tables=[(task, [_row(run) for run in runs]) for task, runs in by_task.items()],
        settings=[(name, _words(value)) for name, value in settings.items()],
        environment=[(name, _words(value)) for name, value in results.environment.items()],
    )


def notes_on(results: Results) -> list[str]:
    """The caveats to print beside results: incomplete, batched or noisy runs."""
    settings = results.settings
    notes = []
    there = {run.task for run in results.runs}
    if missing := [task for task in settings.get("tasks", {}) if task not in there]:
        words = f"{len(there)} of {len(there) + len(missing)} tasks are done"
        notes.append(f"This run was stopped or is still running: {words}, without {', '.join(missing)}.")
    if (rows := settings.get("rows", 1)) > 1:
        notes.append(f"{rows} prompts decode together: times are those of the whole batch.")
    if setups := [f"{label(run)} {run.setups}" for run in results.averages if run.setups]:
        notes.append(f"CUDA graphs were captured while answers were timed: {', '.join(setups)}.")
    if all(run.speedup is None for run in results.averages):
        return notes
    noise = results.environment.get(PLAIN_NOISE)
    if noise is None:
        notes.append("Each answer was timed once, so the machine's noise is not known: --repeat 3 measures it.")
    elif noise > MAX_NOISE:
        notes.append(
            f"No verdict on speeds: plain decoding varied by ±{noise:.0%} from turn to turn, so the machine was too "
            "busy."
        )
    else:
        notes.append(f"Plain decoding varied by ±{noise:.0%} from turn to turn: that is the machine's noise.")
    return notes


class _Bar(NamedTuple):
    percent: float  # of the longest bar
    colour: str
    note: str


class _Point(NamedTuple):
    x: float
    y: float
    colour: str
    note: str
    is_large: bool


class _Axis:
    """Maps the values of a plot to pixels from `start` to `end`."""

    def __init__(
        self,
        title: str,
        values: Sequence[float],
        start: float,
        end: float,
        low: float | None = None,
        whole: bool = False,
    ) -> None:
        """low: the least value shown, if it is not the least of `values`. whole: ticks are whole numbers."""
        room = 0.1 * (max(values) - min(values) or 1.0)
        self.title = title
        self._low, self._high = min(values) - room if low is None else low, max(values) + room
        self._start, self._end = start, end
        self.ticks = [(self(tick), f"{tick:g}") for tick in ticks(self._low, self._high, whole)]

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)


def ticks(low: float, high: float, whole: bool = False, count: int = 8) -> list[float]:
    """Round numbers between two values, about `count` of them."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw)
    step = max(step, 1.0) if whole else step
    return [round(step * i, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


_Plot = tuple[_Axis, _Axis, list[tuple[str, str]], list[_Point]]  # x, y, curves by colour, points


def _frontier(results: Results, colours: dict[tuple[str, str], str], speed: str, title: str) -> _Plot:
    """Speed against accepted length, of single tasks and of averages."""
    every = [*results.runs, *results.averages]
    lengths, speeds = [run.mean_accepted for run in every], [getattr(run, speed) for run in every]
    x, y = _Axis("mean accepted length (tokens per round)", lengths, *_LEFT_RIGHT), _Axis(title, speeds, *_BOTTOM_TOP)
    points = [
        _Point(
            x(run.mean_accepted),
            y(getattr(run, speed)),
            colours[run.key],
            f"{label(run)}, {run.task}: {in_short(run)}",
            place >= len(results.runs),
        )
        for place, run in enumerate(every)
    ]
    return x, y, [], points


def _depths(averages: Sequence[Run], colours: dict[tuple[str, str], str]) -> _Plot:
    """The share of rounds that accept each depth."""
    curves = {
        run.key: [(depth, count / run.rounds) for depth, count in sorted(run.accepted_by_depth.items())]
        for run in averages
    }
    places = [place for curve in curves.values() for place in curve] or [(1, 0.0)]
    xs, ys = zip(*places, strict=True)
    x = _Axis("depth in the tree", xs, *_LEFT_RIGHT, whole=True)
    y = _Axis("share of rounds that accept it", ys, *_BOTTOM_TOP, low=0.0)
    paths = [(colours[key], " ".join(f"{x(a)},{y(b)}" for a, b in curve)) for key, curve in curves.items()]
    points = [
        _Point(x(a), y(b), colours[key], f"{b:.3g} at {a}", False) for key, curve in curves.items() for a, b in curve
    ]
    return x, y, paths, points


def _stacked(
    averages: Sequence[Run], parts: Callable[[Run], dict[str, float]]
) -> tuple[list[tuple[str, list[_Bar], str]], list[tuple[str, str]]]:
    """A bar of the parts of each average, and the legend."""
    names = dict.fromkeys(name for run in averages for name in parts(run))
    colours = {name: _colour(place) for place, name in enumerate(names, start=1)}  # grey is for plain decoding
    longest = max([sum(parts(run).values()) for run in averages]) or 1.0
    rows = []
    for run in averages:
        own = parts(run)
        bars = [
            _Bar(100 * own[name] / longest, colour, f"{name}: {own[name]:.2f}")
            for name, colour in colours.items()
            if name in own
        ]
        rows.append((label(run), bars, f"{sum(own.values()):.2f}"))
    return rows, list(colours.items())


def _tiles(averages: Sequence[Run]) -> list[tuple[str, str]]:
    """The figures on top of the page, and what they are."""
    tiles = []
    if timed := [run for run in averages if run.speedup is not None]:
        best = max(timed, key=lambda run: run.speedup or 0)
        tiles.append((f"{best.speedup:.2f}×", f"fastest on average: {label(best)}"))
    longest = max(averages, key=lambda run: run.mean_accepted)
    tiles.append((f"{longest.mean_accepted:.2f}", f"longest accepted on average: {label(longest)}"))
    if compared := [run for run in averages if run.differ is not None]:
        differ, total = sum(run.differ or 0 for run in compared), sum(run.prompts for run in compared)
        tiles.append((f"{differ} of {total}", "answers differ from plain decoding"))
    return tiles


def _row(run: Run) -> tuple[bool, list[str]]:
    return bool(run.differ), [label(run), *(cell(run) for cell in _PAGE_COLUMNS.values())]


def _colour(place: int) -> str:
    return f"var(--s{place % _NUM_COLOURS})"


def _accepted_per_round(run: Run) -> dict[str, float]:
    return {source: count / run.rounds for source, count in run.accepted_by_source.items()}


def _milliseconds(run: Run, per: int) -> dict[str, float]:
    return {phase: 1000 * seconds / per for phase, seconds in run.seconds_by_phase.items()}


def _listed(values: dict[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


def _sources(run: Run) -> str:
    accepted = _accepted_per_round(run)
    return ", ".join(
        f"{source} {accepted.get(source, 0):.2f} of {nodes / run.rounds:.1f}"
        for source, nodes in run.proposed_by_source.items()
    )


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)


def _with_interval(run: Run, rate: str) -> str:
    value, interval = getattr(run, rate), run.confidence.get(rate)
    if value is None:
        return "–"
    return f"{value:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")

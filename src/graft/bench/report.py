"""report.html: one self-contained HTML file with the plots and all tables of results."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from graft.bench import svg
from graft.bench.results import PLAIN_NOISE, Results, Run
from graft.bench.runner import STATELESS
from graft.bench.turns import MAX_NOISE
from graft.spec_decode.policy_settings import USUAL_PASS_COST

# Each column is explained in docs/measuring.md.
COLUMNS: dict[str, Callable[[Run], str]] = {
    "tokens/s": lambda run: number(run.tokens_per_second, 1),
    "speedup": lambda run: _with_interval(run, "speedup"),
    "accepted": lambda run: _with_interval(run, "mean_accepted"),
    "passes": lambda run: f"{run.draft_passes_per_round:.2f}",
    "nodes": lambda run: f"{run.nodes_per_round:.1f}",
    "modelled": lambda run: f"{run.modelled_speed:.2f}",
    "over dense": lambda run: number(run.modelled_over_dense),
    "differ": lambda run: "–" if run.differ is None else f"{run.differ}",
}


REPLAY_COLUMNS: dict[str, Callable[[Run], str]] = {
    **{name: cell for name, cell in COLUMNS.items() if name not in ("tokens/s", "speedup", "differ")},
    "accepted by source": lambda run: _listed(_accepted_per_round(run), 2),
}


def columns(results: Results) -> dict[str, Callable[[Run], str]]:
    """Columns of the results table: a replay runs no target, so it has no times and no texts to compare."""
    return REPLAY_COLUMNS if results.settings.get("replay") else COLUMNS


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def label(run: Run) -> str:
    return run.method if run.state == STATELESS else f"{run.method} ({run.state})"


def in_short(run: Run) -> str:
    """A run in one line: tokens per second and mean accepted length."""
    speed = f"{run.tokens_per_second:.1f} tokens/s, " if run.tokens_per_second is not None else ""
    return f"{speed}accepted {run.mean_accepted:.2f}"


def titled(words: str, settings: dict[str, Any]) -> str:
    """A title that names the emulated cost, so that a widened model is never taken for a large one."""
    cost = settings.get("as_cost_of")
    return f"{words} at the cost of {cost} (widened {settings['model']})" if cost else words


def html(results: Results) -> str:
    """The whole HTML page."""
    series = {run.key: place for place, run in enumerate(results.averages)}
    sections = [
        ("Speed against accepted length", _FRONTIER, _frontier(results, series), ""),
        ("Speed by task", _BY_TASK, _speeds(results, series), ""),
        ("Acceptance by depth", _BY_DEPTH, *_depths(results, series)),
        ("Acceptance by source", _BY_SOURCE, *_stacked(results, _accepted_per_round, "accepted tokens per round")),
    ]
    if not results.settings.get("replay"):
        phases = _stacked(results, _milliseconds_per_token, "milliseconds per token")
        sections.append(("Time by phase", _BY_PHASE, *phases))
    figures = "".join(
        f'<section id="{title.lower().replace(" ", "-")}"><h2>{title}</h2><p>{words}</p><figure>{plot}{legend}</figure>'
        "</section>"
        for title, words, plot, legend in sections
    )
    every = [*results.averages, *results.runs]
    tables = "".join(
        f"<h3>{escape(task)}</h3>{_table([run for run in every if run.task == task], columns(results))}"
        for task in dict.fromkeys(run.task for run in every)
    )
    name, numbers = (escape(titled(words, results.settings)) for words in ("Graft benchmark", "All numbers"))
    details = _details("Settings", results.settings) + _details("Environment", results.environment)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{name}</title><style>{_STYLE}</style></head><body><main>"
        f"{_head(results)}{figures}<section><h2>{numbers}</h2><p>{_TABLES}</p>{tables}</section>"
        f'<section class="details">{details}</section></main></body></html>\n'
    )


def notes_on(results: Results) -> list[str]:
    """The caveats to print beside results: cut, replayed, batched or noisy runs."""
    settings = results.settings
    notes = []
    there = {run.task for run in results.runs}
    if missing := [task for task in settings.get("tasks", {}) if task not in there]:
        words = f"{len(there)} of {len(there) + len(missing)} tasks are here"
        notes.append(f"This run was cut, or is not over: {words}, without {', '.join(missing)}.")
    if settings.get("replay"):
        notes.append(
            "A replay of recorded answers: accepted lengths are close to live decoding, and there are no times."
        )
        return notes
    if (rows := settings.get("rows", 1)) > 1:
        notes.append(f"{rows} prompts decode together: times are of the whole batch.")
    if all(run.speedup is None for run in results.averages):
        return notes
    noise = results.environment.get(PLAIN_NOISE)
    if noise is None:
        notes.append("Each answer was timed once, so the machine's noise is not known: --repeat 3 measures it.")
    elif noise > MAX_NOISE:
        notes.append(
            f"No verdict on speeds: turns of plain decoding differed by {noise:.0%} from their middle, so the machine "
            "was too busy."
        )
    else:
        notes.append(f"Turns of plain decoding differed by {noise:.0%} from their middle: that is the machine's noise.")
    return notes


_FRONTIER = "Large points are averages over tasks, small ones single tasks. Up and to the right is better."
_BY_TASK = "Whiskers are 95 % intervals over prompts, and over turns if prompts were repeated."
_BY_DEPTH = "How often a round accepts at least this many drafted or retrieved tokens."
_BY_SOURCE = "Tokens accepted per round, by their source. Each round adds one token that the model chose itself."
_BY_PHASE = "Time per token of text, by phase. Shorter is faster."
_TABLES = (
    "accepted: mean accepted length, tokens per round. passes: draft passes per round. nodes: proposals verified per "
    f"round. modelled: accepted / (1 + {USUAL_PASS_COST:g} × passes). over dense: that against the dense tree's. "
    "differ: prompts whose text differs from plain decoding. In brackets: 95 % intervals over prompts "
    "and turns. "
    "Phases and sources are per round."
)


def _head(results: Results) -> str:
    settings = results.settings
    facts = [settings.get("model"), results.environment.get("device"), settings.get("dtype")]
    averages = [run for run in results.averages if run.speedup is not None]
    tiles = []
    if averages:
        best = max(averages, key=lambda run: run.speedup or 0)
        tiles.append((f"{best.speedup:.2f}×", f"fastest on average: {label(best)}"))
    longest = max(results.averages, key=lambda run: run.mean_accepted)
    tiles.append((f"{longest.mean_accepted:.2f}", f"longest accepted on average: {label(longest)}"))
    compared = [run for run in results.averages if run.differ is not None]
    if compared:
        differ, total = sum(run.differ or 0 for run in compared), sum(run.prompts for run in compared)
        tiles.append((f"{differ} of {total}", "answers differ from plain decoding"))
    boxes = "".join(f"<div><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in tiles)
    warning = "".join(f'<p class="note">{escape(note)}</p>' for note in notes_on(results))
    name = escape(titled("Graft benchmark", settings))
    line = " · ".join(escape(str(fact)) for fact in facts if fact)
    return f'<header><h1>{name}</h1><p>{line}</p>{warning}<div class="tiles">{boxes}</div></header>'


def _frontier(results: Results, series: dict[tuple[str, str], int]) -> str:
    speed, title = _speed(results)

    def point(run: Run, text: str) -> svg.Point:
        note = f"{label(run)}, {run.task}: {in_short(run)}"
        return svg.Point(run.mean_accepted, getattr(run, speed), series[run.key], text, note)

    points = [point(run, "") for run in results.runs] + [point(run, label(run)) for run in results.averages]
    return svg.scatter(points, "mean accepted length (tokens per round)", title)


def _speeds(results: Results, series: dict[tuple[str, str], int]) -> str:
    speed, title = _speed(results)

    def bar(run: Run) -> svg.Bar:
        note = f"{label(run)}: {_with_interval(run, speed)}"
        return svg.Bar(getattr(run, speed), series[run.key], note, run.confidence.get(speed))

    every = [*results.runs, *results.averages]
    rows: list[tuple[str, list[svg.Bar]]] = []
    for task in dict.fromkeys(run.task for run in every):
        rows += [(task, []), *((label(run), [bar(run)]) for run in every if run.task == task)]
    return svg.bars(rows, title, line_at=1.0 if speed == "speedup" else None)


def _speed(results: Results) -> tuple[str, str]:
    """The rate to draw and its title: without plain decoding there is no speedup."""
    if all(run.speedup is not None for run in results.averages):
        return "speedup", "speedup over plain decoding"
    if all(run.tokens_per_second is not None for run in results.averages):
        return "tokens_per_second", "tokens per second"
    return "modelled_speed", "modelled speed"


def _depths(results: Results, series: dict[tuple[str, str], int]) -> tuple[str, str]:
    """The plot and its legend."""
    curves = {
        series[run.key]: [(float(depth), count / run.rounds) for depth, count in sorted(run.accepted_by_depth.items())]
        for run in results.averages
    }
    plot = svg.lines(curves, "depth in the tree", "share of rounds that accept it")
    return plot, _legend([(series[run.key], label(run)) for run in results.averages])


def _accepted_per_round(run: Run) -> dict[str, float]:
    return {source: count / run.rounds for source, count in run.accepted_by_source.items()}


def _milliseconds_per_token(run: Run) -> dict[str, float]:
    return {phase: 1000 * seconds / run.tokens for phase, seconds in run.seconds_by_phase.items()}


def _stacked(results: Results, parts: Callable[[Run], dict[str, float]], title: str) -> tuple[str, str]:
    """The plot of each average's parts, and its legend."""
    names = list(dict.fromkeys(name for run in results.averages for name in parts(run)))
    colours = {name: place for place, name in enumerate(names, start=1)}  # grey is for plain decoding
    rows = []
    for run in results.averages:
        bars = [svg.Bar(size, colours[name], f"{name}: {size:.2f}") for name, size in parts(run).items()]
        rows.append((label(run), sorted(bars, key=lambda bar: bar.series)))
    return svg.bars(rows, title), _legend([(place, name) for name, place in colours.items()])


def _legend(entries: Sequence[tuple[int, str]]) -> str:
    items = "".join(f'<li><i style="background:{svg.colour(n)}"></i>{escape(name)}</li>' for n, name in entries)
    return f'<figcaption><ul class="legend">{items}</ul></figcaption>'


def _table(runs: Sequence[Run], own: dict[str, Callable[[Run], str]]) -> str:
    columns = {"method": label, **own, "ms by phase": _phases, "accepted of nodes, by source": _sources}
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = []
    for run in runs:
        cells = "".join(f"<td>{escape(cell(run))}</td>" for cell in columns.values())
        rows.append(f'<tr class="bad">{cells}</tr>' if run.differ else f"<tr>{cells}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _phases(run: Run) -> str:
    return _listed({phase: 1000 * spent / run.rounds for phase, spent in run.seconds_by_phase.items()}, 1)


def _listed(values: dict[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


def _sources(run: Run) -> str:
    return ", ".join(
        f"{source} {run.accepted_by_source.get(source, 0) / run.rounds:.2f} of {nodes / run.rounds:.1f}"
        for source, nodes in run.proposed_by_source.items()
    )


def _details(title: str, facts: dict[str, Any]) -> str:
    rows = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(_words(v))}</dd>" for k, v in facts.items())
    return f"<div><h2>{title}</h2><dl>{rows}</dl></div>"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)


def _with_interval(run: Run, rate: str) -> str:
    interval = run.confidence.get(rate)
    return number(getattr(run, rate)) + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


_STYLE = """
:root { color-scheme: light dark; --page: #f6f6f3; --card: #ffffff; --ink: #1d2126; --soft: #626a73; --line: #e3e4e0;
  --bad: #b3261e; --s0: #6b7280; --s1: #0a6ebd; --s2: #d1600a; --s3: #15803d; --s4: #a02c8a; --s5: #8a6d00;
  --s6: #c01f3f; --s7: #0e7c86; --s8: #6d4bc3; --s9: #87523a; --s10: #3f6212; --s11: #be185d; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1c2024; --ink: #e8eaec; --soft: #9aa3ac;
  --line: #30363c; --bad: #ff8a80; --s0: #9aa3ad; --s1: #5cb0f2; --s2: #f79a4d; --s3: #5fce86; --s4: #e07fcd;
  --s5: #dcbb3e; --s6: #ff7a90; --s7: #4cc6cf; --s8: #b09af0; --s9: #c99878;
  --s10: #a3c76d; --s11: #f58cc0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 920px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: 30px; margin: 0; letter-spacing: -0.02em; } h2 { font-size: 19px; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 22px 0 6px; } p { color: var(--soft); margin: 0 0 14px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 22px 24px;
  margin-top: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin-top: 18px; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px; }
.tiles b { display: block; font-size: 26px; font-variant-numeric: tabular-nums; } .tiles span { color: var(--soft); }
.note { color: var(--bad); } figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .label { fill: var(--ink); paint-order: stroke;
  stroke: var(--card); stroke-width: 3px; }
svg .grid { stroke: var(--line); } svg .whisker { stroke: var(--ink); stroke-width: 1.2; }
svg .reference { stroke: var(--soft); stroke-dasharray: 4 4; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 10px 0 0; padding: 0; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; white-space: nowrap; }
th, td { text-align: right; padding: 5px 9px; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child, th:nth-last-child(-n+2),
td:nth-last-child(-n+2) { text-align: left; } td:first-child { font-weight: 600; } .bad td { color: var(--bad); }
.details { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 24px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""

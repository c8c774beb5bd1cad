"""`graft bench serve`: a load test of a server. `benches` is `graft bench` with this subcommand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.cli.bench import bench
from graft.cli.extras import missing_extra
from graft.cli.options import LIMIT, PROMPTS, Given, Group, option, takes
from graft.cli.terminal import notes

LOAD: Group = {
    "requests": option(int, "Number of requests.", "64"),
    "concurrency": option(int, "Most requests in flight at once.", "8"),
    "rate": option(float, "Requests to start per second.", "start one when another ends"),
    "max_tokens": option(int, "Longest answer.", "128"),
    "temperature": option(float, "Higher is more varied; 0 is greedy.", "0"),
    "plain": option(bool, "Ask a Graft server not to speculate.", flag="--plain"),
    "slo_first": option(float, "Service level: most seconds to the first token.", "2"),
    "slo_token": option(float, "Service level: most seconds per further token.", "0.2"),
}


@takes(load=LOAD)
def serve(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    prompts: Annotated[list[Path] | None, PROMPTS] = None,
    limit: Annotated[int | None, LIMIT] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the server.", envvar="GRAFT_API_KEY")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    *,
    load: Given,
) -> None:
    """Load-test a running server: latencies, throughput, and requests within the service level.

    [dim]Example:[/] graft bench serve --requests 100 --concurrency 16
    """
    import asyncio

    try:
        from graft.bench.load import LoadSettings, load_test
    except ImportError as error:
        raise missing_extra(str(error.name), "bench") from error
    from graft.bench.tasks import built_in_tasks, read_tasks

    settings = LoadSettings.of(load)
    tasks = read_tasks(prompts, limit) if prompts else built_in_tasks(limit)
    with notes().status("sending requests ...") as status:

        def progress(num_done: int) -> None:
            status.update(f"{num_done} of {settings.requests} answered")

        texts = [prompt.text for task in tasks for prompt in task.prompts]
        figures = asyncio.run(load_test(url.rstrip("/"), texts, settings, api_key, progress))
    _show(figures)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "mean", "p50", "p90", "p99", box=None)
    for name in ("time_to_first_token", "time_per_token", "time_between_pieces", "time_to_last_token"):
        values = (figures[name][column] for column in ("mean", "p50", "p90", "p99"))
        table.add_row(f"{name.replace('_', ' ')}, ms", *("–" if v is None else f"{1000 * v:.1f}" for v in values))
    console = Console(highlight=False)
    console.print(table)
    length = figures["mean_acceptance_length"]
    console.print(
        f"{figures['answered']} answered, {figures['refused']} refused, {figures['failed']} failed in "
        f"{figures['seconds']:.1f} s: {figures['tokens_per_second']:.1f} tokens/s, "
        f"{figures['requests_per_second']:.2f} requests/s, {figures['good_requests_per_second']:.2f} requests/s within "
        "the service level" + (f", mean accepted length {length:.2f}" if length else "")
    )


benches = typer.Typer(name="bench", rich_markup_mode="rich")
benches.callback(invoke_without_command=True)(bench)
benches.command()(serve)

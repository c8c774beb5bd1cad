"""`graft drafters`: list the drafters of a model with their measured speed-ups."""

from __future__ import annotations

from typing import Annotated

import typer

from graft.cli.options import MODEL, Given, Group, takes
from graft.cli.terminal import check_loading, load_engine
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS

LOADED: Group = {name: MODEL[name] for name in ("device", "dtype")}


@takes(loading=LOADED)
def drafters(
    model: Annotated[str, typer.Argument(help="A packaged model, a folder, a .gguf file or a hub id.")] = DEFAULT_MODEL,
    *,
    loading: Given,
) -> None:
    """List the drafters of a model, with what graft tune measured for each on this machine.

    Columns: speed relative to plain decoding, mean accepted length, and draft passes per round.
    --draft auto uses the first. graft tune --draft NAME --prompts FILE measures a drafter; graft train makes one.

    [dim]Example:[/] graft drafters smollm2-135m
    """
    check_loading({"model": model})

    from rich.console import Console
    from rich.table import Table

    from graft.hub.drafters import packaged_head_of
    from graft.tuning.drafters import NONE, best_draft, drafts_for, known_results
    from graft.tuning.profile import About

    engine = load_engine(loading | {"model": model, "draft": "none", "policy": "off"})
    about = About.of(engine)
    results = {each.draft: each for each in known_results(about)}
    usual = packaged_head_of(model) or NONE
    chosen = best_draft(about) or usual
    table = Table("speed", "accepted", "passes", "measured", "--draft", "what it is")
    names = drafts_for(model, engine.target.model)
    for name in sorted(names, key=lambda name: (name != chosen, name not in results)):
        figures = [""] * 4
        if found := results.get(name):
            figures = [f"{found.speed:.2f}", f"{found.mean_accepted:.2f}", f"{found.passes:.2f}", found.date]
        table.add_row(*figures, name, _description(name, model))
    Console().print(table)
    print(f"--draft auto uses {chosen}.")
    if not results:
        print("Nothing has been measured on this machine yet: run graft tune --draft NAME --prompts FILE.")


def _description(draft: str, model: str) -> str:
    """A drafter in a few words."""
    from graft.hub.drafters import NAMED, name_of, packaged_head_of
    from graft.tuning.drafters import NONE, is_here

    if draft == NONE:
        return "retrieval only"
    if draft == packaged_head_of(model):
        return "the packaged head"
    if name_of(draft) in NAMED:
        return NAMED[name_of(draft)].what
    if draft in PACKAGED_MODELS:
        return "a small model" if is_here(draft) else f"a small model: graft pull {draft}"
    return "a head or a model" if is_here(draft) else "no longer there"

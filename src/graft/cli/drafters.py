"""`graft drafters`: what a model can draft with here, and what each brought when it was measured."""

from __future__ import annotations

from typing import Annotated

import typer

from graft.cli.options import MODEL, Given, Group, takes
from graft.cli.terminal import load_engine
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS

LOADED: Group = {name: MODEL[name] for name in ("device", "dtype")}


@takes(loading=LOADED)
def drafters(
    model: Annotated[str, typer.Argument(help="A packaged model, a folder, a .gguf file or a hub id.")] = DEFAULT_MODEL,
    *,
    loading: Given,
) -> None:
    """List the drafters of a model, and what each brought when graft tune measured it on this machine.

    speed is tokens per second over those of plain decoding, accepted the tokens of a round, passes its draft passes.
    The first is what --draft auto takes. graft tune --draft NAME --prompts FILE measures one; graft train makes one.

    [dim]Example:[/] graft drafters smollm2-135m
    """
    from rich.console import Console
    from rich.table import Table

    from graft.loading import packaged_head
    from graft.tuning.drafters import NONE, best_draft, drafts_for, known_results
    from graft.tuning.profile import About

    engine = load_engine(loading | {"model": model, "draft": "none", "policy": "off"})
    about = About.of(engine)
    results = {each.draft: each for each in known_results(about)}
    usual = model if packaged_head(model) is not None else NONE
    taken = best_draft(about) or usual
    table = Table("speed", "accepted", "passes", "measured", "--draft", "what it is")
    names = drafts_for(model, engine.target.model)
    order = sorted(names, key=lambda name: (name != taken, name not in results))
    for name in order:
        found = results.get(name)
        numbers = (found.speed, found.mean_accepted, found.passes) if found is not None else ()
        figures = [f"{number:.2f}" for number in numbers] or [""] * 3
        table.add_row(*figures, found.date if found is not None else "", name, _what(name, model))
    Console().print(table)
    print(f"--draft auto takes {taken}.")
    if not results:
        print("Nothing was measured on this machine yet: graft tune --draft NAME --prompts FILE does it.")


def _what(draft: str, model: str) -> str:
    """What a drafter is, in a few words."""
    from graft.hub.drafters import NAMED, name_of
    from graft.tuning.drafters import NONE, is_here

    if draft == NONE:
        return "retrieval alone"
    if draft == model:
        return "its packaged head"
    if name_of(draft) in NAMED:
        return NAMED[name_of(draft)].what
    if draft in PACKAGED_MODELS:
        return "a small model" if is_here(draft) else f"a small model: graft pull {draft}"
    return "a head or a model" if is_here(draft) else "no longer there"

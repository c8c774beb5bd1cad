"""`graft drafters`: list the drafters of a model with their measured speed-ups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import MODEL, Given, Group, takes
from graft.cli.terminal import check_loading, load_engine
from graft.errors import GraftError
from graft.home import learned_folder, model_folder
from graft.hub.draft_names import EARLY_EXIT, NONE, description, packaged_head_of, smaller_models
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS
from graft.tuning.profile_header import read_speeds

if TYPE_CHECKING:
    from graft.tuning.drafters import Measured

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
    check_loading(loading | {"model": model})

    if (names := _unmeasured(model)) is not None:
        _show(model, names, {}, packaged_head_of(model) or NONE)
        return
    from graft.tuning.drafters import best_draft, drafts_for, known_results
    from graft.tuning.profile import About

    engine = load_engine(loading | {"model": model, "draft": "none", "policy": "off"})
    about = About.of(engine)
    results = {each.draft: each for each in known_results(about)}
    chosen = best_draft(about) or packaged_head_of(model) or NONE
    _show(model, drafts_for(model, engine.target.model), results, chosen)


def _unmeasured(model: str) -> list[str] | None:
    """The drafters of a pulled model, if nothing has been measured yet; None: the model has to be loaded.

    Results are kept for a model's weights and for the machine as torch sees it.
    """
    known = PACKAGED_MODELS.get(model)
    is_measured = any(map(_has_speeds, learned_folder().glob("*.safetensors")))
    if known is None or not model_folder(model).is_dir() or is_measured:
        return None
    head = packaged_head_of(model)
    return [NONE, *([head] if head else []), EARLY_EXIT, *smaller_models(model, known.converted_bytes)]


def _has_speeds(path: Path) -> bool:
    try:
        return bool(read_speeds(path))
    except GraftError:  # said once the model is loaded
        return True


def _show(model: str, names: list[str], results: Mapping[str, Measured], chosen: str) -> None:
    """Print the list: the drafter that is chosen first, then those that were measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table("speed", "accepted", "passes", "measured", "--draft", "what it is")
    for name in sorted(names, key=lambda name: (name != chosen, name not in results)):
        figures = [""] * 4
        if found := results.get(name):
            figures = [f"{found.speed:.2f}", f"{found.mean_accepted:.2f}", f"{found.passes:.2f}", found.date[:10]]
        table.add_row(*figures, name, description(name, model))
    Console().print(table)
    print(f"--draft auto uses {chosen}.")
    if not results:
        print("Nothing has been measured on this machine yet: run graft tune --draft NAME --prompts FILE.")

"""`graft load-check`: describe a draft head and check that it fits a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graft.cli.terminal import print_facts
from graft.hub.draft_names import check_head, packaged_head
from graft.hub.registry import DEFAULT_MODEL
from graft.load_options import config_of
from graft.settings import require

if TYPE_CHECKING:
    from graft.drafters.checkpoints import Recognised


def load_check(
    head: Annotated[str, typer.Argument(help="A draft head: folder, hub id or packaged name.", show_default=False)],
    model: Annotated[str, typer.Option(help="The target: a packaged model, a folder or a hub id.")] = DEFAULT_MODEL,
    slots: Annotated[
        Literal["in-place", "shifted"] | None,
        typer.Option(help="For a block head whose config does not say."),
    ] = None,
) -> None:
    """Describe a draft head, load it, and check that it fits a model.

    Reads EAGLE-3 heads and block heads (DFlash, DSpark, JetSpec, TreeFlash). Only the model's config is fetched.
    Exits with 2 and the reason if the head is damaged or belongs to another model.

    [dim]Example:[/] graft load-check ./my-head --model smollm2-135m
    """
    check_head(head)
    config_of(model)

    import torch

    from graft.drafters import block, eagle3
    from graft.drafters.head_kinds import kind_of
    from graft.folders import folder_of
    from graft.home import is_gguf
    from graft.hub.load import load_config

    head = str(packaged_head(head) or head)
    kind = "model" if is_gguf(head) else kind_of(folder_of(head, ("config.json",)))  # before fetching the weights
    require(kind != "model", f"{head} is a whole model, not a head: use it directly with --draft")
    folder = folder_of(head)
    if kind == "block":
        found = block.inspect_head(folder, slots)
        assumed = {} if found.slots_are_said else {"shifted": "assumed, config.json does not say: see --slots"}
        _print_facts(found, found.kind, assumed)
        layers = block.load_head(folder, load_config(model), torch.bfloat16, "cpu", slots=slots).config.target_layers
    else:
        require(slots is None, "--slots is for block heads and this is an EAGLE-3 head: drop it")
        _print_facts(eagle3.inspect_head(folder), "EAGLE-3", {})
        layers = eagle3.load_head(folder, load_config(model), torch.bfloat16, "cpu").config.target_layers
    print(f"It fits {model}: it loads, and reads the inputs of layers {', '.join(map(str, layers))}.")


def _print_facts(found: Recognised, kind: str, notes: dict[str, str]) -> None:
    """Print the files of a head and the facts in its config. notes: on some of the facts."""
    dtype = str(found.tensors["fc.weight"].dtype).removeprefix("torch.")
    files = {
        "kind": kind,
        "folder": str(found.folder),
        "layout": found.layout,
        "files": ", ".join(found.files),
        "tensors": f"{len(found.tensors)}, {found.num_parameters:,} parameters in {dtype}",
    }
    print_facts({**files, **found.facts}, notes)

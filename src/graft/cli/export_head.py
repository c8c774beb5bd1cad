"""`graft export-head`: a draft head in the format of another engine, with a model card."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from graft.hub.draft_names import check_head, packaged_head
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS
from graft.settings import require


def export_head(
    head: Annotated[str, typer.Argument(help="A draft head: folder, hub id or packaged name.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    to: Annotated[Literal["sglang", "vllm", "speculators"], typer.Option(help="The engine.")] = "sglang",
    model: Annotated[str, typer.Option(help="The target: a packaged model, a folder or a hub id.")] = DEFAULT_MODEL,
    name: Annotated[
        str | None, typer.Option(help="The target's name on the card. [dim]\\[default: its hub id][/]")
    ] = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="A results.json of graft bench for the card; repeatable.")
    ] = None,
    load: Annotated[
        list[Path] | None,
        typer.Option(help="A result of benchmarks/batched_serving.py for the card; repeatable."),
    ] = None,
) -> None:
    """Export a draft head for another engine, ready to publish: config, weights, model card, training log.

    EAGLE-3 heads can go to SGLang, vLLM and speculators, block heads to SGLang and vLLM.

    Of the model, only the config is fetched.

    [dim]Example:[/] graft export-head my-head ./for-sglang --to sglang --model meta-llama/Llama-3.1-8B-Instruct
    """
    from graft.hub.export import check_export
    from graft.hub.export import export_head as export
    from graft.load_options import config_of

    check_head(head)
    config_of(model)
    check_export(out, to, results or [], load or [])
    called = name or (PACKAGED_MODELS[model].hub_id if model in PACKAGED_MODELS else model)
    require(
        name is not None or not Path(model).is_dir(), "the card needs a name for the target, not a folder: give --name"
    )
    from graft.hub.load import load_config

    export(packaged_head(head) or head, out, to, called, load_config(model), results or [], load or [])
    print(f"The head for {to} is in {out}, with its model card in README.md")

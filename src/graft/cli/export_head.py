"""`graft export-head`: a draft head as another engine reads it, with a model card."""

from pathlib import Path
from typing import Annotated

import typer

from graft.hub.registry import DEFAULT_MODEL
from graft.settings import require


def export_head(
    head: Annotated[str, typer.Argument(help="A draft head: folder, hub id or packaged name.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    to: Annotated[str, typer.Option(help="sglang, vllm or speculators.")] = "sglang",
    model: Annotated[str, typer.Option(help="The target: a packaged model, a folder or a hub id.")] = DEFAULT_MODEL,
    name: Annotated[str | None, typer.Option(help="What the card calls the target. [default: the model]")] = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="results.json of graft bench --out, for the card; repeatable.")
    ] = None,
    load: Annotated[
        list[Path] | None,
        typer.Option(help="What benchmarks/batched_serving.py --out wrote; repeatable."),
    ] = None,
) -> None:
    """Write a draft head for another engine, as heads are published: config, weights, model card, training log.

    EAGLE-3 heads for SGLang, vLLM and speculators; block heads for SGLang and vLLM. Of the model only its config is
    read.

    [dim]Example:[/] graft export-head my-head ./for-sglang --to sglang --model meta-llama/Llama-3.1-8B-Instruct
    """
    from graft.hub.export import export_head as export
    from graft.hub.load import load_config
    from graft.hub.registry import PACKAGED_MODELS
    from graft.loading import packaged_head

    called = name or (PACKAGED_MODELS[model].hub_id if model in PACKAGED_MODELS else model)
    require(
        name is not None or not Path(model).is_dir(), "a folder is no name for others: say with --name what it holds"
    )
    export(packaged_head(head) or head, out, to, called, load_config(model), results or [], load or [])
    print(f"The head is in {out}, for {to}; README.md is its card")

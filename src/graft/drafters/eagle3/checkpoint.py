"""Checkpoints of EAGLE-3 heads, in any of the layouts in `layouts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from graft import folders
from graft.drafters import checkpoints
from graft.drafters.eagle3.head import Eagle3Config, Eagle3Head, default_target_layers
from graft.drafters.eagle3.layouts import LAYOUTS, head_name, read_config, recognise, write_config
from graft.errors import GraftError
from graft.settings import require


@dataclass(frozen=True)
class Recognised(checkpoints.Recognised):
    """Content of a head's folder. `facts` lack `target_layers` if they are the default ones."""

    def config_for(self, target: PreTrainedConfig) -> Eagle3Config:
        """The head's config for this target; a GraftError if it belongs to another one."""
        usual = default_target_layers(target.get_text_config().num_hidden_layers)
        with checkpoints.said_of(self.folder / "config.json"):
            config = Eagle3Config.of({"target_layers": usual, **self.facts})
        self.check_target(config, target)
        return config


def inspect_head(path: str | Path) -> Recognised:
    """Describe the head in a local folder or under a hub id. Values of weights are not checked."""
    folder = folders.folder_of(path)
    config = folders.read_config(folder)
    files, tensors = checkpoints.read_weights(folder, head_name)
    require("fc.weight" in tensors, f"{folder} is not an EAGLE-3 head: it has no tensor fc.weight")
    with checkpoints.said_of(folder / "config.json"):
        layout = recognise(config)
        own = {"own_embedding": "embed_tokens.weight", "head_norms": "midlayer.self_attn.q_norm.weight"}
        facts = read_config(layout, config) | {fact: name in tensors for fact, name in own.items()}
    return Recognised(folder, layout.name, files, facts, tensors)


def load_head(
    path: str | Path,
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    target_embedding: Tensor | None = None,
) -> Eagle3Head:
    """Load the head in a local folder or under a hub id, for this target, whose embedding [vocab, H] it may use."""
    found = inspect_head(path)
    config = found.config_for(target_config)
    with torch.device("meta"):
        head = Eagle3Head(config)
    found.fill(head, dtype, device, LAYOUTS[found.layout].spell)
    if target_embedding is not None and not config.own_embedding:
        head.borrow_embedding(target_embedding.to(device, dtype))
    return head.to(device)


def save_head(
    head: Eagle3Head, folder: str | Path, layout: str = "safeailab", extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write `config.json` and `model.safetensors`. `extra_config` adds to the former, or overrides it."""
    if layout not in LAYOUTS:
        raise GraftError(f"unknown layout {layout!r}: known are {', '.join(LAYOUTS)}")
    spelling = LAYOUTS[layout]
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    config = write_config(spelling, head.config) | {"torch_dtype": dtype} | dict(extra_config or {})
    tensors = {spelling.spell(name): tensor for name, tensor in head.state_dict().items()}
    checkpoints.write_head(Path(folder), config, tensors)

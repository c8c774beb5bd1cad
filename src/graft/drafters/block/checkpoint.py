"""Checkpoints of block heads, in any of the layouts in `layouts`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from graft import folders
from graft.drafters import checkpoints
from graft.drafters.block.config import BlockConfig, default_target_layers
from graft.drafters.block.head import BlockHead
from graft.drafters.block.layouts import (
    CONDITIONAL,
    LAYOUTS,
    head_name,
    read_config,
    recognise,
    usually_shifted,
    write_config,
)
from graft.settings import require

SLOTS = {"in-place": False, "shifted": True}
# In a subfolder, which other loaders do not read: they refuse tensors that they do not know.
_CONDITIONAL_FILE = Path("conditional_head") / "model.safetensors"
_MASK = "mask_embedding"


@dataclass(frozen=True)
class Recognised(checkpoints.Recognised):
    """Content of a head's folder. `facts` lack values that follow from the target."""

    slots_are_said: bool  # whether config.json says which slots; False: the default or the caller's choice

    @property
    def kind(self) -> str:
        """The published method whose network this is."""
        facts = self.facts
        if facts["conditional"]:
            return "TreeFlash"
        if _is_dspark(facts, self.tensors):
            return "DSpark"
        return "JetSpec" if all(facts["causal"]) and not any(facts["windows"]) else "DFlash"

    def config_for(self, target: PreTrainedConfig) -> BlockConfig:
        """The head's config for this target; a GraftError if it belongs to another one."""
        its = target.get_text_config().num_hidden_layers
        own = self.facts.get("num_target_layers", its)
        require(own == its, f"{self.folder} is for a target with {own} layers, not {its}: it belongs to another model")
        with checkpoints.said_of(self.folder / "config.json"):
            facts = {"num_target_layers": its, **self.facts}
            if "target_layers" not in facts:
                facts["target_layers"] = default_target_layers(its, len(facts["causal"]))
            config = BlockConfig.of(facts)
        self.check_target(config, target)
        return config


def inspect_head(path: str | Path, slots: str | None = None) -> Recognised:
    """Describe the head in a local folder or under a hub id. Values of weights are not checked.

    slots: in-place or shifted, for a head whose config.json does not say; the default if None.
    """
    require(slots in (None, *SLOTS), f"slots must be {' or '.join(SLOTS)}, not {slots!r}")
    folder = folders.folder_of(path)
    config = folders.read_config(folder)
    more = [file for file in (folder / _CONDITIONAL_FILE,) if file.exists()]
    files, tensors = checkpoints.read_weights(folder, head_name, more)
    require("fc.weight" in tensors, f"{folder} is not a block head: it has no tensor fc.weight")
    with checkpoints.said_of(folder / "config.json"):
        layout = recognise(config)
        facts = read_config(layout, config, tensors.keys())
        normed = any(name.endswith((".q_norm.weight", ".k_norm.weight")) for name in tensors)
        shape = checkpoints.value_at(config, layout.shape)
        facts["head_norms"] = normed or shape.get("model_type", "qwen3") == "qwen3"
        said = "shifted" in facts
        chosen = SLOTS[slots] if slots is not None else facts.get("shifted")
        if chosen is None:
            chosen = usually_shifted(layout, config, _is_dspark(facts, tensors))
        facts.setdefault("shifted", chosen)
        require(facts["shifted"] == chosen, f"it says that the slots are not {slots}: leave out the choice of slots")
    if (mask := _read_mask(folder / folders.MASK_FILE, facts["mask_token_id"])) is not None:
        tensors[_MASK] = mask
        files += (folders.MASK_FILE,)
    facts["own_mask"] = mask is not None
    return Recognised(folder, layout.name, files, facts, tensors, said)


def load_head(
    path: str | Path,
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    target_embedding: Tensor | None = None,
    target_lm_head: Tensor | None = None,
    slots: str | None = None,
) -> BlockHead:
    """Load the head in a local folder or under a hub id, for this target, whose weights [vocab, H] it may use.

    slots: see `inspect_head`.
    """
    found = inspect_head(path, slots)
    config = found.config_for(target_config)
    with torch.device("meta"):
        head = BlockHead(config)
    found.fill(head, dtype, device, LAYOUTS[found.layout].spell)
    if target_embedding is not None and not config.own_embedding:
        head.borrow_embedding(target_embedding.to(device, dtype))
    if target_lm_head is not None and not config.own_lm_head:
        head.borrow_lm_head(target_lm_head.to(device, dtype))
    return head.to(device)


def save_head(
    head: BlockHead,
    folder: str | Path,
    extra_config: Mapping[str, Any] | None = None,
    max_file_bytes: int | None = None,
) -> None:
    """Write a head. SGLang and vLLM can read its backbone. `extra_config` adds to config.json, or overrides it.

    A conditional head and the mask's vector have files of their own; the latter has vLLM's name.
    max_file_bytes: split the backbone into files of at most this size.
    """
    folder, config = Path(folder), head.config
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    tensors = dict(head.state_dict())
    if config.draft_vocab_size == config.vocab_size:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in checkpoints.VOCABULARY}
    mask = tensors.pop(_MASK, None)
    conditional = {name: tensors.pop(name) for name in list(tensors) if name.startswith(CONDITIONAL)}
    content = write_config(config) | {"torch_dtype": dtype} | dict(extra_config or {})
    checkpoints.write_head(folder, content, tensors, max_file_bytes)
    for file in (_CONDITIONAL_FILE, folders.MASK_FILE):  # of a previous head
        (folder / file).unlink(missing_ok=True)
    if conditional:
        (folder / _CONDITIONAL_FILE).parent.mkdir(exist_ok=True)
        checkpoints.write_tensors(folder / _CONDITIONAL_FILE, conditional)
    if mask is not None:
        content = {"embedding": mask.detach().cpu().clone(), "mask_token_id": config.mask_token_id}
        torch.save(content, folder / folders.MASK_FILE)


def _is_dspark(facts: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether the head has DSpark's Markov or confidence head. Drafting does not use the latter."""
    return facts["markov"] is not None or not checkpoints.CONFIDENCE_TENSORS.isdisjoint(tensors)


def _read_mask(path: Path, mask_token_id: Any) -> Tensor | None:
    """The learned vector of masked slots, if any."""
    if not path.exists():
        return None
    content = checkpoints.read_pickle(path)
    if isinstance(content, dict):
        its = content.get("mask_token_id", mask_token_id)
        require(its == mask_token_id, f"{path} is for mask token {its}, but config.json has {mask_token_id}")
        content = content.get("embedding")
    require(isinstance(content, Tensor), f"{path} holds no embedding")
    return content.reshape(-1)

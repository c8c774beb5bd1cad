"""Checkpoints of EAGLE-3 heads: reads and writes their files, in any of the layouts of `layouts`.

Nothing is guessed or skipped: a head is complete and fits its target, or an error says what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor
from transformers import PreTrainedConfig

from graft.errors import GraftError
from graft.settings import require
from graft.spec_decode.proposers.eagle3.head import Eagle3Config, Eagle3Head, default_target_layers
from graft.spec_decode.proposers.eagle3.layouts import (
    LAYOUTS,
    UNUSED_TENSORS,
    head_name,
    read_config,
    recognise,
    write_config,
)

_VOCABULARY = {"d2t", "t2d"}  # buffers, which a file need not have


@dataclass(frozen=True)
class Recognised:
    """Content of a head's folder, read without its target."""

    folder: Path
    layout: str
    files: tuple[str, ...]
    facts: Mapping[str, Any]  # arguments of `Eagle3Config`; `target_layers` only if they are not the usual ones
    tensors: Mapping[str, Tensor]  # by the head's names

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for name, tensor in self.tensors.items() if name not in _VOCABULARY)

    def config_for(self, target: PreTrainedConfig) -> Eagle3Config:
        """The head's config for this target; a GraftError if it belongs to another one."""
        text = target.get_text_config()
        with _said_of(self.folder / "config.json"):
            config = Eagle3Config.of({"target_layers": default_target_layers(text.num_hidden_layers), **self.facts})
        for what, own, its in (
            ("a vocabulary", config.vocab_size, text.vocab_size),
            ("hidden states", config.target_hidden_size, text.hidden_size),
        ):
            require(own == its, f"{self.folder} is for a target with {what} of {own:,}, not {its:,}: another model's")
        require(
            max(config.target_layers) < text.num_hidden_layers,
            f"{self.folder} reads the target's layers {', '.join(map(str, config.target_layers))}, "
            f"but the target has only {text.num_hidden_layers}: another model's",
        )
        return config


def inspect_head(path: str | Path) -> Recognised:
    """Describes the head in a local folder or under a hub id. Values of weights are not checked."""
    folder = _folder(path)
    config = _read_json(folder / "config.json")
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    require(len(files) > 0, f"{folder} has neither model.safetensors nor pytorch_model.bin: copy the weights into it")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= {head_name(name): tensor for name, tensor in _read_tensors(file).items()}
    require("fc.weight" in tensors, f"{folder} is not an EAGLE-3 head: it has no tensor fc.weight")
    with _said_of(folder / "config.json"):
        layout = recognise(config)
        facts = read_config(layout, config) | {"own_embedding": "embed_tokens.weight" in tensors}
    return Recognised(folder, layout.name, tuple(file.name for file in files), facts, tensors)


def load_head(
    path: str | Path,
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    target_embedding: Tensor | None = None,
) -> Eagle3Head:
    """The head in a local folder or under a hub id, for this target, whose embedding [vocab, H] it may borrow."""
    found = inspect_head(path)
    config = found.config_for(target_config)
    with torch.device("meta"):
        head = Eagle3Head(config)
    _check_weights(found, head)
    weights = {
        # A copy in any case: a tensor that is still mapped to its file would change with it.
        name: found.tensors[name].to(device, dtype, copy=True)
        for name, _ in head.named_parameters()
    }
    head.load_state_dict(weights, strict=False, assign=True)  # all parameters; the vocabulary is not one
    _set_vocabulary(found, head)
    if target_embedding is not None and not config.own_embedding:
        head.borrow_embedding(target_embedding.to(device, dtype))
    return head.to(device)


def save_head(
    head: Eagle3Head, folder: str | Path, layout: str = "safeailab", extra_config: Mapping[str, Any] | None = None
) -> None:
    """Write `config.json` and `model.safetensors`; `extra_config` adds to the former, or overrides it."""
    if layout not in LAYOUTS:
        raise GraftError(f"unknown layout {layout!r}: known are {', '.join(LAYOUTS)}")
    spelling = LAYOUTS[layout]
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    config = write_config(spelling, head.config) | {"torch_dtype": dtype} | dict(extra_config or {})
    tensors = {spelling.spell(name): tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(to_safetensors(tensors, metadata={"format": "pt"}))


def _check_weights(found: Recognised, head: Eagle3Head) -> None:
    spell = LAYOUTS[found.layout].spell
    expected = {name: parameter.shape for name, parameter in head.named_parameters()}
    if missing := sorted(expected.keys() - found.tensors.keys()):
        name = missing[0]
        raise GraftError(f"{found.folder} has no tensor {spell(name)}, expected as {list(expected[name])}")
    if extra := sorted(found.tensors.keys() - expected.keys() - _VOCABULARY - UNUSED_TENSORS):
        raise GraftError(f"{found.folder} has a tensor {spell(extra[0])}, for which its config.json has no place")
    for name, shape in expected.items():
        tensor = found.tensors[name]
        require(
            tensor.shape == shape and tensor.is_floating_point(),
            f"{found.folder}: {spell(name)} is {tensor.dtype} {list(tensor.shape)}, expected floats {list(shape)}",
        )
        require(bool(tensor.isfinite().all()), f"{found.folder}: {spell(name)} has values that are not finite")


def _set_vocabulary(found: Recognised, head: Eagle3Head) -> None:
    d2t, t2d = (found.tensors.get(name) for name in ("d2t", "t2d"))
    size, vocab_size = head.config.draft_vocab_size, head.config.vocab_size
    if d2t is None:
        require(size == vocab_size, f"{found.folder} has no tensor d2t, expected as [{size}]")
        return
    require(
        d2t.shape == (size,) and not d2t.is_floating_point(),
        f"{found.folder}: d2t is {d2t.dtype} {list(d2t.shape)}, expected whole numbers [{size}]",
    )
    target_ids = torch.arange(size) + d2t
    for token in (int(target_ids.min()), int(target_ids.max())):
        require(0 <= token < vocab_size, f"{found.folder}: d2t leads to token {token}, outside the {vocab_size:,}")
    require(len(target_ids.unique()) == size, f"{found.folder}: d2t gives two draft tokens the same target token")
    head.set_vocabulary(target_ids)
    require(
        t2d is None or torch.equal(t2d.bool(), head.t2d), f"{found.folder}: t2d does not mark the tokens d2t leads to"
    )


def _folder(path: str | Path) -> Path:
    """Where the files are; those of a hub id are fetched first."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    require(not folder.exists(), f"{path} is a file: give the folder that holds config.json and the weights")
    try:
        return Path(snapshot_download(str(path), allow_patterns=["config.json", "*.safetensors", "*.bin"]))
    except HFValidationError as error:
        raise GraftError(f"no head at {str(path)!r}: it is neither a folder nor a hub id (owner/name)") from error
    except OSError as error:  # what the hub client raises, from a missing repository to a missing network
        reason = str(error).strip().partition("\n")[0].rstrip(". ")
        raise GraftError(f"no head at {path}: there is no such folder, and as a hub id: {reason}") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise GraftError(f"{path} is missing: give the folder of an EAGLE-3 head") from error
    except ValueError as error:
        raise GraftError(f"{path} is not valid JSON; copy it again") from error
    require(isinstance(content, dict), f"{path} does not hold settings; copy it again")
    return content


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise GraftError(f"{path} is damaged or cut off; copy it again") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in every way there is
        raise GraftError(f"{path} is damaged, or holds more than tensors; use a copy in safetensors") from error
    named = isinstance(content, dict) and all(isinstance(tensor, Tensor) for tensor in content.values())
    require(named, f"{path} does not hold tensors by name")
    return content


@contextmanager
def _said_of(path: Path) -> Iterator[None]:
    """Puts the file's name before the message of a GraftError."""
    try:
        yield
    except GraftError as error:
        raise GraftError(f"{path}: {error}") from error

"""Files of draft heads of any kind: find, read, check and write them.

The names of config keys and tensors are in `eagle3/layouts.py` and `block/layouts.py`. Nothing is guessed or skipped: a
head is complete and fits its target, or an error says in one line what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor
from transformers import PreTrainedConfig

from graft.drafters.draft_head import SIZES, DraftHead, HeadConfig
from graft.errors import GraftError
from graft.folders import Json
from graft.settings import check_size, require

Place = tuple[str, ...]  # the keys that lead to a value of config.json

VOCABULARY = {"d2t", "t2d"}  # buffers, which may be missing in a file
CONFIDENCE_TENSORS = {"confidence_head.proj.weight", "confidence_head.proj.bias"}  # replaced by our calibration
# The others are copies of the target's weights, which some versions of speculators save for training.
UNUSED_TENSORS = CONFIDENCE_TENSORS | {"verifier_lm_head.weight", "verifier_norm.weight"}
_HEADER = 2**16  # most bytes of a file besides its tensors: names, shapes, offsets
_ONE_FILE = 2**40  # more bytes than any head has
_SHAPE_KEYS = (*SIZES, "rms_norm_eps")


@dataclass(frozen=True)
class Recognised:
    """Content of a head's folder."""

    folder: Path
    layout: str
    files: tuple[str, ...]
    facts: Mapping[str, Any]  # arguments of the head's config, except those that need the target
    tensors: Mapping[str, Tensor]  # by the head's names

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for name, tensor in self.tensors.items() if name not in VOCABULARY)

    def check_target(self, config: HeadConfig, target: PreTrainedConfig) -> None:
        """Raise a GraftError if the head belongs to another target."""
        text = target.get_text_config()
        for what, own, its in (
            ("a vocabulary", config.vocab_size, text.vocab_size),
            ("hidden states", config.target_hidden_size, text.hidden_size),
        ):
            require(
                own == its,
                f"{self.folder} is for a target with {what} of {own:,}, not {its:,}: it belongs to another model",
            )
        require(
            max(config.target_layers) < text.num_hidden_layers,
            f"{self.folder} reads the target's layers {', '.join(map(str, config.target_layers))}, "
            f"but the target has only {text.num_hidden_layers}: it belongs to another model",
        )

    def fill(
        self, head: DraftHead, dtype: torch.dtype, device: str | torch.device, spell: Callable[[str], str]
    ) -> None:
        """Load weights and draft vocabulary into a head on "meta". spell: tensor names in the files."""
        self._check_tensors(dict(head.named_parameters()), spell)
        weights = {
            # Always a copy: a tensor mapped to its file would change with the file.
            name: self.tensors[name].to(device, dtype, copy=True)
            for name, _ in head.named_parameters()
        }
        head.load_state_dict(weights | {"d2t": head.d2t, "t2d": head.t2d}, assign=True)
        if (target_ids := self._target_ids(len(head.d2t), len(head.t2d))) is not None:
            head.set_vocabulary(target_ids)
            t2d = self.tensors.get("t2d")
            marked = t2d is None or torch.equal(t2d.bool(), head.t2d)
            require(marked, f"{self.folder}: t2d does not mark the tokens that d2t maps to")

    def _check_tensors(self, expected: Mapping[str, Tensor], spell: Callable[[str], str]) -> None:
        if missing := sorted(expected.keys() - self.tensors.keys()):
            name = missing[0]
            raise GraftError(f"{self.folder} has no tensor {spell(name)}, expected as {list(expected[name].shape)}")
        if extra := sorted(self.tensors.keys() - expected.keys() - VOCABULARY - UNUSED_TENSORS):
            raise GraftError(f"{self.folder} has a tensor {spell(extra[0])}, which does not fit its config.json")
        for name, parameter in expected.items():
            tensor, shape = self.tensors[name], parameter.shape
            require(
                tensor.shape == shape and tensor.is_floating_point(),
                f"{self.folder}: {spell(name)} is {tensor.dtype} {list(tensor.shape)}, expected floats {list(shape)}",
            )
            require(bool(tensor.isfinite().all()), f"{self.folder}: {spell(name)} has values that are not finite")

    def _target_ids(self, size: int, vocab_size: int) -> Tensor | None:
        """Target ids of all draft ids; None if they are the same."""
        d2t = self.tensors.get("d2t")
        if d2t is None:
            require(size == vocab_size, f"{self.folder} has no tensor d2t, expected as [{size}]")
            return None
        require(
            d2t.shape == (size,) and not d2t.is_floating_point(),
            f"{self.folder}: d2t is {d2t.dtype} {list(d2t.shape)}, expected whole numbers [{size}]",
        )
        target_ids = torch.arange(size) + d2t
        for token in (int(target_ids.min()), int(target_ids.max())):
            require(0 <= token < vocab_size, f"{self.folder}: d2t maps to {token}, outside the {vocab_size:,} tokens")
        require(len(target_ids.unique()) == size, f"{self.folder}: d2t gives two draft tokens the same target token")
        return target_ids


def architecture_of(config: Json) -> str | None:
    named = config.get("architectures")
    return str(named[0]) if named and isinstance(named, list) else None


def read_weights(
    folder: Path, head_name: Callable[[str], str], more: Sequence[Path] = ()
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Names of the weight files, and their tensors by the head's names. more: additional files."""
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    require(len(files) > 0, f"{folder} has neither model.safetensors nor pytorch_model.bin: copy the weights into it")
    files += more
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _read_tensors(file).items():
            own = head_name(name)
            require(own not in tensors, f"{folder} has the tensor {own} twice: delete the wrong one")
            tensors[own] = tensor
    return tuple(str(file.relative_to(folder)) for file in files), tensors


def read_pickle(path: Path) -> Any:
    """The content of a torch file. Only tensors and plain values are accepted, and no code is run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        raise GraftError(f"{path} is damaged, or holds more than tensors; use a copy in safetensors") from error


def write_head(folder: Path, config: Json, tensors: Mapping[str, Tensor], max_bytes: int | None = None) -> None:
    """Write config.json and model.safetensors, or several files of at most `max_bytes` and their index."""
    room = _ONE_FILE if max_bytes is None else max_bytes - _HEADER
    for name, tensor in tensors.items():
        require(tensor.nbytes <= room, f"{name} of {tensor.nbytes:,} bytes exceeds a file of {max_bytes or room:,}")
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for old in folder.glob("model*.safetensors*"):  # of a previous head
        old.unlink()
    save_torch_state_dict(
        {name: tensor.detach().cpu() for name, tensor in tensors.items()}, folder, max_shard_size=room
    )
    for file in folder.glob("model*.safetensors"):
        file.chmod(config_file.stat().st_mode)  # safetensors makes files that only their owner can read


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.write_bytes(to_safetensors(plain, metadata={"format": "pt"}))


def read_shape(config: Json, place: Place, only: Json) -> dict[str, Any]:
    """Arguments of `HeadConfig` from `place` in config.json. only: the supported values of some settings."""
    shape = value_at(config, place)
    require(isinstance(shape, Mapping), f"{'.'.join(place)} is missing")
    for key, value in only.items():
        require(shape.get(key) in (None, value), f"{key} is {shape.get(key)}, and only {value} is supported")
    for key in ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"):
        check_size(key, shape.get(key))
    heads, hidden_size = shape["num_attention_heads"], shape["hidden_size"]
    facts = {key: shape[key] for key in _SHAPE_KEYS if shape.get(key) is not None}
    facts.setdefault("num_key_value_heads", heads)
    facts.setdefault("head_dim", hidden_size // heads)
    facts["target_hidden_size"] = config.get("target_hidden_size") or hidden_size
    facts["draft_vocab_size"] = config.get("draft_vocab_size") or shape["vocab_size"]
    facts["rope"] = _read_rope(shape)
    return facts


def write_shape(head: HeadConfig) -> dict[str, Any]:
    """The head's shape for config.json."""
    rope = dict(head.rope)
    shape = {key: getattr(head, key) for key in _SHAPE_KEYS}
    shape |= {"hidden_act": "silu", "rope_theta": rope.pop("rope_theta")}
    return shape | {"rope_scaling": None if rope["rope_type"] == "default" else rope}


def agreed(config: Json, places: Collection[Place]) -> Any:
    """The value at one or several of these places; a GraftError if they differ."""
    found = {".".join(place): value for place in places if (value := value_at(config, place)) is not None}
    said = " but ".join(f"{place} is {value}" for place, value in found.items())
    values = list(found.values())
    require(all(value == values[0] for value in values), f"{said}: delete the one that is wrong")
    return values[0] if values else None


def agreed_layers(config: Json, places: Mapping[Place, bool]) -> tuple[int, ...] | None:
    """The target layers whose inputs are read. places: True where the numbers count outputs, False for inputs."""
    found: dict[str, tuple[int, ...]] = {}
    for keys, counts_outputs in places.items():
        if layers := value_at(config, keys):
            place = ".".join(keys)
            listed = isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)
            require(listed, f"{place} must be a list of layer numbers, not {layers!r}")
            found[place] = tuple(layer + counts_outputs for layer in layers)
    said = " but ".join(f"{place} means the inputs of {', '.join(map(str, ids))}" for place, ids in found.items())
    require(len(set(found.values())) <= 1, f"{said}: delete the one that is wrong")
    return next(iter(found.values()), None)


def value_at(config: Json, place: Place) -> Any:
    value: Any = config
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def put_at(config: dict[str, Any], place: Place, value: Any) -> None:
    for key in place[:-1]:
        config = config.setdefault(key, {})
    config[place[-1]] = value


@contextmanager
def said_of(path: Path | str) -> Iterator[None]:
    """Put a file's or model's name before the message of a GraftError."""
    try:
        yield
    except GraftError as error:
        raise GraftError(f"{path}: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise GraftError(f"{path} is damaged or cut off; copy it again") from error
    content = read_pickle(path)
    named = isinstance(content, dict) and all(isinstance(tensor, Tensor) for tensor in content.values())
    require(named, f"{path} does not hold tensors by name")
    return content


def _read_rope(shape: Json) -> dict[str, Any]:
    """Rotary parameters as in transformers 5, from its own or the earlier spelling."""
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    require(isinstance(rope, Mapping), f"rotary parameters must be settings by name, not {rope!r}")
    known = {"rope_type": rope.get("type", "default"), "rope_theta": shape.get("rope_theta") or 10000.0}
    known |= {key: value for key, value in rope.items() if key != "type"}
    if known["rope_type"] == "mrope":  # of images; in texts all parts of a head have one position
        known["rope_type"] = "default"
    return {key: value for key, value in known.items() if not key.startswith("mrope_")}

"""The format of profiles, and whose they are: fingerprints of a model and its head, and the machine.

Which profile an engine starts from, and what is added to it, is in `learned`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.device_info import device_name
from graft.drafters.drafter import Drafter
from graft.files import replacing
from graft.spec_decode.states import named, part_of
from graft.tuning.profile_header import FORMAT, opened, read_header, read_speeds

if TYPE_CHECKING:
    from graft.engine import Engine

_SHAPE = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NUM_WEIGHTS = 8  # weights of each tensor that enter a fingerprint


@dataclass(frozen=True)
class About:
    """The model, head and machine that a profile belongs to."""

    model: str  # a fingerprint
    head: str | None  # a fingerprint; None without a head
    device: str | None  # None: a portable profile
    dtype: str | None

    @classmethod
    def of(cls, engine: Engine) -> About:
        return cls.of_model(engine.target.model, engine.drafter)

    @classmethod
    def of_model(cls, model: PreTrainedModel, drafter: Drafter | None = None) -> About:
        return cls(
            model=model_fingerprint(model),
            head=head_fingerprint(drafter),
            device=device_name(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
        )

    @property
    def machine(self) -> str:
        """A hash of the device and the dtype, for file names."""
        return _digest(f"{self.device} {self.dtype}".encode())


@dataclass(frozen=True)
class Profile:
    """What is known of a model with a head on a machine. Any part may be empty; a portable profile has only a state."""

    about: About
    state: Mapping[str, Tensor]  # a policy's, as tuning left it
    costs: Mapping[str, Tensor] = field(default_factory=dict)  # of draft passes and verify steps
    used: Mapping[str, Tensor] = field(default_factory=dict)  # the policy's state as later use left it
    speeds: Mapping[str, Any] = field(default_factory=dict)  # by drafter, see `drafters.Measured`

    def save(self, path: Path) -> None:
        parts = {**self.state, **named("costs", self.costs), **named("used", self.used)}
        # Clones, because `used` may share tensors with `state`.
        tensors = {key: value.cpu().clone().contiguous() for key, value in parts.items()}
        about = {"format": FORMAT, **asdict(self.about)}
        with replacing(path, is_private=True) as file:
            file.write(save(tensors, metadata={"about": json.dumps(about), "speeds": json.dumps(dict(self.speeds))}))

    @classmethod
    def read(cls, path: Path) -> Profile:
        about, speeds = About(**read_header(path)), read_speeds(path)
        with opened(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        state = {name: value for name, value in tensors.items() if not name.startswith(("costs/", "used/"))}
        return cls(about, state, part_of(tensors, "costs"), part_of(tensors, "used"), speeds)


def model_fingerprint(model: PreTrainedModel) -> str:
    """A hash of a model's shape and a few of its weights, rounded so that the dtype does not matter."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    shape = [getattr(config, key, None) for key in _SHAPE]
    return _digest(json.dumps(shape).encode() + _few_weights([embedding[len(embedding) // 2]]))


def head_fingerprint(drafter: Drafter | None) -> str | None:
    """A hash of the shapes and a few weights of a head or draft model; None without a drafter."""
    if drafter is None:
        return None
    head = getattr(drafter, "head", None) or getattr(drafter, "model", None)
    if not isinstance(head, nn.Module):
        return _digest(type(drafter).__name__.encode())
    weights = dict(sorted(head.named_parameters()))
    shapes = {name: list(weight.shape) for name, weight in weights.items()}
    return _digest(json.dumps(shapes).encode() + _few_weights(list(weights.values())))


def _few_weights(tensors: list[Tensor]) -> bytes:
    few = torch.cat([tensor.detach().flatten()[:_NUM_WEIGHTS].to(torch.bfloat16).float() for tensor in tensors])
    return few.cpu().numpy().tobytes()


def _digest(what: bytes) -> str:
    return hashlib.sha256(what).hexdigest()[:12]

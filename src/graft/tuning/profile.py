"""Profiles: what `graft tune` learned about a model, a head and a machine, in one small file that `graft.load` reads.

It holds a policy's state, and the costs of draft passes and verify steps.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.device_info import device_name
from graft.errors import GraftError
from graft.files import replacing
from graft.home import graft_home
from graft.settings import require
from graft.spec_decode.proposers.base import named, part_of
from graft.spec_decode.proposers.drafter import Drafter
from graft.tuning.profile_header import ANEW, FORMAT, OtherFormatError, opened, read_header

if TYPE_CHECKING:
    from graft.engine import Engine

HEADS = Path(__file__).parents[1] / "heads"
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

    def is_for_machine_of(self, other: About) -> bool:
        return (self.device, self.dtype) == (other.device, other.dtype)


@dataclass(frozen=True)
class Profile:
    """A policy's state and its measured costs; a portable profile has no costs."""

    about: About
    state: dict[str, Tensor]
    costs: dict[str, Tensor]

    def save(self, path: Path) -> None:
        tensors = {key: value.cpu().contiguous() for key, value in (self.state | named("costs", self.costs)).items()}
        with replacing(path, is_private=True) as file:
            file.write(save(tensors, metadata={"about": json.dumps({"format": FORMAT, **asdict(self.about)})}))

    @classmethod
    def read(cls, path: Path) -> Profile:
        about = About(**read_header(path))
        with opened(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        state = {name: value for name, value in tensors.items() if not name.startswith("costs/")}
        return cls(about, state, part_of(tensors, "costs"))


def equip(engine: Engine, profile: str | Path | None) -> None:
    """Restore the engine's policy from a profile; it continues to learn from there.

    profile: a file, which must belong to this model and head; auto takes the user's own for this machine, or one that
    comes with the package, or none; None takes none.
    """
    if profile is None:
        return
    about = About.of(engine)
    if profile != "auto":
        path = Path(profile).expanduser()
        _restore(engine, _fitting(path, about), about, path)
        return
    for path in _candidates():
        try:
            its = About(**read_header(path))
            if (its.model, its.head) == (about.model, about.head) and (
                its.device is None or its.is_for_machine_of(about)
            ):
                _restore(engine, Profile.read(path), about, path)
                return
        except OtherFormatError:
            continue
        except GraftError as error:
            warnings.warn(f"{error}; it is ignored", stacklevel=3)


def profile_path(about: About) -> Path:
    """The default file of a user's profile."""
    words = (about.model, about.head or "no-head", machine_digest(about))
    return _folder() / f"{'-'.join(words)}.safetensors"


def machine_digest(about: About) -> str:
    """A hash of the machine and the dtype, for file names."""
    return _digest(f"{about.device} {about.dtype}".encode())


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


def _fitting(path: Path, about: About) -> Profile:
    """The profile at a path that the user gave; a GraftError if it belongs to another model or head."""
    profile = Profile.read(path)
    require(profile.about.model == about.model, f"{path} is the profile of another model: {ANEW} for this one")
    if profile.about.head != about.head:
        its, own = ("no head" if head is None else "another head" for head in (profile.about.head, about.head))
        own = own if about.head is None else "this one"
        raise GraftError(f"{path} was made with {its}, and the engine has {own}: {ANEW} for this head")
    return profile


def _restore(engine: Engine, profile: Profile, about: About, path: Path) -> None:
    policy = engine.policy
    try:
        # Tables hold pieces of texts, so a policy with isolated texts starts without them.
        takes_texts = not policy.isolated
        policy.restore({key: value for key, value in profile.state.items() if takes_texts or _is_general(key)})
        if profile.costs and profile.about.is_for_machine_of(about):
            policy.restore_costs(profile.costs)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        policy.restore({})  # undo a part that was restored before the error
        raise GraftError(f"{path} is an incomplete profile ({type(error).__name__}: {error}): {ANEW}") from error


def _is_general(key: str) -> bool:
    """Whether a part of a state holds no tokens of texts, such as acceptance probabilities."""
    return key.startswith(("calibration/", "paths/", "planner/"))


def _candidates() -> list[Path]:
    """The user's own profiles, newest first, then those that come with heads."""
    own = sorted(_folder().glob("*.safetensors"), key=lambda path: -path.stat().st_mtime)
    return own + sorted(HEADS.glob("*/profile*.safetensors"))


def _folder() -> Path:
    return graft_home() / "profiles"


def _few_weights(tensors: list[Tensor]) -> bytes:
    few = torch.cat([tensor.detach().flatten()[:_NUM_WEIGHTS].to(torch.bfloat16).float() for tensor in tensors])
    return few.cpu().numpy().tobytes()


def _digest(what: bytes) -> str:
    return hashlib.sha256(what).hexdigest()[:12]

"""Checks of `load`'s options that need neither torch nor the model's weights, so that a mistake shows at once."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from graft.errors import ModelError
from graft.folders import Json, folder_of, missing_file, read_config
from graft.home import check_no_adapter, is_gguf, model_folder
from graft.hub.draft_names import EARLY_EXIT, check_draft, check_exit_layer, name_of, named_layer
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS, check_model_name
from graft.model.context import max_positions
from graft.settings import require, require_known
from graft.spec_decode.policy_settings import DEFAULT_POLICY, POLICY_NAMES, PolicySettings

AUTO = "auto"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # torch's names of ours
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")


def check_load_options(
    model: Any = DEFAULT_MODEL,
    policy: str = DEFAULT_POLICY,
    budget: int | None = None,
    draft: Any = AUTO,
    profile: str | Path | None = AUTO,
    device: Any = AUTO,
    dtype: Any = AUTO,
    *,
    policies: Collection[str] = POLICY_NAMES,
    max_new_tokens: int | None = None,
) -> None:
    """Raise a GraftError for options of `load` that it could not use, and for answers longer than the model's context.

    A model, drafter, device or dtype that is not given by name is not checked.
    """
    require_known("policy", policy, policies)
    PolicySettings(budget)  # checks the budget
    if isinstance(device, str):
        check_device(device)
    if isinstance(dtype, str):
        dtype_name(dtype)
    if isinstance(draft, str) and draft != AUTO:
        check_draft(draft)
    if profile not in (None, AUTO) and policy != "off":
        from graft.tuning.profile_header import read_header

        read_header(Path(profile).expanduser())
    if isinstance(model, str):
        _check_model(model, max_new_tokens, draft)


def check_device(name: str) -> None:
    """Raise a GraftError for a name that no device has. Whether it is there, torch must say."""
    known = name == AUTO or _DEVICE.fullmatch(name)
    require(bool(known), f"device {name!r} cannot be used here: choose auto, cpu, cuda, or cuda:1 for the second GPU")


def dtype_name(name: str) -> str:
    """torch's name of a dtype, or auto. Takes our names and torch's."""
    plain = name.removeprefix("torch.")
    found = _DTYPES.get(plain, plain)
    require(found in (AUTO, *_DTYPES.values()), f"unknown dtype {name!r}: known are auto, {', '.join(_DTYPES)}")
    return found


def config_of(name: str) -> Json | None:
    """The config.json of a model; None if the model has yet to be pulled or converted."""
    check_model_name(name)
    if name in PACKAGED_MODELS:  # `pull` checks its files
        folder = model_folder(name)
        return read_config(folder) if (folder / "config.json").is_file() else None
    path = Path(name).expanduser()
    if is_gguf(path):
        return None
    if path.is_dir():
        check_no_adapter(path)
    return read_config(folder_of(name, ("config.json",), "model"))


def _check_model(name: str, max_new_tokens: int | None, draft: Any) -> None:
    check_model_name(name)
    path = Path(name).expanduser()
    if name not in PACKAGED_MODELS and path.is_dir():
        check_no_adapter(path)
        if (missing := missing_file(path)) is not None:
            raise ModelError(f"cannot load {name}: {missing}")
    config = config_of(name)
    if config is None:
        return
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    num_layers = text.get("num_hidden_layers")
    if isinstance(draft, str) and name_of(draft) == EARLY_EXIT and isinstance(num_layers, int):
        check_exit_layer(named_layer(draft), num_layers)
    if max_new_tokens is None:
        return
    limit = max_positions(SimpleNamespace(**text))
    require(
        not isinstance(limit, int) or max_new_tokens < limit,
        f"a prompt and max_new_tokens={max_new_tokens} exceed the model's context of {limit}: ask for fewer new tokens",
    )

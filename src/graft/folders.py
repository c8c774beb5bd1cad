"""Folders of models and heads, local or fetched from the hub, and their config.json. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.errors import ModelError
from graft.files import read_json
from graft.settings import require

Json = Mapping[str, Any]
MASK_FILE = "mask_embedding.pt"  # a block head's learned vector of masked slots
HEAD_FILES = ("config.json", "*.safetensors", "*.bin", MASK_FILE)


def folder_of(path: str | Path, files: Sequence[str] = HEAD_FILES, what: str = "drafter") -> Path:
    """The local folder of a path or hub id. Fetches `files` of a hub id first. what: drafter or model, for errors."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    require(not folder.exists(), f"{path} is a file: give the folder that holds config.json and the weights")
    from huggingface_hub import snapshot_download  # takes half a second
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=list(files)))
    except HFValidationError as error:
        raise ModelError(f"no {what} at {str(path)!r}: it is neither a folder nor a hub id (owner/name)") from error
    except Exception as error:  # of the hub, or of any of the libraries that carry the request
        why = first_line(error.__cause__ or error)
        reason = f"as a hub id: {why}"
        if isinstance(error, LocalEntryNotFoundError) and not isinstance(error.__cause__, HfHubHTTPError):
            reason = f"the hub cannot be reached ({why}): check the network, or give a local folder"
        raise ModelError(f"no {what} at {path}: there is no such folder, and {reason}") from error


def read_config(folder: Path) -> Json:
    """The content of a folder's config.json."""
    path = folder / "config.json"
    require(path.exists(), f"{path} is missing: give the folder of a draft head or a model")
    content: Json = read_json(path)
    require(isinstance(content, dict), f"{path} does not hold settings; copy it again")
    return content


def missing_file(folder: Path) -> str | None:
    """What a model's folder lacks, and what to do about it; None if it has a config and weights."""
    if not (folder / "config.json").is_file():
        return f"{folder / 'config.json'} is missing; give a folder written by save_pretrained"
    if not any(next(folder.glob(kind), None) for kind in ("*.safetensors", "*.bin")):
        return f"{folder / 'model.safetensors'} is missing; copy the weights into the folder"
    return None


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(". ")

"""The manifest of a pulled model: its source, and the size and checksum of each file.

It is written when a model is pulled, and read before it is loaded, so that an error names the damaged file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.errors import ModelError
from graft.files import sha256_of
from graft.hub.registry import PACKAGED_MODELS, PackagedModel

MANIFEST = "graft.json"


def write_manifest(folder: Path, model: PackagedModel) -> None:
    """Record every file of a freshly pulled and converted model."""
    facts = {
        "name": model.name,
        "source": f"{model.requirement}: {model.member}",
        "licence": f"{model.licence}, {model.home_page}",
        "gguf_sha256": model.gguf_sha256,
    }
    record_files(folder, facts)


def record_files(folder: Path, facts: Mapping[str, object]) -> None:
    """Write a manifest of these facts and of every file of a freshly converted model."""
    paths = sorted(folder.iterdir())
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
    manifest = {**facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def check_sizes(folder: Path, cure: str | None = None) -> None:
    """Refuse a model with a missing or truncated file. Only sizes are compared, which is quick.

    cure: what the error message tells the user to do.
    """
    cure = cure or f"run `graft pull --force {folder.name}` to fetch the model again"
    try:
        sizes = {name: int(record["bytes"]) for name, record in _read(folder)["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(f"{folder / MANIFEST} is missing or unreadable: {cure}") from error
    for name, wanted in sizes.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != wanted:
            state = "is missing" if size is None else f"has {size:,} bytes instead of {wanted:,}"
            raise ModelError(f"{path} {state}: {cure}")


def version_of(folder: Path) -> str | None:
    """The version of the GGUF file that a folder was converted from; None if its manifest does not say."""
    try:
        return str(_read(folder)["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def packaged_name(folder: Path) -> str | None:
    """The packaged model that this folder holds; None if it is another model's folder, or no folder."""
    try:
        facts = _read(folder)
        model = PACKAGED_MODELS.get(facts["name"])
        return model.name if model is not None and facts["gguf_sha256"] == model.gguf_sha256 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))

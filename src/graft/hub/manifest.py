"""The manifest of a pulled model: its source, and the size and checksum of each file.

Written once when a model is pulled; read before it is loaded, so that an error names the damaged file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graft.errors import ModelError
from graft.files import sha256_of
from graft.hub.registry import PackagedModel

MANIFEST = "graft.json"


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of one file."""

    bytes: int
    sha256: str


def write_manifest(folder: Path, model: PackagedModel) -> None:
    """Record every file of a freshly pulled and converted model."""
    facts = {
        "name": model.name,
        "source": [f"{wheel.requirement}: {wheel.member}" for wheel in model.wheels],
        "licence": f"{model.licence}, {model.home_page}",
        "gguf_sha256": model.gguf_sha256,
    }
    record_files(folder, facts)


def record_files(folder: Path, facts: Mapping[str, object]) -> None:
    """Write a manifest of these facts and of every file of a freshly converted model."""
    files = {path.name: FileRecord(path.stat().st_size, sha256_of(path)) for path in sorted(folder.iterdir())}
    manifest = {**facts, "files": {name: asdict(record) for name, record in files.items()}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def check_sizes(folder: Path, cure: str | None = None) -> None:
    """Refuse a model with a missing or truncated file; compares sizes only, which is quick. cure: what to do then."""
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


def sources_of(folder: Path) -> list[str]:
    """Where a model came from; nothing if its manifest does not say."""
    try:
        found = _read(folder)["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return found if isinstance(found, list) else []


def _read(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))

"""The manifest of a pulled model: its source, and the size and checksum of each file.

Written once when a model is pulled; read before it is loaded, so that an error names the damaged file.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from graft.errors import ModelError
from graft.hub.registry import PackagedModel

MANIFEST = "graft.json"


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of one file."""

    bytes: int
    sha256: str


def sha256_of(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, model: PackagedModel) -> None:
    """Record every file of a freshly converted model."""
    files = {path.name: FileRecord(path.stat().st_size, sha256_of(path)) for path in sorted(folder.iterdir())}
    manifest = {
        "name": model.name,
        "source": [f"{wheel.requirement}: {wheel.member}" for wheel in model.wheels],
        "licence": f"{model.licence}, {model.home_page}",
        "gguf_sha256": model.gguf_sha256,
        "files": {name: asdict(record) for name, record in files.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def check_sizes(folder: Path) -> None:
    """Refuse a model with a missing or truncated file; compares sizes only, which is quick."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(folder, folder / MANIFEST, "is missing or unreadable") from error
    for name, record in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != record["bytes"]:
            state = "is missing" if size is None else f"has {size:,} bytes instead of {record['bytes']:,}"
            raise _damaged(folder, path, state)


def _damaged(folder: Path, path: Path, state: str) -> ModelError:
    return ModelError(f"{path} {state}: run `graft pull --force {folder.name}` to fetch the model again")

"""File format of an index: a JSON header and raw arrays with sizes and checksums. Loading it runs no code.

Each shard has three files. `tokens` holds all documents as one reversed big-endian stream, so that comparing bytes
compares contexts from their end. `suffixes` is its suffix array, in uint32. `fences` holds the first bytes of every
64th suffix, which is small enough to stay in memory.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.files import sha256_of

HEADER = "index.json"
PARTS = ("tokens", "suffixes", "fences")
FENCE_STRIDE = 64  # suffixes from one fence to the next
FENCE_BYTES = 16
SHARD_TOKENS = 1 << 27  # sorting so many takes about 3 GB

_FORMAT = "graft-index"
_VERSION = 1
_SAMPLES = 16  # blocks of each file that are checked when an index is opened
_BLOCK = 4096


class DatastoreError(GraftError):
    """An index is missing, damaged, or was built with another tokenizer."""


@dataclass(frozen=True)
class Part:
    """Size and checksums of one file."""

    bytes: int
    sample: str  # checksum of a few blocks
    sha256: str


@dataclass(frozen=True)
class Shard:
    """One suffix array and its tokens."""

    tokens: int
    documents: int
    suffixes: int
    parts: dict[str, Part]


@dataclass(frozen=True)
class Header:
    """Header of an index: everything except its arrays."""

    token_bytes: int  # 2 or 4
    vocab_size: int
    tokenizer: str  # fingerprint
    shards: tuple[Shard, ...]
    options: dict[str, Any]  # how it was built, for information

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for shard in self.shards for part in shard.parts.values())


def fingerprint(tokenizer: Any) -> str:
    """A checksum of the vocabulary. Two tokenizers with the same vocabulary may share an index."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def part_path(folder: Path, shard: int, part: str) -> Path:
    return folder / f"shard-{shard:03d}.{part}"


def record(path: Path) -> Part:
    return Part(path.stat().st_size, _sample(path), sha256_of(path))


def write_header(folder: Path, header: Header) -> None:
    content = {"format": _FORMAT, "version": _VERSION, "byteorder": sys.byteorder, **asdict(header)}
    content["checksum"] = checksum_of(content)
    (folder / HEADER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_header(folder: Path) -> Header:
    path = folder / HEADER
    if not path.is_file():
        raise DatastoreError(f"{folder} holds no index: give a folder made by `graft index build`")
    try:
        content = json.loads(path.read_bytes())
        named = content.pop("format"), content.pop("version"), content.pop("byteorder")
        checksum = content.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise damaged(path, "is not a readable header") from error
    if named[:2] != (_FORMAT, _VERSION):
        raise DatastoreError(
            f"{path} has format version {named[1]}, but this Graft reads {_VERSION}: build the index again"
        )
    if checksum != checksum_of(dict(zip(("format", "version", "byteorder"), named, strict=True)) | content):
        raise damaged(path, "has been changed (its checksum differs)")
    if named[2] != sys.byteorder:
        raise DatastoreError(f"{path} was built on a {named[2]}-endian machine: build the index again on this one")
    try:
        shards = content.pop("shards")
        for shard in shards:
            shard["parts"] = {name: Part(**part) for name, part in shard["parts"].items()}
        return Header(**content, shards=tuple(Shard(**shard) for shard in shards))
    except (KeyError, AttributeError, TypeError) as error:
        raise damaged(path, "is not a readable header") from error


def check_parts(folder: Path, header: Header, whole: bool = False) -> None:
    """Raise a DatastoreError if a file is missing, truncated or changed. whole: check every byte, not only samples."""
    for number, shard in enumerate(header.shards):
        for name, part in shard.parts.items():
            path = part_path(folder, number, name)
            size = path.stat().st_size if path.is_file() else None
            if size != part.bytes:
                state = "is missing" if size is None else f"has {size:,} bytes instead of {part.bytes:,}"
                raise damaged(path, state)
            if _sample(path) != part.sample or (whole and sha256_of(path) != part.sha256):
                raise damaged(path, "has been changed (its checksum differs)")


def damaged(path: Path, state: str) -> DatastoreError:
    return DatastoreError(f"{path} {state}: build the index again with `graft index build --force`")


def checksum_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sample(path: Path) -> str:
    """Checksum of blocks spread evenly over a file."""
    digest, last = hashlib.sha256(), max(path.stat().st_size - _BLOCK, 0)
    with path.open("rb", buffering=0) as file:
        for place in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()

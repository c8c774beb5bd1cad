"""Documents from files and folders: plain text, source code, and JSON lines.

A file that the user named must be readable text. Other files found in folders are skipped and counted by reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from graft.errors import GraftError
from graft.settings import require

Document = str | list[dict[str, str]]  # plain text, or a conversation for the model's chat template

_PIECE = 1 << 20  # characters; longer files become several documents, to bound memory
_HEAD = 8192  # bytes searched for zeros, which mean binary data
_ROWS = {".jsonl", ".ndjson"}
_GENERATED = {"__pycache__", "node_modules"}
_ROW_KEYS = {"text", "prompt", "turns"}
_ROW_SHAPES = '{"text"}, {"prompt"}, {"prompt", "answer"} or {"turns"}'


@dataclass(frozen=True)
class Source:
    """A file to read."""

    path: Path
    num_bytes: int
    is_named: bool  # the user named it; otherwise it was found in a folder


@dataclass
class Skipped:
    """How many files or rows were skipped for one reason, and the first of them."""

    first: Path
    count: int = 0


@dataclass
class Corpus:
    """The files under some paths, in a fixed order, and the files skipped so far."""

    sources: list[Source] = field(default_factory=list)
    skipped: dict[str, Skipped] = field(default_factory=dict)  # by reason
    _seen: set[Path] = field(default_factory=set)

    @classmethod
    def under(cls, paths: Sequence[Path]) -> Corpus:
        corpus = cls()
        for path in paths:
            if path.is_dir():
                corpus._walk(path)
            else:
                corpus._add(path, is_named=True)
        return corpus

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    def documents(self) -> Iterator[tuple[Document, int]]:
        """Every document, with the number of bytes read so far."""
        before = 0
        for source in self.sources:
            try:
                with open(source.path, "rb") as raw:
                    for document in self._read(raw, source):
                        yield document, before + raw.tell()
            except UnicodeDecodeError as error:
                self._skip(source, "files that are not UTF-8", f"it is not UTF-8 text ({error.reason})")
            except OSError as error:
                self._skip(source, "unreadable files", str(error.strerror))
            before += source.num_bytes

    def _walk(self, folder: Path) -> None:
        for place, folders, names in os.walk(folder):
            hidden = [name for name in folders if name.startswith(".") or name in _GENERATED]
            for name in hidden:
                self._count(Path(place, name), "hidden or generated folders")
            folders[:] = sorted(set(folders) - set(hidden))
            for name in sorted(names):
                self._add(Path(place, name), is_named=False)

    def _add(self, path: Path, is_named: bool) -> None:
        if not is_named and path.name.startswith("."):
            self._count(path, "hidden files")
            return
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            if is_named:
                raise GraftError(f"cannot read {path}: {error.strerror}") from error
            self._count(path, "unreadable files")
            return
        if num_bytes == 0:
            self._count(path, "empty files")
        elif path.resolve() in self._seen:
            self._count(path, "files given twice")
        else:
            self._seen.add(path.resolve())
            self.sources.append(Source(path, num_bytes, is_named))

    def _read(self, raw: BufferedReader, source: Source) -> Iterator[Document]:
        if b"\0" in raw.peek(_HEAD)[:_HEAD]:
            self._skip(source, "binary files", "it is not text but binary data")
            return
        file = TextIOWrapper(raw, encoding="utf-8-sig")
        yield from self._rows(file, source) if source.path.suffix in _ROWS else _pieces(file)

    def _rows(self, file: TextIO, source: Source) -> Iterator[Document]:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if not (isinstance(row, dict) and _ROW_KEYS & row.keys()):
                self._skip(source, "rows of another shape", f"line {number} is none of {_ROW_SHAPES}")
                continue
            documents = _row_documents(row)
            if not documents:
                self._count(source.path, "rows without text")
            yield from documents

    def _skip(self, source: Source, reason: str, problem: str) -> None:
        """Count a file or row as skipped; an error if the user named the file."""
        require(not source.is_named, f"cannot index {source.path}: {problem}")
        self._count(source.path, reason)

    def _count(self, path: Path, reason: str) -> None:
        self.skipped.setdefault(reason, Skipped(path)).count += 1


def _pieces(file: TextIO) -> Iterator[str]:
    while piece := file.read(_PIECE):
        if len(piece) == _PIECE:
            piece += file.readline(_PIECE)  # complete the line
        if piece.strip():
            yield piece


def _row_documents(row: dict[str, Any]) -> list[Document]:
    prompt, answer = row.get("prompt"), row.get("answer")
    if _is_text(prompt) and _is_text(answer):
        return [[{"role": "user", "content": str(prompt)}, {"role": "assistant", "content": str(answer)}]]
    turns = row.get("turns")
    texts = [row.get("text"), prompt, *(turns if isinstance(turns, list) else [])]
    return [text for text in texts if _is_text(text)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())

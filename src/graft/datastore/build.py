"""Building an index: tokenize the documents and sort them into suffix arrays, one shard at a time to bound memory.

Files are written to a scratch folder that is renamed at the end, so an index is always complete.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from graft.datastore.corpus import Corpus, Document
from graft.datastore.format import (
    FENCE_BYTES,
    FENCE_STRIDE,
    HEADER,
    PARTS,
    SHARD_TOKENS,
    Header,
    Shard,
    fingerprint,
    part_path,
    record,
    write_header,
)
from graft.errors import GraftError
from graft.progress import Report
from graft.settings import require
from graft.version import __version__

_MAX_SHARD_TOKENS = 1 << 29  # libdivsufsort indexes bytes with 31 bits, and a token takes up to 4 bytes
_BATCH_CHARS = 1 << 20  # characters tokenized at once
_SLICE = 1 << 22  # suffixes filtered and written at once
_MB = 10**6


def build_index(
    corpus: Corpus,
    tokenizer: Any,
    folder: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    options: dict[str, Any] | None = None,
    force: bool = False,
    report: Callable[[Report], None] = lambda report: None,
) -> Header:
    """Index the corpus into `folder`. force: replace an existing index. options: stored for information."""
    check_build(corpus, folder, shard_tokens, force)
    vocab_size = int(max(tokenizer.get_vocab().values())) + 1
    with _scratch(folder, force) as scratch:
        writer = _Writer(scratch, vocab_size, shard_tokens, report)
        for ids in _encode(corpus, tokenizer, report):
            writer.add(ids)
        shards = writer.finish()
        require(bool(shards), "there is nothing to index: the files hold less than two tokens of text")
        header = Header(
            token_bytes=writer.dtype.itemsize,
            vocab_size=vocab_size,
            tokenizer=fingerprint(tokenizer),
            shards=tuple(shards),
            options={
                **(options or {}),
                "shard_tokens": shard_tokens,
                "graft": __version__,
                "built": datetime.now(UTC).isoformat(timespec="seconds"),
                "skipped": {reason: skipped.count for reason, skipped in corpus.skipped.items()},
            },
        )
        write_header(scratch, header)
    return header


def check_build(corpus: Corpus, folder: Path, shard_tokens: int, force: bool) -> None:
    """Raise a GraftError for what `build_index` cannot do, before a tokenizer is loaded."""
    require(
        1 <= shard_tokens <= _MAX_SHARD_TOKENS,
        f"shard_tokens must be between 1 and {_MAX_SHARD_TOKENS}, not {shard_tokens}",
    )
    require(bool(corpus.sources), "there is nothing to index: no text under the given paths")
    _check_free(folder, force)


def sorted_suffixes(tokens: NDArray[Any]) -> Iterator[NDArray[np.uint32]]:
    """The suffix array of `tokens`, in slices."""
    from pydivsufsort import divsufsort  # only building needs it

    # libdivsufsort sorts bytes. Replace tokens by their ranks, which need fewer bytes; big-endian keeps the order.
    used = np.bincount(tokens) > 0
    ranks = (np.cumsum(used) - 1).astype(">u4")
    width = max((int(used.sum() - 1).bit_length() + 7) // 8, 1)
    as_bytes = ranks[tokens].view(np.uint8).reshape(-1, 4)[:, 4 - width :].ravel()
    places = divsufsort(as_bytes)
    for start in range(0, len(places), _SLICE):
        part = places[start : start + _SLICE]
        yield (part[part % width == 0] // width).astype(np.uint32)


class _Writer:
    """Collects documents and writes a shard whenever it is full."""

    def __init__(self, folder: Path, vocab_size: int, shard_tokens: int, report: Callable[[Report], None]) -> None:
        # Ids are stored one higher, because 0 separates documents.
        self.dtype = np.dtype(">u2") if vocab_size < 1 << 16 else np.dtype(">u4")
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._report = report
        self._documents: list[NDArray[Any]] = []
        self._num_tokens = 0
        self._shards: list[Shard] = []

    def add(self, ids: Sequence[int]) -> None:
        tokens = np.asarray(ids, dtype=np.uint32)
        for start in range(0, len(tokens), self._shard_tokens):
            document = tokens[start : start + self._shard_tokens]
            if self._num_tokens + len(document) > self._shard_tokens:
                self._write_shard()
            self._documents.append((document + 1).astype(self.dtype.newbyteorder("=")))
            self._num_tokens += len(document)

    def finish(self) -> list[Shard]:
        self._write_shard()
        return self._shards

    def _write_shard(self) -> None:
        documents, num_tokens = self._documents, self._num_tokens
        self._documents, self._num_tokens = [], 0
        if not any(len(document) > 1 for document in documents):
            return  # no token follows another
        number = len(self._shards)
        paths = {part: part_path(self._folder, number, part) for part in PARTS}
        self._report(Report("sorting", number, number + 1, f"{num_tokens / 1e6:.1f} M tokens"))
        separator = np.zeros(1, dtype=documents[0].dtype)
        stream = np.concatenate([part for document in documents for part in (document, separator)])
        count = len(documents)
        documents.clear()

        backwards = stream[::-1].astype(self.dtype)
        backwards.tofile(paths["tokens"])
        num_suffixes = _write_suffixes(np.ascontiguousarray(stream[::-1]), paths["suffixes"])
        _write_fences(backwards, paths["suffixes"], paths["fences"])
        parts = {part: record(path) for part, path in paths.items()}
        self._shards.append(Shard(num_tokens, count, num_suffixes, parts))
        self._report(Report("sorting", number + 1, number + 1, f"{num_tokens / 1e6:.1f} M tokens"))


def _write_suffixes(backwards: NDArray[Any], path: Path) -> int:
    """Write the suffix array without positions that no token follows, and return its length."""
    is_useful = backwards > 0
    is_useful[1:] &= backwards[:-1] > 0  # in the reversed stream, the next token is one place before
    with path.open("wb") as file:
        for places in sorted_suffixes(backwards):
            places[is_useful[places]].tofile(file)
    return int(is_useful.sum())


def _write_fences(backwards: NDArray[Any], suffixes: Path, path: Path) -> None:
    text = np.concatenate([backwards.view(np.uint8), np.zeros(FENCE_BYTES, np.uint8)])
    places = np.fromfile(suffixes, dtype=np.uint32)[::FENCE_STRIDE].astype(np.int64) * backwards.itemsize
    with path.open("wb") as file:
        for start in range(0, len(places), _SLICE // FENCE_BYTES):
            chosen = places[start : start + _SLICE // FENCE_BYTES]
            text[chosen[:, None] + np.arange(FENCE_BYTES)].tofile(file)


def _encode(corpus: Corpus, tokenizer: Any, report: Callable[[Report], None]) -> Iterator[list[int]]:
    start, num_tokens, total = time.perf_counter(), 0, max(corpus.num_bytes // _MB, 1)
    for texts, num_bytes in _batches(corpus, tokenizer):
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        num_tokens += sum(map(len, encoded))
        rate = num_tokens / (time.perf_counter() - start)
        words = f"{num_tokens / 1e6:.1f} M tokens, {rate / 1e3:,.0f} k/s"
        report(Report("reading, MB", min(num_bytes // _MB, total), total, words))
        yield from encoded


def _batches(corpus: Corpus, tokenizer: Any) -> Iterator[tuple[list[str], int]]:
    texts: list[str] = []
    size = num_bytes = 0
    for document, num_bytes in corpus.documents():
        texts.append(_text(document, tokenizer))
        size += len(texts[-1])
        if size >= _BATCH_CHARS:
            yield texts, num_bytes
            texts, size = [], 0
    if texts:
        yield texts, num_bytes


def _text(document: Document, tokenizer: Any) -> str:
    if isinstance(document, str):
        return document
    if tokenizer.chat_template:
        # The template's markers let lookup match the start of an answer.
        return str(tokenizer.apply_chat_template(document, tokenize=False))
    return "".join(message["content"] for message in document)


@contextmanager
def _scratch(folder: Path, force: bool) -> Iterator[Path]:
    """A scratch folder that is renamed to `folder` on success and removed on failure."""
    folder = folder.absolute()
    prefix = f".{folder.name}.scratch-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock", blocking=False):
            _check_free(folder, force)
            for leftover in folder.parent.glob(prefix + "*"):  # left by killed processes, since we hold the lock
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as name:
                new = Path(name, "new")
                new.mkdir()
                yield new
                if folder.exists():
                    folder.rename(Path(name, "old"))
                new.rename(folder)
    except Timeout as error:
        raise GraftError(f"another process is building {folder}: wait for it, or choose another --out") from error
    except OSError as error:
        raise GraftError(f"cannot write {folder}: {error.strerror}") from error


def _check_free(folder: Path, force: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    require((folder / HEADER).is_file(), f"{folder} exists and is not an index: choose another --out")
    require(force, f"{folder} is already an index: choose another --out, or replace it with --force")

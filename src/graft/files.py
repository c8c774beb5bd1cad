"""Atomic files: complete or absent, even if their writer is killed or another one writes at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from graft.errors import GraftError

_ENDING = ".partial"


def sha256_of(path: Path) -> str:
    """The SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """The content of a JSON file. A file that cannot be read is a GraftError with its name."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GraftError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise GraftError(f"{path} is not valid JSON: {error}") from error


@contextmanager
def replacing(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """A new file to write. It replaces `path` in one step at the end; if writing fails, it is removed.

    Each writer has a file of its own beside `path`, so several writers do not mix: the last one to finish wins. Files
    that killed writers of `path` left behind are removed first. is_private: only the user can read the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partial_files(path.parent, f".{path.name}.")
    file, partial = _new_file(path, 0o600 if is_private else 0o666)
    with file:  # closed last: until then, the lock keeps other processes from removing it
        try:
            yield file
            file.flush()
            os.replace(partial, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(partial)
            raise


def remove_partial_files(folder: Path, beginning: str = "") -> None:
    """Remove this user's files that `replacing` left behind when its process was killed.

    A writer locks its file, and the lock ends with its process. So an unlocked file has no writer any more.
    """
    for path in folder.glob("*"):
        if not (path.name.startswith(beginning) and path.name.endswith(_ENDING)):
            continue
        with suppress(OSError):  # another process has removed it or is writing it, or it is not a file
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.geteuid():
                    os.unlink(path)
            finally:
                os.close(handle)


def _new_file(path: Path, mode: int) -> tuple[BinaryIO, Path]:
    """A new file beside `path`, on which this process holds a lock."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_ENDING}")
        file = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process takes it for an abandoned file, and removes it
            file.close()
            continue
        except OSError:  # a file system without locks, where no file is taken for abandoned
            return file, partial
        if partial.exists():
            return file, partial
        file.close()  # removed before it was locked

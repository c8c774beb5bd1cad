"""C code, compiled on first use and kept in the cache folder; where there is no compiler, torch does the work."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from graft.models.home import graft_home


def load(
    source: Path, flags: Sequence[str], link: Sequence[str] = (), loader: type[ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL | None:
    """The library made of a C file, or None where it cannot be had."""
    try:
        return loader(str(compiled(source, flags, link)))
    except (OSError, subprocess.SubprocessError):
        return None


def compiled(source: Path, flags: Sequence[str], link: Sequence[str] = ()) -> Path:
    """The shared library under the cache folder, made unless it is there. Raises OSError or SubprocessError."""
    key = hashlib.sha256(repr((source.read_bytes(), flags, link)).encode()).hexdigest()[:16]
    path = graft_home() / "kernels" / f"{source.stem}-{key}.so"
    if path.exists():
        return path
    compiler = _compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        for step in (
            [compiler, *flags, "-fPIC", "-c", str(source), "-o", f"{made}.o"],
            [compiler, "-shared", f"{made}.o", *link, "-o", str(made)],
        ):
            subprocess.run(step, check=True, capture_output=True, timeout=60)
        made.replace(path)  # at once, so that another process sees a whole file or none
    return path


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError("no C compiler")

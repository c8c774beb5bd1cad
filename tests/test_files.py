"""Files that are there as a whole or not at all."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from graft import files
from graft.files import remove_partial_files, replacing
from graft.tuning import learned
from graft.tuning.profile import About, Profile

ABOUT = About("model", None, None, None)
# Loads the one module, which is quicker than all of Graft.
WRITER = """
import importlib.util, os, pathlib, signal, sys
spec = importlib.util.spec_from_file_location("files", sys.argv[1])
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
with files.replacing(pathlib.Path(sys.argv[2])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_while_writing(path):
    done = subprocess.run([sys.executable, "-c", WRITER, str(files.__file__), str(path)])
    assert done.returncode == -signal.SIGKILL


def test_a_file_is_replaced_as_a_whole_and_nothing_else_stays(tmp_path):
    path = tmp_path / "new folder" / "facts.json"
    for content in (b"first", b"second"):
        with replacing(path) as file:
            file.write(content)
            assert not path.exists() or path.read_bytes() == b"first"
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["facts.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["facts.json"]


def test_two_writers_at_once_do_not_mix(tmp_path):
    path = tmp_path / "facts.json"
    with replacing(path) as one, replacing(path) as other:
        one.write(b"one")
        other.write(b"other")
        one.write(b", to its end")
    assert path.read_bytes() == b"one, to its end"
    assert os.listdir(tmp_path) == ["facts.json"]


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    path = tmp_path / "facts.json"
    killed_while_writing(path)
    assert not path.exists() and len(os.listdir(tmp_path)) == 1
    with replacing(path) as file:
        file.write(b"whole")
    assert os.listdir(tmp_path) == ["facts.json"]


def test_the_file_of_a_writer_that_lives_is_left_alone(tmp_path):
    path = tmp_path / "facts.json"
    with replacing(path) as file:
        remove_partial_files(tmp_path)
        file.write(b"whole")
    assert path.read_bytes() == b"whole"


def test_only_files_of_this_user_and_of_that_name_are_removed(tmp_path, monkeypatch):
    killed_while_writing(tmp_path / "a")
    (tmp_path / "link.partial").symlink_to(tmp_path / "elsewhere")
    before = sorted(os.listdir(tmp_path))
    remove_partial_files(tmp_path, ".b.")
    assert sorted(os.listdir(tmp_path)) == before
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    remove_partial_files(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_private_file_can_be_read_by_its_user_alone(tmp_path):
    before = os.umask(0o022)
    try:
        for is_private, mode in ((True, 0o600), (False, 0o644)):
            with replacing(tmp_path / "facts.json", is_private=is_private) as file:
                assert os.fstat(file.fileno()).st_mode & 0o777 == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", [None, "tmp1234.partial"], ids=["this version's", "an earlier version's"])
def test_texts_that_a_killed_process_left_are_removed_when_more_is_learned(tmp_path, monkeypatch, name):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    path = learned.path_of(ABOUT)
    path.parent.mkdir()
    if name is None:
        killed_while_writing(path.with_name("another-model.safetensors"))
    else:
        (path.parent / name).write_text("pieces of the user's texts")
    learned.add(Profile(ABOUT, {"a": torch.ones(3)}))
    assert not [left for left in os.listdir(path.parent) if left.endswith(".partial")]

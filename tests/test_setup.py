"""The choice of the C compiler that builds the package."""

import runpy
import sysconfig
from pathlib import Path

import pytest

setuptools = pytest.importorskip("setuptools", "70.1", reason="setuptools is not there, or is too old to build with")

SETUP = Path(__file__).parents[1] / "setup.py"


@pytest.fixture
def programs(executable_folder, monkeypatch):
    """A folder that is the whole PATH."""
    monkeypatch.setenv("PATH", str(executable_folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "usual -pthread")
    return executable_folder


def put(folder, name, status):
    """A compiler that ends with that status."""
    (folder / name).write_text(f"#!/bin/sh\nexit {status}\n")
    (folder / name).chmod(0o755)


def choice(monkeypatch):
    """The machine's compiler, and what the package index is asked for."""
    asked = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: asked.update(arguments))
    names = runpy.run_path(str(SETUP))
    return names["own_compiler"](), asked["setup_requires"]


def test_without_a_compiler_one_comes_from_the_package_index(programs, monkeypatch):
    assert choice(monkeypatch) == (None, ["ziglang>=0.13"])


def test_a_compiler_that_makes_no_library_is_passed_over(programs, monkeypatch):
    put(programs, "usual", 1)
    put(programs, "cc", 1)
    assert choice(monkeypatch) == (None, ["ziglang>=0.13"])
    put(programs, "gcc", 0)
    assert choice(monkeypatch) == ("gcc", [])
    put(programs, "usual", 0)
    assert choice(monkeypatch) == ("usual -pthread", []), "what Python itself was built with comes first"


def test_the_compiler_that_the_user_names_is_taken(programs, monkeypatch):
    monkeypatch.setenv("CC", "mine -O1")
    assert choice(monkeypatch) == ("mine -O1", [])

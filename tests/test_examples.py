"""The examples of the documentation: every command parses, and those of README and first steps run on a tiny model."""

import re
import shlex
from pathlib import Path

import pytest
import typer

import graft
from graft import Engine
from graft.cli import app
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS
from graft.loading import load

ROOT = Path(__file__).parent.parent
FIRST = [ROOT / "README.md", ROOT / "docs" / "first-steps.md"]
PAGES = [*sorted({*(ROOT / "docs").glob("*.md"), *FIRST}), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
STANDS_FOR_MORE = ("...", "TASKS", "$OPTIONS")  # words that a page explains elsewhere


def blocks(page, language):
    """Fenced blocks in a language; commands have none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text.replace("\\\n", " ") for name, text in found if name == language]


def commands(page):
    """The words after `graft` of each command, without settings of the environment before it and its comment."""
    lines = [re.match(r"(?:[A-Z_]+=\S+ )*graft (.+)", line) for text in blocks(page, "") for line in text.splitlines()]
    split = [shlex.split(line[1], comments=True) for line in lines if line]
    return [[word for word in words if word not in STANDS_FOR_MORE] for words in split]


def each(found):
    """Parameters of a test: pairs of a page and an example in it."""
    return [pytest.param(text, id=f"{page.stem}: {' '.join(text)[:60]}") for page, text in found]


ALL = [(page, words) for page in PAGES for words in commands(page)]
SHOWN = [(page, words) for page in FIRST for words in commands(page)]


def parse(words):
    """Parse a command without running it; wrong verbs, options and values raise an error."""
    command = typer.main.get_command(app)
    context = command.make_context("graft", list(words))
    while rest := [*getattr(context, "_protected_args", []), *context.args]:
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("words", each(ALL))
def test_every_command_in_the_documentation_has_the_verbs_and_options_of_today(words):
    parse(words)


@pytest.mark.parametrize(
    "line", ["generat hello", "generate hello --show-trees", "bench --out", "train --out x --steps y"]
)
def test_a_mistake_in_a_command_would_be_found(line):
    with pytest.raises(Exception, match=r"No such|requires an argument|valid integer"):
        parse(line.split())


def test_make_targets_in_the_examples_are_there():
    named = {name for page in FIRST for text in blocks(page, "") for name in re.findall(r"^make (\w+)", text, re.M)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert named and named <= targets


# What bounds each command here. None: its options are parsed above, and another file of tests runs it.
BOUNDS = {
    "generate": "--max-new-tokens 8",
    "chat": "--max-new-tokens 8",
    "check": "--max-new-tokens 8",
    "doctor": "--max-new-tokens 8",
    "drafters": "",
    "tune": "--max-new-tokens 8 --out tuned/profile.safetensors",
    "train": "--max-new-tokens 8 --steps 1 --batch-tokens 64 --held-back 0.3 --draft-vocab-size 64 --unroll 1",
    "bench": "--max-new-tokens 8 --data questions.jsonl --draft none",
    "serve": None,
    "pull": None,
}


@pytest.fixture
def example_folder(tmp_path, monkeypatch):
    """A folder with the files that the examples name; the machine's own profiles are out of sight."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))
    for name in ("questions", "prompts"):
        rows = [f'{{"prompt": "{letter * 6}"}}\n' for letter in "abcdefgh"]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    for name in ("docs", "src"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("Some text of your own, to retrieve from. " * 20)
    return tmp_path


@pytest.mark.parametrize("words", each(SHOWN))
def test_every_command_of_the_first_pages_runs(words, example_folder, model_folder, graft):
    verb = words[0]
    if (bounds := BOUNDS[verb]) is None:
        if verb == "pull":
            assert set(words[1:]) <= set(PACKAGED_MODELS)
        return
    named = [model_folder if word in ("MODEL", "Qwen/Qwen2.5-7B-Instruct") else word for word in words]
    if model_folder not in named:
        named += ["--model", model_folder]
    result = graft(*named, *bounds.split())
    # A random model is not faster with Graft, and so says doctor's status.
    assert result.status == 0 or (verb == "doctor" and "verdict" in result.out), result.err


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.stem)
def test_the_python_of_the_first_pages_runs(page, model_folder, monkeypatch, capsys):
    asked = []

    def load_tiny(name, **options):
        asked.append(name)
        return load(model_folder, **options)

    monkeypatch.setattr(graft, "load", load_tiny)
    names = {}
    for text in blocks(page, "python"):
        if "model.generate" in text:
            engine = names["engine"]
            names |= {"model": engine.target.model, "inputs": engine.tokenizer("abc", return_tensors="pt")}
        exec(compile(text, page.name, "exec"), names)
    assert set(asked) <= set(PACKAGED_MODELS) and asked
    assert names["result"].text and capsys.readouterr().out


def test_every_call_that_first_steps_lists_is_there():
    text = FIRST[1].read_text()
    calls = re.findall(r"^\| `(?:engine\.)?(\w+)\(", text, re.MULTILINE)
    calls += re.findall(r"`(\w+_async)`", text)
    assert len(calls) >= 7 and not [call for call in calls if not hasattr(Engine, call)]
    taken = text[text.index("also\ntakes") :].partition(".\n")[0]
    options = [name for name in re.findall(r"`(\w+)`", taken) if name != "off"]
    code = load.__code__
    assert options and set(options) <= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def test_the_first_example_is_answered_well_by_the_default_model(graft):
    words = next(words for page, words in SHOWN if words[0] == "generate")
    assert words[1] == "List the months of the year." and "--model" not in words, f"as it is, by {DEFAULT_MODEL}"
    result = graft(*words)
    months = "January, February, March, April, May, June, July, August, September, October, November, December"
    assert months in " ".join(result.out.split())
    assert "✓" in result.err or "--show-tree" not in words

"""Fixtures: a tiny model in a folder, `graft` as a user runs it, PyTorch in place of kernels."""

from __future__ import annotations

import functools
import io
import os
import shutil
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interpreter  # noqa: F401  (before all that imports Triton)

# isort: split
import hypothesis
import pytest
import torch

import garbage
import graft.bench.baselines
from graft.cli import main
from graft.engine.scheduler import Scheduler
from graft.machine import num_cores, total_memory
from scheduling import schedulers
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

# httpx reads the certificates of all authorities for every request, which takes longer than most answers.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# An example takes as long as the machine lets it: no test fails by the clock.
hypothesis.settings.register_profile("graft", deadline=None)
hypothesis.settings.load_profile("graft")


WORKER_BYTES = 2 << 30  # that a process of `pytest -n auto` takes at most


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One for each core, and no more than there is memory for: a container's share of either may be small."""
    return max(min(num_cores(), total_memory() // WORKER_BYTES), 1)


def pytest_collection_finish() -> None:
    garbage.begin()


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test's engines learn is not to reach other tests, nor the user."""
    monkeypatch.setenv("GRAFT_KEEP_LEARNED", "0")


@pytest.fixture
def executable_folder(tmp_path: Path) -> Path:
    """An empty folder whose programs and libraries can be run."""
    if os.statvfs(tmp_path).f_flag & getattr(os, "ST_NOEXEC", 0):
        pytest.skip("nothing in the temporary folder may be run: name another in TMPDIR")
    return tmp_path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a token a byte and a chat template, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=1024).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Finished:
    status: int
    out: str
    err: str


@pytest.fixture
def graft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Runs `graft WORDS` with `stdin` piped in."""

    def run(*words: str, stdin: bytes = b"") -> Finished:
        monkeypatch.setattr(sys, "argv", ["graft", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as caught:
            main()
        return Finished(int(caught.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def graft_tiny(graft: Callable[..., Finished], model_folder: str) -> Callable[..., Finished]:
    """Runs `graft WORDS` with the tiny model and short answers."""

    def run(*words: str, stdin: bytes = b"") -> Finished:
        return graft(*words, "--model", model_folder, "--max-new-tokens", "8", stdin=stdin)

    return run


@pytest.fixture
def schedule() -> Iterator[Callable[..., Scheduler]]:
    """Makes schedulers, each over a model of its own, and closes them."""
    with schedulers() as make:
        yield make


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, PyTorch in place of Triton's kernels."""
    if not torch.cuda.is_available():
        import plain_kernels  # needs Triton

        plain_kernels.use_plain_kernels(monkeypatch)


@pytest.fixture
def on_device(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose rounds the device makes; without a GPU the interpreter runs their kernels."""
    from captured_parts import TwoContexts

    monkeypatch.setattr("graft.engine.engine.target_for", lambda *given: TwoContexts(*given))
    monkeypatch.setattr("graft.spec_decode.memory.PAST_TOKENS", 1024)
    monkeypatch.setattr("graft.engine.captured_rounds.CapturedRounds.contexts", (64, 128))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: the one that GRAFT_CHROMIUM names, or else the system's."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    named = os.environ.get("GRAFT_CHROMIUM")
    path = named or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium: install Debian's package chromium, or name a browser in GRAFT_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            if named:
                raise
            pytest.skip(f"{path} does not start here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_url() -> Iterator[str]:
    """Where a server shows its page."""
    from graft import Engine
    from served import running

    model = tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=1024)  # two layers: one copies too little
    with running(Engine(model, byte_tokenizer(), budget=12, isolated=True)) as url:
        yield url


@pytest.fixture
def open_page(browser: Any, page_url: str) -> Iterator[Callable[..., Any]]:
    """Opens the page; nothing may go wrong on it."""
    pages: list[tuple[Any, list[str]]] = []

    def open_one(at: str = page_url, **options: Any) -> Any:
        usual = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"}
        page, troubles = browser.new_page(**usual | options), []

        def hear(message: Any) -> None:  # what could not be loaded is shown on the page
            if message.type == "error" and "Failed to load resource" not in message.text:
                troubles.append(message.text)

        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", hear)
        page.goto(at)
        pages.append((page, troubles))
        return page

    yield open_one
    for page, troubles in pages:
        page.close()
        assert troubles == []

"""Folders to publish: a draft head in another engine's layout, and Graft as transformers' custom generate.

A head is exported with a model card: a description, measurements, and the command that serves it. Figures come from
files that benchmarks wrote.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.errors import GraftError
from graft.files import read_json
from graft.folders import folder_of, read_config
from graft.rendering import render
from graft.settings import require
from graft.version import __version__

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

# The layout of EAGLE-3 heads that each engine reads.
ENGINES = {"sglang": "specforge", "vllm": "safeailab", "speculators": "speculators"}
_VLLM = """vllm serve {model} \\
    --speculative-config '{{"method": "{method}", "model": ".", "num_speculative_tokens": {drafts}}}'"""
_SERVE = {  # by engine and kind of head, which is in the current folder
    ("sglang", "eagle3"): """python -m sglang.launch_server --model-path {model} --speculative-algorithm EAGLE3 \\
    --speculative-draft-model-path . --speculative-num-steps 6 --speculative-eagle-topk 8 \\
    --speculative-num-draft-tokens 48""",
    ("sglang", "block"): """python -m sglang.launch_server --model-path {model} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path .""",
    ("vllm", "eagle3"): _VLLM.replace("{method}", "eagle3"),
    ("vllm", "block"): _VLLM.replace("{method}", "dflash"),
    ("speculators", "eagle3"): "vllm serve .    # the config names its model, {model}",
}
_TRAINING = ("training.json", "log.jsonl", "loss.png")  # files that `graft train` writes beside a head


def export_custom_generate(folder: Path) -> None:
    """Write what `model.generate(custom_generate=FOLDER, trust_remote_code=True)` loads."""
    inner = _new_folder(folder) / "custom_generate"
    inner.mkdir()
    (inner / "generate.py").write_text(render("custom_generate.py.jinja"), encoding="utf-8")
    (inner / "requirements.txt").write_text(f"graft-decoding>={__version__}\n", encoding="utf-8")
    (folder / "README.md").write_text(render("custom_generate.md", version=__version__), encoding="utf-8")


def export_head(
    head: Path | str,
    folder: Path,
    engine: str,
    model: str,
    target: PreTrainedConfig,
    results: Sequence[Path] = (),
    load: Sequence[Path] = (),
) -> None:
    """Write a head in an engine's layout, with a card.

    model: the target's name on the card. results: files of `graft bench --out`. load: files of
    `benchmarks/batched_serving.py --out`.
    """
    tables = check_export(folder, engine, results, load)
    from graft.drafters import block, eagle3
    from graft.drafters.head_kinds import kind_of
    from graft.integrations.sglang.settings import check_residual

    source = folder_of(head)
    kind = kind_of(source)
    require(kind != "model", f"{head} is a whole model, not a head: any engine takes it as it is")
    dtype = _dtype(source)
    if kind == "eagle3":
        own = eagle3.load_head(source, target, dtype, "cpu")
        if engine == "sglang":
            check_residual(own.config.norm_before_residual)
        verifier = {"name_or_path": model, "architectures": list(target.architectures or [])}
        eagle3.save_head(own, _new_folder(folder), ENGINES[engine], _named(engine, verifier))
        about, drafts = f"One decoder layer, {own.config.draft_vocab_size:,} draft tokens", 5
    else:
        require(engine != "speculators", "speculators has no layout here for a block head: export it to sglang or vllm")
        other = block.load_head(source, target, dtype, "cpu")
        block.save_head(other, _new_folder(folder))
        about = f"{other.config.num_layers} layers, blocks of {other.config.block_size} slots"
        drafts = other.config.num_drafts
    command = _SERVE[engine, kind].format(model=model, drafts=drafts)
    for name in _TRAINING:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    facts = {"kind": kind, "model": model, "engine": engine, "about": about, "command": command}
    text = render("card_export.md", **facts, tables=tables, training=_training_text(source / "README.md"))
    (folder / "README.md").write_text(text, encoding="utf-8")


def check_export(folder: Path, engine: str, results: Sequence[Path] = (), load: Sequence[Path] = ()) -> list[str]:
    """The tables of the card. Raises a GraftError for what `export_head` cannot do, without importing torch."""
    require(engine in ENGINES, f"no export for {engine!r}: known are {', '.join(ENGINES)}")
    _check_new(folder)
    tables = [accepted_table(read_json(path), path) for path in results]
    return tables + [load_table(read_json(path), path) for path in load]


def _named(engine: str, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """What a speculators config says about the target."""
    if engine != "speculators":
        return {}
    from graft.drafters.eagle3.layouts import LAYOUTS as EAGLE3_LAYOUTS

    constants: Any = EAGLE3_LAYOUTS["speculators"].constants["speculators_config"]
    return {"speculators_config": {**constants, "verifier": verifier}}


def _training_text(card: Path) -> str:
    """The text of a card that `graft train` wrote, below its title. Cards with front matter are from elsewhere."""
    text = card.read_text(encoding="utf-8") if card.is_file() else "---"
    return "" if text.startswith("---") else text.partition("\n")[2].strip()


def accepted_table(facts: Any, path: Path) -> str:
    """Mean accepted length and speed by task, from a file that `graft bench --out` wrote."""
    with _format_errors(path, "graft bench"):
        runs = [run for run in [*facts["runs"], *facts["averages"]] if run["method"] != "off"]
        methods = list(dict.fromkeys(str(run["method"]) for run in runs))
        tasks = list(dict.fromkeys(str(run["task"]) for run in runs))
        cell = {(r["task"], r["method"]): f"{r['mean_accepted']:.2f} ({r['speedup']:.2f})" for r in runs}
        place = dict(facts["environment"])
    head = f"| | {' | '.join(methods)} |\n|---|{'---|' * len(methods)}"
    rows = [f"| {task} | {' | '.join(cell.get((task, m), '') for m in methods)} |" for task in tasks]
    device = place.get("gpu") or place.get("device") or place.get("cpu") or "an unnamed device"
    title = f"## Mean accepted length by task\n\nIn brackets the speed over plain decoding; with Graft, on {device}."
    return "\n\n".join([title, "\n".join([head, *rows])])


def load_table(facts: Any, path: Path) -> str:
    """Tokens per second by concurrency, from a file that `benchmarks/batched_serving.py --out` wrote."""
    with _format_errors(path, "benchmarks/batched_serving.py"):
        rows = [
            f"| {r['concurrency']} | {r['plain']['tokens_per_second']:,.0f} | {r['graft']['tokens_per_second']:,.0f} |"
            for r in facts["results"]
        ]
    return "\n".join(["## Tokens per second by concurrency\n", "| at once | plain | Graft |", "|---|---|---|", *rows])


@contextmanager
def _format_errors(path: Path, writer: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise GraftError(f"{path} is not what {writer} --out writes: {reason}") from error


def _dtype(folder: Path) -> torch.dtype:
    """The dtype that the config names, or bf16, as most heads are published."""
    import torch

    name = read_config(folder).get("torch_dtype") or read_config(folder).get("dtype")
    found = getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _new_folder(folder: Path) -> Path:
    _check_new(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GraftError(f"cannot write to {folder}: {error.strerror}") from error
    return folder


def _check_new(folder: Path) -> None:
    require(not folder.exists() or folder.is_dir(), f"{folder} is a file: choose a folder")
    require(not (folder.is_dir() and any(folder.iterdir())), f"{folder} is not empty: choose a new folder")

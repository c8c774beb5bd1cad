"""Code that several scripts share: command lines, models and prompts, clocks for a device, and a running server.

Import this before anything of Graft: with --dry-run, Triton must be put into its interpreter first.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if "--dry-run" in sys.argv:  # before Triton is imported
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import interpreter  # noqa: F401

from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from graft.bench.shapes import SHAPES, ModelShape
from graft.bench.tasks import Question, built_in_tasks, questions, read_tasks
from graft.hub.draft_names import packaged_head
from graft.hub.registry import DEFAULT_MODEL
from graft.loading import load, load_drafter, tree_settings

if TYPE_CHECKING:
    import httpx2

    from graft.engine import Engine
    from graft.hub.drafters import AnyDrafter

CHAT = "/v1/chat/completions"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TINY = ModelShape(layers=1, hidden=64, intermediate=64, heads=2, kv_heads=1, head_dim=32)  # smallest with exact kernels
MODELS = {  # shape and vocabulary size, by name
    "smollm2-135m": (ModelShape(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64), 49152),
    "llama-1b5": (SHAPES["llama-1b5"], 128256),
    "llama-8b": (SHAPES["llama-8b"], 128256),
    "qwen-32b": (SHAPES["qwen-32b"], 151936),
}
T = TypeVar("T")


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows a script's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that `load_pair` reads."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target")
    parser.add_argument("--draft", help="a drafter, or none; the packaged head of the model if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")


def add_prompts(parser: argparse.ArgumentParser, limit: int | None, max_new_tokens: int) -> None:
    """Prompt files and how much of them is used."""
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="a prompt file; may be repeated")
    parser.add_argument("--limit", type=int, default=limit, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)


def parse_with_dry_run(parser: argparse.ArgumentParser, needs_gpu: bool = True) -> argparse.Namespace:
    """The options of a script that has a dry run, and otherwise may need a GPU."""
    parser.add_argument("--dry-run", action="store_true", help="use a tiny model, in Triton's interpreter if no GPU")
    options = parser.parse_args()
    if needs_gpu and DEVICE.type == "cpu" and not options.dry_run:
        parser.error("no GPU; --dry-run runs a tiny model without one")
    return options


def numbers(text: str) -> list[int]:
    """Parse a list such as 1,4,16."""
    return [int(part) for part in text.split(",")]


def write_json(path: Path | None, facts: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"


def make_model(shape: ModelShape, vocab: int, max_positions: int) -> PreTrainedModel:
    """A Llama with random weights, made on the device."""
    config = LlamaConfig(
        vocab_size=vocab,
        num_hidden_layers=shape.layers,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        **shape.attention_and_mlp,
    )
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval().requires_grad_(False)


def load_pair(options: argparse.Namespace) -> tuple[Engine, AnyDrafter | None]:
    """An engine that decodes plainly, and the drafter for its model."""
    plain = load(
        options.model, draft=None, policy="off", device=options.device, dtype=options.dtype, prefix_cache=False
    )
    name = options.draft or (options.model if packaged_head(options.model) is not None else "none")
    tree = tree_settings("graft", plain.target.model.device)
    return plain, load_drafter(name, plain.target.model, tree, plain.tokenizer) if name != "none" else None


def all_prompts(paths: Sequence[Path] | None, engine: Engine, max_new_tokens: int) -> list[list[int]]:
    """The prompts of these files, or of the built-in tasks, as token ids."""
    tasks = read_tasks(paths) if paths else built_in_tasks()
    return [question.ids for task in tasks for question in questions(task, engine, max_new_tokens)]


def mixed_questions(
    paths: Sequence[Path], engine: Engine, max_new_tokens: int, limit: int | None, max_prompt_tokens: int | None = None
) -> list[Question]:
    """Prompts of all files in turn, so that every batch is a mixture of tasks."""
    by_task = [questions(task, engine, max_new_tokens, max_prompt_tokens) for task in read_tasks(list(paths), limit)]
    longest = max(map(len, by_task))
    return [asked[place] for place in range(longest) for asked in by_task if place < len(asked)]


def milliseconds(run: Callable[[], object], count: int = 20, each: bool = False) -> float:
    """Time of a run: the mean of runs in a row by the device's clock, or the median of single runs by the host's."""
    if DEVICE.type == "cpu":
        count = 1
    else:
        run()
    if each or DEVICE.type == "cpu":
        times = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return sorted(times)[count // 2] * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def microseconds(run: Callable[[T], object], items: Sequence[T], count: int = 20) -> float:
    """Time of one call, from a CUDA graph with a call for each item; without a GPU, from plain calls."""

    def all_items() -> None:
        for item in items:
            run(item)

    all_items()
    if DEVICE.type == "cpu":
        return milliseconds(all_items) / len(items) * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_items()
    return milliseconds(graph.replay, count) / len(items) * 1e3


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes read and written per second."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * num_bytes / milliseconds(lambda: target.copy_(source)) * 1e3


@contextmanager
def server(
    options: Sequence[str], port: int | None = None, program: Sequence[str] = ("-m", "graft")
) -> Iterator[tuple[subprocess.Popen[bytes], httpx2.Client]]:
    """A running `graft serve` process and a client of it. program: what Python runs as `graft`."""
    import httpx2

    port = port or free_port()
    command = [sys.executable, *program, "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        try:
            is_up = False
            while not is_up:
                if process.poll() is not None:
                    sys.exit(f"graft serve ended with {process.returncode}")
                with suppress(httpx2.TransportError):
                    is_up = client.get("/health").status_code == 200
                time.sleep(0 if is_up else 0.5)
            yield process, client
        finally:
            process.kill()
            process.wait()


def metric(client: httpx2.Client, name: str) -> float:
    """A number of the server's /metrics, summed over labels."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"graft:{name}{{"))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

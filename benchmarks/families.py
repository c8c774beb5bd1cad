"""Which families of models have fast and exact steps? Random weights at real sizes.

    python benchmarks/families.py --out families.json                     # all, on a GPU
    python benchmarks/families.py --names gemma3-4b,glm4-9b --layers 4    # a quick try
    python benchmarks/families.py --paths --write docs/models.md          # how each tested architecture is run

For each model, one row at a context of 2,000: `graph` is the CUDA graph of a step alone, `verify` all of
`TargetRunner.verify`, `limit` the time to read once what a step reads, at the bandwidth of a copy measured in the same
run. Of experts, that is the share that so many independent tokens touch. Then, alone and with 8 rows, positions along a
text where trees of 60 nodes give another likeliest token than plain decoding, or another logit (see `exactness.py`).

`--paths` tells by tiny models of the architectures of `architectures.py` whether their layers are fused, in bf16 and in
fp32. Without a GPU it needs --dry-run, and has fp16 in place of bf16.
"""

from __future__ import annotations

import argparse
import gc
import random
import warnings
from pathlib import Path
from typing import Any

import architectures
import common
import exactness
import step_time
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from graft import GraftError
from graft.engine import Engine
from graft.model.cuda_graphs import CapturedTarget

WIDTHS, CONTEXT = (1, 16, 64), 2_000
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("llama", {"layers": 32, "hidden": 4096, "heads": (32, 8), "neurons": 14336, "vocab": 128256}),
    "gemma3-4b": (
        "gemma3_text",
        {"layers": 34, "hidden": 2560, "heads": (8, 4), "neurons": 10240, "vocab": 262144, "head_dim": 256},
    ),
    "glm4-9b": (
        "glm4",
        {"layers": 40, "hidden": 4096, "heads": (32, 2), "neurons": 13696, "vocab": 151552, "head_dim": 128},
    ),
    "phi3-4b": ("phi3", {"layers": 32, "hidden": 3072, "heads": (32, 32), "neurons": 8192, "vocab": 32064}),
    "olmo2-7b": ("olmo2", {"layers": 32, "hidden": 4096, "heads": (32, 32), "neurons": 11008, "vocab": 100352}),
    "gpt-oss-20b": (
        "gpt_oss",
        {"layers": 24, "hidden": 2880, "heads": (64, 8), "neurons": 2880, "vocab": 201088, "head_dim": 64}
        | {"num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {"layers": 48, "hidden": 2048, "heads": (32, 4), "neurons": 6144, "vocab": 151936, "head_dim": 128}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
}
TINY = {"layers": 1, "hidden": 64, "heads": (2, 1), "neurons": 64, "vocab": 101, "head_dim": 32}
TINY |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
START, END = "<!-- made by benchmarks/families.py -->", "<!-- end of families -->"


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    parser = common.command_line(__doc__)
    parser.add_argument("--names", help="models, separated by commas; all if not given")
    parser.add_argument("--layers", type=int, help="layers of each model, for a quick try")
    parser.add_argument("--tokens", type=int, default=256, help="positions that are compared")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--paths", action="store_true", help="tell how tested architectures are run instead")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table of --paths to this page")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = common.parse_with_dry_run(parser)
    if options.paths:
        return write_paths(options)
    names = options.names.split(",") if options.names else list(FAMILIES)
    if unknown := set(names) - set(FAMILIES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    bandwidth = common.copy_bandwidth(2**20 if options.dry_run else 2**31)
    facts: dict[str, Any] = {"device": common.device_name(), "dtype": options.dtype, "bandwidth": bandwidth}
    print(f"{facts['device']}, {options.dtype}, copy {bandwidth / 1e12:.2f} TB/s; times in ms")
    for name in names:
        model = make(name, options)
        facts[name] = lines = measure(name, model, bandwidth, options)
        lines |= compare(name, model, options)
        common.write_json(options.out, facts)
        del model
        gc.collect()
        if common.DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def make(name: str, options: argparse.Namespace) -> PreTrainedModel:
    kind, sizes = FAMILIES[name]
    sizes = dict(TINY if options.dry_run else sizes)
    heads, kv_heads = sizes.pop("heads")
    config = AutoConfig.for_model(
        kind,
        num_hidden_layers=options.layers or sizes.pop("layers"),
        hidden_size=sizes.pop("hidden"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=sizes.pop("neurons"),
        vocab_size=sizes.pop("vocab"),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=0,
        **{key: value for key, value in sizes.items() if key != "layers"},
    )
    dtype = torch.float32 if options.dry_run else getattr(torch, options.dtype)
    with torch.device(common.DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def bytes_of(model: PreTrainedModel, width: int) -> float:
    """What a step of so many independent tokens reads of the weights."""
    config = model.config
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    total = 0.0
    for name, parameter in model.named_parameters():
        touched = 1.0
        if experts and ".experts." in name:
            touched -= (1 - config.num_experts_per_tok / experts) ** width
        total += 0 if "embed_tokens" in name else parameter.nbytes * touched
    return total


def measure(name: str, model: PreTrainedModel, bandwidth: float, options: argparse.Namespace) -> dict[str, Any]:
    target, context = CapturedTarget(model), 70 if options.dry_run else CONTEXT
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    reason = target.not_fused
    print(f"{name}, {size:.1f} billion weights: {'fused layers' if reason is None else reason}", flush=True)
    steps: dict[str, Any] = {}
    for width in (1, 2) if options.dry_run else WIDTHS:
        cache, tree = target.open(1, context + width), step_time.trees_of(width, 1, target.vocab_size)
        for stored in (part for pair in cache.store.pairs for part in pair):
            stored.normal_()
        cache.rows[0].length = context
        run = step_time.captured(target, cache, tree)

        def verify() -> None:
            target.verify(cache, tree)  # noqa: B023
            target.synchronize()

        graph, whole = common.milliseconds(run), common.milliseconds(verify, each=True)
        limit = (bytes_of(model, width) + context * cache.store.bytes_per_token) / bandwidth * 1e3
        print(f"  {width:3d} tokens: graph {graph:7.2f}  verify {whole:7.2f}  limit {limit:6.2f}  {graph / limit:.2f}")
        steps[str(width)] = {"graph_ms": graph, "verify_ms": whole, "limit_ms": limit}
        cache.release()
    return {"not_fused": reason, "steps": steps, "memory": target.memory_report()}


def compare(name: str, model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Positions that diverge from plain decoding, alone and with 8 rows."""
    rng, found = random.Random(0), {}
    most = model.config.vocab_size - 1
    engine = Engine(model, policy="off")
    for rows in (1,) if options.dry_run else (1, 8):
        prompts = [[rng.randrange(most // 2, most) for _ in range(64)] for _ in range(rows)]
        tokens, answer = (4, 4) if options.dry_run else (options.tokens, 128)
        own = {"tokens": tokens, "answer": answer, "rows": rows, "temperature": 0.7, "policy": "known"}
        given = argparse.Namespace(**own, budget=4 if options.dry_run else 60)
        for is_exact in (False, True):
            kind = f"{rows} rows, {'exact' if is_exact else 'as usual'}"
            try:
                tally = exactness.compare(engine, prompts, given, is_exact)
            except GraftError as error:
                print(f"  {kind}: {error}", flush=True)
                continue
            print(f"  {kind}: {tally}", flush=True)
            found[kind] = {"positions": tally.positions, "diverge": len(tally.gaps), "other_bits": tally.bits}
    return {"exactness": found}


def path_of(name: str, dtype: torch.dtype) -> str:
    """How the layers of an architecture are run."""
    try:
        model = architectures.make(name, 0)
    except Exception as error:
        return f"cannot be made here: {str(error).splitlines()[0]}"
    try:
        reason = CapturedTarget(model.to(common.DEVICE, dtype)).not_fused
    except GraftError:
        return "refused, as the table above says"
    if reason is None:
        return "fused layers"
    return f"transformers' own: {reason.replace(type(model).__name__, 'it')}"


def write_paths(options: argparse.Namespace) -> None:
    short = torch.bfloat16 if common.DEVICE.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    groups: dict[str, list[str]] = {}
    for name in architectures.ARCHITECTURES:
        short_path, long_path = (path_of(name, dtype) for dtype in (short, torch.float32))
        own = short_path if short_path == long_path else f"{short_path} (in fp32: {long_path})"
        groups.setdefault(own, []).append(f"`{name}`")
    lines = [f"| {path} | {', '.join(names)} |" for path, names in sorted(groups.items())]
    made = "\n".join(["| layers | architectures |", "|---|---|", *lines])
    if options.write is None:
        return print(made)
    before, _, rest = options.write.read_text().partition(START)
    options.write.write_text(f"{before}{START}\n\n{made}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()

"""How long does a step of the target take, by tree width and context, and how far is it from the memory's limit?

    python benchmarks/step_time.py --out step_time.json
    python benchmarks/step_time.py --shape llama-8b --rows 64 --width 1 --width 4 --context 300
    python benchmarks/step_time.py --shape llama-1b5 --width 1 --width 64 --context 2000 --without-overlap

Models have random weights in bfloat16. `graph` is the CUDA graph of a step alone. `verify` is all of
`TargetRunner.verify` until the device is done. `limit` is the time to read weights, keys and values once, at the
bandwidth of a copy measured in the same run. `ratio` is graph over limit. Steps are padded to the next size in
`cuda_graphs.STEP_SIZES`.

`--without-overlap` also times a graph whose launches do not overlap (see `kernels/overlap.py`), in turns with the usual
one, and compares the bits of their logits.

`--draft-pass` instead times a pass of an EAGLE-3 head that expands its beams, in microseconds, with weights of 16 and
of 8 bits, with and without the noise of coming draws. The head has the model's shape and up to 32,768 draft tokens.
"""

import argparse
import gc
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import common
import torch
from tree_attention import random_tree

from graft.drafters.drafter import Passes, TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.drafters.eagle3.head import Eagle3Config, Eagle3Head
from graft.drafters.factory import fused_for
from graft.model import KVCache
from graft.model.captures import Run, context_for
from graft.model.cuda_graphs import CapturedTarget
from graft.model.families import why_not
from graft.model.kernels import overlap
from graft.model.noise import ComingDraws, RowDraws
from graft.tree.device.buffers import DraftDraws
from graft.tree.tree import DraftTree

WIDTHS, CONTEXTS = (1, 16, 64, 128), (2_000, 16_000, 64_000)
TURNS = 5


@dataclass
class Line:
    shape: str
    context: int
    rows: int
    width: int
    graph_ms: float
    verify_ms: float
    limit_ms: float
    apart_ms: float | None = None  # of a graph whose launches do not overlap
    has_same_bits: bool | None = None  # as that graph

    def __str__(self) -> str:
        line = f"{self.shape:14s}{self.context:8d}{self.rows:6d}{self.width:6d}"
        line += f"{self.graph_ms:9.3f}{self.verify_ms:9.3f}{self.limit_ms:9.3f}{self.graph_ms / self.limit_ms:8.2f}"
        if self.apart_ms is not None:
            line += f"   without overlap {self.apart_ms:.3f} ({self.apart_ms / self.limit_ms:.2f}), "
            line += "same bits" if self.has_same_bits else "OTHER BITS"
        return line


def main() -> None:
    parser = common.command_line(__doc__)
    parser.add_argument("--shape", action="append", choices=common.MODELS, help="may be repeated; all if not given")
    parser.add_argument("--rows", type=int, default=1, help="texts verified together")
    parser.add_argument("--width", action="append", type=int, help="nodes of a row's tree; may be repeated")
    parser.add_argument("--context", action="append", type=int, help="tokens of each text; may be repeated")
    parser.add_argument("--exact", action="store_true", help="use our own kernel for all products, even if slower")
    parser.add_argument("--without-overlap", action="store_true", help="also time launches that do not overlap")
    parser.add_argument("--draft-pass", action="store_true", help="time draft passes instead of steps")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = common.parse_with_dry_run(parser)

    models = {name: common.MODELS[name] for name in options.shape or common.MODELS}
    widths, contexts, copied = options.width or WIDTHS, options.context or CONTEXTS, 2**31
    if options.dry_run:
        models, widths, contexts, copied = {"tiny": (common.TINY, 64)}, (1, 2), (70,), 2**20
    bandwidth = common.copy_bandwidth(copied)
    facts: dict[str, Any] = {"device": common.device_name(), "dtype": str(common.DTYPE), "bandwidth": bandwidth}
    print(f"{facts['device']}, {facts['dtype']}, copy {bandwidth / 1e12:.2f} TB/s; times in ms")
    print(f"{'shape':14s}{'context':>8s}{'rows':>6s}{'width':>6s}{'graph':>9s}{'verify':>9s}{'limit':>9s}{'ratio':>8s}")
    memory, lines = facts["memory"], facts["lines"] = {}, []
    for name, (shape, vocab) in models.items():
        model = common.make_model(shape, vocab, max(contexts) + 256)
        print(f"{name}: {why_not(model) or 'fused layers'}")
        target = CapturedTarget(model, exact=options.exact)
        if options.draft_pass:
            for context in contexts:
                lines.append(time_draft_pass(name, target, context, options))
                common.write_json(options.out, facts)
            continue
        for context, width in product(contexts, widths):
            line = time_step(name, target, context, width, bandwidth, options)
            print(line, flush=True)
            lines.append(asdict(line))
            common.write_json(options.out, facts)
        memory[name] = {"weights": sum(p.nbytes for p in model.parameters()), **target.memory_report()}
        print("memory:", ", ".join(f"{what} {size / 1e9:.2f} GB" for what, size in memory[name].items()))
        common.write_json(options.out, facts)
        del model, target
        gc.collect()
        if common.DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def time_step(
    name: str, target: CapturedTarget, context: int, width: int, bandwidth: float, options: argparse.Namespace
) -> Line:
    cache = target.open(options.rows, context + width)
    for stored in cache.store.stored:
        stored.normal_()
    for row in cache.rows:
        row.length = context
    tree = trees_of(width, options.rows, target.vocab_size)
    run = captured(target, cache, tree)

    def verify() -> None:
        target.verify(cache, tree)
        target.synchronize()

    # Every step reads all weights but the embeddings.
    read = sum(p.nbytes for name, p in target.model.named_parameters() if "embed_tokens" not in name)
    read += options.rows * context * cache.store.bytes_per_token
    line = Line(
        name,
        context,
        options.rows,
        width,
        graph_ms=common.milliseconds(run),
        verify_ms=common.milliseconds(verify, each=True),
        limit_ms=read / bandwidth * 1e3,
    )
    if options.without_overlap:
        compare_overlap(line, target, cache, tree)
    cache.release()
    return line


def time_draft_pass(name: str, target: CapturedTarget, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a draft pass for rows of `context` tokens, by bits of the weights and knowledge of the noise."""
    num_rows, vocab_size = options.rows, min(target.vocab_size, 32_768)
    head = Eagle3Head(Eagle3Config.for_target(target.model.config, draft_vocab_size=vocab_size))
    head = head.to(common.DEVICE, common.DTYPE).requires_grad_(False)
    head.set_vocabulary(torch.arange(vocab_size, device=common.DEVICE))
    head.borrow_embedding(target.model.get_input_embeddings().weight)
    tree, times = TreeSettings(depth=1, topk=2) if options.dry_run else TreeSettings(), {}
    for eight_bits in (False, True):
        settings = replace(tree, eight_bits=eight_bits)
        drafter = Eagle3Drafter(head, settings, fused_for(head, settings)[0])
        fast = drafter.fast
        if fast.has_eight_bits != eight_bits:
            continue
        cache = target.open(num_rows, context + drafter.num_slots)
        for row in cache.rows:
            row.length = context
        state = drafter.open(cache)
        if not drafter.is_captured:
            sys.exit("the head was not captured")
        asked = Passes.scratch(target.pool, state, cache.rows, 1)
        draws = ComingDraws([RowDraws(seed, context + 1, 1.0) for seed in range(num_rows)])
        asked = replace(asked, text_lengths=torch.full_like(asked.text_lengths, context + 1), draws=draws)
        asked, buffers = replace(asked, context=context_for(context)), drafter.buffers_of(target.pool)
        keys = draws.keys()
        seeds, temperatures = keys[0].to(common.DEVICE), keys[1].to(common.DEVICE)
        known = DraftDraws(seeds, temperatures, asked.lengths, head.d2t)
        found: tuple[list[float], list[float]] = ([], [])
        for _, knows_draws in product(range(1 if options.dry_run else TURNS), (False, True)):
            drafter.run_passes(asked, lambda *level: None)
            expand = partial(fast.run_pass, buffers, asked, asked.lengths, known if knows_draws else None)
            found[knows_draws].append(common.microseconds(expand, range(1, drafter.max_passes)))
        cache.release()
        bits = "8" if eight_bits else "16"
        without, with_noise = times[bits] = tuple(map(statistics.median, found))
        print(
            f"{name}, context {context}, {num_rows} rows of {drafter.beams_of(num_rows)} beams, {bits} bits: "
            f"a draft pass takes {without:.1f} us, and with the noise of coming draws {with_noise:.1f} us "
            f"({with_noise - without:+.1f})",
            flush=True,
        )
    return {"shape": name, "context": context, "rows": num_rows, "us_without_and_with_noise_by_bits": times}


def trees_of(width: int, rows: int, vocab_size: int) -> DraftTree:
    """The same random tree for every row, of different tokens, since equal ones would have the same experts."""
    paths = random_tree(width).paths
    parents = torch.tensor([[([0, *path])[-2] for path in paths]]).repeat(rows, 1)
    zeros = torch.zeros_like(parents)
    tokens = torch.randint(vocab_size, zeros.shape, generator=torch.Generator().manual_seed(width))
    return DraftTree(tokens, parents, zeros.float(), zeros)


def captured(target: CapturedTarget, cache: KVCache, tree: DraftTree) -> Run:
    """The graph of the step."""
    target.verify(cache, tree)
    if target._graphs.failure is not None:
        sys.exit(f"not captured: {target._graphs.failure}")
    context = max(row.length for row in cache.rows)
    steps = [key for key in target._graphs.steps if key[0] == "step"]
    fitting = [key for key in steps if key[2] >= tree.num_tokens and key[3] >= context]
    return target._graphs.steps[min(fitting, key=lambda key: key[2:])]


def compare_overlap(line: Line, target: CapturedTarget, cache: KVCache, tree: DraftTree) -> None:
    """Times the graphs with and without overlap in turns, and compares their logits."""
    runs, logits, times = [], [], ([], [])
    for is_on in (True, False):
        overlap.is_on = is_on
        target._graphs.forget()  # the graphs that `runs` keeps live on
        runs.append(captured(target, cache, tree))
        runs[-1]()
        logits.append(target._graphs.buffers[0].logits[: tree.num_tokens].clone())
    overlap.is_on = True
    for _ in range(TURNS):
        for run, own in zip(runs, times, strict=True):
            own.append(common.milliseconds(run))
    line.graph_ms, line.apart_ms = (statistics.median(own) for own in times)
    line.has_same_bits = torch.equal(*(each.view(torch.int32) for each in logits))
    target._graphs.forget()


if __name__ == "__main__":
    main()

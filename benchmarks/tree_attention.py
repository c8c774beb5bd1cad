"""Benchmark of tree attention on a GPU: our kernels, SDPA with a mask and, with --flex, FlexAttention.

    python bench/tree_attention.py
    python bench/tree_attention.py --shape 8b --width 64 --tiles keys=32,prefix_stages=4 --parts
    python bench/tree_attention.py --shape 8b --search

Times are of one layer in microseconds, from a CUDA graph that runs through many layers, so that keys do not wait in
the L2 cache. Our keys lie in pages of any order, those of SDPA and FlexAttention together. `read` is the time to read
keys and values once, at the bandwidth of a copy measured in the same run. Every line also says whether nodes got the
bits of plain decoding, and how far the result is from SDPA's. Ends with an error if bits differ. `--dry-run` goes
through all of it with small shapes, without a GPU in Triton's interpreter.

`--search` times many tiles instead, those of `--tiles` or a list of its own: pieces first, then splits for the best of
them. The best have the smallest mean over contexts and widths of their time relative to that of the tiles in use.

`--tail` times the tail kernel alone, with many rows of few nodes and one row of many, for some stages and registers and
with each node alone in a tile, and says whether they give the bits of the tiles in use.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

if "--dry-run" in sys.argv:  # before Triton is imported
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import interpreter  # noqa: F401

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from graft.model.attention import Layout, attend
from graft.model.kernels.attention import PAGE, Tiles, plan, scratch_size, tiles_for, tree_attention

SHAPES = {"smollm2-135m": (9, 3, 64), "8b": (32, 8, 128), "32b": (64, 8, 128)}  # heads, key heads, head_dim
WIDTHS, CONTEXTS = (1, 16, 64, 128), (2_000, 16_000, 64_000)
FAR_FROM_CACHED = 512e6  # bytes of keys and values that a graph runs through
NUM_CHECKED = 8  # nodes decoded plainly
# What --search tries: pieces, and then splits for the best of them.
PIECES = (
    "tail_registers=128",
    "prefix_stages=2",
    "prefix_stages=4",
    "tail_stages=2",
    "tail_stages=2,tail_registers=128",
    "rows=128,warps=8",
    "keys=32,prefix_stages=4",
)
SPLITS = (
    "short_split=512",
    "long_split=2048",
    "short_split=512,long_split=2048",
    "long_split=4096,border=8192",
    "short_split=512,border=8192,long_split=2048",
    "short_split=128,border=1024,long_split=1024",
)

Changes = dict[str, int | None]  # of tiles
# What --tail times: rows, nodes of each and context; stages and registers.
TAILS = ((64, 4, 300), (16, 4, 300), (4, 28, 1_000), (1, 60, 2_000))
TAIL_STAGES, TAIL_REGISTERS = (1, 2, 3), (None, 128, 168)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


class Tree:
    """One tree, by the parents of its nodes."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.width = len(parents)
        self.paths: list[list[int]] = []  # from the root to each node
        for node, parent in enumerate(parents):
            self.paths.append([*self.paths[parent], node] if node else [0])

    def strips(self) -> Tensor:
        """[width] int32, as a `Layout` has them"""
        numbers: list[int] = []
        for path in self.paths:
            parent = path[-2] if path[1:] else None
            if parent is None or numbers[parent] > 0:  # it has a child already
                numbers.append(-1)
            else:
                numbers.append(numbers[parent] - 1)
                numbers[parent] *= -1
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    def padded_paths(self) -> Tensor:
        """[width, longest] int32"""
        longest = max(map(len, self.paths))
        padded = [path + [0] * (longest - len(path)) for path in self.paths]
        return torch.tensor(padded, dtype=torch.int32, device=DEVICE)

    def ancestors(self) -> Tensor:
        """[width, width] bool, [i, j] when j is i or an ancestor of i."""
        seen = torch.zeros(self.width, self.width, dtype=torch.bool)
        for node, path in enumerate(self.paths):
            seen[node, path] = True
        return seen.to(DEVICE)


class Case:
    """A tree of one row over random layers."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, width: int, context: int, tiles: Tiles, is_chain: bool = False
    ) -> None:
        self.context, self.tiles = context, tiles
        self.tree = Tree([max(node - 1, 0) for node in range(width)]) if is_chain else random_tree(width)
        layer_bytes = 2 * context * kv_heads * head_dim * DTYPE.itemsize
        num_layers = min(max(round(FAR_FROM_CACHED / layer_bytes), 2), 40) if DEVICE.type == "cuda" else 2
        num_layers = 1 if is_chain else num_layers
        num_pages = -(-(context + width) // PAGE)
        shape = (num_layers, (num_pages + 1) * PAGE, kv_heads, head_dim)
        self.keys, self.values = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
        self.query = torch.randn(width, heads, head_dim, dtype=DTYPE, device=DEVICE)
        pages = 1 + torch.randperm(num_pages, device=DEVICE)
        index = torch.arange(context + width, device=DEVICE)
        self.slots = pages[index // PAGE] * PAGE + index % PAGE
        self.layout = layout_of(self.tree, context, pages)
        self.prepare()
        seen = nn.functional.pad(self.tree.ancestors(), (context, 0), value=True)[None]
        mask = torch.zeros(seen.shape, dtype=DTYPE, device=DEVICE).masked_fill_(~seen, -torch.inf)
        self.mask = mask[:, None].repeat(1, 1, heads // kv_heads, 1)
        self.read_bytes = layer_bytes

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    def prepare(self) -> None:
        """What a step has once for all layers."""
        _, heads, head_dim = self.query.shape
        self.plan = plan(self.layout, heads // self.keys.shape[2], self.tiles)
        self.scratch = torch.empty(scratch_size(self.layout, heads, head_dim, self.tiles), device=DEVICE)

    def by_kernels(self, layer: int) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        return tree_attention(self.query, keys, values, self.layout, self.plan, tiles=self.tiles, scratch=self.scratch)

    def by_sdpa(self, layer: int) -> Tensor:
        """Over the first slots, whatever text that is: it takes the same time."""
        num_keys = self.mask.shape[3]
        return self._attended(self.keys[layer, :num_keys], self.values[layer, :num_keys])

    def error(self) -> float:
        """How far we are from SDPA at most."""
        expected = self._attended(self.keys[0, self.slots], self.values[0, self.slots])
        return (self.by_kernels(0).float() - expected.float()).abs().max().item()

    def _attended(self, keys: Tensor, values: Tensor) -> Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in (self.query, keys, values))
        return attend(query, key, value, self.mask)[0].transpose(0, 1).flatten(1)

    def flex(self) -> Callable[[int], Tensor]:
        """FlexAttention with the tree's mask, compiled for this case."""
        ancestors, length = self.tree.ancestors(), self.context
        num_keys, query = self.mask.shape[3], self.query.transpose(0, 1)[None]

        def seen(batch: Tensor, head: Tensor, node: Tensor, slot: Tensor) -> Tensor:
            return (slot < length) | ancestors[node, (slot - length).clamp(min=0)]

        mask = create_block_mask(seen, None, None, self.tree.width, num_keys, device=DEVICE.type)
        compiled = torch.compile(flex_attention, dynamic=False) if DEVICE.type == "cuda" else flex_attention

        def run(layer: int) -> Tensor:
            key, value = (stored[layer, :num_keys].transpose(0, 1)[None] for stored in (self.keys, self.values))
            out: Tensor = compiled(query, key, value, block_mask=mask, enable_gqa=True)
            return out[0].transpose(0, 1).flatten(1)

        return run

    def nodes_that_differ(self) -> int:
        """Of a few nodes, and of a chain that ends a block and a split later, how many get other bits than the same
        token decoded plainly."""
        width, heads, head_dim = self.query.shape
        kv_heads, end_of_split = self.keys.shape[2], self.context // 1024 * 1024
        chain = Case(heads, kv_heads, head_dim, width, max(end_of_split - 8, 56), self.tiles, is_chain=True)
        return sum(case.count_differences() for case in (self, chain))

    def count_differences(self) -> int:
        out = self.by_kernels(0)
        nodes = random.Random(1).sample(range(self.tree.width), min(NUM_CHECKED, self.tree.width))
        return sum(not torch.equal(out[node], self.decoded_plainly(node)) for node in nodes)

    def decoded_plainly(self, node: int) -> Tensor:
        path = torch.tensor(self.tree.paths[node], device=DEVICE)
        slots = torch.cat([self.slots[: self.context], self.slots[self.context + path]])
        num_pages = -(-len(slots) // PAGE)
        layout = layout_of(Tree([0]), len(slots) - 1, torch.arange(num_pages, device=DEVICE))
        keys, values = (
            nn.functional.pad(stored[0, slots], (0, 0, 0, 0, 0, -len(slots) % PAGE))
            for stored in (self.keys, self.values)
        )
        own = plan(layout, self.query.shape[1] // keys.shape[1], self.tiles)
        return tree_attention(self.query[node : node + 1], keys, values, layout, own, tiles=self.tiles)[0]


class ManyRows(Case):
    """The same tree in many rows, to time alone."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, rows: int, width: int, context: int) -> None:
        self.tiles = tiles_for(head_dim, DTYPE)
        num_pages = -(-(context + width) // PAGE)
        layer_bytes = 2 * rows * context * kv_heads * head_dim * DTYPE.itemsize
        num_layers = min(max(round(FAR_FROM_CACHED / layer_bytes), 2), 40) if DEVICE.type == "cuda" else 2
        shape = (num_layers, (rows * num_pages + 1) * PAGE, kv_heads, head_dim)
        self.keys, self.values = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
        self.query = torch.randn(rows * width, heads, head_dim, dtype=DTYPE, device=DEVICE)
        pages = 1 + torch.randperm(rows * num_pages, device=DEVICE).view(rows, num_pages)
        self.layout = layout_of(random_tree(width), context, pages)


def layout_of(tree: Tree, context: int, pages: Tensor) -> Layout:
    """A step of one row, or of one for each line of pages."""
    pages = pages.view(-1, pages.shape[-1])
    width, num_rows = tree.width, len(pages)
    row = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    return Layout(
        rows=row.repeat_interleave(width),
        places=torch.arange(width, dtype=torch.int32, device=DEVICE).repeat(num_rows),
        depths=torch.tensor([len(path) - 1 for path in tree.paths], dtype=torch.int32, device=DEVICE).repeat(num_rows),
        paths=tree.padded_paths().repeat(num_rows, 1),
        starts=row * width,
        counts=torch.full_like(row, width),
        lengths=torch.full_like(row, context),
        lines=row + 1,
        tables=torch.cat([torch.zeros_like(pages[:1]), pages]).int(),
        max_context=context,
        strips=tree.strips().repeat(num_rows),
    )


def random_tree(width: int) -> Tree:
    rng = random.Random(width)
    return Tree([0, *(rng.randrange(node) for node in range(1, width))])


def microseconds(run: Callable[[int], Tensor], num_layers: int, replays: int = 20) -> tuple[float, Callable[[], None]]:
    """Of one layer, and what was timed: a graph of all layers; without a GPU, one plain pass over them."""

    def all_layers() -> None:
        for layer in range(num_layers):
            run(layer)

    all_layers()
    if DEVICE.type == "cpu":
        start = time.perf_counter()
        all_layers()
        return (time.perf_counter() - start) / num_layers * 1e6, all_layers
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_layers()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / replays / num_layers * 1e3, graph.replay


def kernel_times(replay: Callable[[], None]) -> dict[str, float]:
    """Mean microseconds of each of our kernels; of none without a GPU."""
    activity = torch.profiler.ProfilerActivity.CUDA if DEVICE.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        replay()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.key.endswith("_kernel")]
    return {event.key.strip("_"): event.device_time for event in events}


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes read and written per second."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * num_bytes / (microseconds(lambda _: target.copy_(source), num_layers=1)[0] * 1e-6)


def time_flex(case: Case) -> str:
    try:
        return f"{microseconds(case.flex(), case.num_layers)[0]:9.1f}"
    except Exception as error:
        print(f"FlexAttention: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
        return f"{'-':>9s}"


def parse_tiles(text: str) -> Changes:
    return {name: int(value) for name, value in (item.split("=") for item in text.split(",") if item)}


def search(
    shape: tuple[int, int, int], widths: Sequence[int], contexts: Sequence[int], given: list[Changes] | None
) -> None:
    cases = [Case(*shape, width, context, Tiles()) for context in contexts for width in widths]
    print(f"{'context':60s}{''.join(f'{case.context:8d}' for case in cases)}")
    print(f"{'width':60s}{''.join(f'{case.tree.width:8d}' for case in cases)}    mean")
    usual = time_tiles(cases, {})
    best: tuple[float, Changes] = (1.0, {})

    def try_all(candidates: list[Changes]) -> None:
        nonlocal best
        for changes in candidates:
            mean = geometric_mean(time_tiles(cases, changes, usual), usual)
            best = min(best, (mean, changes), key=lambda scored: scored[0])

    try_all(given or [parse_tiles(text) for text in PIECES])
    if not given:
        try_all([best[1] | parse_tiles(text) for text in SPLITS])
    print(f"best: {written(best[1])} with {best[0]:.3f} of the time")


def time_tails(shape: tuple[int, int, int], sizes: Sequence[tuple[int, int, int]]) -> bool:
    """Whether all had the bits of the tiles in use."""
    all_same = True
    tried: list[Changes] = [
        {"tail_stages": stages, "tail_registers": registers} for stages in TAIL_STAGES for registers in TAIL_REGISTERS
    ]
    for rows, width, context in sizes:
        case = ManyRows(*shape, rows, width, context)
        usual, layout = case.tiles, case.layout
        case.prepare()
        print(f"{rows} rows of {width} nodes at {context}: microseconds of the tail, and of all kernels")
        expected = case.by_kernels(0)
        alone = replace(layout, strips=None)
        for changes, case.layout in [({}, layout), ({}, alone), *((changes, layout) for changes in tried)]:
            case.tiles = replace(usual, **changes)
            case.prepare()
            all_kernels, replay = microseconds(case.by_kernels, case.num_layers)
            tail = kernel_times(replay).get("tail_kernel", math.nan)
            is_same = torch.equal(case.by_kernels(0), expected)
            all_same &= is_same
            what = "each node alone" if case.layout is alone else written(changes)
            what += f", {int(case.plan.num_strips)} strips"
            print(f"{what:56s}{tail:9.1f}{all_kernels:9.1f}  {'same' if is_same else 'other'} bits", flush=True)
    return all_same


def time_tiles(cases: list[Case], changes: Changes, usual: list[float] | None = None) -> list[float]:
    """Microseconds of each case; infinite for tiles that are refused or give other bits than plain decoding."""
    times: list[float] = []
    why = ""
    try:
        for case in cases:
            case.tiles = replace(tiles_for(case.query.shape[2], DTYPE), **changes)
            case.prepare()
            times.append(microseconds(case.by_kernels, case.num_layers, replays=5)[0])
        if cases[-1].nodes_that_differ():
            why = "other bits than plain decoding"
    except Exception as error:  # whatever a compiler may raise: no registers, no shared memory
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    mean = f"{geometric_mean(times, usual):8.3f}" if usual and not why else ""
    print(f"{written(changes):60s}{''.join(f'{time:8.1f}' for time in times)}{mean} {why}", flush=True)
    return [math.inf] * len(cases) if why else times


def geometric_mean(times: list[float], usual: list[float]) -> float:
    return math.prod(time / before for time, before in zip(times, usual, strict=True)) ** (1 / len(times))


def written(changes: Changes) -> str:
    return ",".join(f"{name}={value}" for name, value in changes.items()) or "tiles in use"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--width", action="append", type=int)
    parser.add_argument("--context", action="append", type=int)
    parser.add_argument("--tiles", action="append", type=parse_tiles, help="changes to the tiles, as keys=32,warps=8")
    parser.add_argument("--search", action="store_true", help="many tiles, and which are the best")
    parser.add_argument("--tail", action="store_true", help="the tail kernel alone, by stages and registers")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, compiled anew for every line")
    parser.add_argument("--parts", action="store_true", help="the time of each kernel too")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if DEVICE.type == "cpu" and not options.dry_run:
        parser.error("no GPU; --dry-run runs small shapes without one")

    shapes = {name: SHAPES[name] for name in options.shape or SHAPES}
    widths, contexts, copied = options.width or WIDTHS, options.context or CONTEXTS, 2**31
    if options.dry_run:
        shapes, widths, contexts, copied = {"tiny": (2, 1, 16)}, (1, 3), (70,), 2**20
    if options.search:
        for shape_name, shape in shapes.items():
            print(shape_name)
            search(shape, options.width or widths[:3], contexts, options.tiles)
        return
    if options.tail:
        for shape_name, shape in shapes.items():
            print(shape_name)
            if not time_tails(shape, ((3, 4, 70), (1, 5, 130)) if options.dry_run else TAILS):
                sys.exit("other bits than with the tiles in use")
        return
    bandwidth = copy_bandwidth(copied)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    print(f"{name}, {DTYPE}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'shape':14s}{'context':>8s}{'width':>6s}{'graft':>9s}{'sdpa':>9s}{'flex':>9s}{'read':>9s}  bits, error")

    wrong = 0
    for shape, (heads, kv_heads, head_dim) in shapes.items():
        for context in contexts:
            for width in widths:
                for changes in options.tiles or [{}]:
                    tiles = replace(tiles_for(head_dim, DTYPE), **changes)
                    case = Case(heads, kv_heads, head_dim, width, context, tiles)
                    ours, replay = microseconds(case.by_kernels, case.num_layers)
                    sdpa, _ = microseconds(case.by_sdpa, case.num_layers)
                    flex = time_flex(case) if options.flex else f"{'':9s}"
                    read = case.read_bytes / bandwidth * 1e6
                    differ = case.nodes_that_differ()
                    error = case.error()
                    wrong += differ > 0 or error > 0.02
                    print(
                        f"{shape:14s}{context:8d}{width:6d}{ours:9.1f}{sdpa:9.1f}{flex}{read:9.1f}  "
                        f"{f'{differ} nodes differ' if differ else 'same'}, {error:.1e}",
                        "".join(f" {name}={value}" for name, value in changes.items()),
                        flush=True,
                    )
                    if options.parts:
                        parts = ", ".join(f"{name} {spent:.1f}" for name, spent in kernel_times(replay).items())
                        print(f"{'':14s}{parts}")
                    del case
    if wrong:
        sys.exit(f"{wrong} lines are wrong")


if __name__ == "__main__":
    main()

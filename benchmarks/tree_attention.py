"""How fast is attention over a tree, beside SDPA with a mask or SGLang's kernel, and are its bits plain decoding's?

    python benchmarks/tree_attention.py --shape 8b --width 64
    python benchmarks/tree_attention.py --sglang

Times are microseconds of one layer, from a CUDA graph that runs through many layers, so that no keys are in the L2
cache. Our keys lie in pages in random order, those of SDPA side by side. `read` is the time to read keys and values
once, at the bandwidth of a copy measured in the same run. Every line also says whether nodes have the bits of plain
decoding, and the largest difference from SDPA. The exit status is 1 if bits differ.

`--sglang` times the verify attention of SGLang 0.5.15, by its own Triton kernel and by the plugin's, for an 8B Llama.
"""

import random
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from common import DEVICE, command_line, copy_bandwidth, device_name, microseconds, parse_with_dry_run
from torch import Tensor, nn

from graft.model.attention import attend
from graft.model.kernels.attention import PAGE, plan, scratch_size, tiles_for, tree_attention
from graft.model.layout import Layout

SHAPES = {"smollm2-135m": (9, 3, 64), "8b": (32, 8, 128), "32b": (64, 8, 128)}  # heads, key heads, head_dim
WIDTHS, CONTEXTS = (1, 16, 64, 128), (2_000, 16_000, 64_000)
NUM_CHECKED = 8  # nodes that are also decoded plainly
GRAPH_BYTES = 512e6  # read by a timed graph, far more than the device's cache holds
SGLANG_CASES = ((1, 48, 300), (1, 48, 2000), (4, 32, 300), (16, 8, 300), (32, 4, 300), (64, 1, 300))
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="heads of this model; may be repeated")
    parser.add_argument("--width", action="append", type=int, help="nodes of the tree; may be repeated")
    parser.add_argument("--context", action="append", type=int, help="tokens before it; may be repeated")
    parser.add_argument("--sglang", action="store_true", help="time SGLang's verify attention instead")
    options = parse_with_dry_run(parser)
    if options.sglang:
        time_sglang()
        return
    shapes = {name: SHAPES[name] for name in options.shape or SHAPES}
    widths, contexts, copied = options.width or WIDTHS, options.context or CONTEXTS, 2**31
    if options.dry_run:
        shapes, widths, contexts, copied = {"tiny": (2, 1, 16)}, (1, 3), (70,), 2**20
    bandwidth = copy_bandwidth(copied)
    print(f"{device_name()}, {DTYPE}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'shape':14s}{'context':>8s}{'width':>6s}{'graft':>9s}{'sdpa':>9s}{'read':>9s}  bits, error")
    cases = product(shapes.items(), contexts, widths)
    num_wrong = sum(not is_right(*named, width, context, bandwidth) for named, context, width in cases)
    if num_wrong:
        sys.exit(f"{num_wrong} lines are wrong")


def is_right(name: str, shape: tuple[int, int, int], width: int, context: int, bandwidth: float) -> bool:
    """Times one case, prints its line, and checks that its bits are plain decoding's and its result near SDPA's."""
    case = Case(*shape, width, context)
    layers = range(len(case.keys))
    ours, sdpa = (microseconds(run, layers) for run in (case.by_kernels, case.by_sdpa))
    num_differ, error, read = case.nodes_that_differ(), case.error(), case.read_bytes / bandwidth * 1e6
    bits = f"{num_differ} nodes differ" if num_differ else "same"
    print(f"{name:14s}{context:8d}{width:6d}{ours:9.1f}{sdpa:9.1f}{read:9.1f}  {bits}, {error:.1e}", flush=True)
    return not num_differ and error <= 0.02


class Tree:
    """One tree, given by the parents of its nodes."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.width = len(parents)
        self.paths: list[list[int]] = []  # from the root to each node
        for node, parent in enumerate(parents):
            self.paths.append([*self.paths[parent], node] if node else [0])

    def strips(self) -> Tensor:
        """`Layout.strips` of the tree, [width] int32."""
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
        """`Layout.paths` of the tree, [width, longest] int32."""
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
    """A tree of one row over layers of random keys and values."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, width: int, context: int, is_chain: bool = False
    ) -> None:
        self.context, self.tiles = context, tiles_for(head_dim, DTYPE)
        self.tree = Tree([max(node - 1, 0) for node in range(width)]) if is_chain else random_tree(width)
        layer_bytes = 2 * context * kv_heads * head_dim * DTYPE.itemsize
        num_layers = min(max(round(GRAPH_BYTES / layer_bytes), 2), 40) if DEVICE.type == "cuda" else 2
        num_layers = 1 if is_chain else num_layers
        num_pages = -(-(context + width) // PAGE)
        shape = (num_layers, (num_pages + 1) * PAGE, kv_heads, head_dim)
        self.keys, self.values = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
        self.query = torch.randn(width, heads, head_dim, dtype=DTYPE, device=DEVICE)
        pages = 1 + torch.randperm(num_pages, device=DEVICE)
        index = torch.arange(context + width, device=DEVICE)
        self.slots = pages[index // PAGE] * PAGE + index % PAGE
        self.layout = layout_of(self.tree, context, pages)
        # A step makes these once for all layers.
        self.plan = plan(self.layout, heads // kv_heads, self.tiles)
        self.scratch = torch.empty(scratch_size(self.layout, heads, head_dim, self.tiles), device=DEVICE)
        seen = nn.functional.pad(self.tree.ancestors(), (context, 0), value=True)[None]
        mask = torch.zeros(seen.shape, dtype=DTYPE, device=DEVICE).masked_fill_(~seen, -torch.inf)
        self.mask = mask[:, None].repeat(1, 1, heads // kv_heads, 1)
        self.read_bytes = layer_bytes

    def by_kernels(self, layer: int) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        return tree_attention(self.query, keys, values, self.layout, self.plan, tiles=self.tiles, scratch=self.scratch)

    def by_sdpa(self, layer: int) -> Tensor:
        """Attention over the first slots: which text they hold does not change the time."""
        num_keys = self.mask.shape[3]
        return self._attended(self.keys[layer, :num_keys], self.values[layer, :num_keys])

    def error(self) -> float:
        """The greatest difference from SDPA."""
        expected = self._attended(self.keys[0, self.slots], self.values[0, self.slots])
        return (self.by_kernels(0).float() - expected.float()).abs().max().item()

    def _attended(self, keys: Tensor, values: Tensor) -> Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in (self.query, keys, values))
        return attend(query, key, value, self.mask)[0].transpose(0, 1).flatten(1)

    def nodes_that_differ(self) -> int:
        """How many of some nodes get other bits than in plain decoding.

        Nodes are taken from the tree, and from a chain that crosses the end of a block and of a split.
        """
        width, heads, head_dim = self.query.shape
        kv_heads, end_of_split = self.keys.shape[2], self.context // 1024 * 1024
        chain = Case(heads, kv_heads, head_dim, width, max(end_of_split - 8, 56), is_chain=True)
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


def layout_of(tree: Tree, context: int, pages: Tensor) -> Layout:
    """The layout of a step with one row."""
    width, row = tree.width, torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return Layout(
        rows=row.repeat(width),
        places=torch.arange(width, dtype=torch.int32, device=DEVICE),
        depths=torch.tensor([len(path) - 1 for path in tree.paths], dtype=torch.int32, device=DEVICE),
        paths=tree.padded_paths(),
        starts=row,
        counts=torch.full_like(row, width),
        lengths=torch.full_like(row, context),
        table_rows=row + 1,
        tables=torch.stack([torch.zeros_like(pages), pages]).int(),
        max_context=context,
        strips=tree.strips(),
    )


def random_tree(width: int) -> Tree:
    rng = random.Random(width)
    return Tree([0, *(rng.randrange(node) for node in range(1, width))])


def time_sglang() -> None:
    """Prints the microseconds of a layer by SGLang's kernel and by ours, for each case."""
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    from graft.integrations.sglang.kernels import verify_attention

    heads, kv_heads, head_dim = SHAPES["8b"]
    layers = range(32)
    print(f"{'requests, places, tokens':>26s}{'SGLang':>9s}{'ours':>9s}{'largest difference':>20s}")
    for batch, places, length in SGLANG_CASES:
        torch.manual_seed(0)
        query, ours, theirs = torch.randn(3, batch * places, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        new = torch.randn(2, batch * places, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        cache = torch.randn(2, batch * length + 100, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        rows = torch.arange(batch + 1, device="cuda")
        slots = torch.randperm(cache.shape[1], device="cuda")[: batch * length]
        trees = torch.rand(batch, places, places, device="cuda").lt(0.4).tril()
        trees |= torch.eye(places, device="cuda", dtype=torch.bool)
        texts = torch.ones(batch, places, length, device="cuda", dtype=torch.bool)
        mask, mask_starts = torch.cat([texts, trees], dim=2).flatten(), rows * places * (length + places)
        starts, key_starts = (rows * places).int(), (rows * length).int()
        scale = head_dim**-0.5
        prefix = (*cache, starts, key_starts, slots, mask, True, mask_starts, places, 1.0, 1.0, scale)
        own = (*cache, key_starts, slots, mask, mask_starts, places, scale)
        by_sglang = partial(extend_attention_fwd, query, *new, theirs, *prefix)
        by_ours = partial(verify_attention, query, *new, ours, *own)
        times = [microseconds(lambda _, run=run: run(), layers) for run in (by_sglang, by_ours)]
        difference = (ours.float() - theirs.float()).abs().max().item()
        case = f"{batch},{places},{length}"
        print(f"{case:>26s}{times[0]:9.1f}{times[1]:9.1f}{difference:20.4f}", flush=True)


if __name__ == "__main__":
    main()

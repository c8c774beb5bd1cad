"""How fast are a layer's experts beside the time to read the weights that are touched, and are a token's bits its own?

    python benchmarks/expert_products.py --shape qwen3-30b-a3b
    python benchmarks/expert_products.py --shape gpt-oss-20b --search

Times are microseconds of one layer's router, grouping, two products and sum, from a CUDA graph of different tokens and
two layers, so that few weights are in the L2 cache; `all` is the layer. `limit` is the time to read the router and the
experts that the tokens touch, at the bandwidth of a copy measured in the same run. Each line also says whether a token
has the bits that it has alone, and the largest error, relative to a product in float32. The exit status is 1 if bits
differ. `--search` times the products with other tiles, too, and prints the fastest.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from common import DEVICE, command_line, copy_bandwidth, device_name, microseconds, numbers, parse_with_dry_run
from torch import Tensor

from graft.model.kernels import experts as kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import overlap, routing
from graft.model.kernels.experts import Tile, tiles_for
from graft.model.kernels.mixed import Mixed
from graft.model.kernels.routing import Choice, Groups
from graft.model.network import Router

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16
TOKENS = (1, 4, 16, 64, 256)
NUM_LAYERS, NUM_BATCHES = 2, 4  # of different weights and tokens in a timed graph
NUM_SHOWN = 4  # tiles


@dataclass(frozen=True)
class Shape:
    hidden: int
    neurons: int
    num_experts: int
    router: Router  # all but its weights
    clamp: tuple[float, float] | None = None  # then there are biases, and gates and ups take turns


NONE = torch.empty(0)
SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, Router(NONE, None, None, "softmax", 8, normalise=True)),
    "gpt-oss-20b": Shape(2880, 2880, 32, Router(NONE, None, None, "softmax_of_chosen", 4), (7.0, 1.702)),
    "mixtral-8x7b": Shape(4096, 14336, 8, Router(NONE, None, None, "softmax", 2, normalise=True, wide_weights=True)),
}
TINY = Shape(128, 64, 8, Router(NONE, None, None, "softmax", 2, normalise=True))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated; all if not given")
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS), help="of a step, such as 1,16,64")
    parser.add_argument("--search", action="store_true", help="time the products with other tiles too")
    parser.add_argument("--no-overlap", action="store_true", help="launch kernels one after the other")
    options = parse_with_dry_run(parser)
    shapes, copied = {name: SHAPES[name] for name in options.shape or SHAPES}, 2**31
    if options.dry_run:
        shapes, options.tokens, copied = {"tiny": TINY}, [1, 5], 2**20
    bandwidth = copy_bandwidth(copied)
    print(f"{device_name()}, {DTYPE}, copy {bandwidth / 1e12:.2f} TB/s")
    with overlap.launches(not options.no_overlap):
        is_right = [
            print_shape(name, shape, options.tokens, bandwidth, options.search) for name, shape in shapes.items()
        ]
    if not all(is_right):
        sys.exit("some tokens have other bits in company")


def print_shape(name: str, shape: Shape, tokens: Sequence[int], bandwidth: float, searches: bool) -> bool:
    """Time a shape with each number of tokens. Returns whether all bits are right."""
    layers = [Layer(shape, seed) for seed in range(NUM_LAYERS if DEVICE.type == "cuda" else 1)]
    many = torch.randn(max(*tokens, 2) * NUM_BATCHES, shape.hidden, device=DEVICE).to(DTYPE)
    print(f"\n{name}: hidden {shape.hidden}, neurons {shape.neurons}, {shape.num_experts} experts")
    titles = ("router", "group", "up", "down", "sum", "all", "limit")
    print(f"{'tokens':>6}{''.join(f'{title:>8}' for title in titles)}{'times':>7}  bits, error")
    are_right = True
    for count in tokens:
        cases = [Case(layer, many[batch * count :][:count]) for batch in range(NUM_BATCHES) for layer in layers]
        steps = (Case.choose, Case.group, Case.up, Case.down, Case.add)
        # One token has no groups, so there is nothing to time.
        parts = [0.0 if count == 1 and run is Case.group else microseconds(partial(run), cases) for run in steps]
        whole = microseconds(Case.run, cases)
        limit = sum(case.read_bytes for case in cases) / len(cases) / bandwidth * 1e6
        num_wrong, error = cases[0].tokens_that_differ(), cases[0].error()
        are_right &= num_wrong == 0
        bits = f"{num_wrong} DIFFER" if num_wrong else "same"
        figures = "".join(f"{part:8.1f}" for part in (*parts, whole, limit))
        print(f"{count:6d}{figures}{whole / limit:7.2f}  {bits}, {error:.1e}", flush=True)
        if searches:
            are_right &= search(cases)
    return are_right


class Layer:
    """Random weights of one layer."""

    def __init__(self, shape: Shape, seed: int) -> None:
        torch.manual_seed(seed)
        self.shape = shape
        number, inner, size = shape.num_experts, shape.neurons, shape.hidden

        def normal(*sizes: int, of: int) -> Tensor:
            return torch.empty(sizes, device=DEVICE, dtype=DTYPE).normal_(0, of**-0.5)

        self.router = replace(shape.router, weight=normal(number, size, of=size))
        self.gate_up = normal(number, 2, inner, size, of=size)
        self.down = normal(number, 1, size, inner, of=inner)
        self.biases: list[Tensor | None] = [None, None]
        if shape.clamp is not None:
            self.gate_up = self.gate_up.view(number, inner, 2, size).transpose(1, 2)
            self.biases = [normal(*sizes, of=1) for sizes in ((number, 2, inner), (number, 1, size))]
            self.router = replace(self.router, bias=normal(number, of=1))


class Case:
    """One layer and some tokens."""

    def __init__(self, layer: Layer, x: Tensor, tiles: tuple[Tile, Tile] | None = None) -> None:
        self.layer, self.x, self.router = layer, x, layer.router
        self.tiles = tiles or tiles_for(len(x), self.router.num_experts, self.router.top_k, x.shape[1], x.dtype)
        self.choice: Choice = self.choose()
        self.groups: Groups | None = self.group()
        self.active = self.up()
        self.results = self.down()
        self.nothing = torch.zeros_like(x)

    def choose(self) -> Choice:
        return routing.choose(self.x, self.router)

    def group(self) -> Groups | None:
        return routing.group(self.choice, self.router.num_experts, self.tiles[0].tokens)

    def up(self, tile: Tile | None = None) -> Tensor:
        layer, tile = self.layer, tile or self.tiles[0]
        clamp = layer.shape.clamp
        return kernels.multiply(self.x, layer.gate_up, self.choice, self.groups, tile, layer.biases[0], clamp=clamp)

    def down(self, tile: Tile | None = None) -> Tensor:
        layer, tile = self.layer, tile or self.tiles[1]
        return kernels.multiply(self.active, layer.down, self.choice, self.groups, tile, layer.biases[1])

    def add(self) -> Tensor:
        mixed = Mixed(self.results, self.choice.weights, self.router.wide_weights)
        return layer_kernels.add_norm(self.nothing, mixed, None)[0]

    def run(self) -> Tensor:
        """All of the layer, from new memory."""
        return Case(self.layer, self.x, self.tiles).add()

    @property
    def read_bytes(self) -> float:
        touched = len(self.choice.experts.unique()) / self.router.num_experts
        layer = self.layer
        return layer.router.weight.nbytes + touched * (layer.gate_up.nbytes + layer.down.nbytes)

    def tokens_that_differ(self) -> int:
        """How many of a few tokens have other bits than alone."""
        together, count = self.run(), len(self.x)
        places = sorted({0, count // 2, count - 1})
        return sum(not torch.equal(Case(self.layer, self.x[at : at + 1]).add()[0], together[at]) for at in places)

    def error(self) -> float:
        """The largest error of the first token, relative to the largest number, beside products in float32."""
        layer, x = self.layer, self.x[0].float()
        total = torch.zeros(layer.shape.hidden, device=x.device)
        for expert, weight in zip(self.choice.experts[0].tolist(), self.choice.weights[0], strict=True):
            gate, up = layer.gate_up[expert].float() @ x + (
                layer.biases[0][expert] if layer.biases[0] is not None else 0
            )
            if layer.shape.clamp is None:
                inner = torch.nn.functional.silu(gate) * up
            else:
                limit, alpha = layer.shape.clamp
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
            down = layer.down[expert, 0].float() @ inner
            total += weight * (down + (layer.biases[1][expert, 0] if layer.biases[1] is not None else 0))
        return float((self.add()[0].float() - total).abs().max() / total.abs().max())


def search(cases: Sequence[Case]) -> bool:
    """Time both products with other tiles, and print the fastest. Returns whether all gave the same bits."""
    are_right = True
    first = cases[0]
    for tokens in candidates_of_tokens(len(first.x), first.router):
        own = [Case(case.layer, case.x, tuple(replace(tile, tokens=tokens) for tile in case.tiles)) for case in cases]
        for name, run, chosen in (("up", Case.up, 0), ("down", Case.down, 1)):
            expected, timed = run(first), list[tuple[float, Tile]]()
            for tile in (first.tiles[chosen], *tiles_to_try(tokens, 2 - chosen)):
                if tile.tokens == tokens:
                    call: Callable[[Case], Tensor] = partial(run, tile=tile)
                    are_right &= DEVICE.type == "cpu" or torch.equal(call(own[0]), expected)  # NumPy adds differently
                    timed.append((microseconds(call, own), tile))
            timed.sort(key=lambda each: each[0])
            shown = "; ".join(
                f"{time:.1f} {t.outputs}x{t.inputs} {t.warps}w {t.stages}s" for time, t in timed[:NUM_SHOWN]
            )
            print(f"       {name:>5} {tokens:3d} tokens an item: {shown}; slowest {timed[-1][0]:.1f}", flush=True)
    return are_right


def candidates_of_tokens(num_tokens: int, router: Router) -> list[int]:
    """Tokens of an item that are worth a try: about as many as an expert has, to four times as many."""
    by_expert = num_tokens * router.top_k / router.num_experts
    return [tokens for tokens in (16, 32, 64, 128) if tokens == 16 or by_expert <= 2 * tokens <= 16 * by_expert][:2]


def tiles_to_try(tokens: int, parts: int) -> Iterator[Tile]:
    """Tiles whose blocks fit in the shared memory of a program, or of half a processor."""
    for outputs in (64, 128):
        for inputs in (128, 256) if tokens <= 32 else (64, 128):
            size = (parts * outputs + tokens) * inputs * 2
            for memory in (227 * 1024, 113 * 1024):
                stages = min((memory - 1024) // size, 8)
                is_wide = parts * outputs > 128  # too many numbers for four warps
                if stages >= 2 and (tokens >= 64 or not is_wide):
                    yield Tile(tokens, outputs, inputs, 8 if is_wide else 4, stages)


if __name__ == "__main__":
    main()

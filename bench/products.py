"""Our matrix products beside PyTorch's: microseconds by the number of tokens, and whether a token's bits depend on it.

    python bench/products.py

For each weight of a model's shape and 1, 16, 64 and 128 tokens: the kernel of `target/product_kernels.py`, PyTorch's
product, and how long reading the weight takes at the bandwidth of a copy in the same run. Weights are read from memory,
not from the device's cache: each is there many times over. `--dry-run` goes through it in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

if "--dry-run" in sys.argv:  # before Triton is imported
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import interpreter  # noqa: F401

from step_time import DEVICE, DTYPE, MODELS, copy_bandwidth, milliseconds

from graft.target.product_kernels import Products, cut_of

TOKENS = (1, 16, 64, 128)
FAR_FROM_CACHED = 600e6  # bytes of one kind of weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=MODELS)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if DEVICE.type == "cpu" and not options.dry_run:
        parser.error("no GPU; --dry-run runs a small weight without one")
    bandwidth = copy_bandwidth(2**31 if DEVICE.type == "cuda" else 2**20)
    print(f"copy {bandwidth / 1e12:.2f} TB/s; microseconds, ours / PyTorch's, and whether bits are the same")
    heads = "".join(f"{count:>16d}" for count in TOKENS)
    print(f"{'weight':28s}{'read':>8s}{heads}  same")
    for shape in options.shape or MODELS:
        weights = {"small": (128, 192)} if options.dry_run else weights_of(shape)
        for name, size in weights.items():
            print(f"{shape + ' ' + name:28s}" + line(size, bandwidth), flush=True)
        if options.dry_run:
            break


def weights_of(name: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products, and of the last one."""
    shape, vocab = MODELS[name]
    sizes = shape.attention_and_mlp
    hidden, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    return {
        "q, k, v": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
        "logits": (vocab, hidden),
    }


def line(size: tuple[int, int], bandwidth: float) -> str:
    dtype = DTYPE if DEVICE.type == "cuda" else torch.float16
    num_bytes = size[0] * size[1] * dtype.itemsize
    count = max(round(FAR_FROM_CACHED / num_bytes), 2) if DEVICE.type == "cuda" else 1
    weights = [torch.randn(size, device=DEVICE).to(dtype) * 0.02 for _ in range(count)]
    tokens = torch.randn(TOKENS[-1], size[1], device=DEVICE).to(dtype)
    cut = cut_of(size, dtype)
    assert cut is not None, f"{size} cannot be cut"
    products = Products(tokens.device)
    results, columns = [], []
    for number in TOKENS:
        x = tokens[:number].contiguous()
        results.append(products.multiply(x, weights[0], None, cut))
        ours = microseconds(lambda weight, x=x: products.multiply(x, weight, None, cut), weights)
        theirs = microseconds(lambda weight, x=x: linear(x, weight), weights)
        columns.append(f"{ours:8.1f}{theirs:8.1f}")
    same = all(torch.equal(few, results[-1][: len(few)]) for few in results)
    return f"{num_bytes / bandwidth * 1e6:8.1f}{''.join(columns)}  {same}"


def microseconds(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Of one product: a graph of one with every weight."""

    def all_of_them() -> None:
        for weight in weights:
            run(weight)

    all_of_them()
    if DEVICE.type == "cpu":
        return milliseconds(all_of_them) / len(weights) * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    return milliseconds(graph.replay, count=5) / len(weights) * 1e3


if __name__ == "__main__":
    main()

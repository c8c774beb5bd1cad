"""How long do our matrix products take beside PyTorch's, and do a token's bits depend on the tokens beside it?

    python benchmarks/products.py --shape llama-8b
    python benchmarks/products.py --shape llama-8b --tokens 512,1024,2048

For each weight of a model's shape and each number of tokens: the kernel of `model/kernels/matmul.py`, PyTorch's
product, and how long reading the weight takes at the bandwidth of a copy measured in the same run. Then a layer's
products together, and how much longer ours take. Each weight exists many times over, so that it is read from memory and
not from the device's cache. `same` says whether tokens had the same bits beside any number of others, at any place and
beside other tokens.
"""

from __future__ import annotations

import torch
from common import (
    DEVICE,
    DTYPE,
    FAR_FROM_CACHED,
    MODELS,
    add_dry_run,
    command_line,
    copy_bandwidth,
    microseconds,
    numbers,
    require_gpu,
)
from torch.nn.functional import linear

from graft.model.kernels.matmul import Products, can_multiply

TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shape", action="append", choices=MODELS, help="weights of this model; may be repeated")
    parser.add_argument("--tokens", default=TOKENS, type=numbers, metavar="N,N", help="numbers of tokens")
    add_dry_run(parser)
    options = parser.parse_args()
    counts = sorted(options.tokens)
    require_gpu(parser, options.dry_run)
    bandwidth = copy_bandwidth(2**31 if DEVICE.type == "cuda" else 2**20)
    print(f"copy {bandwidth / 1e12:.2f} TB/s; microseconds, by the number of tokens")
    print(f"{'weight':24s}{'read':>8s}{'':12s}{''.join(f'{count:8d}' for count in counts)}")
    for shape in options.shape or MODELS:
        weights = {"small": (64, 64)} if options.dry_run else weights_of(shape)
        layer = [[0.0] * len(counts), [0.0] * len(counts)]
        for name, size in weights.items():
            times, same = compare(size, counts)
            read = f"{size[0] * size[1] * DTYPE.itemsize / bandwidth * 1e6:8.1f}"
            show(f"{shape + ' ' + name:24s}{read}", times, f"  same {same}")
            if name != "logits":
                layer = [[a + b for a, b in zip(*both, strict=True)] for both in zip(layer, times, strict=True)]
        show(f"{shape + ' layer':32s}", layer)
        ratios = "".join(f"{(ours / theirs - 1) * 100:+8.1f}" for ours, theirs in zip(*layer, strict=True))
        print(f"{'':34s}{'ours, %':10s}{ratios}", flush=True)
        if options.dry_run:
            break


def show(title: str, times: list[list[float]], note: str = "") -> None:
    for who, row in zip(("ours", "PyTorch's"), times, strict=True):
        print(f"{title:32s}  {who:10s}{''.join(f'{time:8.1f}' for time in row)}{note}", flush=True)
        title, note = "", ""


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


def compare(size: tuple[int, int], counts: list[int]) -> tuple[list[list[float]], bool]:
    """Times of our products and of PyTorch's, and whether bits are the same."""
    assert can_multiply(size), f"{size} are no multiples of 64"
    dtype = DTYPE if DEVICE.type == "cuda" else torch.float16
    count = max(round(FAR_FROM_CACHED / (size[0] * size[1] * dtype.itemsize)), 2) if DEVICE.type == "cuda" else 1
    weights = [torch.randn(size, device=DEVICE).to(dtype) * 0.02 for _ in range(count)]
    tokens = torch.randn(counts[-1], size[1], device=DEVICE).to(dtype)
    products = Products(tokens.device)
    expected = products.multiply(tokens, weights[0])
    microseconds(lambda weight: linear(tokens, weight), weights)  # clocks rise
    times: list[list[float]] = [[], []]
    same = True
    for number in counts:
        x = tokens[:number].contiguous()
        beside = torch.randn_like(x)
        beside[number // 2] = x[number // 2]
        same = same and torch.equal(products.multiply(x, weights[0]), expected[:number])
        same = same and torch.equal(products.multiply(tokens[-number:], weights[0]), expected[-number:])
        same = same and torch.equal(products.multiply(beside, weights[0])[number // 2], expected[number // 2])
        for row, run in zip(times, (products.multiply, linear), strict=True):
            row.append(microseconds(lambda weight, x=x, run=run: run(x, weight), weights))
    return times, same


if __name__ == "__main__":
    main()

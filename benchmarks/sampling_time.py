"""How long does drawing the tokens of a step take: Graft's kernel, beside the usual operations of PyTorch?

    python benchmarks/sampling_time.py
    python benchmarks/sampling_time.py --places 64 --vocab 128256

Times are microseconds for all places, from CUDA graphs over logits that are not in the L2 cache. In half of the places
one token is almost certain. PyTorch sorts the probabilities, cuts them off and draws by exponential noise, as engines
do without kernels of their own.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from common import DEVICE, command_line, device_name, microseconds, parse_with_dry_run
from torch import Tensor

from graft.model.kernels.draw import draw

SETTINGS = {
    "greedy": (0.0, 0, 1.0),
    "temperature 1": (1.0, 0, 1.0),
    "top-p 0.95": (1.0, 0, 0.95),
    "top-k 50": (1.0, 50, 1.0),
}
NUM_SETS = 8  # of logits: together far more than the cache holds


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--places", type=int, default=64, help="tokens that are drawn, each of a row of its own")
    parser.add_argument("--vocab", type=int, default=128_256, help="tokens of the vocabulary")
    options = parse_with_dry_run(parser)
    places, vocab, count = options.places, options.vocab, NUM_SETS
    if options.dry_run:
        places, vocab, count = 2, 300, 1
    torch.manual_seed(0)
    all_logits = [torch.randn(places, vocab, device=DEVICE) * 3 for _ in range(count)]
    for logits in all_logits:
        logits[::2, 7] += 25
    print(f"{device_name()}, {places} places, {vocab:,} tokens; microseconds")
    print(f"{'':16s}{'Graft':>10s}{'PyTorch':>10s}")
    for name, (temperature, top_k, top_p) in SETTINGS.items():
        ours = drawing(places, temperature, top_k, top_p)
        theirs = partial(drawn_by_torch, temperature=temperature, top_k=top_k, top_p=top_p)
        if not all(int(ours(logits).max()) < vocab and int(theirs(logits).max()) < vocab for logits in all_logits):
            sys.exit(f"{name}: a token outside the vocabulary was drawn")
        print(f"{name:16s}{microseconds(ours, all_logits):10.1f}{microseconds(theirs, all_logits):10.1f}", flush=True)


def drawing(places: int, temperature: float, top_k: int, top_p: float) -> Callable[[Tensor], Tensor]:
    """Graft's draw of rows that all have these settings; rows, seeds and limits lie on the device."""
    rows = torch.arange(places, device=DEVICE)
    ones, zeros, out = torch.ones(places, device=DEVICE), torch.zeros_like(rows), torch.empty_like(rows)
    settings = (ones * temperature, zeros + top_k, ones * top_p, ones * 0)

    def run(logits: Tensor) -> Tensor:
        draw(logits, rows, zeros, rows, zeros, *settings, out, truncates=top_k > 0 or top_p < 1)
        return out

    return run


def drawn_by_torch(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    probs = (logits / temperature).softmax(dim=-1)
    if top_k == 0 and top_p == 1:
        return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)
    ordered, tokens = probs.sort(dim=-1, descending=True)
    kept = (ordered.cumsum(dim=-1) - ordered <= top_p) & (
        torch.arange(logits.shape[1], device=DEVICE) < (top_k or logits.shape[1])
    )
    ordered = torch.where(kept, ordered, 0.0)
    return tokens.gather(1, (ordered / torch.empty_like(ordered).exponential_()).argmax(dim=-1, keepdim=True))[:, 0]


if __name__ == "__main__":
    main()

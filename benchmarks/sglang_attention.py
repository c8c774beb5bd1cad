"""Attention of a verify by SGLang's triton kernel and by ours, in microseconds of a layer of an 8B Llama.

    python bench/sglang_attention.py

Needs SGLang 0.5.15 and a GPU. The cases are those of docs/engines.md unless others are given.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from tree_attention import microseconds

from graft.integrations.sglang.kernels import verify_attention

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
CASES = "1,48,300 1,48,2000 4,32,300 16,8,300 32,4,300 64,1,300"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="requests, places and tokens before them, with spaces between")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU")
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    print(f"{'requests, places, tokens':>26s}{'SGLang':>9s}{'ours':>9s}{'largest difference':>20s}")
    for case in options.cases.split():
        batch, places, length = map(int, case.split(","))
        torch.manual_seed(0)
        query, ours, theirs = torch.randn(3, batch * places, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        new = torch.randn(2, batch * places, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        cache = torch.randn(2, batch * length + 100, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        rows = torch.arange(batch + 1, device="cuda")
        slots = torch.randperm(cache.shape[1], device="cuda")[: batch * length]
        trees = torch.rand(batch, places, places, device="cuda").lt(0.4).tril()
        trees |= torch.eye(places, device="cuda", dtype=torch.bool)
        texts = torch.ones(batch, places, length, device="cuda", dtype=torch.bool)
        mask, mask_starts = torch.cat([texts, trees], dim=2).flatten(), rows * places * (length + places)
        starts, key_starts = (rows * places).int(), (rows * length).int()
        scale = HEAD_DIM**-0.5
        prefix = (*cache, starts, key_starts, slots, mask, True, mask_starts, places, 1.0, 1.0, scale)
        theirs_us = of_a_layer(partial(extend_attention_fwd, query, *new, theirs, *prefix))
        own = (*cache, key_starts, slots, mask, mask_starts, places, scale)
        ours_us = of_a_layer(partial(verify_attention, query, *new, ours, *own))
        difference = (ours.float() - theirs.float()).abs().max().item()
        print(f"{case:>26s}{theirs_us:9.1f}{ours_us:9.1f}{difference:20.4f}", flush=True)


def of_a_layer(run: Callable[[], object]) -> float:
    """Microseconds."""
    return microseconds(lambda _: run(), LAYERS)[0]


if __name__ == "__main__":
    main()

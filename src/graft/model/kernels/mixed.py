"""The weighted sum of a token's experts, as a part of the kernel that adds it to the residual stream. Needs Triton."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """What experts give, before it is added up."""

    results: Tensor  # [T * top_k, size], by token and then in the order of the token's experts
    weights: Tensor  # [T, top_k] float32
    wide: bool  # weighted results stay in float32; otherwise each is rounded
    shared: Tensor | None = None  # [T, size] of the shared expert
    gates: Tensor | None = None  # [T] float32: its sigmoid scales the shared expert's result


@triton.jit
def summed(
    results: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor | None,
    gates: tl.tensor | None,
    token: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """One token's sum, in float32 from the first expert to the last, rounded where transformers' modules round."""
    kind: tl.constexpr = results.dtype.element_ty
    token = token.to(tl.int64)
    total = tl.zeros(columns.shape, tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + number
        part = tl.load(results + pair * SIZE + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(weights + pair)
        if not WIDE:
            part = part.to(kind).to(tl.float32)
        total += part
    total = total.to(kind)
    if shared is not None:
        more = tl.load(shared + token * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        if gates is not None:
            gate = 1.0 / (1.0 + tl.exp(-tl.load(gates + token).to(kind).to(tl.float32)))
            more = (gate.to(kind).to(tl.float32) * more).to(kind).to(tl.float32)
        total = (total.to(tl.float32) + more).to(kind)
    return total

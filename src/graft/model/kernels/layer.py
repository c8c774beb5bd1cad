"""Triton kernels of a decoder layer between its matrix products: norms, residual sums, activations. Needs Triton.

Rotary positions are in `rotary`.

Each kernel rounds where transformers' modules round, so results differ only by the order of sums. A token's result
does not depend on other tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate, overlap
from graft.model.kernels.eight_bits import fitted
from graft.model.kernels.gate import is_shut
from graft.model.kernels.mixed import Mixed, summed
from graft.model.kernels.overlap import start_next, wait_for_previous
from graft.model.network import Activation, Norm

_NEURONS_AT_ONCE = 1024
_NUMBERS_AT_ONCE = 1024
# Activations, by number; 0 is none.
ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu_squared": 4}
_SILU, _GELU_TANH, _GELU = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


def lay_out(parents: Tensor, places: Tensor, depths: Tensor, starts: Tensor, rows: Tensor, max_path: int) -> Tensor:
    """Paths [T, max_path] of a step's tokens for a `Layout`; only written where depth and place differ.

    parents: [T] int32 places in the same row. Tokens whose path is written are at most max_path - 1 deep.
    """
    paths = parents.new_empty(len(parents), max_path)
    numbers = (parents, places, depths, starts, rows, paths)
    _lay_out_kernel[(len(parents),)](*numbers, max_path, num_warps=1, **gate.options())
    return paths


def add_norm(
    stream: Tensor,
    delta: Tensor | Mixed | None,
    norm: Tensor | Norm | None,
    eps: float = 0.0,
    total: Tensor | None = None,
    normed: Tensor | None = None,
    *,
    post: Norm | None = None,
    more: Tensor | None = None,
    sum_first: bool = False,
    scale: float = 1.0,
    output_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """output_scale * (stream + scale * post(delta) + more), and its norm; all [tokens, size].

    norm: a tensor is the weight of an RMS norm with this eps, [size] or [weights, size]. Several weights take turns:
    the first is that of token 0, the second that of token 1, and so on. None: the second result is the first.
    delta: if it is `Mixed`, its sum. more: a second delta, which is added last; sum_first: to the first delta.
    total, normed: where to write the two results; None: new tensors. Without a delta, the total is the stream itself.
    `normed` may be in 8 bits.

    The first kernel of a stack of layers has no delta. Its launch does not overlap, so it sees all earlier writes (see
    `overlap`). So it is launched even if there is nothing to compute.
    """
    num_tokens, size = stream.shape
    if delta is None:
        total = stream
    elif total is None:
        total = torch.empty_like(stream)
    if norm is None and delta is not None:
        normed = total
    elif normed is None:
        normed = torch.empty_like(stream)
    weight, bias, own_eps, flags = parts_of(norm, eps, stream)
    post_weight, post_bias, post_eps, post_flags = parts_of(post, 0.0, stream)
    block = triton.next_power_of_2(size)
    given = delta.results if isinstance(delta, Mixed) else stream if delta is None else delta
    _add_norm_kernel[(num_tokens,)](
        *(stream, given, stream if more is None else more),
        *((delta.weights, delta.shared, delta.gates) if isinstance(delta, Mixed) else (None, None, None)),
        *(weight, bias, post_weight, post_bias, total, normed, own_eps, post_eps, scale, output_scale),
        HAS_DELTA=delta is not None,
        TOP_K=delta.weights.shape[1] if isinstance(delta, Mixed) else 0,
        IS_WIDE=isinstance(delta, Mixed) and delta.wide,
        HAS_MORE=more is not None,
        SUM_FIRST=sum_first,
        IS_SCALED=scale != 1,
        IS_OUTPUT_SCALED=output_scale != 1,
        NORM=flags,
        POST=post_flags,
        NUM_WEIGHTS=max(weight.numel() // size, 1) if isinstance(norm, Tensor) else 1,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **(overlap.USUAL if delta is None else overlap.options(stream.device)),
        **gate.options(),
    )
    return total, normed


def parts_of(
    norm: Tensor | Norm | None, eps: float, like: Tensor
) -> tuple[Tensor, Tensor, float, tuple[Any, ...] | None]:
    """A norm's weight, bias (`like`, if there is none), eps, and the flags that `scale_of` and `_normed` take."""
    if norm is None:
        return like, like, 0.0, None
    if isinstance(norm, Tensor):
        return norm, like, eps, (False, True, False, 0, True)
    weight, bias = norm.weight, norm.bias
    # A layer norm of PyTorch's takes the sum of weight and 1 in the weight's dtype.
    plus_one = int(norm.plus_one) * (2 if norm.kind == "layer" else 1)
    flags = (norm.kind == "layer", weight is not None, bias is not None, plus_one, norm.rounds)
    return like if weight is None else weight.detach(), like if bias is None else bias.detach(), norm.eps, flags


def activate(x: Tensor, activation: Activation = "silu", gated: bool = True) -> Tensor:
    """activation(gate) * up of [tokens, 2 * neurons], gates first; not gated: of [tokens, neurons]."""
    num_tokens, size = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = x.new_empty(num_tokens, size)
    block = min(triton.next_power_of_2(size), _NEURONS_AT_ONCE)
    number = ACTIVATIONS[activation]
    _activate_kernel[num_tokens, triton.cdiv(size, block)](
        x, out, SIZE=size, ACTIVATION=number, IS_GATED=gated, BLOCK=block, **gate.options()
    )
    return out


def finish_logits(logits: Tensor, scale: float, softcap: float | None) -> None:
    """Scale logits, and cap them at +- softcap by tanh, in place."""
    if scale == 1 and softcap is None:
        return
    count, block = logits.numel(), _NUMBERS_AT_ONCE
    _logits_kernel[(triton.cdiv(count, block),)](
        *(logits, count, scale, softcap or 1.0),
        IS_SCALED=scale != 1,
        IS_CAPPED=softcap is not None,
        BLOCK=block,
        **gate.options(),
    )


@triton.jit(do_not_specialize=["max_path"])
def _lay_out_kernel(
    parents: tl.tensor,
    places: tl.tensor,
    depths: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    paths: tl.tensor,
    max_path: int,
    flag: tl.tensor | None = None,
) -> None:
    """Walk from one token up to the root, and write its path from the end."""
    if is_shut(flag):
        return
    token = tl.program_id(0)
    place = tl.load(places + token)
    depth = tl.load(depths + token)
    if depth != place:
        parents += tl.load(starts + tl.load(rows + token))
        paths += token.to(tl.int64) * max_path
        while place > 0:
            tl.store(paths + depth, place)
            place = tl.load(parents + place)
            depth -= 1
        tl.store(paths, 0)


@triton.jit
def rms_normed(x: tl.tensor, weight: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """RMS norm, rounded before and after the weight, as in transformers' modules."""
    scaled = (x.to(tl.float32) * inverse).to(x.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def scale_of(weight: tl.tensor, at: tl.tensor, inside: tl.tensor, FLAGS: tl.constexpr) -> tl.tensor:
    """A norm's weights in float32; 1 if it has none."""
    HAS_WEIGHT: tl.constexpr = FLAGS[1]
    PLUS_ONE: tl.constexpr = FLAGS[3]
    scale = tl.where(inside, 1.0, 0.0)
    if HAS_WEIGHT:
        stored = tl.load(weight + at, mask=inside, other=0.0)
        scale = stored.to(tl.float32)
        if PLUS_ONE > 0:
            scale += 1.0
        if PLUS_ONE > 1:
            scale = scale.to(stored.dtype).to(tl.float32)
    return scale


@triton.jit
def _normed(
    x: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    eps: float,
    SIZE: tl.constexpr,
    FLAGS: tl.constexpr,
) -> tl.tensor:
    """Norm of one token, rounded where its module rounds."""
    IS_LAYER: tl.constexpr = FLAGS[0]
    HAS_BIAS: tl.constexpr = FLAGS[2]
    ROUNDS: tl.constexpr = FLAGS[4]
    wide = x.to(tl.float32)
    if IS_LAYER:
        wide = tl.where(inside, wide - tl.sum(wide, axis=0) / SIZE, 0.0)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    if ROUNDS:
        wide = wide.to(x.dtype).to(tl.float32)
    wide *= scale
    if HAS_BIAS:
        wide += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return wide.to(x.dtype)


@triton.jit
def _sum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def scaled(x: tl.tensor, factor: float) -> tl.tensor:
    return (x.to(tl.float32) * factor).to(x.dtype)


@triton.jit
def _add_norm_kernel(
    stream: tl.tensor,
    delta: tl.tensor,
    more: tl.tensor,
    expert_weights: tl.tensor | None,
    shared: tl.tensor | None,
    gates: tl.tensor | None,
    weight: tl.tensor,
    bias: tl.tensor,
    post_weight: tl.tensor,
    post_bias: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    eps: float,
    post_eps: float,
    scale: float,
    output_scale: float,
    HAS_DELTA: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_WIDE: tl.constexpr,
    HAS_MORE: tl.constexpr,
    SUM_FIRST: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_OUTPUT_SCALED: tl.constexpr,
    NORM: tl.constexpr,
    POST: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    token = tl.program_id(0)
    start = token.to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    if NORM is not None:
        weights = scale_of(weight, token % NUM_WEIGHTS * SIZE + columns, inside, NORM)
    if POST is not None:
        post_weights = scale_of(post_weight, columns, inside, POST)
    wait_for_previous(OVERLAPS)
    x = tl.load(stream + start + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        if expert_weights is not None:
            added = summed(delta, expert_weights, shared, gates, token, columns, inside, SIZE, TOP_K, IS_WIDE)
        else:
            added = tl.load(delta + start + columns, mask=inside, other=0.0)
        if POST is not None:
            added = _normed(added, post_weights, post_bias, columns, inside, post_eps, SIZE, POST)
        if IS_SCALED:
            added = scaled(added, scale)
        if HAS_MORE:
            last = tl.load(more + start + columns, mask=inside, other=0.0)
            x = _sum(_sum(added, last), x) if SUM_FIRST else _sum(_sum(x, added), last)
        else:
            x = _sum(x, added)
        if IS_OUTPUT_SCALED:
            x = scaled(x, output_scale)
        tl.store(total + start + columns, x, mask=inside)
    if NORM is not None:
        x = _normed(x, weights, bias, columns, inside, eps, SIZE, NORM)
    if NORM is not None or not HAS_DELTA:
        tl.store(normed + start + columns, fitted(x, normed.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The activation of x, rounded to its dtype."""
    wide = x.to(tl.float32)
    if ACTIVATION == _SILU:
        active = wide / (1.0 + tl.exp(-wide))
    elif ACTIVATION == _GELU_TANH:
        active = 0.5 * wide * (1.0 + _tanh(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)))
    elif ACTIVATION == _GELU:
        active = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    else:
        active = tl.maximum(wide, 0.0)
        active = active.to(x.dtype).to(tl.float32) * active
    return active.to(x.dtype)


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr = _SILU) -> tl.tensor:
    """activation(gate) * up, rounded before and after the product."""
    return (activated(gate, ACTIVATION).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _activate_kernel(
    x: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    if is_shut(flag):
        return
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    x += token * (2 * SIZE if IS_GATED else SIZE)
    first = tl.load(x + columns, mask=inside, other=0.0)
    if IS_GATED:
        result = gated(first, tl.load(x + SIZE + columns, mask=inside, other=0.0), ACTIVATION)
    else:
        result = activated(first, ACTIVATION)
    tl.store(out + token * SIZE + columns, result, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _logits_kernel(
    logits: tl.tensor,
    count: tl.int64,
    scale: float,
    softcap: float,
    IS_SCALED: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Each operation is rounded."""
    if is_shut(flag):
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(logits + at, mask=inside, other=0.0)
    if IS_SCALED:
        x = scaled(x, scale)
    if IS_CAPPED:
        x = (x.to(tl.float32) / softcap).to(x.dtype)
        x = scaled(_tanh(x.to(tl.float32)).to(x.dtype), softcap)
    tl.store(logits + at, x, mask=inside)

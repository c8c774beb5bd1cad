"""Exact mixtures of experts as Triton kernels: routing, the experts' products, their sum. Importing needs Triton.

A token's result does not depend on the other tokens. The router's sums have fixed parts, added in their order. Of equal
scores the lower expert wins. A product is one chain of matrix instructions, whatever the tile (see `matmul`), and a
token's results are added in the order of its own experts.

Nothing waits for the host: grids have the most programs that a step of this size may need, and those without work
return. So all of it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graft.model.kernels import gate, overlap
from graft.model.kernels.gate import is_shut
from graft.model.kernels.layer import ACTIVATIONS, gated
from graft.model.kernels.overlap import after_previous, start_next, wait_for_previous
from graft.model.network import Activation, Router

_PART = 256  # inputs of a part of the router's sums
_PAIRS_AT_ONCE = 1024
_COLUMNS_AT_ONCE = 1024


@dataclass(frozen=True)
class Choice:
    """The experts of each token, best first. A pair is a token and one of its experts: token * top_k + number."""

    experts: Tensor  # [T, top_k] int32
    weights: Tensor  # [T, top_k] float32
    gates: Tensor | None  # [T] float32: of the shared expert, before the sigmoid


@dataclass(frozen=True)
class Groups:
    """Pairs by expert. An item is a block of one expert's pairs: what one program multiplies."""

    members: Tensor  # [T * top_k] int32 pairs, by expert and then in their order
    items: Tensor  # [3, most items] int32: expert, first and last + 1 of its places in `members`
    count: Tensor  # [1] int32 items


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes. The choice changes no bit of the result."""

    tokens: int  # of an item
    outputs: int
    inputs: int  # of a block
    warps: int
    stages: int  # blocks that are loaded at once


@cache
def tiles_for(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """The tiles of gate and up, and of down, for a step. Both have as many tokens."""
    if dtype is torch.float32:
        return Tile(16, 64, 32, 4, 3), Tile(16, 64, 32, 4, 3)
    by_expert = num_tokens * top_k / num_experts
    tokens = 16 if by_expert <= 6 else 32 if by_expert <= 20 else 64 if by_expert <= 80 else 128
    if tokens <= 32:
        return Tile(tokens, 64, 128, 4, 3), Tile(tokens, 64, 128, 4, 4)
    return Tile(tokens, 64, 64, 4, 4), Tile(tokens, 128, 64, 4, 4)


def choose(x: Tensor, router: Router, weight: Tensor | None = None) -> Choice:
    """Choose the experts of tokens x [T, inputs]. A router in float32 multiplies in float32.

    weight: the router's with a row more, which computes the gate of a shared expert.
    """
    weight = router.weight if weight is None else weight
    num_experts, top_k = router.num_experts, router.top_k
    num_tokens, num_inputs = x.shape
    num_parts = triton.cdiv(num_inputs, _PART)
    sums = x.new_empty(num_parts, num_tokens, len(weight), dtype=torch.float32)
    block = 16 if num_tokens <= 64 else 64
    grid = (triton.cdiv(num_tokens, block), triton.cdiv(len(weight), 64), num_parts)
    assert x.is_contiguous() and weight.is_contiguous()
    _router_kernel[grid](
        x,
        weight,
        sums,
        num_tokens,
        len(weight),
        num_inputs,
        PART=_PART,
        BLOCK_T=block,
        BLOCK_E=64,
        BLOCK_K=64,
        **overlap.options(x.device),
        **gate.options(),
    )
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    gates = weights.new_empty(num_tokens) if len(weight) > num_experts else None
    block_g = triton.next_power_of_2(router.groups)
    block_m = triton.next_power_of_2(num_experts // router.groups)
    _choose_kernel[(num_tokens,)](
        sums,
        router.bias,
        router.correction,
        experts,
        weights,
        gates,
        router.least_sum,
        router.added_to_sum,
        router.factor,
        num_tokens * len(weight),
        PARTS=num_parts,
        ROWS=len(weight),
        EXPERTS=num_experts,
        TOP_K=top_k,
        GROUPS=router.groups,
        TOP_GROUPS=router.top_groups,
        SCORING=router.scoring,
        NORMALISES=router.normalise,
        PRODUCT_TYPE=_type_of(torch.float32 if router.wide else x.dtype),
        WEIGHT_TYPE=_type_of(torch.float32 if router.wide_weights else x.dtype),
        BLOCK_G=block_g,
        BLOCK_M=block_m,
        num_warps=max(block_g * block_m // 256, 1),
        **overlap.options(x.device),
        **gate.options(),
    )
    return Choice(experts, weights, gates)


def group(choice: Choice, num_experts: int, tokens: int) -> Groups | None:
    """Group a step's pairs into items of up to `tokens` pairs of one expert.

    None: the step is one token, whose pairs are the items.
    """
    experts = choice.experts
    num_pairs = experts.numel()
    if len(experts) == 1:
        return None
    # Each expert has at most one item that is not full.
    most = min(num_pairs, num_experts + num_pairs // tokens)
    members, items, count = torch.empty(num_pairs + 3 * most + 1, dtype=torch.int32, device=experts.device).split(
        (num_pairs, 3 * most, 1)
    )
    _group_kernel[(num_experts,)](
        experts,
        members,
        items,
        count,
        num_pairs,
        most,
        TOKENS=tokens,
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        BLOCK=min(triton.next_power_of_2(num_pairs), _PAIRS_AT_ONCE),
        **overlap.options(experts.device),
        **gate.options(),
    )
    return Groups(members, items.view(3, most), count)


def multiply(
    x: Tensor,  # [T, inputs], or [T * top_k, inputs] by pair
    weight: Tensor,  # [num_experts, 1 or 2, outputs, inputs]; 2: gates and ups. Inputs must be contiguous
    choice: Choice,
    groups: Groups | None,
    tile: Tile,
    bias: Tensor | None = None,  # [num_experts, 1 or 2, outputs]
    activation: Activation = "silu",
    clamp: tuple[float, float] | None = None,
    by_descriptor: bool | None = None,
) -> Tensor:
    """Each pair's product with its expert's weight, [T * top_k, outputs] by pair. Gates and ups become activations.

    clamp: limit and alpha of GPT-OSS's activation, (up + 1) * gate * sigmoid(alpha * gate), in place of `activation`.
    """
    _, parts, num_outputs, num_inputs = weight.shape
    num_pairs = choice.experts.numel()
    assert x.is_contiguous() and weight.stride(3) == 1
    limit, alpha = clamp or (0.0, 0.0)
    out = x.new_empty(num_pairs, num_outputs)
    source: Tensor | TensorDescriptor = weight
    if by_descriptor is None:
        by_descriptor = _has_descriptors(x.device)
    if by_descriptor:
        source = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [1, 1, tile.outputs, tile.inputs])
    num_items = num_pairs if groups is None else groups.items.shape[1]
    _expert_kernel[num_items, triton.cdiv(num_outputs, tile.outputs)](
        x,
        source,
        bias,
        out,
        choice.experts,
        groups.members if groups is not None else None,
        groups.items if groups is not None else None,
        groups.count if groups is not None else None,
        num_items,
        num_outputs,
        num_inputs,
        *weight.stride()[:3],
        limit,
        alpha,
        PAIRS_BY_ROW=num_pairs // len(x),
        PARTS=parts,
        ACTIVATION=ACTIVATIONS[activation],
        IS_CLAMPED=clamp is not None,
        BY_DESCRIPTOR=by_descriptor,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        IS_EVEN=num_inputs % tile.inputs == 0,
        BLOCK_T=tile.tokens,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap.options(x.device),
        **gate.options(),
    )
    return out


def combine(results: Tensor, choice: Choice, shared: Tensor | None, wide_weights: bool) -> Tensor:
    """Add each token's weighted results [T * top_k, size], in float32, and the shared expert's [T, size], if any."""
    num_tokens, top_k = choice.experts.shape
    size = results.shape[1]
    out = results.new_empty(num_tokens, size)
    block = min(triton.next_power_of_2(size), _COLUMNS_AT_ONCE)
    _combine_kernel[num_tokens, triton.cdiv(size, block)](
        results,
        choice.weights,
        shared,
        choice.gates,
        out,
        SIZE=size,
        TOP_K=top_k,
        ROUNDED_TYPE=_type_of(torch.float32 if wide_weights else results.dtype),
        BLOCK=block,
        **overlap.options(results.device),
        **gate.options(),
    )
    return out


@cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether blocks are loaded by tensor descriptors, which newer devices support."""
    return device.type != "cuda" or torch.cuda.get_device_properties(device).major >= 9


def _type_of(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


@triton.jit(do_not_specialize=["num_tokens"])
def _router_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    sums: tl.tensor,
    num_tokens: int,
    num_rows: int,
    num_inputs: int,
    PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Compute one part of some tokens' products."""
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    acc = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    wait_for_previous(OVERLAPS)
    for place in tl.static_range(0, PART, BLOCK_K):
        columns = part * PART + place + tl.arange(0, BLOCK_K)
        inside = (columns < num_inputs)[None, :]
        w = tl.load(weight + rows[:, None] * num_inputs + columns[None, :], (rows < num_rows)[:, None] & inside, 0.0)
        at = tokens[:, None].to(tl.int64) * num_inputs + columns[None, :]
        some = tl.load(x + at, (tokens < num_tokens)[:, None] & inside, 0.0).to(w.dtype)
        acc = tl.dot(w, some.T, acc, input_precision="ieee")
    at = (part.to(tl.int64) * num_tokens + tokens[None, :]) * num_rows + rows[:, None]
    tl.store(sums + at, acc, mask=(tokens < num_tokens)[None, :] & (rows < num_rows)[:, None])


@triton.jit(do_not_specialize=["least_sum", "added_to_sum", "factor", "size"])
def _choose_kernel(
    sums: tl.tensor,
    bias: tl.tensor | None,
    correction: tl.tensor | None,
    chosen: tl.tensor,
    weights: tl.tensor,
    gates: tl.tensor | None,
    least_sum: float,
    added_to_sum: float,
    factor: float,
    size: int,  # of a part's sums
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISES: tl.constexpr,
    PRODUCT_TYPE: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Choose the experts of one token."""
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    OF_GROUP: tl.constexpr = EXPERTS // GROUPS
    places = tl.arange(0, BLOCK_G * BLOCK_M)
    experts = places // BLOCK_M * OF_GROUP + places % BLOCK_M
    real = (places % BLOCK_M < OF_GROUP) & (places // BLOCK_M < GROUPS)
    wait_for_previous(OVERLAPS)
    sums += token * ROWS
    products = tl.load(sums + experts, mask=real, other=0.0)
    for part in tl.static_range(1, PARTS):
        products += tl.load(sums + part * size + experts, mask=real, other=0.0)
    if bias is not None:
        products += tl.load(bias + experts, mask=real, other=0.0).to(tl.float32)
    products = products.to(PRODUCT_TYPE).to(tl.float32)
    if SCORING == "softmax":
        exponentials = tl.where(real, tl.exp(products - tl.max(tl.where(real, products, float("-inf")))), 0.0)
        scores = exponentials / tl.sum(exponentials)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-products))
    else:
        scores = products
    wanted = scores
    if correction is not None:
        wanted += tl.load(correction + experts, mask=real, other=0.0).to(tl.float32)
    lowest: tl.constexpr = -3.4e38  # what is no number is chosen last: there are always as many experts as needed
    wanted = tl.where(wanted >= lowest, wanted, lowest)
    if TOP_GROUPS < GROUPS:
        wanted = _of_best_groups(wanted, real, GROUPS, TOP_GROUPS, BLOCK_G, BLOCK_M, lowest)
    rank = _rank(tl.where(real, wanted, float("-inf")), places, TOP_K)
    is_chosen = rank < TOP_K
    if SCORING == "softmax_of_chosen":
        highest = tl.max(tl.where(is_chosen, products, float("-inf")))
        exponentials = tl.where(is_chosen, tl.exp(products - highest), 0.0)
        scores = exponentials / tl.sum(exponentials)
    if NORMALISES:
        scores /= tl.maximum(tl.sum(tl.where(is_chosen, scores, 0.0)), least_sum) + added_to_sum
    at = token * TOP_K + rank
    tl.store(chosen + at, experts, mask=is_chosen)
    tl.store(weights + at, (scores * factor).to(WEIGHT_TYPE).to(tl.float32), mask=is_chosen)
    if gates is not None:
        value = tl.load(sums + EXPERTS)
        for part in tl.static_range(1, PARTS):
            value += tl.load(sums + part * size + EXPERTS)
        tl.store(gates + token, value)


@triton.jit
def _rank(values: tl.tensor, places: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """The rank of the COUNT highest values, from 0; COUNT for all others. Of equal values the first is higher."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # the sum makes -0.0 to 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places)
    rank = tl.full(values.shape, COUNT, tl.int32)
    for number in tl.static_range(COUNT):
        is_best = keys == tl.max(keys)
        rank = tl.where(is_best, number, rank)
        keys = tl.where(is_best, -0x7FFFFFFFFFFFFFFF, keys)
    return rank


@triton.jit
def _of_best_groups(
    wanted: tl.tensor,
    real: tl.tensor,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    lowest: tl.constexpr,
) -> tl.tensor:
    """What is wanted of the groups whose two best experts have the highest sums; elsewhere the lowest number."""
    table = tl.where(real, wanted, float("-inf")).reshape(BLOCK_G, BLOCK_M)
    members = tl.arange(0, BLOCK_M)[None, :]
    best = tl.max(table, axis=1)
    first = tl.min(tl.where(table == best[:, None], members, BLOCK_M), axis=1)
    second = tl.max(tl.where(members == first[:, None], float("-inf"), table), axis=1)
    groups = tl.arange(0, BLOCK_G)
    is_best = _rank(tl.where(groups < GROUPS, best + second, float("-inf")), groups, TOP_GROUPS) < TOP_GROUPS
    return tl.where(is_best[:, None], table, lowest).reshape(BLOCK_G * BLOCK_M)


@triton.jit(do_not_specialize=["num_pairs", "most"])
def _group_kernel(
    experts: tl.tensor,
    members: tl.tensor,
    items: tl.tensor,
    count: tl.tensor,
    num_pairs: int,
    most: int,
    TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Write the pairs and items of one expert."""
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    mine = tl.program_id(0)
    numbers = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    wait_for_previous(OVERLAPS)
    for place in range(0, num_pairs, BLOCK):
        pairs = place + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(experts + pairs, mask=pairs < num_pairs, other=BLOCK_E - 1), BLOCK_E)
    counts = tl.where(numbers < tl.num_programs(0), counts, 0)
    blocks = tl.cdiv(counts, TOKENS)
    start = tl.sum(tl.where(numbers < mine, counts, 0))
    end = start + tl.sum(tl.where(numbers == mine, counts, 0))
    item = tl.sum(tl.where(numbers < mine, blocks, 0))
    if mine == 0:
        tl.store(count, tl.sum(blocks))
    for place in range(start, end, TOKENS):
        tl.store(items + item, mine)
        tl.store(items + most + item, place)
        tl.store(items + 2 * most + item, end)
        item += 1
    if start < end:
        for place in range(0, num_pairs, BLOCK):
            pairs = place + tl.arange(0, BLOCK)
            is_mine = tl.load(experts + pairs, mask=pairs < num_pairs, other=BLOCK_E - 1) == mine
            number = tl.cumsum(is_mine.to(tl.int32), 0)
            tl.store(members + start + number - 1, pairs, mask=is_mine)
            start += tl.sum(is_mine.to(tl.int32))


@triton.jit(do_not_specialize=["num_items", "limit", "alpha"])
def _expert_kernel(
    x: tl.tensor,
    weight: tl.tensor_descriptor,
    bias: tl.tensor | None,
    out: tl.tensor,
    experts: tl.tensor,
    members: tl.tensor | None,
    items: tl.tensor | None,
    count: tl.tensor | None,
    num_items: int,
    num_outputs: int,
    num_inputs: int,
    expert_stride: tl.int64,
    part_stride: int,
    output_stride: int,
    limit: float,
    alpha: float,
    PAIRS_BY_ROW: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    """Compute some outputs of one item.

    Gates and ups must wait for the choice of experts. They let the next kernel, down, start only then, so it may read
    the choice at once, and load its first weights before it waits. It reads past caches that earlier kernels filled.
    """
    if is_shut(flag):
        return
    if PARTS == 2:
        wait_for_previous(OVERLAPS)
    start_next(OVERLAPS)
    item = tl.program_id(0)
    output = tl.program_id(1) * BLOCK_N
    places = tl.arange(0, BLOCK_T)
    if items is None:
        expert = tl.load(experts + item, cache_modifier=".cg")
        real = places < 1
        pairs = item + places
    else:
        if item >= tl.load(count, cache_modifier=".cg"):
            return
        expert = tl.load(items + item, cache_modifier=".cg")
        places += tl.load(items + num_items + item, cache_modifier=".cg")
        real = places < tl.load(items + 2 * num_items + item, cache_modifier=".cg")
        pairs = tl.load(members + places, mask=real, other=0, cache_modifier=".cg")
    rows = pairs // PAIRS_BY_ROW
    strides = expert_stride, part_stride, output_stride
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    ups = acc
    for place in range(0, num_inputs, BLOCK_K):
        columns = place + tl.arange(0, BLOCK_K)
        inside = real[:, None]
        if not IS_EVEN:
            inside &= (columns < num_inputs)[None, :]
        sizes = num_outputs, num_inputs
        w = _weights(weight, expert, 0, output, place, sizes, strides, IS_EVEN, BY_DESCRIPTOR, BLOCK_N, BLOCK_K)
        own = rows
        if OVERLAPS and PARTS == 1:  # the first weights are loaded before the wait
            own += after_previous(item * 0, place)
        tokens = tl.load(x + own.to(tl.int64)[:, None] * num_inputs + columns[None, :], mask=inside, other=0.0)
        acc = tl.dot(w, tokens.T, acc, input_precision=PRECISION)
        if PARTS == 2:
            w = _weights(weight, expert, 1, output, place, sizes, strides, IS_EVEN, BY_DESCRIPTOR, BLOCK_N, BLOCK_K)
            ups = tl.dot(w, tokens.T, ups, input_precision=PRECISION)
    outputs = output + tl.arange(0, BLOCK_N)
    stored: tl.constexpr = out.dtype.element_ty
    result = acc.to(stored)
    up = ups.to(stored)
    if bias is not None:  # transformers' modules round before they add it
        bias += expert * PARTS * num_outputs + outputs
        result = _plus(result, tl.load(bias, mask=outputs < num_outputs, other=0.0)[:, None])
        if PARTS == 2:
            up = _plus(up, tl.load(bias + num_outputs, mask=outputs < num_outputs, other=0.0)[:, None])
    if IS_CLAMPED:
        result = _clamped_gated(result, up, limit, alpha)
    elif PARTS == 2:
        result = gated(result, up, ACTIVATION)
    at = pairs.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(out + at, result, mask=real[None, :] & (outputs < num_outputs)[:, None])


@triton.jit
def _weights(
    weight: tl.tensor_descriptor,
    expert: tl.tensor,
    part: tl.constexpr,
    output: tl.tensor,
    place: tl.tensor,
    sizes: tl.tuple,
    strides: tl.tuple,
    IS_EVEN: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Load a block of an expert's weights, [outputs, inputs]. What is outside is 0."""
    if BY_DESCRIPTOR:
        block = weight.load([expert, part, output, place]).reshape(BLOCK_N, BLOCK_K)
    else:
        num_outputs, num_inputs = sizes
        rows, columns = output + tl.arange(0, BLOCK_N), place + tl.arange(0, BLOCK_K)
        inside = (rows < num_outputs)[:, None]
        if not IS_EVEN:
            inside &= (columns < num_inputs)[None, :]
        start = weight + expert * strides[0] + part * strides[1]
        block = tl.load(start + rows.to(tl.int64)[:, None] * strides[2] + columns[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def _plus(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x + y, rounded to x's type, as PyTorch adds."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def _clamped_gated(gates: tl.tensor, ups: tl.tensor, limit: float, alpha: float) -> tl.tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped gates and ups, rounded after every operation."""
    kind: tl.constexpr = gates.dtype
    wide = tl.minimum(gates.to(tl.float32), limit).to(kind).to(tl.float32)
    up = tl.minimum(tl.maximum(ups.to(tl.float32), -limit), limit).to(kind).to(tl.float32)
    scaled = (wide * alpha).to(kind).to(tl.float32)
    active = (wide * (1.0 / (1.0 + tl.exp(-scaled))).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    return ((up + 1.0).to(kind).to(tl.float32) * active).to(kind)


@triton.jit
def _combine_kernel(
    results: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor | None,
    gates: tl.tensor | None,
    out: tl.tensor,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROUNDED_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
    flag: tl.tensor | None = None,
) -> None:
    if is_shut(flag):
        return
    start_next(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    wait_for_previous(OVERLAPS)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + number
        result = tl.load(results + pair * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        total += (result * tl.load(weights + pair)).to(ROUNDED_TYPE).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    total = total.to(kind)
    if shared is not None:
        more = tl.load(shared + token * SIZE + columns, mask=inside, other=0.0)
        if gates is not None:
            gate = 1.0 / (1.0 + tl.exp(-tl.load(gates + token).to(kind).to(tl.float32)))
            more = (gate.to(kind).to(tl.float32) * more.to(tl.float32)).to(kind)
        total = _plus(total, more)
    tl.store(out + token * SIZE + columns, total, mask=inside)

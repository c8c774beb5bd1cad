"""The choice of experts as Triton kernels: a router's products, scores, the best of them, and groups by expert.

A token's choice does not depend on the other tokens. The router's sums have fixed parts, added in their order. Of equal
scores the lower expert wins. Importing this module needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.model.kernels import gate, overlap
from graft.model.kernels.gate import is_shut
from graft.model.kernels.overlap import start_next, wait_for_previous
from graft.model.network import Router

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PART = 256  # inputs of a part of the router's sums
_PAIRS_AT_ONCE = 1024


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


def choose(x: Tensor, router: Router, weight: Tensor | None = None) -> Choice:
    """Choose the experts of tokens x [T, inputs]. A router in float32 multiplies in float32.

    weight: the router's with a row more, which computes the gate of a shared expert.
    """
    weight = router.weight if weight is None else weight
    num_experts, top_k = router.num_experts, router.top_k
    num_tokens, num_inputs = x.shape
    num_parts = triton.cdiv(num_inputs, _PART)
    sums = x.new_empty(num_parts, num_tokens, len(weight), dtype=torch.float32)
    # Products in float32 use no matrix instructions, so large tiles would be too much for a program's registers.
    is_wide = weight.dtype is torch.float32
    block, rows = 16 if num_tokens <= 64 or is_wide else 64, 16 if is_wide else 64
    grid = (triton.cdiv(num_tokens, block), triton.cdiv(len(weight), rows), num_parts)
    assert x.is_contiguous() and weight.is_contiguous()
    _router_kernel[grid](
        *(x, weight, sums, num_tokens, len(weight), num_inputs),
        PART=_PART,
        BLOCK_T=block,
        BLOCK_E=rows,
        **overlap.options(x.device),
        **gate.options(),
    )
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    gates = weights.new_empty(num_tokens) if len(weight) > num_experts else None
    block_g = triton.next_power_of_2(router.groups)
    block_m = triton.next_power_of_2(num_experts // router.groups)
    _choose_kernel[(num_tokens,)](
        *(sums, router.bias, router.correction, experts, weights, gates),
        *(router.least_sum, router.added_to_sum, router.factor, num_tokens * len(weight)),
        PARTS=num_parts,
        ROWS=len(weight),
        EXPERTS=num_experts,
        TOP_K=top_k,
        GROUPS=router.groups,
        TOP_GROUPS=router.top_groups,
        SCORING=router.scoring,
        NORMALISES=router.normalise,
        PRODUCT_TYPE=TYPES[torch.float32 if router.wide else x.dtype],
        WEIGHT_TYPE=TYPES[torch.float32 if router.wide_weights else x.dtype],
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
    numbers = torch.empty(num_pairs + 3 * most + 1, dtype=torch.int32, device=experts.device)
    members, items, count = numbers.split((num_pairs, 3 * most, 1))
    _group_kernel[(num_experts,)](
        *(experts, members, items, count, num_pairs, most),
        TOKENS=tokens,
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        BLOCK=min(triton.next_power_of_2(num_pairs), _PAIRS_AT_ONCE),
        **overlap.options(experts.device),
        **gate.options(),
    )
    return Groups(members, items.view(3, most), count)


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
    columns = part * PART + tl.arange(0, PART)
    inside = (columns < num_inputs)[None, :]
    w = tl.load(weight + rows[:, None] * num_inputs + columns[None, :], (rows < num_rows)[:, None] & inside, 0.0)
    wait_for_previous(OVERLAPS)
    at = tokens[:, None].to(tl.int64) * num_inputs + columns[None, :]
    some = tl.load(x + at, (tokens < num_tokens)[:, None] & inside, 0.0).to(w.dtype)
    acc = tl.dot(w, some.T, input_precision="ieee")
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
    products = _added(sums + experts, size, real, PARTS)
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
        tl.store(gates + token, _added(sums + EXPERTS, size, True, PARTS))


@triton.jit
def _added(sums: tl.tensor, size: int, real: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The sum of all parts, in their order."""
    total = tl.load(sums, mask=real, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * size, mask=real, other=0.0)
    return total


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

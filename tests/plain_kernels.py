"""The Triton kernels in plain PyTorch: the reference they are compared with, and the stand-in where they would run
thousands of times. In Triton's interpreter one program takes 20 ms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graft.model.attention import Paths
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import eagle3 as eagle3_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import matmul as matmul_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.sampler import gumbel_noise
from graft.spec_decode.tree import DraftTree


def use_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (tree_attention, commit):
        monkeypatch.setattr(attention_kernels, function.__name__, function)
    for function in (lay_out, add_norm, rotate_and_store, silu_mul):
        monkeypatch.setattr(layer_kernels, function.__name__, function)
    monkeypatch.setattr(matmul_kernels.Products, "multiply", multiply)
    for function in (highest, draw):
        monkeypatch.setattr(topk_kernels, function.__name__, function)
    for function in (enter, follow, spread):
        monkeypatch.setattr(eagle3_kernels, function.__name__, function)


def lay_out(tokens: Tensor, parents: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    is_real = torch.arange(tokens.shape[1]) < width
    tokens, parents = (
        torch.where(is_real, tokens, tokens[:, :1]).long(),
        torch.where(is_real, parents.clamp(min=0), 0).long(),
    )
    tree = DraftTree(tokens.shape[1] - 1, tokens, parents, *[torch.zeros_like(tokens)] * 3)
    return tokens, (tree.depths() * is_real).int(), (tree.paths() * is_real[:, None]).int()


def add_norm(stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = stream if delta is None else stream + delta
    return total, _norm(total, weight, eps)


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Paths,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
    before: Tensor | None = None,
) -> None:
    kv_heads, head_dim = keys.shape[2:]
    rows, width = seen.depths.shape
    vectors = qkv.view(rows, width, -1, head_dim)
    heads = vectors.shape[2] - 2 * kv_heads
    query, key, value = vectors.split((heads, kv_heads, kv_heads), dim=2)
    if norms is not None:
        query, key = _norm(query, norms[0], norms[2]), _norm(key, norms[1], norms[2])
    positions = (seen.lengths[:, None] + seen.depths).clamp(max=len(cos) - 1).long()
    c, s = (table[positions].repeat(1, 1, 2)[:, :, None] for table in (cos, sin))
    query, key = (
        x * c + torch.cat([-x[..., head_dim // 2 :], x[..., : head_dim // 2]], dim=-1) * s for x in (query, key)
    )
    vectors[:, :, :heads] = query
    slots = (seen.lengths + (0 if before is None else before))[:, None].long() + torch.arange(width)
    row = torch.arange(rows)[:, None]
    keys[row, slots], values[row, slots] = key, value


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return nn.functional.silu(gate) * up


def multiply(products: matmul_kernels.Products, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return nn.functional.linear(x, weight, bias)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    paths: Tensor,
    depths: Tensor,
    *,
    max_context: int,
    scale: float | None = None,
    window: int | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    batch, heads, width, head_dim = query.shape
    assert int(lengths.max()) <= max_context
    steps = torch.arange(int(lengths.max()) + paths.shape[2])  # positions
    step = (steps - lengths[:, None])[:, None]  # [B, 1, S] of the path
    place = paths.long().gather(2, step.clamp(0, paths.shape[2] - 1).expand(-1, width, -1))
    slots = torch.where(step < 0, steps, lengths[:, None, None] + place)  # [B, W, S]
    position = (lengths[:, None] + depths)[:, :, None]
    is_seen = (steps <= position) & (steps > position - (window or len(steps) + 1))
    slots = torch.where(is_seen, slots, 0)
    row = torch.arange(batch)[:, None, None]
    group = heads // keys.shape[2]
    key, value = (
        stored[row, slots].repeat_interleave(group, dim=3) for stored in (keys, values)
    )  # [B, W, S, heads, D]
    scores = torch.einsum("bhwd,bwshd->bhws", query, key) * (head_dim**-0.5 if scale is None else scale)
    weights = scores.masked_fill(~is_seen[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("bhws,bwshd->bwhd", weights, value).flatten(2)


def commit(keys: Tensor, values: Tensor, lengths: Tensor, places: Tensor, counts: Tensor) -> None:
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for step, place in enumerate(places[row, :count].tolist(), start=1):
            for stored in (keys, values):
                stored[:, row, length + step] = stored[:, row, length + place]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def highest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    values, tokens = logits.float().sort(dim=1, descending=True, stable=True)
    return tokens[:, :k].int(), values[:, :k], logits.float().logsumexp(dim=1)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    keyed = (seeds[:, None].expand_as(positions).flatten(), positions.flatten())
    noise = gumbel_noise(*keyed, logits.shape[2]).view_as(logits)
    warm = temperatures[:, None, None]
    return torch.where(warm > 0, logits / warm.clamp(min=1e-6) + noise, logits.double()).argmax(dim=2)


def enter(
    tokens: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    origins: Tensor | None,
    norms: tuple[Tensor, Tensor],
    eps: float,
    keeps_normed: bool,
) -> tuple[Tensor, Tensor]:
    if origins is not None:
        hidden = hidden[torch.arange(len(hidden))[:, None], origins.long()]
    normed = _norm(hidden, norms[1], eps)
    both = torch.cat([_norm(embedding[tokens.long()], norms[0], eps), normed], dim=-1)
    return both.flatten(0, 1), (normed if keeps_normed else hidden).flatten(0, 1)


def follow(
    tokens: Tensor,
    parents: Tensor,
    chosen: Tensor,
    starts: Tensor,
    counts: Tensor,
    lengths: Tensor,
    following: Tensor,
    nodes: Tensor,
) -> None:
    width, room = chosen.shape[1], following.shape[1]
    for row, choices in enumerate(chosen.tolist()):
        path = [0]
        while True:
            fits = (tokens[row, 1:width] == choices[path[-1]]) & (parents[row, 1:width] == path[-1])
            if not fits.any():
                break
            path.append(1 + int(fits.int().argmax()))
        path = path[:room]
        following[row, : len(path)] = torch.tensor([choices[node] for node in path])
        nodes[row, : len(path)] = torch.tensor(path)
        counts[row], lengths[row] = len(path), starts[row] + len(path)


def spread(
    draft_ids: Tensor,
    logits: Tensor,
    totals: Tensor,
    to_target: Tensor,
    beams: eagle3_kernels.Beams,
    numbers: Tensor,
    keep: int | None,
    is_first: bool,
) -> None:
    batch, topk = beams.tokens.shape
    chances = numbers.view(torch.float32).unflatten(2, (2, -1))
    for row in range(batch):
        number = 0 if is_first else int(beams.num_passes[row])
        parts = (draft_ids.view(batch, -1, topk)[row], (logits - totals[:, None]).exp().view(batch, -1, topk)[row])
        above = [(1.0, 0, [])]
        if not is_first:
            columns = (beams.paths[row].tolist(), beams.places[row].tolist(), beams.entries[row, :, :number].tolist())
            above = list(zip(*columns, strict=True))
        children = []  # path probability, token, beam, parent's place, q
        for beam, (path, place, _) in enumerate(above):
            for draft_id, q in zip(parts[0][beam].tolist(), parts[1][beam].tolist(), strict=True):
                children.append((path * q, draft_id + int(to_target[draft_id]), beam, place, q))
        order = sorted(range(len(children)), key=lambda i: -children[i][0])
        listed = range(len(children)) if keep is None else order[: max(keep, topk)]
        listed = list(listed)
        span = slice(row * len(listed), (row + 1) * len(listed))
        numbers[number, 0, span] = torch.tensor([children[i][1] for i in listed])
        numbers[number, 1, span] = torch.tensor([children[i][3] for i in listed])
        chances[number, 2, 0, span] = torch.tensor([children[i][4] for i in listed])
        chances[number, 2, 1, span] = torch.tensor([children[i][0] for i in listed])
        later = topk * topk if keep is None else min(max(keep, topk), topk * topk)
        start = 1 if is_first else 1 + topk + (number - 1) * later
        for rank, i in enumerate(order[:topk]):
            path, token, beam, _, _ = children[i]
            beams.tokens[row, rank], beams.origins[row, rank], beams.paths[row, rank] = token, beam, path
            beams.places[row, rank], beams.depths[row, rank] = start + listed.index(i), number
            beams.entries[row, rank, : number + 1] = torch.tensor([*above[beam][2], number * topk + rank])
        beams.before[row], beams.num_passes[row] = number * topk, number + 1

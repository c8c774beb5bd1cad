"""The Triton kernels' work in plain PyTorch: what they are compared with, and what stands in for them where they would
be run thousands of times. In Triton's interpreter one program takes 20 ms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graft.target import kernels, layer_kernels, narrow_layers
from graft.target.attention import Paths
from graft.tree import DraftTree


def use_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (tree_attention, commit):
        monkeypatch.setattr(kernels, function.__name__, function)
    for function in (lay_out, add_norm, rotate_and_store, silu_mul):
        monkeypatch.setattr(layer_kernels, function.__name__, function)
    for function in (norm_qkv, norm_mlp, add_product, logits):
        monkeypatch.setattr(narrow_layers, function.__name__, function)


def lay_out(tokens: Tensor, parents: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    is_real = torch.arange(tokens.shape[1]) < width
    tokens, parents = torch.where(is_real, tokens, tokens[:, :1]).long(), torch.where(is_real, parents, 0).long()
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
    slots = seen.lengths[:, None].long() + torch.arange(width)
    row = torch.arange(rows)[:, None]
    keys[row, slots], values[row, slots] = key, value


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return nn.functional.silu(gate) * up


def norm_qkv(
    stream: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    values: Tensor,
    seen: Paths,
    cos: Tensor,
    sin: Tensor,
    head_norms: tuple[Tensor, Tensor, float] | None = None,
    overlap: bool = False,
) -> Tensor:
    qkv = nn.functional.linear(_norm(stream, norm, eps), weight, bias)
    rotate_and_store(qkv, keys, values, seen, cos, sin, head_norms)
    return qkv[:, : len(weight) - 2 * keys[0, 0].numel()].contiguous()


def norm_mlp(stream: Tensor, norm: Tensor, eps: float, gate_up: Tensor, overlap: bool = False) -> Tensor:
    return silu_mul(nn.functional.linear(_norm(stream, norm, eps), gate_up))


def add_product(stream: Tensor, inputs: Tensor, weight: Tensor, overlap: bool = False) -> Tensor:
    return stream + nn.functional.linear(inputs, weight)


def logits(inputs: Tensor, weight: Tensor, overlap: bool = False) -> Tensor:
    return nn.functional.linear(inputs, weight)


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
    overlap: bool = False,
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

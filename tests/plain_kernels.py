"""The Triton kernels in plain PyTorch: the reference they are compared with, and the stand-in where they would run
thousands of times. In Triton's interpreter one program takes 20 ms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from graft.drafters.block import kernels as block_kernels
from graft.drafters.block import tree
from graft.drafters.eagle3 import kernels as eagle3_kernels
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import draw as draw_kernels
from graft.model.kernels import eight_bits as eight_bit_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import matmul as matmul_kernels
from graft.model.kernels import rotary as rotary_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.eight_bits import EIGHT_BITS
from graft.model.kernels.mixed import Mixed
from graft.model.layout import Layout
from graft.model.network import Attention, Norm
from graft.model.noise import gumbel_noise, noise_of_tokens
from graft.model.sampler import truncated
from graft.tree.device.buffers import Beams, DraftDraws


def use_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (plan, tree_attention, commit):
        monkeypatch.setattr(attention_kernels, function.__name__, function)
    for function in (lay_out, add_norm, activate, finish_logits):
        monkeypatch.setattr(layer_kernels, function.__name__, function)
    monkeypatch.setattr(rotary_kernels, "rotate_and_store", rotate_and_store)
    monkeypatch.setattr(matmul_kernels.Products, "multiply", multiply)
    monkeypatch.setattr(eight_bit_kernels, "in_eight_bits", in_eight_bits)
    monkeypatch.setattr(topk_kernels, "highest", highest)
    monkeypatch.setattr(draw_kernels, "draw", draw)
    for function in (slots, tree.children):
        monkeypatch.setattr(block_kernels, function.__name__, function)
    for function in (enter, keep_last, take_roots, spread):
        monkeypatch.setattr(eagle3_kernels, function.__name__, function)


def lay_out(parents: Tensor, places: Tensor, depths: Tensor, starts: Tensor, rows: Tensor, max_path: int) -> Tensor:
    paths = parents.new_full((len(parents), max_path), -(2**30))  # nobody may read what is not written
    for token in (depths != places).nonzero().flatten().tolist():
        path = [int(places[token])]
        while path[0] > 0:
            path.insert(0, int(parents[starts[rows[token]] + path[0]]))
        paths[token, : len(path)] = torch.tensor(path)
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
    added = stream
    delta = summed(delta) if isinstance(delta, Mixed) else delta
    if delta is not None:
        delta = (delta if post is None else normed_by(post, delta)) * scale
        if more is not None and sum_first:
            added = (delta + more) + stream
        else:
            added = stream + delta if more is None else (stream + delta) + more
        added = added * output_scale
    if isinstance(norm, Tensor):
        turns = norm.view(-1, norm.shape[-1]).repeat(len(added), 1)[: len(added)]
        results = added, _norm(added, turns, eps)
    else:
        results = added, added if norm is None else normed_by(norm, added)
    total, normed = (
        new if out is None else out.copy_(fitted(new, out.dtype))
        for out, new in zip((total, normed), results, strict=True)
    )
    return total, normed


def summed(mixed: Mixed) -> Tensor:
    results, total = mixed.results.unflatten(0, mixed.weights.shape), 0.0
    for number in range(results.shape[1]):
        part = results[:, number].float() * mixed.weights[:, number, None]
        total = total + (part if mixed.wide else part.to(results.dtype).float())
    total = total.to(results.dtype)
    if mixed.shared is None:
        return total
    gates = 1.0 if mixed.gates is None else mixed.gates.to(results.dtype).float().sigmoid().to(results.dtype)[:, None]
    return total + gates * mixed.shared


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    cos: Tensor | None,
    sin: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    *,
    attention: Attention | None = None,
    growth: Tensor | None = None,
) -> None:
    if qkv.dim() == 3:
        for number, (own, key, value) in enumerate(zip(qkv, keys, values, strict=True)):
            weights = (norms[0][number], norms[1][number], norms[2]) if norms is not None else None
            rotate_and_store(own, key, value, layout, cos, sin, weights)
        return
    kv_heads, head_dim = keys.shape[1:]
    vectors = qkv.view(len(qkv), -1, head_dim)
    stores = attention is None or attention.kv_of is None
    if attention is not None and attention.values_are_keys:
        parts = vectors.split((vectors.shape[1] - kv_heads, kv_heads), dim=1)
        query, key, value = *parts, parts[1]
    elif stores:
        query, key, value = vectors.split((vectors.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    else:
        query, key, value = vectors, vectors[:, :0], vectors[:, :0]
    turned_last = attention is None or not attention.norms_turned
    both = [query, key]
    if norms is not None:
        both = [_norm(part, weight, norms[2]) for part, weight in zip(both, norms[:2], strict=True)]

    def normed(parts: list[Tensor]) -> list[Tensor]:
        own = (None, None) if attention is None else (attention.q_norm, attention.k_norm)
        return [part if norm is None else normed_by(norm, part) for part, norm in zip(parts, own, strict=True)]

    both = normed(both) if turned_last else both
    lengths = layout.lengths[layout.rows.long()]
    positions = (lengths + layout.depths).long()
    if cos is not None and sin is not None:
        c, s = (table[positions.clamp(max=len(cos) - 1)][:, None].float() for table in (cos, sin))
        rotary = attention.rotary if attention is not None else None
        neighbours, wide = (rotary.interleaved, rotary.wide) if rotary is not None else (False, False)
        both = [_turned(part, c, s, neighbours, wide) for part in both]
    both = both if turned_last else normed(both)
    vectors[:, : query.shape[1]] = both[0] if growth is None else both[0] * growth[positions][:, None, None]
    if stores:
        if attention is not None and attention.v_norm is not None:
            value = normed_by(attention.v_norm, value)
        slots = slots_of(layout.tables, layout.table_rows[layout.rows.long()], lengths + layout.places)
        keys[slots], values[slots] = both[1], value


def _turned(x: Tensor, c: Tensor, s: Tensor, neighbours: bool, wide: bool) -> Tensor:
    half = c.shape[-1]
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)

    def product(part: Tensor, factor: Tensor) -> Tensor:
        return part.float() * factor if wide else (part.float() * factor).to(x.dtype)

    turned = (product(first, c) - product(second, s), product(second, c) + product(first, s))
    turned = tuple(part.to(x.dtype) for part in turned)
    both = torch.stack(turned, dim=-1).flatten(-2) if neighbours else torch.cat(turned, dim=-1)
    return torch.cat([both, rest], dim=-1)


def normed_by(norm: Norm, x: Tensor) -> Tensor:
    """The norm of each vector x [..., size], or of all heads x [T, heads, size] together."""
    if norm.over_all:
        return normed_by(replace(norm, over_all=False), x.flatten(1)).view_as(x)
    wide = x.float()
    if norm.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    wide = wide.to(x.dtype).float() if norm.rounds else wide
    if norm.weight is not None:
        weight = norm.weight + 1 if norm.plus_one and norm.kind == "layer" else norm.weight.float() + norm.plus_one
        wide = wide * weight.view(-1, x.shape[-1]).float()
    return (wide if norm.bias is None else wide + norm.bias.float()).to(x.dtype)


def activate(x: Tensor, activation: str = "silu", gated: bool = True) -> Tensor:
    function = {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "relu_squared": lambda x: nn.functional.relu(x).square(),
    }[activation]
    if not gated:
        return function(x)
    gate, up = x.chunk(2, dim=1)
    return function(gate) * up


def finish_logits(logits: Tensor, scale: float, softcap: float | None) -> None:
    logits.mul_(scale)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)


def multiply(
    products: matmul_kernels.Products,
    x: Tensor,
    weight: Tensor | matmul_kernels.EightBits,
    bias: Tensor | None = None,
    tile: matmul_kernels.Tile | None = None,
    is_gated: bool = False,
    activation: str | None = None,
) -> Tensor:
    activation = "silu" if is_gated and activation is None else activation
    if isinstance(weight, matmul_kernels.EightBits):
        product = nn.functional.linear(x.float(), weight.values.float()) * weight.factors
        return fitted(activate(product), x.dtype) if is_gated else product.to(weight.dtype)
    product = nn.functional.linear(x, weight, bias)
    return product if activation is None else activate(product, activation, is_gated)


def in_eight_bits(x: Tensor) -> Tensor:
    return fitted(x, EIGHT_BITS)


def fitted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(-448, 448).to(dtype) if dtype is EIGHT_BITS else x.to(dtype)


def slots_of(tables: Tensor, table_rows: Tensor, index: Tensor) -> Tensor:
    """Slots of positions by rows of the block tables. Padding may be past the end of a table."""
    pages = tables[table_rows.long(), (index.long() // attention_kernels.PAGE).clamp(max=tables.shape[1] - 1)]
    return pages.long() * attention_kernels.PAGE + index.long() % attention_kernels.PAGE


def plan(layout: Layout, group: int, tiles: attention_kernels.Tiles) -> attention_kernels.Plan:
    items, chains, strips = [], [], []
    by_row = zip(*(part.tolist() for part in (layout.starts, layout.counts, layout.lengths)), strict=True)
    for row, (start, count, length) in enumerate(by_row):
        places, depths = (part[start : start + count].tolist() for part in (layout.places, layout.depths))
        chains.append(int(count > 0 and places == depths == list(range(count))))
        takes_all = chains[-1] and tiles.tokens(group)
        num_splits = tiles.count_splits(length + count if takes_all else length // tiles.keys * tiles.keys)
        num_tiles = -(-count * group // tiles.used_rows(group))
        items += [(row, tile, split) for split in reversed(range(num_splits)) for tile in range(num_tiles)]
        numbers = [-1] * count if layout.strips is None else layout.strips[start : start + count].tolist()
        for token, number in enumerate([] if takes_all else numbers, start=start):
            most = tiles.tokens(group) or 1
            if number < 0 or number % most == 0:
                ends = (length // tiles.keys * tiles.keys + 1, length + int(layout.depths[token]) + 1)
                first, last = (tiles.count_splits(end) - 1 for end in ends)
                strips += [(row, token, 1 + (abs(number) - 1) % most, split) for split in range(first, last + 1)]
    numbers_of = layout.rows.new_tensor
    lists = (numbers_of(items).view(-1, 3), numbers_of([len(items)]), numbers_of(chains))
    return attention_kernels.Plan(*lists, numbers_of(strips).view(-1, 4), numbers_of([len(strips)]))


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    plan: attention_kernels.Plan,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiles: attention_kernels.Tiles | None = None,
    scratch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    _, heads, head_dim = query.shape
    rows = layout.rows.long()
    lengths, depths = layout.lengths[rows].long()[:, None], layout.depths.long()[:, None]
    assert int(lengths.max()) <= layout.max_context
    position = lengths + depths
    steps = torch.arange(int(position.max()) + 1, device=query.device)  # positions
    is_seen = (steps <= position) & (steps > position - (window or len(steps) + 1))
    if chunk is not None:
        is_seen &= steps // chunk == position // chunk
    step = (steps - lengths).clamp(min=0)  # of the path
    stored = layout.paths.long().gather(1, step.clamp(max=layout.paths.shape[1] - 1))
    place = torch.where(depths == layout.places[:, None], step, stored)
    index = torch.where(is_seen, torch.where(steps < lengths, steps, lengths + place), 0)
    slots = slots_of(layout.tables, layout.table_rows[rows][:, None], index)  # [T, S]
    group = heads // keys.shape[1]
    key, value = (part[slots].repeat_interleave(group, dim=2) for part in (keys, values))  # [T, S, heads, D]
    scores = torch.einsum("thd,tshd->ths", query, key) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~is_seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(len(scores), -1, -1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(steps)]
    return fitted(torch.einsum("ths,tshd->thd", weights, value).flatten(1), dtype or query.dtype)


def commit(
    keys: Tensor, values: Tensor, tables: Tensor, table_rows: Tensor, lengths: Tensor, places: Tensor, counts: Tensor
) -> None:
    for row, count in enumerate(counts.tolist()):
        old = slots_of(tables, table_rows[row], lengths[row] + places[row, :count])
        new = slots_of(tables, table_rows[row], lengths[row] + 1 + torch.arange(count, device=lengths.device))
        for stored in (keys, values):
            stored[:, new] = stored[:, old]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def highest(
    logits: Tensor, k: int, draws: DraftDraws | None = None, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float() if wanted is None else logits.float().masked_fill(wanted[:, None] == 0, torch.nan)
    if draws is not None:
        tokens = draws.to_target + torch.arange(logits.shape[1], device=logits.device)
        passes = 0 if draws.num_passes is None else draws.num_passes
        noise = noise_of_tokens(draws.seeds, draws.positions + passes + 1, tokens)
        perturbed = logits.unflatten(0, (len(noise), -1)) / draws.temperatures[:, None, None] + noise[:, None]
        is_sampled = (draws.temperatures > 0).repeat_interleave(len(logits) // len(noise))
        logits = torch.where(is_sampled[:, None], perturbed.flatten(0, 1).float(), logits)
    values, tokens = logits.sort(dim=1, descending=True, stable=True)
    return tokens[:, :k].int(), values[:, :k], logits.logsumexp(dim=1)


def draw(
    logits: Tensor,
    rows: Tensor,
    depths: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    truncates: bool = True,
) -> None:
    is_real = (rows >= 0) & (rows < len(seeds))
    own = rows[is_real].long()
    scores = logits[is_real].float()
    if bias is not None:
        scores = scores + bias[own]
    noise = gumbel_noise(seeds[own], positions[own] + depths[is_real], logits.shape[1])
    warm = scores / temperatures[own].clamp(min=1e-6)[:, None]
    drawn = (truncated(warm, top_k[own], top_p[own], min_p[own]) + noise).argmax(dim=1)
    out[is_real] = torch.where(temperatures[own] > 0, drawn, scores.argmax(dim=1))


def enter(
    tokens: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    origins: Tensor | None,
    norms: tuple[Tensor, Tensor],
    eps: float,
    keeps_normed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    hidden = hidden[: len(tokens)] if origins is None else hidden[origins.long()]
    normed = _norm(hidden, norms[1], eps)
    both = torch.cat([_norm(embedding[tokens.long()], norms[0], eps), normed], dim=-1)
    return fitted(both, dtype), normed if keeps_normed else hidden


def slots(roots: Tensor, embedding: Tensor, mask: Tensor, width: int) -> Tensor:
    return torch.cat([torch.cat([embedding[root][None], mask.expand(width - 1, -1)]) for root in roots.tolist()])


def keep_last(outputs: Tensor, begins: Tensor, counts: Tensor, table_rows: Tensor, root: Tensor) -> None:
    for begin, count, line in zip(begins.tolist(), counts.tolist(), table_rows.tolist(), strict=True):
        if count:
            root[line] = outputs[begin + count - 1]


def take_roots(root: Tensor, table_rows: Tensor, hidden: Tensor, topk: int) -> Tensor:
    taken = root[table_rows.long()]
    hidden[: len(taken) * topk : topk] = taken
    return taken


def spread(
    draft_ids: Tensor,
    logits: Tensor,
    totals: Tensor,
    to_target: Tensor,
    beams: Beams,
    level: Tensor,
    keep: int,
    is_first: bool,
) -> None:
    batch, topk = beams.tokens.shape
    q_of = (logits - totals[:, None]).exp()
    for row in range(batch):
        number = 0 if is_first else int(beams.num_passes[row])
        above = [(1.0, 0, [])]
        if not is_first:
            columns = (beams.paths[row].tolist(), beams.places[row].tolist(), beams.entries[row, :, :number].tolist())
            above = list(zip(*columns, strict=True))
        children = []  # path probability, token, beam, parent's place, q
        parts = (part.view(batch, -1, topk)[row].tolist() for part in (draft_ids, q_of))
        for beam, (own, ids, probs) in enumerate(zip(above, *parts, strict=True)):
            for draft_id, q in zip(ids, probs, strict=True):
                children.append((own[0] * q, draft_id + int(to_target[draft_id]), beam, own[1], q))
        listed = sorted(children, key=lambda child: -child[0])[:keep]
        span = slice(row * len(listed), (row + 1) * len(listed))
        level[:2, span] = torch.tensor([[child[1] for child in listed], [child[3] for child in listed]])
        level[2, span] = torch.tensor([child[4] for child in listed]).view(torch.int32)
        start = 1 if is_first else 1 + topk + (number - 1) * min(keep, topk * topk)
        for rank, (path, token, beam, _, _) in enumerate(listed[:topk]):
            beams.tokens[row, rank], beams.paths[row, rank] = token, path
            beams.origins[row, rank], beams.cache_places[row, rank] = row * topk + beam, number * topk + rank
            beams.places[row, rank], beams.depths[row, rank] = start + rank, number
            beams.entries[row, rank, : number + 1] = torch.tensor([*above[beam][2], number * topk + rank])
        beams.num_passes[row] = number + 1

"""SGLang's arrays: what its head has drafted as levels, a tree as its verify's inputs, and the tokens chosen there.

Nothing here imports SGLang or needs a GPU. D is --speculative-num-draft-tokens: every row's tree has exactly D places.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from graft.model.noise import gumbel_noise
from graft.model.sampler import truncated
from graft.model.verified import NUM_SUCCESSORS, likeliest
from graft.spec_decode.grafter import KEPT_OF_A_LEVEL
from graft.tree.candidates import Level
from graft.tree.native import native, plain
from graft.tree.tree import TreeLinks

_NOISE_AT_ONCE = 1 << 22  # numbers of noise made at once, several of which are in memory: 8 bytes each


class Drafted(NamedTuple):
    """What the head has drafted, M nodes by SGLang's flat ids: level 1 has K from 0, every further level K².

    The parent of a node f >= K is `beams[f // K]`, a flat id; that of the others is the root.
    """

    tokens: Tensor  # [B, M] target ids
    scores: Tensor  # [B, M] the head's q multiplied along the path
    beams: Tensor  # [B, 1 + levels * K] -1 for the root, then the flat ids of the K expanded nodes of each level


class VerifyArrays(NamedTuple):
    """The fields of SGLang's `EagleVerifyInput` for B trees of D places; of its names, in its order."""

    custom_mask: Tensor  # flat: of every row D times (prefix + D), whether the place sees it
    positions: Tensor  # [B * D]
    retrieve_index: Tensor  # [B, D] where each place is among all
    retrieve_next_token: Tensor  # [B, D] first child in the row, -1 if none
    retrieve_next_sibling: Tensor  # [B, D]
    draft_token: Tensor  # [B * D]


def levels_of(drafted: Drafted, topk: int, most_nodes: int = KEPT_OF_A_LEVEL) -> list[Level]:
    """The drafted nodes as Graft's levels on the host, each with its likeliest nodes first, the expanded ones among
    them. They are written over by the next call for as many rows. most_nodes: of a level, beside the expanded ones."""
    tokens, beams = plain(drafted.tokens), plain(drafted.beams)
    scores = plain(drafted.scores, torch.float32)
    num_rows, total = tokens.shape
    # Of equal scores SGLang may have expanded one that is left out here: what is below it then has probability 0.
    width = max(min(KEPT_OF_A_LEVEL, most_nodes), topk)
    widths = (topk, *[min(topk * topk, width)] * ((total - topk) // (topk * topk)))
    columns, levels = _level_memory(num_rows, widths)
    native().graft_flat_levels(
        *(num_rows, total, topk, width, tokens.data_ptr(), scores.data_ptr(), beams.data_ptr(), beams.shape[1]),
        *(column.data_ptr() for column in columns),
    )
    return levels


@lru_cache(maxsize=256)  # numbers of rows
def _level_memory(num_rows: int, widths: tuple[int, ...]) -> tuple[list[Tensor], list[Level]]:
    """Memory for levels of these widths, used by round after round: tokens, parents, q and paths, level after level;
    and the levels, which are views of it."""
    size = num_rows * sum(widths)
    columns = [*torch.empty(2, size, dtype=torch.int64), *torch.empty(2, size)]
    by_level = (column.split([num_rows * width for width in widths]) for column in columns)
    parts = zip(widths, zip(*by_level, strict=True), strict=True)
    return columns, [Level(*(part.view(num_rows, width) for part in level)) for width, level in parts]


@lru_cache(maxsize=256)  # numbers of rows
def link_memory(num_rows: int, num_places: int, is_pinned: bool) -> TreeLinks:
    """Memory for a round's links. The next round writes over it: what this one has sent to a device has arrived by
    then, since that round's drafts come behind it."""
    return TreeLinks.empty(num_rows, num_places, is_pinned)


def verify_arrays(links: TreeLinks, seq_lens: Tensor, seq_lens_sum: int, mask_buffer: Tensor | None) -> VerifyArrays:
    """The verify's inputs, where `seq_lens` [B] is; nothing waits for that device.

    links: of D places a row. seq_lens: tokens in the KV cache, without the root; seq_lens_sum: all of them, or more.
    mask_buffer: where the mask is to be written, if the attention backend has such a place and the mask fits.
    """
    device, (num_rows, num_places, _) = seq_lens.device, links.mask.shape
    tokens, depths, children, siblings = _to_device(links.numbers, device)
    seen = _to_device(links.mask, device)
    lengths = seq_lens.to(torch.int64)
    places = torch.arange(num_places, device=device)
    positions = lengths[:, None] + depths
    size = mask_size(links, seq_lens_sum)
    if mask_buffer is None or len(mask_buffer) < size:  # a batch larger than those that are captured
        mask = torch.ones(size, dtype=torch.bool, device=device)
    else:
        mask = mask_buffer.fill_(True)  # all of it: a padded batch reads beyond our rows
    wide = lengths + num_places
    starts = num_places * (wide.cumsum(0) - wide)
    index = starts[:, None, None] + places[:, None] * wide[:, None, None] + lengths[:, None, None] + places
    mask[index.flatten()] = seen.flatten().to(mask.dtype)
    numbers = place_numbers(num_rows, num_places, device)
    return VerifyArrays(mask, positions.flatten(), numbers, children, siblings, tokens.flatten())


def mask_size(links: TreeLinks, seq_lens_sum: int) -> int:
    """Places of a `VerifyArrays.custom_mask`: of every row D times (prefix + D)."""
    num_rows, num_places, _ = links.mask.shape
    return num_places * (seq_lens_sum + num_rows * num_places)


def fill_verify(
    links: TreeLinks, seq_lens: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes trees of D places to the verify's own inputs, and gives their links: each place's first child and next
    sibling, [B, D]. Nothing waits for the device.

    tokens [B * D], positions [B * D or more], mask: as in `VerifyArrays`; of the mask, what every place sees is there
    already.
    """
    if not seq_lens.is_cuda:
        arrays = verify_arrays(links, seq_lens, int(seq_lens.sum()), mask)
        tokens.copy_(arrays.draft_token)
        positions[: len(arrays.positions)] = arrays.positions
        return arrays.retrieve_next_token, arrays.retrieve_next_sibling
    from graft.integrations.sglang.kernels import place_trees  # needs Triton

    numbers, seen = (_to_device(part, seq_lens.device) for part in links)
    place_trees(numbers, seen, seq_lens, tokens, positions, mask)
    return numbers[2], numbers[3]


@lru_cache(maxsize=256)  # numbers of rows
def place_numbers(num_rows: int, num_places: int, device: torch.device) -> Tensor:
    """[B, D] where each place is among all."""
    return torch.arange(num_rows * num_places, device=device).view(num_rows, num_places)


def likeliest_successors(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The target's likeliest tokens [B * D, k] int32 after every node, best first, and their logits in float32."""
    if logits.is_cuda:
        from graft.model.kernels.topk import highest  # needs Triton

        tokens, values, _ = highest(logits, min(NUM_SUCCESSORS, logits.shape[1]))
        return tokens, values
    tokens, values = likeliest(logits)
    return tokens.int(), values.float()


class Sampling(NamedTuple):
    """How each of B rows chooses its tokens, all [B]. SGLang writes greedy as top-k 1 at temperature 1."""

    seeds: Tensor  # int64
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    is_truncated: bool  # whether top-k above 1, top-p or min-p excludes tokens in any row


def target_tokens(logits: Tensor, best: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """The target's own token [B * D] after every node: what is accepted is compared with it.

    logits [B * D, V]; best [B * D]: the likeliest tokens, which greedy rows choose; positions [B * D] of the nodes. The
    noise is keyed by the row's seed and the position of the token to choose alone, so what the tree holds never changes
    a choice.
    """
    num_places = len(logits) // len(sampling.seeds)
    seeds, temperatures, top_k, top_p, min_p = (column.repeat_interleave(num_places) for column in sampling[:5])
    keys = positions + 1
    if logits.is_cuda and not sampling.is_truncated:
        from graft.model.kernels.topk import draw  # needs Triton

        drawn = draw(logits.float(), seeds, keys, temperatures.float())
        return torch.where(top_k <= 1, best, drawn)
    drawn = torch.empty_like(best)
    at_once = max(_NOISE_AT_ONCE // logits.shape[1], 1)
    for first in range(0, len(logits), at_once):
        part = slice(first, first + at_once)
        scores = logits[part].float() / temperatures[part, None]
        if sampling.is_truncated:
            scores = truncated(scores, top_k[part], top_p[part], min_p[part])
        drawn[part] = (scores + gumbel_noise(seeds[part], keys[part], logits.shape[1])).argmax(dim=1)
    return torch.where(top_k <= 1, best, drawn)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy there. On the host itself one too: the memory may be used again."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # else the transfer waits for the device; nothing is done where it is pinned
    return tensor.to(device, non_blocking=True, copy=True)

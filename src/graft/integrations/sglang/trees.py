"""Conversions of SGLang's arrays: drafts to levels, trees to the inputs of a verify, and logits to chosen tokens.

Nothing here imports SGLang or needs a GPU. D is --speculative-num-draft-tokens: every row's tree has exactly D places.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from graft.model.noise import gumbel_noise
from graft.model.sampler import truncated
from graft.model.verified import NUM_SUCCESSORS, likeliest
from graft.spec_decode.proposers.drafter import KEPT_OF_A_LEVEL
from graft.tree.candidates import Level
from graft.tree.native import native, plain
from graft.tree.tree import TreeLinks

_NOISE_AT_ONCE = 1 << 22  # random numbers made at once, each in several copies of 8 bytes


class Drafted(NamedTuple):
    """The head's drafts: M nodes by SGLang's flat ids. Level 1 has the first K, every further level K².

    The parent of a node f >= K is `beams[f // K]`, a flat id. The parent of the first K nodes is the root.
    """

    tokens: Tensor  # [B, M] target ids
    scores: Tensor  # [B, M] products of the head's q along the path
    beams: Tensor  # [B, 1 + levels * K] -1 for the root, then the flat ids of the K expanded nodes of each level


class VerifyArrays(NamedTuple):
    """The fields of SGLang's `EagleVerifyInput` for B trees of D places, with its names and in its order."""

    custom_mask: Tensor  # flat: D x (prefix + D) for each row, whether the place sees it
    positions: Tensor  # [B * D]
    retrieve_index: Tensor  # [B, D] the index of each place among all
    retrieve_next_token: Tensor  # [B, D] first child in the row, -1 if none
    retrieve_next_sibling: Tensor  # [B, D]
    draft_token: Tensor  # [B * D]


def levels_of(drafted: Drafted, topk: int, most_nodes: int = KEPT_OF_A_LEVEL) -> list[Level]:
    """The drafted nodes as Graft's levels on the host, the likeliest nodes of each level first.

    The next call for the same number of rows overwrites them. most_nodes: of a level, beside the expanded nodes.
    """
    tokens, beams = plain(drafted.tokens), plain(drafted.beams)
    scores = plain(drafted.scores, torch.float32)
    num_rows, total = tokens.shape
    # With equal scores SGLang may have expanded a node that is left out here. Its children then have probability 0.
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
    """Memory for levels of these widths, reused in every round, and the levels as views of it.

    The columns are tokens, parents, q and path probabilities, level after level.
    """
    size = num_rows * sum(widths)
    columns = [*torch.empty(2, size, dtype=torch.int64), *torch.empty(2, size)]
    by_level = (column.split([num_rows * width for width in widths]) for column in columns)
    parts = zip(widths, zip(*by_level, strict=True), strict=True)
    return columns, [Level(*(part.view(num_rows, width) for part in level)) for width, level in parts]


@lru_cache(maxsize=256)  # numbers of rows
def link_memory(num_rows: int, num_places: int, is_pinned: bool) -> TreeLinks:
    """Memory for a round's links, which the next round overwrites.

    That is safe: the next round's drafts arrive after this round's links have reached the device.
    """
    return TreeLinks.empty(num_rows, num_places, is_pinned)


def verify_arrays(links: TreeLinks, seq_lens: Tensor, seq_lens_sum: int, mask_buffer: Tensor | None) -> VerifyArrays:
    """The verify's inputs on the device of `seq_lens` [B], made without waiting for it.

    links: of D places for each row. seq_lens: tokens in the KV cache, without the root. seq_lens_sum: at least their
    sum. mask_buffer: the attention backend's buffer for the mask, which is used if the mask fits.
    """
    device, (num_rows, num_places, _) = seq_lens.device, links.mask.shape
    tokens, depths, children, siblings = _to_device(links.numbers, device)
    seen = _to_device(links.mask, device)
    lengths = seq_lens.to(torch.int64)
    places = torch.arange(num_places, device=device)
    positions = lengths[:, None] + depths
    size = mask_size(links, seq_lens_sum)
    if mask_buffer is None or len(mask_buffer) < size:  # too small for a batch larger than all captured ones
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
    """The length of a `VerifyArrays.custom_mask`: D x (prefix + D) for each row."""
    num_rows, num_places, _ = links.mask.shape
    return num_places * (seq_lens_sum + num_rows * num_places)


def fill_verify(
    links: TreeLinks, seq_lens: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Write trees of D places into the verify's inputs, without waiting for the device.

    Returns each place's first child and next sibling, [B, D]. tokens [B * D], positions [B * D or more] and mask are as
    in `VerifyArrays`. The mask already shows the prefix to every place.
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
    """The index of each place among all, [B, D]."""
    return torch.arange(num_rows * num_places, device=device).view(num_rows, num_places)


def likeliest_successors(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The target's top-k tokens [B * D, k] int32 after every node, best first, and their logits in float32."""
    if logits.is_cuda:
        from graft.model.kernels.topk import highest  # needs Triton

        tokens, values, _ = highest(logits, min(NUM_SUCCESSORS, logits.shape[1]))
        return tokens, values
    tokens, values = likeliest(logits)
    return tokens.int(), values.float()


class Sampling(NamedTuple):
    """The sampling settings of B rows, each [B]. SGLang writes greedy as top-k 1 at temperature 1."""

    seeds: Tensor  # int64
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    is_truncated: bool  # whether top-k above 1, top-p or min-p excludes tokens in any row


def target_tokens(logits: Tensor, best: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """The target's token [B * D] after every node, which decides what is accepted.

    logits [B * D, V]; best [B * D]: the likeliest tokens, which greedy rows choose; positions [B * D] of the nodes. The
    noise depends only on the row's seed and the position of the chosen token, so the tree never changes a choice.
    """
    num_places = len(logits) // len(sampling.seeds)
    seeds, temperatures, top_k, top_p, min_p = (column.repeat_interleave(num_places) for column in sampling[:5])
    keys = positions + 1
    if logits.is_cuda:
        from graft.model.kernels.draw import draw  # needs Triton

        rows = torch.arange(len(logits), device=logits.device)
        drawn = torch.empty_like(rows)
        temperatures = torch.where(top_k <= 1, 0.0, temperatures.float())
        settings = (seeds, keys, temperatures, top_k, top_p, min_p)
        draw(logits, rows, torch.zeros_like(rows), *settings, drawn, truncates=sampling.is_truncated)
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
    """A copy on the device. On the host it is a copy too, since the memory is reused."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # so that the transfer does not wait for the device; no copy if already pinned
    return tensor.to(device, non_blocking=True, copy=True)

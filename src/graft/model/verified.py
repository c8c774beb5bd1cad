"""VerifyOutput: the target's output for the tokens of a forward: logits, hidden states, top-k successors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.model.cpu_linear import library

NUM_SUCCESSORS = 8  # top-k successors of a verified token that tables keep: the best value of the published method
_BLOCK = 128  # logits in a block of `_top_logits`


@dataclass(frozen=True)
class VerifyOutput:
    """The target's output for trees [B, W], or for one row's chunk [1, W]: a part of a flat step of T tokens.

    The next step may overwrite it, so callers copy what they keep.
    """

    tokens: Tensor  # [B, W] the verified tokens, on the host
    index: Tensor  # [B, W] int64 on the host: indices into the step's tokens; padding has its row's root
    counts: list[int]  # [B] tokens, padding not counted
    logits: Tensor  # [T, V] float32, for the token after each token of the step
    hidden: Tensor  # [T, layers * H] inputs of the requested layers, concatenated
    # Captured steps only: the top-k successors of all tokens, and their logits, as the step left them on the device.
    highest: tuple[Tensor, Tensor] | None = None
    is_captured: bool = False  # whether it is a captured step, whose output is always at the same address


def top_logits(logits: Tensor, k: int = NUM_SUCCESSORS) -> tuple[Tensor, Tensor]:
    """The top k of logits [..., V], or all if there are fewer: tokens and logits."""
    found = _by_library(logits, k, has_sums=False)
    return found[:2] if found is not None else _top_logits(logits, k)


def top_probabilities(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The top k of logits [..., V]: tokens and their probabilities."""
    found = _by_library(logits, k, has_sums=True)
    if found is not None:
        tokens, values, sums = found
        return tokens, (values - values[..., :1]).exp_().div_(sums)
    probabilities, tokens = logits.softmax(dim=-1).topk(k, dim=-1)
    return tokens, probabilities


def _by_library(logits: Tensor, k: int, has_sums: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """The top k, and the sums [..., 1] of exponentials after the highest logit is taken off; None if it cannot run."""
    if logits.device.type != "cpu" or logits.dtype is not torch.float32 or logits.requires_grad:
        return None
    compiled = library()
    if compiled is None or not logits.is_contiguous():
        return None
    vocab_size, batch = logits.shape[-1], logits.shape[:-1]
    k = min(k, vocab_size)
    tokens, values = logits.new_empty((*batch, k), dtype=torch.int64), logits.new_empty((*batch, k))
    sums = logits.new_empty((*batch, 1))
    where = sums.data_ptr() if has_sums else None
    sizes = (sums.numel(), vocab_size, k)
    compiled.highest(logits.data_ptr(), *sizes, tokens.data_ptr(), values.data_ptr(), where)
    return tokens, values, sums


def _top_logits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_logits` by torch.

    Two steps over fewer numbers are faster: find the k blocks with the highest maxima, then the top k inside them.
    """
    vocab_size = logits.shape[-1]
    if vocab_size % _BLOCK or vocab_size < 2 * k * _BLOCK:
        values, tokens = logits.topk(min(k, vocab_size), dim=-1)
        return tokens, values
    blocks = logits.unflatten(-1, (-1, _BLOCK))
    best = blocks.amax(dim=-1).topk(k, dim=-1).indices  # [..., k]
    inside = blocks.gather(-2, best[..., None].expand(*best.shape, _BLOCK)).flatten(-2)
    values, place = inside.topk(k, dim=-1)
    return best.gather(-1, place // _BLOCK) * _BLOCK + place % _BLOCK, values

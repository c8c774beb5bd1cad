"""Verified: what the target thinks of the tokens of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from graft.model.arena import Event

NUM_SUCCESSORS = 8  # of each judged token that are remembered: retrieval of 8 was best where it was published
_BLOCK = 128  # logits of which only the highest are looked at again


@dataclass(frozen=True)
class Step:
    """A captured step as it lies on the device, [rows, room] whatever part of it a round needs."""

    tokens: Tensor  # int32
    parents: Tensor  # int32; -1 where a place holds no node
    best: Tensor  # int32, the likeliest token after each
    chosen: Tensor  # int64 on the host, [rows * room] for the tokens that are chosen after each
    judged: Event  # when the host may read what the step tells it


@dataclass(frozen=True)
class VerifyOutput:
    """The target's judgement of W tokens in B rows. Copy what is kept: the next verify may write over it."""

    tokens: Tensor  # [B, W] what was judged, on the host
    logits: Tensor  # [B, W, V] float32, the target's opinion of what follows each
    hidden: Tensor  # [B, W, layers * H] inputs of the layers asked for, side by side
    # Of a captured step: what `likeliest` would find, on the host by the time it is judged.
    highest: tuple[Tensor, Tensor] | None = None
    step: Step | None = None

    def likeliest(self) -> tuple[Tensor, Tensor]:
        """The likeliest successors [B, W, k] of every token, best first, as int32, and their logits; on the host."""
        if self.highest is not None:
            return self.highest
        tokens, logits = likeliest(self.logits)
        return tokens.cpu().int(), logits.cpu()


def likeliest(logits: Tensor, k: int = NUM_SUCCESSORS) -> tuple[Tensor, Tensor]:
    """The k highest of logits [..., V]: which and what they are.

    By blocks: of every block only the highest is ranked, and only the best blocks are looked into.
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

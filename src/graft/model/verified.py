"""VerifyOutput: what a forward of the target gives for its tokens: logits, hidden states, top-k successors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from graft.model.captures import Event

NUM_SUCCESSORS = 8  # the k of a verified token's top-k that tables keep: the best value where it was published
_BLOCK = 128  # logits of a block in `likeliest`


@dataclass(frozen=True)
class Step:
    """Buffers of a captured step on the device: T tokens of R rows, those of trees first."""

    tokens: Tensor  # [T] int32
    parents: Tensor  # [T] int32, places in the row's own tree
    rows: Tensor  # [T] int32
    depths: Tensor  # [T] int32
    starts: Tensor  # [R] int32 each row's first token
    counts: Tensor  # [R] int32
    best: Tensor  # [T] int32, the likeliest token after each
    chosen: Tensor  # [T] int64 on the host: room for the token chosen after each
    judged: Event  # when the step's results are on the host


@dataclass(frozen=True)
class VerifyOutput:
    """The target's output for trees [B, W], or for one row's chunk [1, W]; a part of a flat step of T tokens.

    Copy what is kept: the next step may write over it.
    """

    tokens: Tensor  # [B, W] the verified tokens, on the host
    index: Tensor  # [B, W] int64 on the host: which of the step's tokens each is; padding is its row's root
    counts: list[int]  # [B] tokens that are no padding
    logits: Tensor  # [T, V] float32, of what follows each token of the step
    hidden: Tensor  # [T, layers * H] inputs of the layers asked for, concatenated
    # Of a captured step: what `likeliest` gives for all its tokens, on the host once `step.judged` has happened.
    highest: tuple[Tensor, Tensor] | None = None
    step: Step | None = None
    depths: Sequence[int] = ()  # [B] of each row's deepest token

    def likeliest(self) -> tuple[Tensor, Tensor]:
        """The top-k successors [B, W, k] of every token, best first, as int32, and their logits; on the host."""
        if self.highest is not None:
            tokens, logits = self.highest
        else:
            # Flat places of a part are consecutive.
            first, end = int(self.index[0, 0]), int(self.index[-1, 0]) + self.counts[-1]
            tokens, logits = likeliest(self.logits[first:end])
            tokens, logits = tokens.cpu().int(), logits.cpu()
            return _at(tokens, self.index - first), _at(logits, self.index - first)
        return _at(tokens, self.index), _at(logits, self.index)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values [T, k] at index [B, W]: [B, W, k]."""
    return values.index_select(0, index.flatten()).view(*index.shape, -1)


def likeliest(logits: Tensor, k: int = NUM_SUCCESSORS) -> tuple[Tensor, Tensor]:
    """The top k of logits [..., V]: tokens and logits.

    In two steps, as a top-k over few is faster: the k blocks with the highest maxima, then the top k inside them.
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

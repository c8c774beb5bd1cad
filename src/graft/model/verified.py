"""VerifyOutput: the target's output for the tokens of a forward: logits, hidden states, top-k successors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NUM_SUCCESSORS = 8  # top-k successors of a verified token that tables keep: the best value of the published method
_BLOCK = 128  # logits in a block of `likeliest`


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

    def likeliest(self) -> tuple[Tensor, Tensor]:
        """The top-k successors [B, W, k] of every token, best first, as int32, and their logits; on the host."""
        # A part's tokens are consecutive in the step.
        first, end = int(self.index[0, 0]), int(self.index[-1, 0]) + self.counts[-1]
        if self.highest is not None:
            tokens, logits = (part[first:end] for part in self.highest)
        else:
            tokens, logits = likeliest(self.logits[first:end])
        return _at(tokens.cpu().int(), self.index - first), _at(logits.cpu(), self.index - first)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values [T, k] at index [B, W]: [B, W, k]."""
    return values.index_select(0, index.flatten()).view(*index.shape, -1)


def likeliest(logits: Tensor, k: int = NUM_SUCCESSORS) -> tuple[Tensor, Tensor]:
    """The top k of logits [..., V]: tokens and logits.

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

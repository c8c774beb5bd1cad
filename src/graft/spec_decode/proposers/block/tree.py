"""Trees from one pass of a block head: its table of likely tokens, and the levels of the best-first tree in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.spec_decode.candidates import Level
from graft.spec_decode.proposers.block.head import BlockHead

_LOGITS = 2**28  # conditional logits that exist at once


@dataclass(frozen=True)
class Table:
    """What one pass says: for each of K slots, after each of P tokens before it, its m likeliest tokens."""

    tokens: Tensor  # [B, K, P, m]
    log_probs: Tensor  # [B, K, P, m]
    entries: Tensor  # [B, K, P, m] which of the next slot's P a token is; -1: none, it has no children


def marginal_table(head: BlockHead, hidden: Tensor, width: int) -> Table:
    """The `width` likeliest tokens of slots with hidden states [B, K, H], whatever comes before them."""
    log_probs = head.marginals(hidden).float().log_softmax(dim=-1)  # [B, K, vocab]
    found = log_probs.topk(min(width, log_probs.shape[-1]))
    tokens = head.to_target(found.indices)[:, :, None]
    return Table(tokens, found.values[:, :, None], torch.zeros_like(tokens))


def conditional_table(head: BlockHead, hidden: Tensor, roots: Tensor, width: int) -> Table:
    """The `width` likeliest tokens of slots with hidden states [B, K, H], after each of as many likely tokens before
    them; the first slot's stand behind the roots [B]."""
    logits = head.marginals(hidden)  # [B, K, vocab]
    most = logits.shape[-1]
    width = min(width, most)
    candidates = head.to_target(logits.topk(width).indices)  # [B, K, P], a slot's own
    parents = torch.cat([roots[:, None, None].expand(-1, 1, width), candidates[:, :-1]], dim=1)
    rows = max(1, _LOGITS // (hidden.shape[1] * width * most))
    found_tokens, found_values = [], []
    for some, before in zip(hidden.split(rows), parents.split(rows), strict=True):
        best = head.conditionals(some, before).float().log_softmax(dim=-1).topk(width)
        found_tokens.append(head.to_target(best.indices))
        found_values.append(best.values)
    children = torch.cat(found_tokens)
    same = children[:, :-1, :, :, None] == candidates[:, :-1, None, None]  # [B, K - 1, P, m, P]
    entries = torch.where(same.any(dim=-1), same.int().argmax(dim=-1), -1)
    return Table(children, torch.cat(found_values), torch.cat([entries, torch.full_like(children[:, -1:], -1)], dim=1))


def levels_of(table: Table, most: int) -> list[Level]:
    """By slot, the `most` likeliest nodes of that depth, likeliest first, each a child of a node of the level before.

    A node is never likelier than its parent, so the `most` likeliest nodes of all levels are a tree, the best-first
    one.
    """
    batch, num_slots, _, width = table.tokens.shape
    scores = table.log_probs.new_zeros(batch, 1)  # log of the path's probability
    entries = torch.zeros_like(table.entries[:, 0, 0, :1])
    levels: list[Level] = []
    first = 0  # number of the first parent in the tree
    for slot in range(num_slots):
        index = entries.clamp(min=0)[..., None].expand(-1, -1, width)
        tokens, log_probs, following = (
            part[:, slot].gather(1, index) for part in (table.tokens, table.log_probs, table.entries)
        )
        paths = (scores[..., None] + log_probs).masked_fill(entries[..., None] < 0, -torch.inf).flatten(1)
        scores, best = paths.topk(min(most, paths.shape[1]))
        level = Level(
            tokens=tokens.flatten(1).gather(1, best),
            parents=first + best // width,
            probabilities=log_probs.flatten(1).gather(1, best).exp().masked_fill(scores == -torch.inf, 0.0),
            path_probabilities=scores.exp(),
        )
        levels.append(level)
        first += entries.shape[1]
        entries = following.flatten(1).gather(1, best)
    return levels

"""Trees from one pass of a block head: its table of likely tokens, and the levels of the best-first tree in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graft.spec_decode.candidates import Level
from graft.spec_decode.native import native, plain
from graft.spec_decode.proposers.block.head import BlockHead


class Table(NamedTuple):
    """What one pass says, by row: for each of E entries the m likeliest tokens of a slot, likeliest first.

    An entry is a slot after one token before it, or after any. Entry 0 is the first slot's, behind the root.
    """

    tokens: Tensor  # [B, E, m] int32
    probabilities: Tensor  # [B, E, m] float32
    entries: Tensor  # [B, E, m] int32: that of the next slot after this token; -1: none, it has no children

    def to_host(self) -> Table:
        return Table(*(part.cpu() for part in self))


def marginal_table(head: BlockHead, hidden: Tensor, width: int) -> Table:
    """The `width` likeliest tokens of slots with hidden states [B, K, H], whatever comes before them: an entry each."""
    logits = head.marginals(hidden).float()  # [B, K, vocab]
    found = logits.topk(min(width, logits.shape[-1]))
    probabilities = (found.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
    return _by_slot(head.to_target(found.indices), probabilities)


def chain_table(head: BlockHead, hidden: Tensor, roots: Tensor) -> Table:
    """The likeliest token of each slot with hidden states [B, K, H] after that of the slot before, the first one's
    behind the roots [B]: an entry each.

    Made slot by slot: in a table for trees many a chain would end at a token that has no children there.
    """
    if not head.config.has_conditionals:
        return marginal_table(head, hidden, 1)
    chain, probabilities = [roots], []
    for slot in range(hidden.shape[1]):
        first = 0 if head.config.markov == "rnn" else slot  # a recurrent head's state is made on the way
        parents = torch.stack(chain[first:], dim=1)[..., None]
        logits = head.conditionals(hidden[:, first : slot + 1], parents)[:, -1, 0].float()
        best = logits.max(dim=-1)
        chain.append(head.to_target(best.indices))
        probabilities.append((best.values - logits.logsumexp(dim=-1)).exp())
    return _by_slot(torch.stack(chain[1:], dim=1)[..., None], torch.stack(probabilities, dim=1)[..., None])


def conditional_table(
    head: BlockHead, hidden: Tensor, roots: Tensor, width: int, children: int, shortlist: int
) -> Table:
    """The likeliest `children` of slots with hidden states [B, K, H] behind roots [B], after each of the `width`
    likeliest tokens of the slot before.

    Children are looked for among a slot's `shortlist` likeliest tokens whatever comes before, and their probabilities
    are shares of these: the logits of others are not computed.
    """
    best = head.marginals(hidden).topk(min(shortlist, head.config.draft_vocab_size)).indices  # [B, K, S]
    candidates = head.to_target(best)
    width, num_slots = min(width, candidates.shape[-1]), hidden.shape[1]
    behind_root = roots[:, None, None].expand(-1, 1, width)  # only the first of these entries is used
    parents = torch.cat([behind_root, candidates[:, :-1, :width]], dim=1)
    shares = head.conditionals(hidden, parents, best).float().softmax(dim=-1)  # [B, K, P, S]
    found = shares.topk(min(children, shares.shape[-1]))
    tokens = candidates[:, :, None].expand_as(shares).gather(-1, found.indices)
    # Of the next slot the first `width` candidates have entries.
    following = torch.arange(1, num_slots + 1, device=hidden.device)[:, None, None]
    entries = (following * width + found.indices).where((found.indices < width) & (following < num_slots), -1)
    table = Table(tokens.int(), found.values, entries.int())
    return Table(*(part.flatten(1, 2) for part in table))


def _by_slot(tokens: Tensor, probabilities: Tensor) -> Table:
    """A table with one entry a slot: each [B, K, m]."""
    entries = torch.arange(1, tokens.shape[1] + 1, dtype=torch.int32, device=tokens.device)
    entries = entries.where(entries < tokens.shape[1], -1)[:, None].expand_as(tokens)
    return Table(tokens.int(), probabilities, entries)


def levels_of(table: Table, num_levels: int, num_nodes: int) -> list[Level]:
    """The levels of the trees of the `num_nodes` likeliest nodes, as many as there are: at most `num_levels`."""
    tokens, probabilities, entries = (
        plain(part, dtype) for part, dtype in zip(table, (torch.int32, torch.float32, torch.int32), strict=True)
    )
    num_rows, num_entries, num_children = tokens.shape
    widths = torch.empty(num_levels, dtype=torch.int64)
    room = num_rows * num_nodes * min(num_rows, num_levels)  # rows may have all their nodes at different depths
    whole, real = torch.empty(2, room, dtype=torch.int64), torch.empty(2, room)
    native().graft_best_first(
        num_rows,
        num_entries,
        num_children,
        *(part.data_ptr() for part in (tokens, probabilities, entries)),
        num_levels,
        num_nodes,
        room,
        *(part.data_ptr() for part in (widths, *whole, *real)),
    )
    levels, start = [], 0
    for width in widths.tolist():
        if width == 0:
            break
        end = start + num_rows * width
        levels.append(Level(*(part[start:end].view(num_rows, width) for part in (*whole, *real))))
        start = end
    return levels

"""Trees from one pass of a block head: the table of likely tokens, and the best-first tree in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graft.model.noise import ComingDraws, added
from graft.spec_decode.proposers.block.head import BlockHead
from graft.tree.candidates import Level
from graft.tree.native import native, plain


class Table(NamedTuple):
    """The result of one pass, by row: for each of E entries the m likeliest tokens of a slot, likeliest first.

    An entry is a slot after one certain token, or after any token. Entry 0 is the first slot, after the root.
    """

    tokens: Tensor  # [B, E, m] int32
    probabilities: Tensor  # [B, E, m] float32
    entries: Tensor  # [B, E, m] int32: the next slot's entry after this token; -1: no children

    def to_host(self) -> Table:
        return Table(*(part.cpu() for part in self))


class Noise(NamedTuple):
    """What is known of coming draws. The softmax of logits / T + noise is the probability that a token is drawn."""

    of_slots: Tensor  # [B, K, draft vocabulary] float32; 0 in a greedy row
    factors: Tensor  # [B] 1 / T; 1 in a greedy row

    @classmethod
    def of(cls, draws: ComingDraws, head: BlockHead) -> Noise:
        """Slot i gives the token of depth i + 1."""
        tokens = head.target_ids
        depths = range(1, head.config.num_drafts + 1)
        return cls(draws.noise(tokens, depths, tokens.device), draws.factors(tokens.device))


class Ranking(NamedTuple):
    """Functions that choose the tokens of tables: those below, or kernels with the same arguments."""

    highest: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    children: Callable[[Tensor, Tensor, int], Table]


def highest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k of logits [N, V], best first: ids and logits [N, k], and the logsumexp [N]."""
    logits = logits.float()
    found = logits.topk(k)
    return found.indices, found.values, logits.logsumexp(dim=-1)


def children(logits: Tensor, candidates: Tensor, k: int) -> Table:
    """The table of the k likeliest candidates of each slot after each of P tokens before it.

    Probabilities are normalised over the candidates. logits: [B, K, P, S] of the slots' candidates [B, K, S], of which
    the first P are the tokens before the next slot.
    """
    num_slots, num_parents = logits.shape[1:3]
    found = logits.float().softmax(dim=-1).topk(k)
    tokens = candidates[:, :, None].expand_as(logits).gather(-1, found.indices)
    following = torch.arange(1, num_slots + 1, device=logits.device)[:, None, None]
    has_entry = (found.indices < num_parents) & (following < num_slots)
    entries = (following * num_parents + found.indices).where(has_entry, -1)
    return Table(*(part.flatten(1, 2) for part in (tokens.int(), found.values, entries.int())))


PLAIN = Ranking(highest, children)


def marginal_table(
    head: BlockHead, hidden: Tensor, width: int, ranking: Ranking = PLAIN, noise: Noise | None = None
) -> Table:
    """One entry a slot: its `width` likeliest tokens, independent of the token before. hidden: [B, K, H]."""
    ids, best, total = _highest(head, hidden, width, ranking, noise)
    return _by_slot(head.to_target(ids), (best - total[..., None]).exp())


def chain_table(
    head: BlockHead,
    hidden: Tensor,
    roots: Tensor,
    shortlist: int,
    ranking: Ranking = PLAIN,
    noise: Noise | None = None,
) -> Table:
    """One entry a slot: its likeliest token after that of the slot before. hidden: [B, K, H]. roots: [B].

    Made slot by slot: in a table for trees, chains would often end at a token without children. As there, tokens come
    from a slot's `shortlist` likeliest ones, over which probabilities are normalised.
    """
    if not head.config.has_conditionals:
        return marginal_table(head, hidden, 1, ranking, noise)
    ids, _, _ = _highest(head, hidden, shortlist, ranking, noise)  # [B, K, S]
    chain, probabilities = [roots], []
    for slot in range(hidden.shape[1]):
        first = 0 if head.config.markov == "rnn" else slot  # a recurrent head needs all slots before
        parents, slots = torch.stack(chain[first:], dim=1)[..., None], slice(first, slot + 1)
        logits = head.conditionals(hidden[:, slots], parents, ids[:, slots])[:, -1, 0]  # [B, S]
        if noise is not None:
            logits = added(logits, noise.factors, noise.of_slots[:, slot].gather(1, ids[:, slot]))
        places, best, total = ranking.highest(logits, 1)
        chain.append(head.to_target(ids[:, slot].gather(1, places.long())[:, 0]))
        probabilities.append((best[:, 0] - total).exp())
    return _by_slot(torch.stack(chain[1:], dim=1)[..., None], torch.stack(probabilities, dim=1)[..., None])


def conditional_table(
    head: BlockHead,
    hidden: Tensor,
    roots: Tensor,
    width: int,
    children: int,
    shortlist: int,
    ranking: Ranking = PLAIN,
    noise: Noise | None = None,
) -> Table:
    """An entry for each of the `width` likeliest tokens of a slot: the likeliest `children` of the next slot.

    hidden: [B, K, H]. roots: [B]. Children come from a slot's `shortlist` likeliest tokens by its marginals, over which
    probabilities are normalised: other logits are not computed.
    """
    ids, _, _ = _highest(head, hidden, shortlist, ranking, noise)
    candidates = head.to_target(ids)  # [B, K, S]
    num_candidates = candidates.shape[-1]
    after_root = roots[:, None, None].expand(-1, 1, min(width, num_candidates))  # only the first of these is used
    parents = torch.cat([after_root, candidates[:, :-1, :width]], dim=1)
    logits = head.conditionals(hidden, parents, ids)  # [B, K, P, S]
    if noise is not None:
        logits = added(logits, noise.factors, noise.of_slots.gather(2, ids)[:, :, None])
    return ranking.children(logits, candidates, min(children, num_candidates))


def _highest(
    head: BlockHead, hidden: Tensor, k: int, ranking: Ranking, noise: Noise | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k marginals of slots with hidden states [B, K, H]: draft ids, logits [B, K, k] and the logsumexp [B, K]."""
    logits = head.marginals(hidden)  # [B, K, vocab]
    if noise is not None:
        logits = added(logits, noise.factors, noise.of_slots)
    ids, best, total = ranking.highest(logits.flatten(0, 1), min(k, logits.shape[-1]))
    shape = hidden.shape[:2]
    return ids.long().unflatten(0, shape), best.unflatten(0, shape), total.unflatten(0, shape)


def _by_slot(tokens: Tensor, probabilities: Tensor) -> Table:
    """A table with one entry a slot, from [B, K, m]."""
    entries = torch.arange(1, tokens.shape[1] + 1, dtype=torch.int32, device=tokens.device)
    entries = entries.masked_fill(entries == tokens.shape[1], -1)[:, None].expand_as(tokens)
    return Table(tokens.int(), probabilities, entries)


def levels_of(table: Table, num_levels: int, num_nodes: int) -> list[Level]:
    """The levels of the trees of the `num_nodes` likeliest nodes, at most `num_levels`."""
    tokens, probabilities, entries = (
        plain(part, dtype) for part, dtype in zip(table, (torch.int32, torch.float32, torch.int32), strict=True)
    )
    num_rows, num_entries, num_children = tokens.shape
    widths = torch.empty(num_levels, dtype=torch.int64)
    room = num_rows * num_nodes * min(num_rows, num_levels)  # rows may have their nodes at different depths
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
    counts = [num_rows * width for width in widths.tolist() if width > 0]
    parts = (part[: sum(counts)].split(counts) for part in (*whole, *real))
    return [Level(*(part.view(num_rows, -1) for part in level)) for level in zip(*parts, strict=True)]

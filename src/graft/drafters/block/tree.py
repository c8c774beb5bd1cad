"""Trees from one pass of a block head: the table of likely tokens, and the best-first tree in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graft.drafters.block.head import BlockHead
from graft.model.noise import ComingDraws, added
from graft.tree.device import c_kernels
from graft.tree.device.buffers import Trees
from graft.tree.native import plain


class Table(NamedTuple):
    """The result of one pass, by row: for each of E entries the m likeliest tokens of a slot, likeliest first.

    An entry is a slot after one given token, or after any token. Entry 0 is the first slot, after the root.
    """

    tokens: Tensor  # [B, E, m] int32
    probabilities: Tensor  # [B, E, m] float32
    entries: Tensor  # [B, E, m] int32: the next slot's entry after this token; -1: no children


class Ranking(NamedTuple):
    """The functions that choose the tokens of tables: those below, or kernels with the same arguments.

    If coming draws are known, `highest` ranks logits / T + noise, whose softmax is the probability that a token is
    drawn.
    """

    highest: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    children: Callable[[Tensor, Tensor, int], Table]
    factors: Tensor | None = None  # [B] 1 / T, 1 in a greedy row; None: nothing is known of coming draws


def highest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k of logits [B, K, V], best first: ids and logits [B, K, k], and the logsumexp [B, K]."""
    logits = logits.float()
    found = logits.topk(k)
    return found.indices, found.values, logits.logsumexp(dim=-1)


def children(logits: Tensor, candidates: Tensor, k: int) -> Table:
    """The table of the k likeliest candidates of each slot, after each of P candidates of the previous token.

    Probabilities are normalised over the candidates. logits: [B, K, P, S] of the slots' candidates [B, K, S]. The first
    P candidates of a slot are the previous tokens of the next slot.
    """
    num_slots, num_parents = logits.shape[1:3]
    found = logits.float().softmax(dim=-1).topk(k)
    tokens = candidates[:, :, None].expand_as(logits).gather(-1, found.indices)
    following = torch.arange(1, num_slots + 1, device=logits.device)[:, None, None]
    has_entry = (found.indices < num_parents) & (following < num_slots)
    entries = (following * num_parents + found.indices).where(has_entry, -1)
    return Table(*(part.flatten(1, 2) for part in (tokens.int(), found.values, entries.int())))


PLAIN = Ranking(highest, children)


def ranking_of(draws: ComingDraws, tokens: Tensor) -> Ranking:
    """The ranking of slots whose coming draws are known: the first slot's is the next draw. tokens: [V] target ids."""

    def highest_drawn(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        slots = logits.float().split(1, dim=1)
        return highest(torch.cat([draws.perturbed(own, tokens, slot) for slot, own in enumerate(slots, 1)], dim=1), k)

    return Ranking(highest_drawn, children, draws.factors(tokens.device))


def marginal_table(head: BlockHead, hidden: Tensor, width: int, ranking: Ranking = PLAIN) -> Table:
    """One entry per slot: its `width` likeliest tokens, independent of the previous token. hidden: [B, K, H]."""
    logits = head.marginals(hidden)  # [B, K, V]
    ids, best, total = ranking.highest(logits, min(width, logits.shape[-1]))
    return _by_slot(head.to_target(ids.long()), (best - total[..., None]).exp())


def chain_table(head: BlockHead, hidden: Tensor, roots: Tensor, shortlist: int, ranking: Ranking = PLAIN) -> Table:
    """One entry per slot: its likeliest token after that of the previous slot. hidden: [B, K, H]. roots: [B].

    It is made slot by slot, because in a table for trees, chains would often end at a token without children. As there,
    tokens come from a slot's `shortlist` likeliest ones, over which probabilities are normalised.
    """
    if not head.config.has_conditionals:
        return marginal_table(head, hidden, 1, ranking)
    ids, noise = _shortlist(head, hidden, shortlist, ranking)  # [B, K, S]
    chain, probabilities = [roots], []
    for slot in range(hidden.shape[1]):
        first = 0 if head.config.markov == "rnn" else slot  # a recurrent head needs all slots before
        parents, slots = torch.stack(chain[first:], dim=1)[..., None], slice(first, slot + 1)
        logits = head.conditionals(hidden[:, slots], parents, ids[:, slots])[:, -1, 0]  # [B, S]
        if ranking.factors is not None and noise is not None:
            logits = added(logits, ranking.factors, noise[:, slot])
        best = logits.float().softmax(dim=-1).max(dim=-1, keepdim=True)
        chain.append(head.to_target(ids[:, slot].gather(1, best.indices)[:, 0]))
        probabilities.append(best.values[:, 0])
    return _by_slot(torch.stack(chain[1:], dim=1)[..., None], torch.stack(probabilities, dim=1)[..., None])


def conditional_table(
    head: BlockHead,
    hidden: Tensor,
    roots: Tensor,
    width: int,
    children: int,
    shortlist: int,
    ranking: Ranking = PLAIN,
) -> Table:
    """An entry for each of the `width` likeliest tokens of a slot: the likeliest `children` of the next slot.

    hidden: [B, K, H]. roots: [B]. Children come from a slot's `shortlist` likeliest tokens by its marginals, over which
    probabilities are normalised: other logits are not computed.
    """
    ids, noise = _shortlist(head, hidden, shortlist, ranking)
    candidates = head.to_target(ids)  # [B, K, S]
    num_candidates = candidates.shape[-1]
    after_root = roots[:, None, None].expand(-1, 1, min(width, num_candidates))  # only the first of these is used
    parents = torch.cat([after_root, candidates[:, :-1, :width]], dim=1)
    logits = head.conditionals(hidden, parents, ids)  # [B, K, P, S]
    if ranking.factors is not None and noise is not None:
        logits = added(logits, ranking.factors, noise[:, :, None])
    return ranking.children(logits, candidates, min(children, num_candidates))


def _shortlist(head: BlockHead, hidden: Tensor, size: int, ranking: Ranking) -> tuple[Tensor, Tensor | None]:
    """Draft ids [B, K, S] of the slots' likeliest tokens by their marginals, and the noise of each if it is known."""
    logits = head.marginals(hidden)  # [B, K, V]
    ids, best, _ = ranking.highest(logits, min(size, logits.shape[-1]))
    ids = ids.long()
    if ranking.factors is None:
        return ids, None
    return ids, added(logits.gather(-1, ids), -ranking.factors, best)


def _by_slot(tokens: Tensor, probabilities: Tensor) -> Table:
    """A table with one entry per slot, from [B, K, m]."""
    entries = torch.arange(1, tokens.shape[1] + 1, dtype=torch.int32, device=tokens.device)
    entries = entries.masked_fill(entries == tokens.shape[1], -1)[:, None].expand_as(tokens)
    return Table(tokens.int(), probabilities, entries)


def grown(table: Table, num_levels: int, num_nodes: int) -> Trees:
    """The trees of the `num_nodes` likeliest nodes, at most `num_levels` deep, on the host."""
    tokens, probabilities, entries = (part.cpu() for part in table)
    of_table = plain(tokens, torch.int32), plain(probabilities, torch.float32), plain(entries, torch.int32)
    trees = Trees(torch.empty(5, len(table.tokens), num_nodes, dtype=torch.int32))
    c_kernels.grow(*of_table, num_levels, trees)
    return trees

"""Round reports: what some rows want to know of a device round beyond its tokens.

Log-probabilities are those of the model, so they are computed from the logits before adjustments, and only after the
walk, for the nodes that it has reached. Rounds that somebody watches also report the likeliest nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.engine.staging import Landing, Staging
from graft.model.captures import padded
from graft.model.sampler import is_adjusted
from graft.request.sequence import Sequence as TokenSequence
from graft.request.sequence import TokenLogprob
from graft.tree.device.round import MAX_TOKENS, DeviceRound, RoundShape
from graft.tree.tree import PADDING, ROOT, DraftTree

_ALTERNATIVES = (8, 32)  # of a token: numbers that kernels are compiled for; torch finds more, more slowly
SHOWN = 8  # the most pruned candidates that the record of a round shows


@dataclass(frozen=True)
class Logprobs:
    """The log-probabilities of a round's tokens, by the node after which each was chosen."""

    values: np.ndarray  # [T, 1 + K] float32 that of the chosen token, then the highest
    tokens: np.ndarray  # [T, K] int32 with the highest
    starts: Sequence[int]  # each row's first token in the step

    def logprob(self, row: int, node: int, token: int, num_alternatives: int) -> TokenLogprob:
        place = self.starts[row] + node
        values, tokens = self.values[place].tolist(), self.tokens[place].tolist()
        alternatives = dict(list(zip(tokens, values[1:], strict=True))[:num_alternatives])
        return TokenLogprob(token, values[0], alternatives)


@dataclass(frozen=True)
class Report:
    """What a round reports, once it has ended."""

    scores: np.ndarray | None = None  # [T, 1 + 2K] int32: values and tokens of `Logprobs`
    candidates: np.ndarray | None = None  # [5, rows, most] int32: `DeviceRound.candidates`

    def logprobs(self, num_nodes: np.ndarray) -> Logprobs | None:
        """num_nodes: by row, nodes of the tree."""
        if self.scores is None:
            return None
        num_values = self.scores.shape[1] // 2 + 1
        values = np.ascontiguousarray(self.scores[:, :num_values]).view(np.float32)
        widths = num_nodes + 1
        return Logprobs(values, self.scores[:, num_values:], (np.cumsum(widths) - widths).tolist())

    def considered(self, tree: DraftTree) -> DraftTree | None:
        """The trees and, after each, its likeliest pruned candidates; None if the round was plain or nobody watches."""
        if self.candidates is None:
            return None
        roots, num_nodes = tree.tokens[:, 0].numpy(), np.array(tree.num_nodes)
        nodes, new, above, origins, bits = self.candidates[:, : len(roots)]
        paths = bits.view(np.float32)
        counts = np.minimum((paths > 0).sum(axis=1), num_nodes + SHOWN)
        shape = (len(roots), 1 + int(counts.max()))
        tokens, parents, sources = np.zeros((3, *shape), dtype=np.int64)
        probabilities = np.ones(shape, dtype=np.float32)
        sources[:] = PADDING
        tokens[:, 0], sources[:, 0] = roots, ROOT
        for row, count in enumerate(counts.tolist()):
            place = {0: 0} | {node: number for number, node in enumerate(nodes[row, :count].tolist(), start=1)}
            own = slice(1, 1 + count)
            tokens[row, own], sources[row, own] = new[row, :count], origins[row, :count]
            parents[row, own] = [place[node] for node in above[row, :count].tolist()]
            by_place = np.append(np.float32(1), paths[row, :count])
            probabilities[row, own] = by_place[1:] / by_place[parents[row, own]]
        return DraftTree(*map(torch.from_numpy, (tokens, parents, probabilities, sources)))


class RoundReports:
    """Makes reports on the device, and sends them to the host."""

    def __init__(self, device: torch.device, staging: Staging) -> None:
        self._staging = staging
        self._scores, self._candidates = Landing(device), Landing(device)

    def logits_of(self, sequences: Sequence[TokenSequence], buffers: Any, shape: RoundShape) -> Tensor:
        """The logits that log-probabilities are computed from. Called before they are adjusted."""
        logits = buffers.logits[: shape.tokens]
        is_changed = any(
            s.settings.logprobs is not None and (is_adjusted(s.settings) or s.constraint is not None) for s in sequences
        )
        return logits.clone() if is_changed else logits

    def make(self, sequences: Sequence[TokenSequence], round: DeviceRound, shape: RoundShape, logits: Tensor) -> Report:
        """Start the copy of the round's report to the host, after the walk."""
        scores = candidates = None
        asked = [sequence.settings.logprobs for sequence in sequences]
        if any(number is not None for number in asked):
            asks = self._staging.send([int(number is not None) for number in asked])
            most = max(number for number in asked if number is not None)
            scores = self._scores.fetch(_scores_of(round, shape, logits, asks, most))
        if not shape.is_plain and any(sequence.is_recorded for sequence in sequences):
            candidates = self._candidates.fetch(round.candidates(shape, shape.cap + SHOWN))
        return Report(scores, candidates)


def _scores_of(round: DeviceRound, shape: RoundShape, logits: Tensor, asks: Tensor, most: int) -> Tensor:
    """[T, 1 + 2K] int32: see `Report.scores`. What nobody asks for, or no walk has reached, is undefined.

    asks: by row, 1 or 0. most: the most alternatives that a row asks for.
    """
    num_tokens, vocab_size = logits.shape
    nodes, tokens, counts = (part[: len(asks)] for part in round.walked(shape))
    is_wanted = (torch.arange(MAX_TOKENS, device=round.device) < counts[:, None]) & (asks[:, None] > 0)
    places = torch.where(is_wanted, nodes, num_tokens).long().flatten()  # one more place takes the others
    wanted, chosen = torch.zeros(2, num_tokens + 1, dtype=torch.int32, device=round.device)
    wanted.scatter_(0, places, 1)
    chosen.scatter_(0, places, tokens.flatten())
    if most <= _ALTERNATIVES[-1]:
        from graft.model.kernels import topk  # needs Triton

        count = min(padded(most, _ALTERNATIVES), vocab_size)
        likeliest, values, total = topk.highest(logits, count, wanted=wanted[:num_tokens])
    else:
        values, likeliest = logits.topk(min(most, vocab_size))
        total = logits.logsumexp(dim=1)
    own = logits.gather(1, chosen[:num_tokens, None].long())
    scores = torch.cat([own, values], dim=1) - total[:, None]
    return torch.cat([scores.view(torch.int32), likeliest.int()], dim=1)

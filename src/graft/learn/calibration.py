"""Calibration: from a proposer's own score to the probability that the target accepts, by counting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from graft.pool import AGREED, ALONE, Pool, WeighAgain
from graft.tree import ROOT

_PRIOR_WEIGHT = 16.0  # observations that the prior is worth
NUM_STANDINGS = AGREED + 1
_MEMORY = 1024.0  # observations after which old ones begin to fade

NUM_BUCKETS = 16  # a power of two: tables pack a bucket beside a token
BUCKET_PROBABILITIES = 2.0 ** (-torch.arange(NUM_BUCKETS) / 2)  # two buckets per halving


def probability_bucket(probabilities: Tensor) -> Tensor:
    """Evidence bucket of a score that is itself a probability."""
    return (-2 * probabilities.log2()).clamp(0, NUM_BUCKETS - 1).long()


class Calibration:
    """For every (source, evidence bucket): how often the parent was reached, and how often then the child fitted."""

    def __init__(self, priors: Sequence[Tensor], device: torch.device) -> None:
        """`priors` are the proposers' own, in the order of their source numbers (from 1; the root has no entry)."""
        num_buckets = max(len(prior) for prior in priors)
        prior = torch.ones(NUM_STANDINGS, len(priors) + 1, num_buckets)
        for source, values in enumerate(priors, start=ROOT + 1):
            prior[:, source, : len(values)] = values
        self._prior = prior.to(device)
        self._tried = torch.full_like(self._prior, _PRIOR_WEIGHT)
        self._fitted = self._tried * self._prior

    def probability(self, sources: Tensor, evidence: Tensor) -> Tensor:
        """P(accepted | parent accepted) of proposals by their source and evidence."""
        return self.table()[ALONE, sources, evidence]

    def table(self) -> Tensor:
        """[sources, buckets] P(accepted | parent accepted)."""
        return self._fitted / self._tried

    def weigh(self, first: int) -> Callable[[Tensor, Tensor], Tensor]:
        """`probability` for a proposer that numbers its own sources from 0, of which the first is `first` here."""
        table = self.table()[ALONE, first:]
        return lambda sources, evidence: table[sources, evidence]

    def weigh_again(self) -> WeighAgain:
        """P(accepted | parent accepted) by source, evidence and how a node stands among all proposals."""
        table = self.table()
        return lambda sources, evidence, standing: table[standing, sources, evidence]

    def observe(self, pool: Pool, emitted: Sequence[Sequence[int]]) -> None:
        """Judges every proposal by the tokens that came, whether or not it was verified."""
        judged, fitted = pool.judged(emitted)
        cell = (pool.standing[judged], pool.nodes.sources[judged], pool.nodes.evidence[judged])
        self._tried.index_put_(cell, torch.ones_like(cell[0], dtype=torch.float32), accumulate=True)
        self._fitted.index_put_(cell, fitted[judged].float(), accumulate=True)
        fade = (_MEMORY / self._tried).clamp(max=1.0)
        self._tried *= fade
        self._fitted *= fade

    def state(self) -> dict[str, Tensor]:
        return {"tried": self._tried.clone(), "fitted": self._fitted.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes on what `state` once gave; an empty one starts anew."""
        self._tried.copy_(state.get("tried", torch.full_like(self._prior, _PRIOR_WEIGHT)))
        self._fitted.copy_(state.get("fitted", _PRIOR_WEIGHT * self._prior))

"""Calibration: from a proposer's own score to the probability that the target accepts, by counting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.tree import ROOT, DraftTree

_PRIOR_WEIGHT = 16.0  # observations that the prior is worth
_MEMORY = 256.0  # observations after which old ones begin to fade

_NUM_BUCKETS = 16
BUCKET_PROBABILITIES = 2.0 ** (-torch.arange(_NUM_BUCKETS) / 2)  # two buckets per halving


def probability_bucket(probabilities: Tensor) -> Tensor:
    """Evidence bucket of a score that is itself a probability."""
    return (-2 * probabilities.log2()).clamp(0, _NUM_BUCKETS - 1).long()


class Calibration:
    """For every (source, evidence bucket): how often the parent was reached, and how often then the child fitted."""

    def __init__(self, priors: Sequence[Tensor], device: torch.device) -> None:
        """`priors` are the proposers' own, in the order of their source numbers (from 1; the root has no entry)."""
        num_buckets = max(len(prior) for prior in priors)
        prior = torch.ones(len(priors) + 1, num_buckets)
        for source, values in enumerate(priors, start=ROOT + 1):
            prior[source, : len(values)] = values
        self._tried = torch.full_like(prior, _PRIOR_WEIGHT).to(device)
        self._fitted = self._tried * prior.to(device)

    def probability(self, sources: Tensor, evidence: Tensor) -> Tensor:
        """P(accepted | parent accepted); 1 for roots. Padding may get any value."""
        table = self._fitted / self._tried
        return table[sources.clamp(min=ROOT), evidence]

    def observe(self, pool: DraftTree, emitted: Sequence[Sequence[int]]) -> None:
        """Judges every proposal by the tokens that came, whether or not it was verified."""
        depths = pool.depths()
        horizon = torch.tensor([len(tokens) for tokens in emitted], device=depths.device)[:, None]
        longest = max(map(len, emitted))
        truth = torch.tensor([[*t, *[-1] * (longest - len(t))] for t in emitted], device=depths.device)
        fits = pool.tokens == truth.gather(1, (depths - 1).clamp(0, longest - 1))
        fits[:, 0] = True
        on_path = pool.fold_to_root(fits, torch.logical_and)
        judged = on_path.gather(1, pool.parents) & (depths <= horizon) & (pool.sources > ROOT)

        cell = (pool.sources[judged], pool.evidence[judged])
        self._tried.index_put_(cell, torch.ones_like(cell[0], dtype=torch.float32), accumulate=True)
        self._fitted.index_put_(cell, fits[judged].float(), accumulate=True)
        fade = (_MEMORY / self._tried).clamp(max=1.0)
        self._tried *= fade
        self._fitted *= fade

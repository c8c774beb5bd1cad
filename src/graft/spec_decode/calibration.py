"""Calibration: from a proposer's own score to the probability that the target accepts, by counting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graft.spec_decode.candidates import AGREED, ALONE, Candidates
from graft.spec_decode.tree import ROOT

_PRIOR_WEIGHT = 16.0  # observations that the prior is worth
NUM_AGREEMENTS = AGREED + 1
_MEMORY = 1024.0  # observations after which old ones begin to fade


class Calibration:
    """For every (source, score bucket): how often the parent was reached, and how often then the child fitted."""

    def __init__(self, priors: Sequence[Tensor]) -> None:
        """`priors` are the proposers' own, in the order of their source numbers (from 1; the root has no entry)."""
        num_buckets = max(len(prior) for prior in priors)
        prior = torch.ones(NUM_AGREEMENTS, len(priors) + 1, num_buckets)
        for source, values in enumerate(priors, start=ROOT + 1):
            prior[:, source, : len(values)] = values
        self._prior = prior
        self._tried = torch.full_like(self._prior, _PRIOR_WEIGHT)
        self._fitted = self._tried * self._prior
        self._chances: Tensor | None = None

    def probability(self, sources: Tensor, score_bucket: Tensor) -> Tensor:
        """P(accepted | parent accepted) of proposals by their source and score bucket."""
        return self.chances[ALONE, sources, score_bucket]

    @property
    def chances(self) -> Tensor:
        """[standings, sources, buckets] P(accepted | parent accepted). The same tensor until something is learned."""
        if self._chances is None:
            self._chances = self._fitted / self._tried
        return self._chances

    def observe(self, candidates: Candidates, emitted: Sequence[Sequence[int]]) -> None:
        """Judges every proposal by the tokens that came, whether or not it was verified."""
        candidates.count(emitted, self._tried, self._fitted, _MEMORY)
        self._chances = None

    def state(self) -> dict[str, Tensor]:
        return {"tried": self._tried.clone(), "fitted": self._fitted.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes on what `state` once gave; an empty one starts anew."""
        self._tried.copy_(state.get("tried", torch.full_like(self._prior, _PRIOR_WEIGHT)))
        self._fitted.copy_(state.get("fitted", _PRIOR_WEIGHT * self._prior))
        self._chances = None

"""Calibration: from a proposer's own score to an acceptance probability, by counting what was accepted."""

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
    """Acceptance probabilities by (agreement, source, score bucket).

    Counted are how often the parent's path was accepted, and how often then the child's token came too.
    """

    def __init__(self, priors: Sequence[Tensor]) -> None:
        """priors: of each source its probabilities by bucket, in the order of source numbers (from 1, as 0 is the
        root)."""
        num_buckets = max(len(prior) for prior in priors)
        prior = torch.ones(NUM_AGREEMENTS, len(priors) + 1, num_buckets)
        for source, values in enumerate(priors, start=ROOT + 1):
            prior[:, source, : len(values)] = values
        self._prior = prior
        self._tried = torch.full_like(self._prior, _PRIOR_WEIGHT)
        self._fitted = self._tried * self._prior
        self._chances: Tensor | None = None

    def probability(self, sources: Tensor, score_bucket: Tensor) -> Tensor:
        """P(accepted | parent accepted) of proposals that one source made alone."""
        return self.chances[ALONE, sources, score_bucket]

    @property
    def chances(self) -> Tensor:
        """P(accepted | parent accepted), [agreements, sources, buckets]: the same tensor until the next `observe`."""
        if self._chances is None:
            self._chances = self._fitted / self._tried
        return self._chances

    def observe(self, candidates: Candidates, emitted: Sequence[Sequence[int]]) -> None:
        """Counts every proposal whose parent's path was emitted, whether or not it was verified."""
        candidates.count(emitted, self._tried, self._fitted, _MEMORY)
        self._chances = None

    def state(self) -> dict[str, Tensor]:
        return {"tried": self._tried.clone(), "fitted": self._fitted.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes on what `state` once gave; an empty one starts anew."""
        self._tried.copy_(state.get("tried", torch.full_like(self._prior, _PRIOR_WEIGHT)))
        self._fitted.copy_(state.get("fitted", _PRIOR_WEIGHT * self._prior))
        self._chances = None

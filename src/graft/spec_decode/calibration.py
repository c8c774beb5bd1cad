"""Calibration: from a proposer's own score to an acceptance probability, and from those along a path to that of all of
it, by counting what was accepted."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from graft.tree.candidates import AGREED, ALONE, Candidates
from graft.tree.tree import ROOT

_PRIOR_WEIGHT = 16.0  # observations that the prior is worth
NUM_AGREEMENTS = AGREED + 1
_NUM_TRUTHS = 12  # powers of two that path probabilities are told apart by, as in native.c
_PATH_PRIOR = 8.0  # accepted nodes that it is worth that path probabilities are right
_PATH_MEMORY = 256.0  # accepted nodes after which old ones begin to fade
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


class PathCalibration:
    """What part of nodes' path probabilities comes true, by their power of two.

    A product of many estimates, and the highest of many products, is too high on the whole: the less likely a node is
    said to be, the more so. Which nodes are likelier than others does not change.
    """

    def __init__(self) -> None:
        self._hoped, self._came = np.full((2, _NUM_TRUTHS), _PATH_PRIOR)
        self.truths = array("d", [1.0] * _NUM_TRUTHS)

    def observe(self, paths: Tensor, nodes: Sequence[Sequence[int]]) -> None:
        """Counts a round's nodes. paths: [B, W] path probabilities of the verified trees, 0 for padding; nodes: by row
        the accepted ones, without the root."""
        tree = paths.numpy()
        powers = np.clip(-np.frexp(tree)[1], 0, _NUM_TRUTHS - 1)
        powers[:, 0] = 0
        weights = tree.astype(np.float64)
        weights[:, 0] = 0.0
        self._hoped += np.bincount(powers.ravel(), weights.ravel(), minlength=_NUM_TRUTHS)
        rows = [row for row, path in enumerate(nodes) for _ in path]
        columns = [node for path in nodes for node in path]
        self._came += np.bincount(powers[rows, columns], minlength=_NUM_TRUTHS)
        fading = np.minimum(_PATH_MEMORY / np.maximum(self._hoped, 1e-9), 1.0)
        self._hoped *= fading
        self._came *= fading
        self._update()

    def _update(self) -> None:
        self.truths = array("d", (self._came / self._hoped).tolist())

    def state(self) -> dict[str, Tensor]:
        return {"hoped": torch.from_numpy(self._hoped.copy()), "came": torch.from_numpy(self._came.copy())}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes on what `state` once gave; an empty one starts anew."""
        unknown = torch.full((_NUM_TRUTHS,), _PATH_PRIOR)
        counts = (state.get(name, unknown).double().cpu().clone() for name in ("hoped", "came"))
        # Native code reads as many as there are to be: a state of others is an error here.
        self._hoped, self._came = (count.view(_NUM_TRUTHS).numpy() for count in counts)
        self._update()

"""Calibration: turns a proposer's scores into acceptance probabilities, and corrects those of whole paths, by counting
what was accepted."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from graft.tree.candidates import AGREED, ALONE, Candidates
from graft.tree.tree import ROOT

_PRIOR_WEIGHT = 16.0  # of the prior, in observations
NUM_AGREEMENTS = AGREED + 1
_NUM_POWERS = 12  # path probabilities are counted by power of two; as in the C code
_PATH_PRIOR = 8.0  # weight of the prior that path probabilities are right, in accepted nodes
_PATH_MEMORY = 256.0  # accepted nodes after which old ones fade
_MEMORY = 1024.0  # observations after which old ones fade


class Calibration:
    """Acceptance probabilities by (agreement, source, score bucket).

    It counts how often the parent's path was accepted (tried), and how often the child's token followed (fitted).
    """

    def __init__(self, priors: Sequence[Tensor]) -> None:
        """priors: probabilities by bucket of each source, in the order of source numbers, from 1 (0 is the root)."""
        num_buckets = max(len(prior) for prior in priors)
        prior = torch.ones(NUM_AGREEMENTS, len(priors) + 1, num_buckets)
        for source, values in enumerate(priors, start=ROOT + 1):
            prior[:, source, : len(values)] = values
        self._prior = prior
        self._tried = torch.full_like(self._prior, _PRIOR_WEIGHT)
        self._fitted = self._tried * self._prior
        self._probs: Tensor | None = None

    def probability(self, sources: Tensor, score_bucket: Tensor) -> Tensor:
        """P(accepted | parent accepted) of proposals that a single source made."""
        return self.acceptance_probs[ALONE, sources, score_bucket]

    @property
    def acceptance_probs(self) -> Tensor:
        """P(accepted | parent accepted), [agreements, sources, buckets]: the same tensor until the next `observe`."""
        if self._probs is None:
            self._probs = self._fitted / self._tried
        return self._probs

    def observe(self, candidates: Candidates, emitted: Sequence[Sequence[int]]) -> None:
        """Count every proposal whose parent's path was emitted, verified or not."""
        candidates.count(emitted, self._tried, self._fitted, _MEMORY)
        self._probs = None

    def add(self, tried: np.ndarray, fitted: np.ndarray) -> None:
        """Add what was counted elsewhere, [agreements, sources, buckets] each."""
        self._tried += torch.from_numpy(tried)
        self._fitted += torch.from_numpy(fitted)
        fade = (_MEMORY / self._tried).clamp(max=1.0)
        self._tried *= fade
        self._fitted *= fade
        self._probs = None

    def state(self) -> dict[str, Tensor]:
        return {"tried": self._tried.clone(), "fitted": self._fitted.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `state`; an empty one starts anew."""
        self._tried.copy_(state.get("tried", torch.full_like(self._prior, _PRIOR_WEIGHT)))
        self._fitted.copy_(state.get("fitted", _PRIOR_WEIGHT * self._prior))
        self._probs = None


class PathCalibration:
    """Calibration of path probabilities: accepted / expected nodes, by power of two of the probability.

    Products of many estimates are too high, and so is the highest of many products: the less likely a node, the more.
    The order of nodes does not change.
    """

    def __init__(self) -> None:
        self._expected, self._accepted = np.full((2, _NUM_POWERS), _PATH_PRIOR)
        self.ratios = array("d", [1.0] * _NUM_POWERS)

    def observe(self, paths: Tensor, nodes: Sequence[Sequence[int]]) -> None:
        """Count a round's nodes.

        paths: [B, W] path probabilities of the verified trees, 0 for padding. nodes: by row, the accepted ones without
        the root.
        """
        tree = paths.numpy()
        powers = np.clip(-np.frexp(tree)[1], 0, _NUM_POWERS - 1)
        powers[:, 0] = 0
        weights = tree.astype(np.float64)
        weights[:, 0] = 0.0
        self._expected += np.bincount(powers.ravel(), weights.ravel(), minlength=_NUM_POWERS)
        rows = [row for row, path in enumerate(nodes) for _ in path]
        columns = [node for path in nodes for node in path]
        self._accepted += np.bincount(powers[rows, columns], minlength=_NUM_POWERS)
        fading = np.minimum(_PATH_MEMORY / np.maximum(self._expected, 1e-9), 1.0)
        self._expected *= fading
        self._accepted *= fading
        self._update()

    def _update(self) -> None:
        self.ratios = array("d", (self._accepted / self._expected).tolist())

    def state(self) -> dict[str, Tensor]:
        return {"hoped": torch.from_numpy(self._expected.copy()), "came": torch.from_numpy(self._accepted.copy())}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `state`; an empty one starts anew."""
        unknown = torch.full((_NUM_POWERS,), _PATH_PRIOR)
        counts = (state.get(name, unknown).double().cpu().clone() for name in ("hoped", "came"))
        # C code reads exactly this many numbers, so `view` refuses a state of another length.
        self._expected, self._accepted = (count.view(_NUM_POWERS).numpy() for count in counts)
        self._update()

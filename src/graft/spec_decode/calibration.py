"""Calibration: acceptance probabilities of proposals and of whole paths, from counts of what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from graft.model.noise import NOT_SAMPLED, NUM_KINDS
from graft.tree.device.buffers import AGREED
from graft.tree.tree import ROOT

_PRIOR_WEIGHT = 16.0  # observations that a prior counts for
NUM_AGREEMENTS = AGREED + 1
_NUM_POWERS = 12  # path probabilities are counted by power of two; as in the C code
_PATH_PRIOR = 8.0  # expected nodes that the prior of a ratio counts for
_PATH_MEMORY = 256.0  # expected nodes after which old ones fade
NOISE_ENDS = (0.05, 0.15, 0.35, 0.7, 1.3, 2.2, 3.5)  # limits between the buckets of E = exp(-g); as in the C code
_NEARLY, _HARDLY = 0.97, 0.003  # the two probabilities that a copied token may have, see `by_noise`
_MEMORY = 1024.0  # observations after which old ones fade


class Calibration:
    """Acceptance probabilities by (kind of row, agreement, source, score bucket).

    Kinds of rows are greedy rows, and sampled rows with known noise by temperature. A proposal is tried if its parent's
    path was accepted, and fits if its own token came next. The probability is the share of tried proposals that fit.
    """

    def __init__(self, priors: Sequence[Tensor], sampled_priors: Sequence[Tensor] | None = None) -> None:
        """priors: for each source, in the order of source numbers from 1, the probabilities by score bucket.

        sampled_priors: those of sampled rows, whose sources may have other buckets; None: the same.
        """
        sampled_priors = priors if sampled_priors is None else sampled_priors
        num_buckets = max(len(prior) for prior in (*priors, *sampled_priors))
        prior = torch.ones(NUM_KINDS, NUM_AGREEMENTS, len(priors) + 1, num_buckets)
        for kind in range(NUM_KINDS):
            for source, values in enumerate(priors if kind == NOT_SAMPLED else sampled_priors, start=ROOT + 1):
                prior[kind, :, source, : len(values)] = values
        self._prior = prior.flatten(0, 1)
        self._tried = torch.full_like(self._prior, _PRIOR_WEIGHT)
        self._fitted = self._tried * self._prior
        self._probs: Tensor | None = None
        self.is_frozen = False  # whether `add` learns nothing

    @property
    def acceptance_probs(self) -> Tensor:
        """P(accepted | parent accepted), [kinds * agreements, sources, buckets]; the first kind is greedy.

        It is the same tensor until the next `add`.
        """
        if self._probs is None:
            self._probs = self._fitted / self._tried
        return self._probs

    def to(self, device: torch.device) -> Calibration:
        """Move to a device, where `add` may run inside a CUDA graph."""
        self._prior, self._tried, self._fitted = (part.to(device) for part in (self._prior, self._tried, self._fitted))
        self._probs = None
        return self

    def add(self, tried: Tensor, fitted: Tensor, kinds: Iterable[int] | None = None) -> None:
        """Add counts of a device round, [kinds * agreements, sources, buckets] each.

        kinds: of the round's rows; None: any. Others are left out, which saves time.
        """
        if self.is_frozen:
            return
        parts = [slice(None)]
        if kinds is not None:
            parts = [slice(kind * NUM_AGREEMENTS, (kind + 1) * NUM_AGREEMENTS) for kind in set(kinds)]
        for own in parts:
            all_tried, all_fitted = self._tried[own], self._fitted[own]
            all_tried += tried[own]
            all_fitted += fitted[own]
            fade = (_MEMORY / all_tried).clamp(max=1.0)
            all_tried *= fade
            all_fitted *= fade
        self._probs = None

    def state(self) -> dict[str, Tensor]:
        return {"tried": self._tried.clone(), "fitted": self._fitted.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `state`; an empty one starts anew."""
        self._tried.copy_(state.get("tried", torch.full_like(self._prior, _PRIOR_WEIGHT)))
        self._fitted.copy_(state.get("fitted", _PRIOR_WEIGHT * self._prior))
        self._probs = None


def by_noise(prior: Tensor) -> Tensor:
    """Split priors [buckets] of copied tokens by the tokens' noise: [buckets * noises].

    With E = exp(-g) of its noise g, a token of probability p is drawn with probability exp(-E (1 - p) / p). The result
    is the mean of this over each bucket of E. A prior is a mean over many places, and at almost all of them a copied
    token is either nearly certain or hardly possible. So p takes these two values, weighted to give the prior: a high
    noise does not make an unlikely copy likely.
    """
    certain = ((prior.double() - _HARDLY) / (_NEARLY - _HARDLY)).clamp(0, 1)[:, None]  # share of nearly certain tokens
    nearly, hardly = (_drawn_by_noise(p) for p in (_NEARLY, _HARDLY))
    return (certain * nearly + (1 - certain) * hardly).float().flatten()


def _drawn_by_noise(p: float) -> Tensor:
    """P(a token of probability p is drawn), [noises] by bucket of E."""
    rate = 1 / p - 1
    starts, ends = torch.tensor([0.0, *NOISE_ENDS]).double(), torch.tensor([*NOISE_ENDS, torch.inf]).double()
    # E is exponentially distributed: the integral of exp(-E) exp(-rate E) over the bucket, divided by that of exp(-E).
    drawn = ((-(1 + rate) * starts).exp() - (-(1 + rate) * ends).exp()) / (1 + rate)
    return drawn / ((-starts).exp() - (-ends).exp())


class PathCalibration:
    """Calibration of path probabilities: accepted / expected nodes, by kind of row and power of two of the probability.

    A product of many estimates, chosen because it is among the highest, tends to be too high, and more so for unlikely
    nodes. So a ratio is at most that of likelier nodes, which is also its prior. The order of nodes does not change.
    """

    def __init__(self) -> None:
        self._expected, self._accepted = np.zeros((2, NUM_KINDS * _NUM_POWERS))
        self.ratios = np.ones(NUM_KINDS * _NUM_POWERS)  # kind after kind

    def cells(self, paths: np.ndarray, kinds: Sequence[int]) -> np.ndarray:
        """[rows, nodes] the place of each node's ratio. paths: their path probabilities. kinds: by row."""
        return np.clip(-np.frexp(paths)[1], 0, _NUM_POWERS - 1) + _NUM_POWERS * np.array(kinds)[:, None]

    def probabilities(self, paths: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Calibrated path probabilities."""
        return paths * self.ratios[cells]

    def observe(
        self,
        paths: np.ndarray,
        cells: np.ndarray,
        is_verified: np.ndarray,
        nodes: Sequence[Sequence[int]],
        kinds: Sequence[int],
    ) -> None:
        """Count a round's nodes.

        is_verified: which of them were in the trees. nodes: by row, the accepted ones, counted from 1.
        """
        size = len(self._expected)
        self._expected += np.bincount(cells[is_verified], paths[is_verified], size)
        rows = [row for row, path in enumerate(nodes) for _ in path]
        columns = [node - 1 for path in nodes for node in path]
        self._accepted += np.bincount(cells[rows, columns], minlength=size)
        fading = np.minimum(_PATH_MEMORY / np.maximum(self._expected, 1e-9), 1.0)
        self._expected *= fading
        self._accepted *= fading
        self._update(set(kinds))

    def _update(self, kinds: Iterable[int] = range(NUM_KINDS)) -> None:
        counts = np.stack([self._expected, self._accepted], axis=1).reshape(NUM_KINDS, _NUM_POWERS, 2)
        for kind in kinds:
            self.ratios[kind * _NUM_POWERS : (kind + 1) * _NUM_POWERS] = _falling_ratios(counts[kind].tolist())

    def state(self) -> dict[str, Tensor]:
        return {"hoped": torch.from_numpy(self._expected.copy()), "came": torch.from_numpy(self._accepted.copy())}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore from `state`; an empty one starts anew."""
        unknown = torch.zeros(NUM_KINDS * _NUM_POWERS).double()
        counts = [state.get(name, unknown).double().cpu().flatten() for name in ("hoped", "came")]
        if len(counts[0]) == len(counts[1]) == _NUM_POWERS:  # from a version without kinds of rows
            counts = [torch.cat([count, unknown[_NUM_POWERS:]]) for count in counts]
        # C code reads exactly this many numbers, so `view` refuses a state of another length.
        self._expected, self._accepted = (count.clone().view(len(unknown)).numpy() for count in counts)
        self._update()


def _falling_ratios(counts: Sequence[Sequence[float]]) -> list[float]:
    """Ratios accepted / expected by power of two, from (expected, accepted), fitted so that they never rise.

    Neighbours in the wrong order are counted together (isotonic regression). The prior of the first ratio is 1, that of
    each later one the previous ratio.
    """
    pooled: list[tuple[float, float, int]] = []  # expected, accepted, and number of powers
    for expected, accepted in counts:
        size = 1
        while pooled and pooled[-1][1] * expected <= accepted * pooled[-1][0]:
            more_expected, more_accepted, more = pooled.pop()
            expected, accepted, size = expected + more_expected, accepted + more_accepted, size + more
        pooled.append((expected, accepted, size))
    ratios: list[float] = []
    for expected, accepted, size in pooled:
        before = ratios[-1] if ratios else 1.0
        ratio = (accepted + _PATH_PRIOR * before) / (expected + _PATH_PRIOR)
        ratios += [min(ratio, before) if ratios else ratio] * size
    return ratios

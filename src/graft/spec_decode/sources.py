"""Sources of candidates: their names in the order of their numbers, and how likely they are before any observation."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.spec_decode.buckets import BUCKET_PROBABILITIES
from graft.spec_decode.calibration import Calibration, by_noise

COPIES = ("suffix", "past")  # of the text itself, and of finished texts
TABLES = ("trigram", "bigram", "adjacency")

# Of copied tokens, by match length and by the share of occurrences that continue with the token. Longer matches are
# likelier to be accepted, and so are tokens that all occurrences agree on.
_NUM_LENGTHS, _SHARES = 8, (0.25, 0.5, 0.75, 1.0)
_COPIED = torch.tensor(
    [(0.35 + 0.6 * length / (_NUM_LENGTHS - 1)) * agreed for length in range(_NUM_LENGTHS) for agreed in _SHARES]
)
# Measured at temperatures 0.7 and 1: sampled text repeats itself as often as greedy text, but rarely other texts.
_SAMPLED_COPIES = (1.0, 0.3)
# Prior acceptance probability / probability of the successor in its earlier context. A longer n-gram means a more
# similar context.
_AFTER_NGRAM = (0.85, 0.7, 0.5)
_SAMPLED_TABLES = 0.6  # factor on priors in sampled rows, measured at temperatures 0.7 and 1


def calibrated(has_drafter: bool, copies: bool = True, tables: bool = True) -> tuple[tuple[str, ...], Calibration]:
    """The names of these sources, and their calibration before any observation. Number 0 is the root."""
    names, priors, sampled = ["root"], list[Tensor](), list[Tensor]()
    if has_drafter:
        names.append("drafted")
        priors.append(BUCKET_PROBABILITIES)
        sampled.append(BUCKET_PROBABILITIES)
    if copies:
        names += COPIES
        priors += [_COPIED] * len(COPIES)
        sampled += [by_noise(factor * _COPIED) for factor in _SAMPLED_COPIES]
    if tables:
        names += TABLES
        priors += [factor * BUCKET_PROBABILITIES for factor in _AFTER_NGRAM]
        sampled += [_SAMPLED_TABLES * factor * BUCKET_PROBABILITIES for factor in _AFTER_NGRAM]
    return tuple(names), Calibration(priors, sampled)

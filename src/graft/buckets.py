"""Buckets of a score that is itself a probability: the drafter's q, the share that the target gave a successor."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BUCKETS = 16  # a power of two: tables pack a bucket beside a token
BUCKET_PROBABILITIES = 2.0 ** (-torch.arange(NUM_BUCKETS) / 2)  # two buckets per halving


def probability_bucket(probabilities: Tensor) -> Tensor:
    """The evidence that a probability is."""
    return (-2 * probabilities.float().log2()).clamp(0, NUM_BUCKETS - 1).long()

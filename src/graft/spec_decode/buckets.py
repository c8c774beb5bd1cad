"""Score buckets of scores that are probabilities themselves: a drafter's q, the share the target gave a successor."""

from __future__ import annotations

import math

import torch

NUM_BUCKETS = 16  # as in `native.c`, which finds a probability's bucket
# Two buckets per halving; by square roots, which are the same on every machine, and not by powers.
BUCKET_PROBABILITIES = torch.tensor([math.sqrt(0.5**bucket) for bucket in range(NUM_BUCKETS)])

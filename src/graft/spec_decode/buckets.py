"""Buckets for scores that are probabilities: a drafter's q, or the target's share of a successor."""

from __future__ import annotations

import math

import torch

NUM_BUCKETS = 16  # as in the C code, which finds a probability's bucket
# Two buckets per halving. Square roots are the same on every machine; powers are not.
BUCKET_PROBABILITIES = torch.tensor([math.sqrt(0.5**bucket) for bucket in range(NUM_BUCKETS)])

"""Adjacency matrix: for every token, the successors the target found most likely when it last judged that token.

First order (it knows one token of context) but always current: each verification updates the row of every node
it judged, accepted or not. Memory is fixed at vocabulary x k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.learn.calibration import BUCKET_PROBABILITIES, probability_bucket
from graft.retrieve.base import History
from graft.target import Verified
from graft.tree import PADDING, ROOT, DraftTree


class Adjacency:
    """The matrix M[vocab, k] of token ids, with the share of each among its row as the target judged it."""

    name = "adjacency"
    # The target's old opinion of a successor, in a context that is now another, is worth about half its face.
    prior = 0.5 * BUCKET_PROBABILITIES

    def __init__(self, vocab_size: int, device: torch.device, k: int = 8, beam: int = 4, depth: int = 4) -> None:
        # A token never judged has the successor `vocab_size`, no token, whose own row is of that kind too.
        self._cold = vocab_size
        self._successors = torch.full((vocab_size + 1, k), self._cold, device=device)
        self._shares = torch.zeros(vocab_size + 1, k, device=device)
        self._beam = beam  # nodes expanded at each depth
        self._depth = depth

    def propose(self, histories: Sequence[History], roots: Tensor, max_depth: int) -> DraftTree:
        """The best `beam` nodes of each depth are expanded, by the product of shares on their path."""
        k = self._successors.shape[1]
        parent, token, path = torch.zeros_like(roots)[:, None], roots[:, None], torch.ones_like(roots)[:, None]
        tokens, parents, shares = [token], [parent], [path.float()]
        width = 1
        for _ in range(min(self._depth, max_depth)):
            tokens.append(self._successors[token].flatten(1))  # [B, beam * k]
            parents.append(parent.repeat_interleave(k, dim=1))
            shares.append(self._shares[token].flatten(1))
            path = path.repeat_interleave(k, dim=1) * shares[-1]
            path, best = path.topk(min(self._beam, path.shape[1]), dim=1)
            parent, token = best + width, tokens[-1].gather(1, best)
            width += tokens[-1].shape[1]

        all_tokens = torch.cat(tokens, dim=1)
        cold = all_tokens == self._cold
        return DraftTree(
            max_depth=len(tokens) - 1,
            tokens=all_tokens.masked_fill(cold, 0),
            parents=torch.cat(parents, dim=1).masked_fill(cold, 0),
            probabilities=torch.ones_like(all_tokens, dtype=torch.float32),
            sources=torch.full_like(all_tokens, ROOT).masked_fill(cold, PADDING),
            evidence=probability_bucket(torch.cat(shares, dim=1)),
        )

    def learn(self, verified: Verified) -> None:
        tokens = verified.tokens.flatten()  # [R]
        values, successors = verified.logits.flatten(0, 1).topk(self._successors.shape[1], dim=1)  # [R, k]
        shares = values.softmax(dim=1)
        if len(tokens) > 1:
            # A token judged twice at once keeps its last judgement: both then write the same row, in any order.
            index = torch.arange(len(tokens), device=tokens.device)
            last = torch.zeros(self._cold, dtype=torch.int64, device=tokens.device)
            last = last.scatter_reduce_(0, tokens, index, "amax")[tokens]
            successors, shares = successors[last], shares[last]
        self._successors[tokens] = successors
        self._shares[tokens] = shares
